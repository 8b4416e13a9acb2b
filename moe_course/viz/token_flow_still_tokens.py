"""The tokens of the film strip: tiles with their texts, and the strips of the finished ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moe_course.viz import colours
from moe_course.viz.glyphs import drawable
from moe_course.viz.token_flow_pen import Pen

if TYPE_CHECKING:
    from moe_course.viz.token_flow_still import Frame


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


def tiles_of(frame: Frame, tokens: list[dict]) -> Tiles:
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


def draw_tokens(pen: Pen, tokens: list[dict], tiles: Tiles, strips: list) -> None:
    """Tiles with their texts; `strips`, as `strips_of` makes them, below."""
    w, h = tiles.width, tiles.height
    edges = [colours.of_rank(token["rank"]) for token in tokens]
    with_text = h >= 7
    pen.boxes([(x, y, w - 1, h - 1) for x, y in tiles.places], "white" if with_text else edges, edges, 0.5)
    thick = max(2.0, h * 0.3) if strips else 0.0
    for rank, parts in strips:
        boxes = [
            (tiles.places[t][0] + (w - 1) * start, tiles.places[t][1] + h - 1 - thick, (w - 1) * share, thick)
            for t, start, share in parts
        ]
        pen.boxes(boxes, colours.of_rank(rank))
    if with_text:
        pen.letters(texts_of(tokens, tiles, thick), min(tiles.font, (h - thick) * 0.95))


def texts_of(tokens: list[dict], tiles: Tiles, below: float = 0) -> list[tuple[float, float, str]]:
    """For each token: the middle of its text, and as much of it as fits; `below` pixels are taken by a strip."""
    middle_x, middle_y = (tiles.width - 1) / 2, (tiles.height - 1 - below) / 2
    return [
        (x + middle_x, y + middle_y, _cell(token["text"], tiles.cell))
        for (x, y), token in zip(tiles.places, tokens, strict=True)
    ]


def strips_of(shown: dict) -> list[tuple[int, list[tuple[int, float, float]]]]:
    """For each rank: token, and from where to where its share in the token's routes goes, 0 to 1."""
    same = [(token["prompt"], token["position"]) for token in shown["tokens"]]  # ranks may share rows, and add them up
    owners: dict[tuple[int, int], list[int]] = {}
    for token, owner in zip(shown["routes"]["token"], shown["routes"]["owner"], strict=True):
        owners.setdefault(same[token], []).append(owner)
    found: dict[int, list[tuple[int, float, float]]] = {}
    for token, place in enumerate(same):
        start, all_ = 0.0, owners.get(place, [])
        for owner, n in sorted(Counter(all_).items()):
            found.setdefault(owner, []).append((token, start, n / len(all_)))
            start += n / len(all_)
    return sorted(found.items())


def _cell(text: str, width: int) -> str:
    """A text cut to `width` characters; those that the font lacks are drawn as a box."""
    text = drawable(text, "DejaVu Sans Mono")
    if len(text) > width:
        text = "·" if text.startswith("·") else text[: max(1, width - 1)] + "…"
    return text
