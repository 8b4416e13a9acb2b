"""What a recorder does during a pass: nothing but to keep references and stamps, and without a trace not even that."""

from __future__ import annotations

import pytest
import torch
from layer_cases import make_config, make_layer, make_weights

from moe_course.backends.configure import configure
from moe_course.comm.ledger import Ledger
from moe_course.comm.sim import run_threads
from moe_course.expert_map import make_placement
from moe_course.trace import spans
from moe_course.trace.record import Recorder
from moe_course.trace.schema import COLUMNS, STAGES, dtype_of

CONFIG, RANKS = make_config(9, 3, 16, 8), 3
ROWS = ((4, 0, 6), (1, 1, 0))  # of each rank, in two passes


def run(name: str, make, after=lambda recorder, comm: None):
    """Two passes of one layer in threads: exchanges, ledger, recorder, and what `after` says, of each rank."""
    weights, placement = make_weights(CONFIG, torch.float32), make_placement(RANKS, 9, ranks_per_node=2)

    def body(comm):
        recorder = make()
        layer = make_layer(weights, placement, comm, configure(name, max_num_tokens=6), layer=1, on_event=recorder)
        comm.ledger = Ledger()
        generator = torch.Generator().manual_seed(comm.rank)
        for step, n in enumerate(ROWS):
            comm.step, rows = step, torch.randn(n[comm.rank], 16, generator=generator)
            if recorder is not None:
                recorder.on_pass(step, torch.arange(len(rows)) + 7, [(comm.rank, i) for i in range(len(rows))])
            layer(rows)
        exchanges, ledger = comm._op_number, comm.ledger.total()
        comm.ledger = Ledger()
        return exchanges, ledger, recorder, after(recorder, comm)

    return run_threads(RANKS, body)


@pytest.mark.parametrize("name", ["allgather_reducescatter", "two_hop", "low_latency"])
@pytest.mark.parametrize("make", [lambda: Recorder(trace=False), Recorder, lambda: Recorder(values=True)])
def test_recording_exchanges_nothing_during_the_passes(name, make):
    bare, recorded = run(name, lambda: None), run(name, make)
    assert [(exchanges, ledger) for exchanges, ledger, *_ in recorded] == [one[:2] for one in bare]


def test_without_a_trace_there_are_no_stamps_and_only_ids_are_kept(monkeypatch):
    def refuse():
        raise AssertionError("a stamp was taken")

    monkeypatch.setattr(spans.time, "monotonic_ns", refuse)
    with pytest.raises(AssertionError, match="a stamp was taken"):
        run("two_hop", Recorder)
    for rank, (_, _, recorder, _) in enumerate(run("two_hop", lambda: Recorder(trace=False))):
        assert [len(entry.topk_ids) for entry in recorder.passes] == [n[rank] for n in ROWS]
        assert all(entry.topk_weights is None and entry.handle is None for entry in recorder.passes)
        assert not recorder.outputs and not recorder.computed and len(recorder.clock.tensors()["span_step"]) == 0
        assert recorder.rows_per_pass().keys() == {(0, 1), (1, 1)}


@pytest.mark.parametrize("name", ["allgather_reducescatter", "all_to_all", "high_throughput", "low_latency",
                                  "two_hop", "one_sided"])  # fmt: skip
def test_places_are_worked_out_after_the_run(name):
    """Each route has a place of its own there, or shares it with routes of its row that went to the same rank."""
    found = run(name, Recorder, lambda recorder, comm: recorder.columns())
    columns = {n: torch.cat([columns[n] for *_, columns in found]) for n in COLUMNS}
    assert all(columns[n].dtype == dtype_of(n) for n in COLUMNS)
    assert len(columns["row"]) == sum(map(sum, ROWS)) * 3
    assert (columns["send_row"] >= 0).all() and (columns["receive_row"] >= 0).all()
    assert torch.equal(columns["prompt"], columns["source_rank"])
    assert torch.equal(columns["position"], columns["row"]) and torch.equal(columns["token_id"], columns["row"] + 7)
    by_place: dict[tuple, set] = {}
    for step, owner, place, source, row, k in zip(
        *(columns[n].tolist() for n in ("step", "owner_rank", "receive_row", "source_rank", "row", "k")), strict=True
    ):
        route = (source, row, k) if name in ("all_to_all", "low_latency") else (source, row)
        by_place.setdefault((step, owner, place), set()).add(route)
    assert all(len(routes) == 1 for routes in by_place.values())
    assert ((columns["via_rank"] >= 0) == (name == "two_hop")).all()


def test_spans_follow_each_other_without_a_gap():
    for _, _, recorder, _ in run("all_to_all", Recorder):
        times = recorder.clock.tensors()
        assert (
            times["span_stage"].tolist() == [STAGES.index(n) for n in ("route", "dispatch", "experts", "combine")] * 2
        )
        assert times["span_step"].tolist() == [0] * 4 + [1] * 4 and set(times["span_layer"].tolist()) == {1}
        begin, end = times["span_begin_ns"], times["span_end_ns"]
        assert (begin <= end).all()
        assert torch.equal(begin[1:4], end[:3]) and torch.equal(begin[5:], end[4:7]) and begin[4] >= end[3]
