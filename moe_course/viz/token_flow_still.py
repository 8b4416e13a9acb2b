"""The player as a film strip: six phases of one pass in one image. Built in: notebook 13."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from moe_course.viz import colours
from moe_course.viz.picture import png
from moe_course.viz.token_flow_pen import DPI, Pen
from moe_course.viz.token_flow_still_tokens import Tiles, draw_tokens, fit, strips_of, tiles_of

#: What each backend does with rows; the browser's words for it are `TRAVEL` in `token_flow_model.js`.
DISPATCH = {
    "no_dp_ep": "every rank has all rows its experts need",
    "allgather_reducescatter": "every row goes to every other rank, wanted or not",
    "all_to_all": "a copy of a row for each route to another rank",
    "high_throughput": "one copy of a row for each rank with one of its experts",
    "low_latency": "a copy of a row for each route, to a place kept for it",
    "two_hop": "one copy of a row for each node, forwarded inside it",
    "one_sided": "written into the memory of each rank with one of its experts",
}
_WIDTH, _GAP = 1180, 20
_MUTED, _LINE, _LANE = "#5c5c5c", "#c4c4c4", "#f3f3f3"


def captions(shape: str) -> dict[str, str]:
    """The six phases in order, with what happens in each by this backend's rules."""
    return {
        "at source": "every token is on its rank",
        "router": "every token chooses its experts",
        "dispatch": DISPATCH[shape],
        "experts": "routes that each rank computes",
        "combine": "what was computed goes home",
        "done": "strip below a token: the ranks whose parts were added up",
    }


@dataclass(frozen=True)
class Frame:
    """Where things are in one of the six panels; pixels from its upper left corner."""

    ranks: int
    lane: float
    width: float = (_WIDTH - _GAP) / 2
    label: float = 62.0
    tokens: float = 178.0
    rows_in: float = 290.0
    router: float = 296.0
    door: float = 384.0
    experts: float = 394.0
    tiles: float = 116.0
    load: float = 516.0

    def top(self, rank: int) -> float:
        return 20 + rank * self.lane

    def middle(self, rank: int) -> float:
        return self.top(rank) + self.lane / 2


