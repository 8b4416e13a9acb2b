"""The parts of every row add up to its output, for every shape and mode; and a part that is wrong shows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from moe_course.errors import TraceError
from moe_course.options import RunOptions
from moe_course.trace import Trace
from moe_course.trace.simulate import run_here

PROMPTS = ("def add(", "x", "import os\n")
EP = {"enable_expert_parallel": True}
BACKENDS = {
    "allgather_reducescatter": {}, "all_to_all": {}, "deepep_high_throughput": {}, "deepep_low_latency": {},
    "two_hop": {"ranks_per_node": "2,1"}, "flashinfer_nvlink_one_sided": {},
}  # fmt: skip
CELLS = {name: {"all2all_backend": name, "world_size": 3} | more for name, more in BACKENDS.items()} | {
    "one rank": {"world_size": 1},
    "TP + EP": {"tensor_parallel_size": 2} | EP,
    "TP + DP + EP, rows shared": {"tensor_parallel_size": 2, "data_parallel_size": 2} | EP,
    "TP + DP + EP, rows split": {
        "tensor_parallel_size": 2, "data_parallel_size": 2, "all2all_backend": "deepep_high_throughput",
    } | EP,
    "PCP + EP": {"prefill_context_parallel_size": 2} | EP,
    "sums added in each node": {
        "all2all_backend": "two_hop", "world_size": 4, "ranks_per_node": "2", "reduce_in_node": True,
    },
    "bf16": {"world_size": 2, "dtype": "bfloat16"},
    "bf16 rows by route": {"world_size": 2, "dtype": "bfloat16", "all2all_backend": "all_to_all"},
    "quantised": {"world_size": 2, "dispatch_quant": "fp8_group", "all2all_backend": "deepep_high_throughput"},
    "quantised, fixed places": {"world_size": 2, "dispatch_quant": "fp8_group",
                                "all2all_backend": "deepep_low_latency"},
    "narrow sums": {"world_size": 3, "combine_dtype": "bfloat16"},
    "narrow outputs": {"world_size": 3, "combine_dtype": "bfloat16", "all2all_backend": "all_to_all"},
    "narrow sums added in each node": {
        "all2all_backend": "two_hop", "world_size": 4, "ranks_per_node": "2", "reduce_in_node": True,
        "combine_dtype": "bfloat16",
    },
}  # fmt: skip


def record(**options) -> Trace:
    return run_here(RunOptions(prompts=PROMPTS, max_new_tokens=3, trace_values=True, **options))


def places(trace: Trace):
    for rank, tensors in enumerate(trace.ranks):
        for step, layer, row in zip(*(tensors[f"output_{n}"].tolist() for n in ("step", "layer", "row")), strict=True):
            yield rank, row, layer, step


@pytest.mark.parametrize("cell", CELLS)
def test_every_row_adds_up(cell):
    trace, seen = record(**CELLS[cell]), 0
    for place in places(trace):
        found = trace.explain(*place)
        assert found.equal and found.promised, (place, found.difference)
        assert sorted(route["k"] for route in found.routes) == list(range(8))
        assert sorted(k for partial in found.partials for k in partial.ks) == list(range(8))
        seen += 1
    assert seen >= (9 + 2 + 11 + 3 * 2) * 2
    assert ("quantised" in str(found)) == ("quantised" in cell) and ("bfloat16" in found.note) == ("narrow" in cell)


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return record(world_size=2)


def test_the_table(recorded):
    text = str(recorded.explain(0, 3, 1, 0))
    assert text.startswith("'f' (token 102) is position 3 of prompt 0: row 3 of rank 0 in step 0, layer 1\n")
    assert "equal: all 128 numbers of the sum are those of the run, to the bit" in text
    assert len([line for line in text.splitlines() if " rank " in line]) >= 8 + 1
    cells = [line.split() for line in text.splitlines()[4:12]]  # k, expert, "rank", owner, …
    routes = recorded.explain(0, 3, 1, 0).routes
    assert [int(line[3]) for line in cells] == [route["owner_rank"] for route in routes]
    assert {route["owner_rank"] for route in routes} == {0, 1}
    heads = text.splitlines()[2]
    assert heads.split()[:4] == ["k", "expert", "owner", "slot"]
    assert [int(line[4]) for line in cells] == [route["local_expert"] for route in routes]  # on the owner's shelf
    for line, route in zip(text.splitlines()[4:12], routes, strict=True):
        told = [float(number) for number in line[line.index("[") + 1 : line.index("…")].split()]
        weighted = (route["contribution"] * route["weight"])[: len(told)]
        torch.testing.assert_close(torch.tensor(told), weighted, rtol=0, atol=6e-5)
        assert len(told) == 3
    token = recorded.explain(1, 0, 2, 2).token
    new = recorded.meta["new_tokens"][1]
    assert token == {"id": new[1], "text": chr(new[1]), "prompt": 1, "position": 3, "rank": 1, "row": 0, "layer": 2,
                     "step": 2}  # fmt: skip


def broken(trace: Trace, column: str, change) -> Trace:
    """The trace with one column of row 3 of rank 0, step 0, layer 1 changed: of its 8 routes."""
    here = slice(3 * 8, 4 * 8)
    columns = dict(trace.columns)
    if column == "contribution":
        first = dict(trace.ranks[0])
        first["contribution"] = first["contribution"].clone()
        change(first["contribution"][here])
        return replace(trace, ranks=(first, *trace.ranks[1:]))
    columns[column] = columns[column].clone()
    change(columns[column][here])
    return replace(trace, columns=columns)


def swap(values: torch.Tensor, a: int = 0, b: int = 2) -> None:
    values[[a, b]] = values[[b, a]]


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("contribution", lambda values: values[1].neg_()),
        ("contribution", lambda values: values[0, 5].add_(1e-3)),
        ("contribution", swap),
        ("weight", lambda values: values[3:4].mul_(1 + 1e-6)),
        ("weight", swap),
        ("owner_rank", lambda values: values[0:1].fill_(1)),
        ("row", lambda values: values[7:8].fill_(10**6)),
    ],
)
def test_a_wrong_part_shows(recorded, column, change):
    assert recorded.explain(0, 3, 1, 0).equal
    found = broken(recorded, column, change).explain(0, 3, 1, 0)
    assert not found.equal and "DIFFERENT: number" in str(found)


def test_the_order_of_k_shows():
    """On one rank all eight are added in k order; another order has other last bits in most rows."""
    trace = record(world_size=1)
    wrong = replace(trace, columns=trace.columns | {"k": 7 - trace.columns["k"]})
    differ = [not wrong.explain(*place).equal for place in places(trace)]
    assert sum(differ) > len(differ) / 2


def test_what_is_not_there_is_named(recorded):
    with pytest.raises(TraceError, match=r"rank 0 recorded 0 outputs for row 99 of layer 1, step 0; it has \d+ rows"):
        recorded.explain(0, 99, 1, 0)
    with pytest.raises(TraceError, match="sparse layers \\[1, 2\\]"):
        recorded.explain(0, 0, 7, 0)
    with pytest.raises(TraceError, match="rank 5 is not in this trace; it has ranks 0 to 1"):
        recorded.explain(5, 0, 1, 0)
    with pytest.raises(TraceError, match="rank is '0', needs to be a whole number; write rank=0"):
        recorded.explain("0", 0, 1, 0)
    for name in ("rank", "row", "layer", "step"):
        for odd in ("x", 1.0, None, True, [0]):
            with pytest.raises(TraceError, match=f"{name} is {re.escape(repr(odd))}, needs to be a whole number$"):
                recorded.explain(**{"rank": 0, "row": 0, "layer": 1, "step": 0} | {name: odd})
    with pytest.raises(TraceError, match="rank is '1', needs to be a whole number"):
        recorded.spans("1")
    with pytest.raises(TraceError, match="layer is '1', needs to be a whole number; write layer=1"):
        list(recorded.where(layer="1"))
    assert recorded.explain(torch.tensor(0), 0, 1, torch.tensor(0)).equal
    assert len(list(recorded.where(weight=recorded.columns["weight"][0].item()))) >= 1
    bare = replace(recorded, meta=recorded.meta | {"values": False})
    with pytest.raises(TraceError, match="record the run with --trace-values"):
        bare.explain(0, 0, 1, 0)


def test_where_bits_are_not_promised_it_says_so(recorded):
    first = dict(recorded.ranks[0])
    first["contribution"] = first["contribution"] + 1e-8
    elsewhere = replace(recorded, meta=recorded.meta | {"device": "cuda"}, ranks=(first, *recorded.ranks[1:]))
    found = elsewhere.explain(0, 3, 1, 0)
    assert not found.promised and not found.equal and found.within
    assert "bits are not promised here" in str(found) and "equal:" not in str(found)
