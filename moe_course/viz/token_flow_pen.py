"""Boxes, curves, dots and texts in pixels of one panel of a film strip, in as few drawing calls as possible."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.path import Path

DPI = 100
_INK = "#1b1b1b"
_MIDDLE = 0.32  # of a letter above its line, in sizes of the font: between small and capital ones


class Pen:
    """Draws in pixels of one panel, whose corner is `x, y`."""

    def __init__(self, axes: Any):
        self.axes, self.x, self.y = axes, 0.0, 0.0

    def text(self, x: float, y: float, text: str, size: float = 10, align: str = "left", **look: Any) -> None:
        look = {"color": _INK, "va": "center", "parse_math": False} | look
        self.axes.text(self.x + x, self.y + y, text, fontsize=size * 72 / DPI, ha=align, **look)

    def boxes(self, places: list[tuple[float, float, float, float]], face: Any, edge: Any = "none", width: float = 0.7):
        from matplotlib.collections import PolyCollection

        if places:
            x, y, w, h = np.array(places, dtype=float).T
            left, top = x + self.x, y + self.y
            corners = [(left, top), (left + w, top), (left + w, top + h), (left, top + h)]
            shapes = np.stack([np.stack(corner, 1) for corner in corners], 1)  # [n, 4, 2]
            look = {"facecolors": face, "edgecolors": edge, "linewidths": width}
            self.axes.add_collection(PolyCollection(shapes, **look), autolim=False)

    def letters(self, texts: list[tuple[float, float, str]], size: float) -> None:
        """Texts around their middles, as outlines: a font's own widths are rounded to pixels and would drift."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        outlines = [
            Path(_outline(text).vertices * (size, -size) + (self.x + x, self.y + y), _outline(text).codes)
            for x, y, text in texts
            if text.strip()
        ]
        self.axes.add_artist(PathPatch(Path.make_compound_path(*outlines), facecolor=_INK, linewidth=0))

    def curves(self, ends: list[tuple], colour: list[str], width: Any, alpha: float) -> None:
        """Lines from (x, y) to (x, y) that leave and arrive level."""
        from matplotlib.collections import LineCollection

        if ends:
            start, end = (np.array(side, dtype=float)[:, None] for side in zip(*ends, strict=True))  # [n, 1, 2]
            u = np.linspace(0, 1, 24)
            way = start + (end - start) * np.stack([u, u * u * (3 - 2 * u)], 1)  # [n, 24, 2]
            lines = way + np.array([self.x, self.y])
            self.axes.add_collection(
                LineCollection(lines, colors=colour, linewidths=width, alpha=alpha, zorder=1), autolim=False
            )

    def dots(self, points: list[tuple[float, float]], colour: str, mark: str, size: float) -> None:
        x, y = zip(*points, strict=True)
        self.axes.scatter(
            np.array(x) + self.x, np.array(y) + self.y, s=size, c=colour, marker=mark, linewidths=0, rasterized=True
        )


@cache
def _outline(text: str) -> Path:
    """A text in a font of size 1 around its middle."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), text, size=100, prop=FontProperties(family="DejaVu Sans Mono"))
    return Path(path.vertices / 100 - (0.301 * len(text), _MIDDLE), path.codes)