def draw(data: dict, shown: dict) -> bytes:
    """PNG of one pass; the same bytes for the same data."""
    from matplotlib.figure import Figure

    ranks = data["ranks"]
    frame = Frame(ranks, max(22.0, min(46.0, 190 / ranks)))
    panel = 20 + frame.lane * ranks + 14
    height = 26 + 3 * panel
    figure = Figure(figsize=(_WIDTH / DPI, height / DPI), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.axis("off")
    axes.set_autoscale_on(False)
    title = f"step {shown['step']} ({shown['phase']}), layer {shown['layer']} · {data['backend']}"
    pen = Pen(axes)
    pen.text(4, 12, title, size=13, weight="bold")
    legend = "colour: the rank a row comes from · tile, dark to bright: 1 to most routes of an expert, white: none"
    pen.text(_WIDTH - 4, 12, legend, align="right")
    for number, (phase, caption) in enumerate(captions(data["shape"]).items()):
        pen.x, pen.y = (number % 2) * (frame.width + _GAP), 26 + (number // 2) * panel
        name = f"{number + 1}  {phase}"
        pen.text(0, 10, name, size=12, weight="bold")
        pen.text(14 + 7.8 * len(name), 10.5, caption, size=10, color=_MUTED)
        _panel(pen, frame, data, shown, phase)
    return png(figure, palette=255)


def _panel(pen: Pen, frame: Frame, data: dict, shown: dict, phase: str) -> None:
    ranks = range(frame.ranks)
    pen.boxes([(0, frame.top(rank) + 1, frame.width, frame.lane - 2) for rank in ranks], _LANE)
    pen.boxes(
        [(0, frame.top(rank) + 1, 4, frame.lane - 2) for rank in ranks], [colours.of_rank(rank) for rank in ranks]
    )
    for rank in ranks:
        pen.dots([(11, frame.middle(rank))], colours.of_rank(rank), colours.mark_of_rank(rank), 22)
        pen.text(18, frame.middle(rank), f"rank {rank}" if frame.ranks <= 99 else str(rank), size=10, weight="bold")
    tiles = tiles_of(frame, shown["tokens"])
    if phase == "router":
        _routes(pen, frame, shown, tiles)
    draw_tokens(pen, shown["tokens"], tiles, strips_of(shown) if phase == "done" else [])
    _experts(pen, frame, data, shown, lit=phase in ("experts", "combine", "done"))
    if phase in ("dispatch", "combine"):
        _wire(pen, frame, shown["wire"][phase], home=phase == "combine")


def _experts(pen: Pen, frame: Frame, data: dict, shown: dict, lit: bool) -> None:
    from matplotlib import colormaps

    held: list[list[int]] = [[] for _ in range(frame.ranks)]
    for expert, rank in enumerate(data["owner"]):
        held[rank].append(expert)
    load = Counter(shown["routes"]["owner"])
    of_expert = Counter(shown["routes"]["expert"])
    most, most_of_expert = max(load.values()), max(of_expert.values())
    heat = colormaps[colours.HEAT](np.arange(256))
    columns, side = fit(max(map(len, held)), frame.tiles, frame.lane - 6, 1, 16)
    boxes, faces = [], []
    for rank, experts in enumerate(held):
        up = (frame.lane - math.ceil(len(experts) / columns) * side) / 2
        for place, expert in enumerate(experts):
            boxes.append(
                (
                    frame.experts + place % columns * side,
                    frame.top(rank) + up + place // columns * side,
                    side - 1,
                    side - 1,
                )
            )
            n = of_expert[expert] if lit else 0
            faces.append(heat[round(255 * (n - 1) / max(1, most_of_expert - 1))] if n else (1, 1, 1, 1))
    pen.boxes(boxes, faces, _LINE, 0.4)
    if not lit:
        return
    for rank in range(frame.ranks):
        n, room = load[rank], frame.width - frame.load - 4
        busiest = n == most
        pen.boxes([(frame.load, frame.middle(rank) + 4, room * n / most, 7)], colours.of_rank(rank))
        text = f"{n:,}" + (" max" if busiest else "")
        pen.text(frame.load, frame.middle(rank) - 5, text, size=11, weight="bold" if busiest else "normal")


def _routes(pen: Pen, frame: Frame, shown: dict, tiles: Tiles) -> None:
    """Each token's routes at the router, and lines to them where they are few."""
    tokens, routes = shown["tokens"], shown["routes"]
    counts = Counter(token["rank"] for token in tokens)
    top_k, first, points, lines = max(routes["k"]) + 1, {}, {}, []
    for index, token in enumerate(tokens):
        first.setdefault(token["rank"], index)
    for token, k in zip(routes["token"], routes["k"], strict=True):
        rank = tokens[token]["rank"]
        part = (token - first[rank] + (k + 0.5) / top_k) / counts[rank]
        y = frame.top(rank) + 4 + part * (frame.lane - 8)
        points.setdefault(rank, []).append((frame.router, y))
        lines.append(
            (rank, (tiles.places[token][0] + tiles.width, tiles.places[token][1] + tiles.height / 2), (frame.router, y))
        )
    if len(lines) <= 600:
        pen.curves([line[1:] for line in lines], [colours.of_rank(line[0]) for line in lines], 0.5, 0.6)
    for rank, dots in points.items():
        pen.dots(dots, colours.of_rank(rank), "o", 9 if len(lines) <= 600 else 3)
        pen.text(frame.router + 8, frame.middle(rank), f"{len(dots):,} routes", size=10, color=_MUTED)


def _wire(pen: Pen, frame: Frame, entries: list[list[int]], home: bool) -> None:
    """A band for each pair of ranks, as wide as its rows; rows that came in, as numbers."""
    if not entries:
        pen.text(
            (frame.router + frame.door) / 2, frame.top(0) + 9, "no row travels", size=10, align="center", color=_MUTED
        )
        return
    most = max(rows for _, _, rows, _, _ in entries) or 1
    into: Counter = Counter()
    left, right = frame.router, frame.door
    ends, colour, widths = [], [], []
    for source, destination, rows, _, _ in entries:
        into[destination] += rows
        if rows:
            low, high = (source, destination) if not home else (destination, source)
            nudge = 2 * (high - low)  # so that bands of one rank do not start in one point
            ends.append(((left, frame.middle(low) + nudge), (right, frame.middle(high) - nudge)))
            colour.append(colours.of_rank(source))
            widths.append(0.6 + 3.4 * rows / most)
    pen.curves(ends, colour, widths, 0.55)
    for rank in range(frame.ranks):
        pen.text(frame.rows_in, frame.middle(rank), f"{into[rank]:,} in", size=10, align="right")
