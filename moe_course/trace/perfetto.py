"""A trace as Chrome trace events: open the file in ui.perfetto.dev or chrome://tracing.

One process per rank, one slice per span; an arrow leads from a rank's dispatch to the experts its routes went to, and
from there to its combine. Built in: notebook 13. Source: the Trace Event Format of Chrome.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_course.errors import TraceError
from moe_course.trace.schema import STAGES

if TYPE_CHECKING:
    from moe_course.trace.trace import Trace

MOST_ARROWS = 4000  # of each direction; a viewer gets slow with more
_INSIDE = 1e-3  # an arrow belongs to the slice it begins and ends in: one nanosecond away from its edge
_DISPATCH, _EXPERTS, _COMBINE = (STAGES.index(name) for name in ("dispatch", "experts", "combine"))


def write_perfetto(trace: Trace, path: str | Path) -> Path:
    """See `Trace.to_perfetto`."""
    content, file = json.dumps(perfetto(trace)), Path(path)
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from None
    return file


def perfetto(trace: Trace, most_arrows: int = MOST_ARROWS) -> dict:
    """`{"traceEvents": [...], "otherData": {...}}`; times in microseconds, from the first span of the run on.

    Where clocks of hosts differ, each rank's time begins with its own first span, and there are no arrows.
    """
    meta, ranks = trace.meta, range(trace.meta["world_size"])
    spans = [trace.spans(rank) for rank in ranks]
    starts = [int(s["span_begin_ns"][0]) if len(s["span_begin_ns"]) else None for s in spans]
    comparable = meta["clock"]["comparable"]
    first = min((start for start in starts if start is not None), default=0)
    zero = [first if comparable or start is None else start for start in starts]
    names, slices = [], []
    for rank in ranks:
        names += _names(rank, meta)
        slices += _slices(rank, spans[rank], zero[rank])
    arrows, left_out = _arrows(trace, spans, first, most_arrows) if comparable else ([], 0)
    other = {
        "schema": meta["schema"], "backend": meta["backend"], "transport": meta["transport"],
        "clock": json.dumps(meta["clock"]), "arrows_left_out": left_out,
    }  # fmt: skip
    events = names + sorted(slices + arrows, key=lambda event: event["ts"])
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _names(rank: int, meta: dict) -> list[dict]:
    owned = meta["plan"]["experts_per_rank"][rank] if meta["plan"]["ep_size"] > 1 else meta["experts"]
    return [
        {"ph": "M", "name": "process_name", **_of(rank), "args": {"name": f"rank {rank} ({owned} experts)"}},
        {"ph": "M", "name": "process_sort_index", **_of(rank), "args": {"sort_index": rank}},
        {"ph": "M", "name": "thread_name", **_of(rank), "args": {"name": "stages"}},
    ]


def _of(rank: int) -> dict:
    """Numbers of a rank's process and thread: from 1 on, because 0 is the idle task to a viewer."""
    return {"pid": rank + 1, "tid": rank + 1}


def _slices(rank: int, spans: dict[str, torch.Tensor], zero: int) -> list[dict]:
    lists = [spans[f"span_{name}"].tolist() for name in ("step", "layer", "stage", "begin_ns", "end_ns")]
    return [
        {
            "ph": "X",
            "name": STAGES[stage],
            "cat": "stage",
            **_of(rank),
            "ts": (begin - zero) / 1e3,
            "dur": (end - begin) / 1e3,
            "args": {"step": step} if layer < 0 else {"step": step, "layer": layer},
        }
        for step, layer, stage, begin, end in zip(*lists, strict=True)
    ]


def _arrows(trace: Trace, spans: list[dict], zero: int, most: int) -> tuple[list[dict], int]:
    """Arrows for routes that left their rank, those of one pass and one pair of ranks as one; and how many are missing.

    An arrow ends where the slice begins that needs what it stands for: experts cannot begin before their rows are
    here, and combine does not end before the sums are.
    """
    columns = trace.columns
    moved = columns["source_rank"] != columns["owner_rank"]
    keys = torch.stack([columns[name][moved] for name in ("step", "layer", "source_rank", "owner_rank")], dim=1)
    pairs, counts = keys.unique(dim=0, return_counts=True)
    at = [_by_place(s, zero) for s in spans]
    events: list[dict] = []
    drawn = 0
    for (step, layer, source, owner), routes in zip(pairs.tolist(), counts.tolist(), strict=True):
        out, there = at[source].get((step, layer, _DISPATCH)), at[owner].get((step, layer, _EXPERTS))
        back = at[source].get((step, layer, _COMBINE))
        if drawn == most or None in (out, there, back):  # without its spans an arrow has no ends
            continue
        args = {"routes": routes, "step": step, "layer": layer, "from": source, "to": owner}
        events += _arrow(2 * drawn + 1, "rows", (source, out[0] + _INSIDE), (owner, there[0] + _INSIDE), args)
        home = (owner, there[1] - _INSIDE), (source, back[1] - _INSIDE)
        events += _arrow(2 * drawn + 2, "contributions", *home, args)
        drawn += 1
    return events, len(pairs) - drawn


def _by_place(spans: dict[str, torch.Tensor], zero: int) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(step, layer, stage) -> begin and end in microseconds."""
    places = zip(*(spans[f"span_{name}"].tolist() for name in ("step", "layer", "stage")), strict=True)
    times = zip(
        *(((spans[f"span_{name}_ns"] - zero).double() / 1e3).tolist() for name in ("begin", "end")), strict=True
    )
    return dict(zip(places, times, strict=True))


def _arrow(number: int, name: str, start: tuple[int, float], end: tuple[int, float], args: dict) -> list[dict]:
    common = {"name": name, "cat": "route", "id": number, "args": args}
    return [
        common | {"ph": "s", **_of(start[0]), "ts": start[1]},
        common | {"ph": "f", "bp": "e", **_of(end[0]), "ts": max(end[1], start[1])},
    ]
