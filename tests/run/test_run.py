"""`moe-course run` for real: several processes, the trained model, real text, one verdict."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from moe_course.backends import BACKENDS
from moe_course.backends.traffic import RowBytes
from moe_course.combine import sum_contributions
from moe_course.config import MoEConfig
from moe_course.console import print_result
from moe_course.expert_map import make_placement
from moe_course.options import TINY
from moe_course.prompts import DEFAULT_PROMPTS
from moe_course.rows import TOLERANCE
from moe_course.trace import Trace

PROMPTS = ["def add(a, b):\n    return", "", "Größe → 漢字 🙂", "x" * 200 + "\n", "import os\n"]
CONFIG = MoEConfig.from_pretrained(TINY)
LAYERS, K = len(CONFIG.sparse_layers), CONFIG.num_experts_per_tok
TEXTS: dict[int, list[str]] = {}


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return str(path)


@pytest.mark.parametrize("world_size", [1, 3, 8])  # 2 and 4 below, with other prompts
def test_same_text_as_one_process_for_any_number_of_ranks(course, prompts_file, world_size, request):
    """Fewer and more prompts than ranks, uneven experts, an empty prompt, non-ASCII, very different lengths."""
    from_nothing = world_size == 1  # as a user's does; the largest share of memory
    if not from_nothing:
        request.getfixturevalue("warm")
    ended = course.run(
        "--world-size", str(world_size), "--prompts-file", prompts_file, "--max-new-tokens", "12", "--check"
    )
    assert ended.returncode == 0, ended.stderr
    result = ended.result
    assert result["verdict"] == "equal" and result["topk_ids_equal"] is True
    assert result["max_abs_logit_diff"] <= 1e-4
    assert [p["matches_reference"] for p in result["prompts"]] == [True] * len(PROMPTS)
    assert [p["dp_rank"] for p in result["prompts"]] == [i % world_size for i in range(len(PROMPTS))]
    assert [p["prompt"] for p in result["prompts"]] == PROMPTS
    texts = [p["text"] for p in result["prompts"]]
    assert TEXTS.setdefault(1, texts) == texts
    assert "equal" in ended.stdout and not course.wait_until_gone()

    # every rank holds its share of experts exactly, and stays small
    placement = make_placement(world_size, CONFIG.n_routed_experts)
    per_expert = 3 * CONFIG.hidden_size * CONFIG.moe_intermediate_size * 4 * LAYERS
    assert [r["experts"] for r in result["ranks"]] == [placement.num_local(r) for r in range(world_size)]
    assert [r["expert_bytes"] for r in result["ranks"]] == [r["experts"] * per_expert for r in result["ranks"]]
    assert sum(r["experts"] for r in result["ranks"]) == CONFIG.n_routed_experts
    if from_nothing:  # a fork begins with the memory of pytest
        assert all(r["peak_rss"] <= 600e6 for r in result["ranks"])

    # the ledger is what this routing must move: every row to R - 1 ranks, a partial sum back from each
    rows = sum(len(p["prompt_tokens"]) + 12 - 1 for p in result["prompts"])
    row_bytes = CONFIG.hidden_size * 4
    assert result["bytes"]["payload"] == rows * LAYERS * (world_size - 1) * 2 * row_bytes
    assert result["bound"]["payload"] == result["bytes"]["payload"] and result["bytes"]["padding"] == 0
    routing_bytes = rows * LAYERS * (world_size - 1) * K * 8  # id and weight of each route
    headers = sum(e["metadata"] for e in result["ledger"]) - routing_bytes
    message = 8 * (10 + 2 * world_size)
    meetings = 12 * LAYERS * 2 + 1  # dispatch and combine per step and layer, and the barrier after loading
    assert headers == meetings * world_size * (world_size - 1) * message


def test_the_default_prompts_are_equal_without_near_ties(warm):
    ended = warm.run("--check")
    assert ended.returncode == 0, ended.stderr
    assert ended.result["verdict"] == "equal" and ended.result["near_ties"] == []
    assert ended.result["world_size"] == 4 and len(ended.result["prompts"]) == len(DEFAULT_PROMPTS)


def test_torchrun_starts_the_same_program(course):
    ended = course.run(
        "--prompt", PROMPTS[0], "--max-new-tokens", "8", "--check",
        module=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moe_course.run"),
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.result["verdict"] == "equal" and ended.result["world_size"] == 2
    assert "verdict" in ended.stdout and not course.wait_until_gone()


def test_torchrun_with_another_number_of_ranks_is_refused(warm):
    ended = warm.run(
        "--world-size", "3",
        module=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moe_course.run"),
    )  # fmt: skip
    assert ended.returncode != 0
    assert "torchrun started 2 ranks, the options ask for 3" in ended.stderr


def test_the_trace_joins_all_ranks_and_adds_up_to_the_output(warm, prompts_file):
    folder = warm.folder / "trace"
    ended = warm.run(
        "--world-size", "3", "--prompts-file", prompts_file, "--max-new-tokens", "4",
        "--trace", str(folder), "--trace-values",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.result["verdict"] == "not checked" and ended.result["max_abs_logit_diff"] is None
    assert ended.result["bound"]["ratio"] == 1.0  # collecting the trace is not part of the run
    trace = Trace.load(folder)
    rows = sum(len(p["prompt_tokens"]) + 4 - 1 for p in ended.result["prompts"])
    assert len(trace) == rows * LAYERS * K
    assert [json.loads(line) for line in (folder / "routes.jsonl").read_text().splitlines()] == list(trace.routes())
    placement = make_placement(3, CONFIG.n_routed_experts)
    experts = trace.columns["expert"]
    assert torch.equal(trace.columns["owner_rank"], placement.owner[experts].long())
    assert torch.equal(trace.columns["local_expert"], placement.local[experts].long())
    first = [p for p in ended.result["prompts"] if p["dp_rank"] == 1][0]["prompt_tokens"]
    mine = list(trace.where(source_rank=1, step=0, layer=1, k=0))
    assert [r["token_id"] for r in mine][: len(first)] == first
    shift = sum(len(p["prompt_tokens"]) for p in ended.result["prompts"] if p["dp_rank"] == 0)
    assert all(r["receive_row"] == r["row"] + shift and r["send_row"] == r["row"] for r in mine)
    _assert_sums(folder, 3)


def _assert_sums(folder, world_size):
    """The recorded contributions, weighted and summed by the recipe, are the recorded outputs bit for bit."""
    for rank in range(world_size):
        t = load_file(folder / f"rank{rank:04d}.safetensors")
        parts = torch.zeros(len(t["output"]), world_size, K, CONFIG.hidden_size)
        row_of_route = torch.arange(len(t["row"])) // K  # K routes for every row, step by step and layer by layer
        parts[row_of_route, t["owner_rank"], t["k"]] = t["contribution"] * t["weight"].unsqueeze(1)
        partials = [sum_contributions(parts[:, owner].unbind(1)) for owner in range(world_size)]
        assert torch.equal(sum_contributions(partials), t["output"])


def test_bound_of_no_communication_is_zero():
    assert (
        BACKENDS["no_dp_ep"]
        .traffic([torch.zeros(3, 8, dtype=torch.int32)], make_placement(1, 8))
        .payload(RowBytes(1, 1, 1))
        == 0
    )


def test_fallbacks_and_old_names_are_said_out_loud(warm):
    ended = warm.run(
        "--world-size", "2", "--prompt", "x", "--max-new-tokens", "2",
        "--expert-placement-strategy", "round_robin", "--all2all-backend", "pplx",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    plan = ended.result["plan"]
    assert plan["placement"] == "linear" and "n_group 1" in plan["placement_reason"]
    assert "round_robin was asked for" in ended.stdout
    assert ended.result["backend"] == "allgather_reducescatter" and "pplx is an old name" in ended.stdout


def test_bf16_reports_and_promises_nothing(warm):
    ended = warm.run("--world-size", "2", "--prompt", "x = ", "--max-new-tokens", "4", "--dtype", "bfloat16", "--check")
    assert ended.returncode == 0, ended.stderr
    assert ended.result["verdict"] == "reported" and ended.result["max_abs_logit_diff"] is not None


def test_the_rank_program_launches_itself_when_started_alone(warm):
    ended = warm.run("--world-size", "1", "--prompt", "x", "--max-new-tokens", "1", module=("-m", "moe_course.run"))
    assert ended.returncode == 0 and len(ended.result["prompts"][0]["tokens"]) == 1


def test_help_teaches():
    import subprocess

    shown = subprocess.run([sys.executable, "-m", "moe_course", "run", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "torchrun" in shown.stdout and "Exit codes" in shown.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("flag", "line"), [("static_shapes", "static "), ("reduce_in_node", "sums ")])
def test_sums_in_another_order_are_as_near_as_the_dtype_allows(told, flag, line, dtype):
    console = Console(file=io.StringIO(), width=400)
    print_result(told[1] | {flag: True, "dtype": dtype}, console)
    (said,) = [text for text in console.file.getvalue().splitlines() if text.startswith(line)]
    assert f"up to {TOLERANCE[getattr(torch, dtype)]:g} from other backends ({dtype}, sums of size 1)" in said
