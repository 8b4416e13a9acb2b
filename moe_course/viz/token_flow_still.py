"""The player as a film strip: six phases of one pass in one image. Built in: notebook 13."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np

from moe_course.viz import colours
from moe_course.viz.picture import png
from moe_course.viz.token_flow_pen import DPI, Pen

PHASES = ("at source", "router", "dispatch", "experts", "combine", "done")
_WIDTH, _GAP = 1180, 20
_MUTED, _LINE, _LANE = "#5c5c5c", "#c4c4c4", "#f3f3f3"


@dataclass(frozen=True)
class Frame:
    """Where things are in one of the six panels; pixels from its upper left corner."""

    ranks: int
    lane: float
    width: float = (_WIDTH - _GAP) / 2
    label: float = 62.0
    tokens: float = 214.0
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
    legend = "colour: the rank a row comes from · tile, dark to bright: 1 to most routes of an expert"
    pen.text(_WIDTH - 4, 12, legend, align="right")
    for number, phase in enumerate(PHASES):
        pen.x, pen.y = (number % 2) * (frame.width + _GAP), 26 + (number // 2) * panel
        _panel(pen, frame, data, shown, phase)
    return png(figure, palette=255)


def _panel(pen: Pen, frame: Frame, data: dict, shown: dict, phase: str) -> None:
    ranks = range(frame.ranks)
    pen.text(0, 10, f"{PHASES.index(phase) + 1}  {phase}", size=12, weight="bold")
    pen.boxes([(0, frame.top(rank) + 1, frame.width, frame.lane - 2) for rank in ranks], _LANE)
    pen.boxes(
        [(0, frame.top(rank) + 1, 4, frame.lane - 2) for rank in ranks], [colours.of_rank(rank) for rank in ranks]
    )
    for rank in ranks:
        pen.dots([(11, frame.middle(rank))], colours.of_rank(rank), colours.mark_of_rank(rank), 22)
        pen.text(18, frame.middle(rank), f"rank {rank}" if frame.ranks <= 99 else str(rank), size=10, weight="bold")
    tiles = _tiles(frame, shown["tokens"])
    _tokens(pen, shown["tokens"], tiles, _strips(shown) if phase == "done" else [])
    _experts(pen, frame, data, shown, lit=phase in ("experts", "combine", "done"))
    if phase == "router":
        _routes(pen, frame, shown, tiles)
    if phase in ("dispatch", "combine"):
        _wire(pen, frame, shown["wire"][phase], home=phase == "combine")


def fit(n: int, width: float, height: float, ratio: float, most: float) -> tuple[int, float]:
    """Columns, and the side of the largest tile, with which n tiles of `ratio` sides by one side fit into an area."""
    for side in np.arange(most, 1, -0.5):
        columns = max(1, int(width // (side * ratio)))
        if columns * int(height // side) >= n:
            return columns, float(side)
    columns = max(1, math.ceil(math.sqrt(n * width / height)))
    return columns, height / math.ceil(n / columns)


@dataclass(frozen=True)
class Tiles:
    """Tokens as tiles: `places[t]` is a tile's upper left corner; `cell` characters fit into one."""

    places: list[tuple[float, float]]
    columns: int
    width: float
    height: float
    cell: int

    @property
    def font(self) -> float:
        """Pixels of a font whose characters fill the tiles, 0.602 of its size each."""
        return self.width / (0.602 * self.cell)


def _tiles(frame: Frame, tokens: list[dict]) -> Tiles:
    counts = Counter(token["rank"] for token in tokens)
    lengths = sorted(len(token["text"]) for token in tokens)
    cell = max(2, min(7, lengths[int(0.8 * len(lengths))]))
    ratio = 0.44 * cell
    columns, side = fit(max(counts.values()), frame.tokens, frame.lane - 5, ratio, 15)
    seen: Counter = Counter()
    places = []
    for token in tokens:
        rank, place = token["rank"], seen[token["rank"]]
        seen[rank] += 1
        places.append((frame.label + place % columns * side * ratio, frame.top(rank) + 3 + place // columns * side))
    return Tiles(places, columns, side * ratio, side, cell)


def _tokens(pen: Pen, tokens: list[dict], tiles: Tiles, strips: list) -> None:
    w, h = tiles.width, tiles.height
    edges = [colours.of_rank(token["rank"]) for token in tokens]
    with_text = h >= 7
    pen.boxes([(x, y, w - 1, h - 1) for x, y in tiles.places], "white" if with_text else edges, edges, 0.5)
    lines: dict[float, list[str]] = {}  # a line of tiles is one text: hundreds of texts would take seconds
    for (_, y), token in zip(tiles.places, tokens, strict=True) if with_text else ():
        lines.setdefault(y, []).append(_cell(token["text"], tiles.cell))
    for y, cells in lines.items():
        left, look = tiles.places[0][0] + 0.12 * tiles.font, {"family": "DejaVu Sans Mono"}
        pen.text(left, y + h / 2 - 0.5, "".join(cells), size=tiles.font, **look)
    thick = max(2.0, h * 0.22)
    for rank, parts in strips:
        boxes = [
            (tiles.places[t][0] + (w - 1) * start, tiles.places[t][1] + h - 1 - thick, (w - 1) * share, thick)
            for t, start, share in parts
        ]
        pen.boxes(boxes, colours.of_rank(rank))


def _strips(shown: dict) -> list[tuple[int, list[tuple[int, float, float]]]]:
    """For each rank: token, and from where to where its share in the token's routes goes, 0 to 1."""
    owners: dict[int, list[int]] = {}
    for token, owner in zip(shown["routes"]["token"], shown["routes"]["owner"], strict=True):
        owners.setdefault(token, []).append(owner)
    found: dict[int, list[tuple[int, float, float]]] = {}
    for token, all_ in owners.items():
        start = 0.0
        for owner, n in sorted(Counter(all_).items()):
            found.setdefault(owner, []).append((token, start, n / len(all_)))
            start += n / len(all_)
    return sorted(found.items())


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
    for rank, rows in into.items():
        x, align = (right - 3, "right") if not home else (left + 3, "left")
        pen.text(
            x, frame.top(rank) + frame.lane - 7, f"{rows:,} in", size=10, align=align,
            bbox={"facecolor": _LANE, "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )  # fmt: skip


def _cell(text: str, width: int) -> str:
    """A text cut or filled to `width` characters; those that the font lacks are drawn as a box."""
    text = "".join(char if ord(char) in _font_characters() else "□" for char in text)
    if len(text) > width:
        text = "·" if text.startswith("·") else text[: max(1, width - 1)] + "…"
    return text.center(width) if len(text) > 1 else text.ljust(width)


@cache
def _font_characters() -> frozenset[int]:
    from matplotlib import font_manager, ft2font

    path = font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans Mono"))
    return frozenset(ft2font.FT2Font(path).get_charmap())
