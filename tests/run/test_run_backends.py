"""`moe-course run` with every backend on every transport: the text of one process, and exactly the bytes it must move.

The grid runs in one start of the processes for each number of ranks (`many_runs.py`); a few cells run as a user
would start them.
"""

from __future__ import annotations

import pytest
import torch
from many_runs import run_many

from moe_course.backends.capabilities import KNOWN_BACKENDS
from moe_course.backends.support import SUPPORT
from moe_course.trace import Trace

TRANSPORTS = ("gloo", "shm")


def supported(ranks: int) -> list[dict]:
    cells = [
        {"world_size": ranks, "all2all_backend": name, "transport": transport}
        for name, known in KNOWN_BACKENDS.items()
        for transport in TRANSPORTS
        if SUPPORT[known.shape, transport] is True
    ]
    uneven = {"ranks_per_node": "3" if ranks == 4 else "1"}
    return cells + [
        {"world_size": ranks, "all2all_backend": "two_hop", "transport": transport} | uneven | more
        for transport in TRANSPORTS
        for more in ({}, {"reduce_in_node": True})
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_supported_backend_and_transport_gives_the_text_of_one_process(ranks, warm):
    cells = supported(ranks)
    results = run_many(ranks, cells, new_tokens=4)
    moved = {}
    for cell, result in zip(cells, results, strict=True):
        assert result["verdict"] == "equal", (cell, result["failures"])
        assert result["max_abs_logit_diff"] <= 1e-4 and result["topk_ids_equal"] is True, cell
        assert result["transport"] == cell["transport"], cell
        assert result["rows"]["sent"] == result["rows"]["received"] > 0, cell
        assert result["bound"]["ratio"] == 1.0, cell
        assert [row["ratio"] for row in result["moved"]] == [1.0] * len(result["moved"]), cell
        assert {(row["layer"], row["phase"]) for row in result["moved"]} == {
            (layer, phase) for layer in (1, 2) for phase in ("prefill", "decode")
        }
        padded = KNOWN_BACKENDS[cell["all2all_backend"]].shape == "low_latency" and cell["transport"] == "gloo"
        assert (result["bytes"]["padding"] > 0) == padded, cell  # shared memory takes only the rows in use
        what = tuple(value for name, value in cell.items() if name != "transport")
        moved.setdefault(what, set()).add(result["bytes"]["payload"])
    crossed = {
        cell.get("reduce_in_node", False): result["across_nodes"]
        for cell, result in zip(cells, results, strict=True)
        if "ranks_per_node" in cell
    }
    assert crossed[False]["ranks"] == ([3, 1] if ranks == 4 else [1, 1])
    # with a node of one rank nothing is to be added there; the three of the other one share copies and sums
    assert (crossed[True]["rows"] < crossed[False]["rows"]) == (ranks == 4)
    elsewhere = [r["across_nodes"] for cell, r in zip(cells, results, strict=True) if "ranks_per_node" not in cell]
    assert not any(elsewhere)
    assert all(len(figures) == 1 for figures in moved.values()), moved  # the same rows on every transport


def test_long_prompts_go_through_fixed_places_in_parts(warm):
    """T_max 16 on two ranks, one of them with shorter prompts and fewer parts; experts compiled for fixed shapes."""
    prompts = ["x" * 70 + "\n", "def", "import os\nimport sys\n"]
    ended = warm.run(
        "--world-size=2", "--all2all-backend=deepep_low_latency", "--max-num-batched-tokens=16", "--static-shapes",
        "--max-new-tokens=3", "--check", *(f"--prompt={text}" for text in prompts),
        f"--trace={warm.folder / 'trace'}",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result = ended.result
    assert result["verdict"] == "equal" and result["bound"]["ratio"] == 1.0
    passes = {row["phase"]: row["passes"] for row in result["moved"]}
    assert passes["prefill"] > 5 and passes["decode"] == 2
    columns = Trace.load(warm.folder / "trace").columns
    rows = sum(len(p["prompt_tokens"]) + 2 for p in result["prompts"])
    assert len(columns["row"]) == rows * 2 * 8
    assert int(columns["row"].max()) < 16  # never more than T_max rows at once
    assert not warm.wait_until_gone()


def test_more_prompts_than_fixed_places_is_refused_before_anything_starts(course):
    ended = course.run(
        "--world-size=1", "-dp=2", "--enable-expert-parallel", "--all2all-backend=nixl_ep", "--world-size=2",
        "--max-num-batched-tokens=2", *["--prompt=x"] * 5,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "3 prompts on one data-parallel rank" in ended.stderr and "--max-num-batched-tokens to 3" in ended.stderr


def test_quantised_rows_keep_the_text_or_the_run_says_by_how_much(warm):
    ended = warm.run(
        "--world-size=2", "--all2all-backend=deepep_high_throughput", "--dispatch-quant=fp8_group", "--check",
        "--transport=shm",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result = ended.result
    assert result["verdict"] == "reported" and 0 < result["max_abs_logit_diff"] < 1
    assert all(prompt["matches_reference"] for prompt in result["prompts"])  # the default prompts keep their text
    assert result["quantised"]["row_bytes"] == 132 and result["quantised"]["plain_row_bytes"] == 512
    sent = {row["rows"] for row in result["moved"] if row["phase"] == "prefill"}
    assert all(row["payload"] == row["rows"] // 2 * (132 + 512) for row in result["moved"]) and sent
    assert result["bound"]["ratio"] == 1.0
    assert "rows are quantised (fp8_group)" in " ".join(ended.stdout.split())


def test_a_trace_of_two_hops_names_who_forwarded(warm):
    ended = warm.run(
        "--world-size=3", "--all2all-backend=two_hop", "--ranks-per-node=2", "--max-new-tokens=2", "--prompt=def add(",
        "--prompt=x", f"--trace={warm.folder / 'trace'}", "--trace-values", "--transport=shm",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    columns = Trace.load(warm.folder / "trace").columns
    source, owner, via = (columns[name] for name in ("source_rank", "owner_rank", "via_rank"))
    node = lambda rank: rank // 2  # noqa: E731
    assert torch.equal(node(via), node(owner))  # it sits where the expert is
    assert torch.equal(via[node(source) == node(owner)], source[node(source) == node(owner)])
    assert (columns["receive_row"] >= 0).all() and (columns["send_row"] >= 0).all()
