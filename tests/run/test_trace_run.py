"""Recorded runs of processes: every row of every backend on every transport adds up, and threads do the same.

One start of the processes for each number of ranks (`many_runs.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from many_runs import run_many

from moe_course.backends.capabilities import KNOWN_BACKENDS
from moe_course.backends.support import SUPPORT
from moe_course.trace import Trace
from moe_course.trace.schema import STAGES
from moe_course.trace.simulate import same, simulate
from moe_course.trace.strict.result import check_result
from moe_course.trace.strict.same_run import check_same_run
from moe_course.viz.flow_data import flow_data

PROMPTS = ("def add(a, b):", "x", "größe = 1\n")
NEW = 3
TP_DP = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
MODES = {
    1: [{"world_size": 1}],
    2: [  # ranks agree on tokens (no_dp_ep), and on whether all texts have ended, outside of layers
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "stop_at_eos": True},
        {"prefill_context_parallel_size": 2, "enable_expert_parallel": True},
    ],
    4: [
        TP_DP,
        TP_DP | {"sequence_parallel_moe": True},
        {"world_size": 4, "all2all_backend": "two_hop", "ranks_per_node": "3", "reduce_in_node": True},
        {"world_size": 4, "all2all_backend": "deepep_low_latency", "dispatch_quant": "fp8_group"},
        {"world_size": 4, "all2all_backend": "all_to_all", "combine_dtype": "bfloat16"},
    ],
}


def one_of_each_shape(ranks: int) -> list[dict]:
    names = {known.shape: name for name, known in KNOWN_BACKENDS.items()}
    return [
        {"world_size": ranks, "all2all_backend": name, "transport": transport}
        | ({"ranks_per_node": "3" if ranks == 4 else "1"} if shape == "two_hop" else {})
        for shape, name in names.items()
        for transport in ("gloo", "shm")
        if SUPPORT[shape, transport] is True
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_row_adds_up_and_threads_record_the_same(tmp_path, ranks):
    cells = MODES[ranks] + (one_of_each_shape(ranks) if ranks > 1 else [])
    for number, cell in enumerate(cells):
        cells[number] = cell | {"trace": str(tmp_path / str(number)), "trace_values": True}
    results = run_many(ranks, cells, new_tokens=NEW, prompts=PROMPTS)
    shapes = set()
    for cell, result in zip(cells, results, strict=True):
        exact = cell.get("dispatch_quant") is None and cell.get("combine_dtype") is None
        assert result["verdict"] == ("equal" if exact else "reported"), (cell, result["failures"])
        trace = Trace.load(cell["trace"])
        shapes.add(trace.meta["shape"])
        figures = check_result(result | {"wall_s": 0.0}, Path("run.json"))
        check_same_run(trace.meta, flow_data(trace), figures, Path("run.json"))
        assert trace.meta["transport"] == result["transport"] == cell.get("transport", "gloo")
        assert trace.meta["new_tokens"] == [prompt["tokens"] for prompt in result["prompts"]]
        assert all(_adds_up(trace, rank) for rank in range(ranks)), cell
        _assert_time_is_told(trace)
        if cell.get("transport") != "shm":  # a second transport records what the first did
            first = trace
            assert same(trace, simulate(trace)) == [], cell
        elif cell.get("all2all_backend") == first.meta["backend"]:
            assert same(first, trace) == [], cell
    assert len(shapes) == {1: 1, 2: 7, 4: 6}[ranks]  # nothing travels among two TP ranks


def _adds_up(trace: Trace, rank: int) -> bool:
    places = zip(*(trace.values(rank)[f"output_{n}"].tolist() for n in ("row", "layer", "step")), strict=True)
    return all(trace.explain(rank, *place).equal for place in places)


def _assert_time_is_told(trace: Trace) -> None:
    """Three passes of two sparse layers; what lies between two stages of a rank belongs to one of them."""
    assert trace.meta["clock"]["comparable"]
    for rank in range(trace.meta["world_size"]):
        spans = trace.spans(rank)
        counts = torch.bincount(spans["span_stage"], minlength=len(STAGES)).tolist()
        assert counts[:4] == [NEW * 2] * 4 and counts[4] in (NEW * 2, NEW * 3)  # idle ranks have no head
        assert (spans["span_layer"][spans["span_stage"] < 4] > 0).all()
    prompts = trace.meta["prompts"]
    for prompt, position, token in zip(*(trace.columns[n].tolist() for n in ("prompt", "position", "token_id")),
                                       strict=True):  # fmt: skip
        text = prompts[prompt]["tokens"] + trace.meta["new_tokens"][prompt]
        assert text[position] == token
