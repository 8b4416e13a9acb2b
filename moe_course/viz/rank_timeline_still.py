"""The still image of RankTimeline: the whole run above, its longest pass below."""

from __future__ import annotations

from typing import Any

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from moe_course.trace.schema import STAGES
from moe_course.viz.picture import png
from moe_course.viz.rank_timeline import findings, longest_pass

#: Colour (none of a rank) and height of a stage's bars, repeated in rank_timeline_draw.js; a test compares.
LOOKS = {
    "route": ("#a0522d", 0.5),
    "dispatch": ("#117a6b", 0.8),
    "experts": ("#e0a800", 1.0),
    "combine": ("#9a83dd", 0.8),
    "other": ("#8a8a8a", 0.25),
}
_LANE = 0.8  # of a row


def draw(data: dict[str, Any]) -> bytes:
    """PNG of `timeline_data`."""
    lanes, (longest, _) = 0.26 * data["ranks"] + 0.1, longest_pass(data)
    height = 2 * lanes + 1.6
    figure = Figure(figsize=(10, height), dpi=110)
    whole = figure.add_axes((0.07, 1 - (0.78 + lanes) / height, 0.915, lanes / height))
    single = figure.add_axes((0.07, 0.3 / height, 0.915, lanes / height))
    figure.text(0.012, 1 - 0.08 / height, findings(data), va="top", fontsize=9)
    marks = [Patch(facecolor=colour, label=name) for name, (colour, _) in LOOKS.items()]
    if data["comparable"]:
        marks.append(Patch(facecolor="white", edgecolor="#333333", hatch="/////", label="waits for the last rank"))
    place = {"loc": "upper left", "bbox_to_anchor": (0.005, 1 - 0.22 / height), "fontsize": 8, "frameon": False}
    figure.legend(handles=marks, ncols=len(marks), handlelength=1.2, **place)
    _lanes(whole, data, range(len(data["spans"]["rank"])))
    _lanes(single, data, [i for i, step in enumerate(data["spans"]["step"]) if step == longest["step"]])
    clocks = "" if data["comparable"] else "; clocks of the ranks differ: each lane begins at 0"
    whole.set_title(f"whole run, ms{clocks}", loc="left", fontsize=8, pad=3)
    single.set_title(f"step {longest['step']} ({longest['phase']}), ms", loc="left", fontsize=8, pad=3)
    return png(figure)


def _lanes(axis, data: dict[str, Any], chosen) -> None:
    spans = data["spans"]
    first = min(spans["begin"][i] for i in chosen)
    for number, stage in enumerate(STAGES):
        colour, tall = LOOKS[stage]
        mine = [i for i in chosen if spans["stage"][i] == number]
        bars = [_bar(spans, i, spans["time"][i], tall, first) for i in mine]
        axis.add_collection(PatchCollection(bars, facecolor=colour, linewidths=0))
        waits = [_bar(spans, i, spans["wait"][i], tall, first) for i in mine if spans["wait"][i]]
        axis.add_collection(PatchCollection(waits, facecolor="white", linewidths=0))
        axis.add_collection(PatchCollection(waits, facecolor="none", edgecolor=colour, hatch="//////", linewidths=0.4))
    axis.set_xlim(0, max(spans["begin"][i] + spans["time"][i] for i in chosen) / 1e6 - first / 1e6)
    axis.set_ylim(data["ranks"] - 0.4, -0.6)
    axis.set_yticks(range(data["ranks"]), [f"rank {rank}" for rank in range(data["ranks"])], fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _bar(spans: dict[str, list[int]], i: int, long: int, tall: float, first: int) -> Rectangle:
    return Rectangle(((spans["begin"][i] - first) / 1e6, spans["rank"][i] - tall * _LANE / 2), long / 1e6, tall * _LANE)
