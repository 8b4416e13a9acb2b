"""The Chrome trace of a run: what a viewer needs, and only what happened."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from moe_course.errors import TraceError
from moe_course.options import RunOptions
from moe_course.trace.perfetto import perfetto
from moe_course.trace.schema import STAGES
from moe_course.trace.simulate import run_here

#: What the format asks of an event, by its phase.
NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id", "args"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp", "args"},
}


@pytest.fixture(scope="module")
def recorded():
    return run_here(RunOptions(prompts=("def f(", "x"), max_new_tokens=3, world_size=2, all2all_backend="all_to_all"))


@pytest.fixture(scope="module")
def events(recorded, tmp_path_factory):
    path = tmp_path_factory.mktemp("perfetto") / "trace.json"
    assert recorded.to_perfetto(str(path)) == path
    content = json.loads(path.read_text())
    assert content == perfetto(recorded) and content["otherData"]["arrows_left_out"] == 0
    return content["traceEvents"]


def test_every_event_has_what_its_kind_needs(events):
    assert {event["ph"] for event in events} == set(NEEDED)
    for event in events:
        assert set(event) - {"ph"} == NEEDED[event["ph"]], event
        assert event["pid"] in (1, 2) and event["tid"] == event["pid"]
        if event["ph"] != "M":
            assert isinstance(event["ts"], float) and event["ts"] >= 0 and event.get("dur", 0.0) >= 0
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0 (128 experts)", "rank 1 (128 experts)",
    }  # fmt: skip
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times) and times[0] == 0


def test_slices_are_the_spans_and_never_overlap(recorded, events):
    for rank in (0, 1):
        spans = recorded.spans(rank)
        mine = [event for event in events if event["ph"] == "X" and event["pid"] == rank + 1]
        assert [event["name"] for event in mine] == [STAGES[stage] for stage in spans["span_stage"].tolist()]
        for event, following in zip(mine, mine[1:], strict=False):
            assert event["ts"] + event["dur"] <= following["ts"] + 1e-3
        total = (spans["span_end_ns"] - spans["span_begin_ns"]).sum().item()
        assert sum(event["dur"] for event in mine) == pytest.approx(total / 1e3)
        assert all(("layer" in event["args"]) == (event["name"] != "other") for event in mine)
        steps = Counter((e["args"]["step"], e["args"].get("layer"), e["name"]) for e in mine)
        # three passes; before layer 1, before layer 2 and after it lie other things
        assert steps == {(s, n, stage): 1 for s in range(3) for n in (1, 2) for stage in STAGES[:4]} | {
            (s, None, "other"): 3 for s in range(3)
        }


def test_arrows_join_slices_of_two_ranks_and_count_the_routes(recorded, events):
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 2 * 3 * 2 * 2  # both ways, passes, layers, pairs
    routes = Counter()
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] != end["pid"] and start["ts"] <= end["ts"] and start["args"] == end["args"]
        names = [_slice_at(events, event)["name"] for event in (start, end)]
        assert names == (["dispatch", "experts"] if start["name"] == "rows" else ["experts", "combine"])
        routes[start["name"]] += start["args"]["routes"]
    left = (recorded.columns["source_rank"] != recorded.columns["owner_rank"]).sum().item()
    assert routes == {"rows": left, "contributions": left}


def _slice_at(events, arrow):
    """The slice a viewer ties an arrow to."""
    found = [
        event for event in events
        if event["ph"] == "X" and event["pid"] == arrow["pid"]
        and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"] and event["args"].get("layer") is not None
    ]  # fmt: skip
    assert len(found) == 1, arrow
    return found[0]


def test_arrows_are_bounded_and_what_is_left_out_is_counted(recorded):
    content = perfetto(recorded, most_arrows=5)
    assert sum(event["ph"] == "s" for event in content["traceEvents"]) == 10
    assert content["otherData"]["arrows_left_out"] == 12 - 5


def test_clocks_of_several_hosts_are_not_put_on_one_line(recorded):
    late = {name: tensor.clone() for name, tensor in recorded.ranks[1].items()}
    for name in ("span_begin_ns", "span_end_ns"):
        late[name] += 10**15
    clock = recorded.meta["clock"] | {"hosts": 2, "comparable": False}
    content = perfetto(replace(recorded, meta=recorded.meta | {"clock": clock}, ranks=(recorded.ranks[0], late)))
    firsts = [
        min(e["ts"] for e in content["traceEvents"] if e["ph"] == "X" and e["pid"] == rank + 1) for rank in (0, 1)
    ]
    assert firsts == [0, 0] and all(event["ph"] in "MX" for event in content["traceEvents"])


def test_a_rank_without_spans_and_a_file_that_cannot_be_written(recorded, tmp_path):
    bare = {name: torch.empty(0, dtype=torch.int64) for name in recorded.ranks[0]}
    content = perfetto(replace(recorded, ranks=(recorded.ranks[0], bare)))
    assert {event["pid"] for event in content["traceEvents"] if event["ph"] != "M"} == {1}
    assert content["otherData"]["arrows_left_out"] == 12
    with pytest.raises(TraceError, match="cannot be written: .*name a file in a folder that exists"):
        recorded.to_perfetto(tmp_path / "nowhere" / "trace.json")
