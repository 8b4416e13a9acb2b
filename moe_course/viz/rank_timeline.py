"""RankTimeline: what each rank did when, from the time stamps of a recorded run.

Built in: notebook 13.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_course.errors import TraceError
from moe_course.trace.schema import STAGES
from moe_course.viz.given import a_trace
from moe_course.viz.picture import Picture

if TYPE_CHECKING:
    from moe_course.trace.trace import Trace


class RankTimeline(Picture):
    """A lane of spans per rank; `state` is `{"step", "rank", "layer", "stage"}`, step None for the whole run."""

    module = "rank_timeline"

    @classmethod
    def of(cls, trace: Trace | str | Path) -> RankTimeline:
        """A picture of the spans of `trace`, or of the one in a folder.

        Raises ConfigError for what is neither, TraceError when a rank has no spans.
        """
        data = timeline_data(a_trace(trace))
        return cls(data=data, state={"step": None, "rank": busiest(data), "layer": None, "stage": None})

    def text(self) -> str:
        data = self.data
        layers = {layer for layer in data["spans"]["layer"] if layer >= 0}
        counts = ((data["ranks"], "rank"), (len(data["passes"]), "pass"), (len(layers), "sparse layer"))
        parts = [f"{n} {noun}{'' if n == 1 else 'es' if noun == 'pass' else 's'}" for n, noun in counts]
        return f"RankTimeline: {', '.join(parts)}, {len(data['spans']['rank'])} spans"

    def still(self) -> bytes:
        from moe_course.viz.rank_timeline_still import draw

        return draw(self.data)


def timeline_data(trace: Trace) -> dict[str, Any]:
    """The spans of all ranks as plain JSON, columns in the order of time on each rank.

    `begin` is in ns since the first span of the run. Ranks whose clocks do not compare each start at 0, and
    `comparable` is False. `wait` is the part of a dispatch or combine, in ns, that passed before the last rank
    had come to it: 0 where clocks do not compare.
    """
    spans = [trace.spans(rank) for rank in range(trace.meta["world_size"])]
    for rank, found in enumerate(spans):
        if not len(found["span_step"]):
            raise TraceError(f"rank {rank} has no spans in this trace; record the run again with --trace")
    clock = trace.meta.get("clock", {})
    comparable = bool(clock.get("comparable", True))
    zero = min(int(found["span_begin_ns"][0]) for found in spans)
    columns: dict[str, list[int]] = {name: [] for name in ("rank", "step", "layer", "stage", "begin", "time")}
    for rank, found in enumerate(spans):
        start = zero if comparable else int(found["span_begin_ns"][0])
        columns["rank"] += [rank] * len(found["span_step"])
        for name in ("step", "layer", "stage"):
            columns[name] += found[f"span_{name}"].tolist()
        columns["begin"] += (found["span_begin_ns"] - start).tolist()
        columns["time"] += (found["span_end_ns"] - found["span_begin_ns"]).tolist()
    exchanges = {"combine"} if trace.meta.get("shape") == "no_dp_ep" else {"dispatch", "combine"}  # there, rows stay
    columns["wait"] = _waits(columns, exchanges) if comparable else [0] * len(columns["rank"])
    prefill = int(trace.meta.get("prefill_passes", 1))
    steps = sorted(set(columns["step"]))
    return {
        "schema": "moe_course.timeline/1",
        "ranks": len(spans),
        "stages": list(STAGES),
        "passes": [{"step": step, "phase": "prefill" if step < prefill else "decode"} for step in steps],
        "comparable": comparable,
        "note": str(clock.get("note", "")),
        "spans": columns,
    }


def _waits(columns: dict[str, list[int]], exchanges: set[str]) -> list[int]:
    """Time of each exchange before the last rank began the same one."""
    last: dict[tuple[int, int, int], int] = {}
    places = list(zip(columns["step"], columns["layer"], columns["stage"], strict=True))
    for place, begin in zip(places, columns["begin"], strict=True):
        last[place] = max(last.get(place, begin), begin)
    return [
        min(last[place] - begin, time) if STAGES[place[2]] in exchanges else 0
        for place, begin, time in zip(places, columns["begin"], columns["time"], strict=True)
    ]


def totals(data: dict[str, Any]) -> torch.Tensor:
    """`[R, 6]` int64 ns: what each rank spent on each of the five stages without waiting, and on waiting."""
    spans = {name: torch.tensor(data["spans"][name], dtype=torch.int64) for name in ("rank", "stage", "time", "wait")}
    found = torch.zeros(data["ranks"], len(STAGES) + 1, dtype=torch.int64)
    found.index_put_((spans["rank"], spans["stage"]), spans["time"] - spans["wait"], accumulate=True)
    found[:, -1].index_add_(0, spans["rank"], spans["wait"])
    return found


def longest_pass(data: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The pass that took longest on any rank, and its time there in ns. Clocks need not compare."""
    spans, begin, end = data["spans"], {}, {}
    for step, rank, start, time in zip(spans["step"], spans["rank"], spans["begin"], spans["time"], strict=True):
        begin.setdefault((step, rank), start)
        end[step, rank] = start + time
    times: dict[int, int] = {}
    for step, rank in begin:
        times[step] = max(times.get(step, 0), end[step, rank] - begin[step, rank])
    longest = max(data["passes"], key=lambda entry: times[entry["step"]])
    return longest, times[longest["step"]]


def busiest(data: dict[str, Any]) -> int:
    """The rank that spent the most time in its experts."""
    return int(totals(data)[:, STAGES.index("experts")].argmax())


def findings(data: dict[str, Any]) -> str:
    """Longest pass, busiest rank and the rank that waited longest, with times: what the picture shows, in words."""
    longest, time = longest_pass(data)
    spent, rank = totals(data), busiest(data)
    words = f"longest pass: step {longest['step']} ({longest['phase']}), {milliseconds(time)}"
    words += f"; most time in experts: rank {rank}, {milliseconds(int(spent[rank, STAGES.index('experts')]))}"
    waits = spent[:, -1]
    if data["comparable"] and waits.any():
        words += f"; waits longest: rank {int(waits.argmax())}, {milliseconds(int(waits.max()))}"
    return words


def milliseconds(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms" if ns >= 1e6 else f"{ns / 1e6:.3f} ms"
