"""The still image of ScoreGrid: lines of experts below each other, the weights of each token at the bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib import colormaps
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from moe_course.viz.colours import HEAT
from moe_course.viz.glyphs import drawable
from moe_course.viz.picture import png

if TYPE_CHECKING:
    from moe_course.viz.score_grid import ScoreGrid

_LINE = 64  # experts in a line
_ROW = 0.19  # inches
_DROPPED = (0.9, 0.9, 0.9, 1.0)
_MIDDLE = {"ha": "center", "va": "center"}


def draw(grid: ScoreGrid) -> bytes:
    """PNG of what `grid` shows now."""
    choice = grid.choice()
    T, E = choice.shape
    lines = -(-E // _LINE)
    figure = Figure(figsize=(10, _ROW * (T + 2.4) * (lines + 1) + 0.4), dpi=110)
    height = figure.get_figheight()
    figure.subplots_adjust(left=0.085, right=0.915, top=1 - 0.35 / height, bottom=0.01, hspace=0)
    figure.text(0.012, 1 - 0.1 / height, _title(grid), va="top", fontsize=9)
    axes = figure.subplots(lines + 1, 1)
    for axis in axes:
        axis.set_axis_off()
        axis.set_ylim(T + 0.2, -2.2)
    for line in range(lines):
        _line(axes[line], grid, choice, line * _LINE)
    _weights(axes[lines], grid)
    return png(figure)


def _title(grid: ScoreGrid) -> str:
    state, data = grid.state, grid.data
    extra = f"; bias of expert {state['expert']} moved by {state['bias']:+.2f}" if state.get("bias") else ""
    crossed = "; crossed: group dropped" if data["n_group"] > 1 else ""
    what = "score" if grid.bias() is None else "score + bias"
    return f"{what}: blue low, yellow high; outlined and numbered: the {data['top_k']} chosen{crossed}{extra}"


def _line(axis, grid: ScoreGrid, choice, first: int) -> None:
    T, E = choice.shape
    last, columns = min(first + _LINE, E), min(_LINE, E)
    low, high = choice.min(), choice.max()
    heat = colormaps[HEAT](((choice[:, first:last] - low) / (high - low).clamp(min=1e-20)).numpy())  # [T, n, 4]
    dropped = ~grid.kept()[:, first:last]
    heat[dropped.numpy()] = _DROPPED
    axis.set_xlim(0, columns)
    axis.imshow(heat, extent=(0, last - first, T, 0), interpolation="none", aspect="auto")
    axis.set_ylim(T + 0.2, -2.2)
    gaps = [[(x, 0), (x, T)] for x in range(last - first + 1)] + [[(0, y), (last - first, y)] for y in range(T + 1)]
    axis.add_collection(LineCollection(gaps, colors="white", linewidths=1.3))
    crosses = [[(x + 0.15, t + 0.85), (x + 0.85, t + 0.15)] for t, x in dropped.nonzero().tolist()]
    axis.add_collection(LineCollection(crosses, colors="#9a9a9a", linewidths=0.6))
    outlines = []
    for token, ids in enumerate(grid.chosen()[1].tolist()):
        for place, expert in enumerate(ids):
            if first <= expert < last:
                x = expert - first
                red, green, blue, _ = heat[token, x]
                paper = "black" if red * 0.299 + green * 0.587 + blue * 0.114 > 0.49 else "white"
                outlines.append(Rectangle((x + 0.06, token + 0.06), 0.88, 0.88))
                axis.text(x + 0.5, token + 0.53, place + 1, **_MIDDLE, fontsize=7, color=paper, weight="bold")
    axis.add_collection(PatchCollection(outlines, facecolor="none", edgecolor="black", linewidths=1.6, zorder=3))
    _names(axis, grid)
    _heads(axis, first, last, E // grid.data["n_group"], E, T)


def _heads(axis, first: int, last: int, size: int, experts: int, T: int) -> None:
    """Numbers of the experts, and of their groups where there are several."""
    for expert in range(first, last):
        x = expert - first
        if experts <= 32 or expert % 4 == 0:
            axis.text(x + 0.5, -0.45, expert, **_MIDDLE, fontsize=7, color="#444444")
        if size < experts and (expert % size == 0 or x == 0):
            end = min((expert // size + 1) * size, last) - first
            axis.plot([x + 0.1, end - 0.1], [-1, -1], color="#444444", linewidth=1)
            axis.text((x + end) / 2, -1.5, f"group {expert // size}", **_MIDDLE, fontsize=7)
            if x > 0:
                axis.plot([x, x], [0, T], color="black", linewidth=1.4, zorder=4)


def _weights(axis, grid: ScoreGrid) -> None:
    weights, ids = grid.chosen()
    most = weights.sum(dim=1).max().item() or 1.0
    axis.set_xlim(0, most)
    axis.text(0, -0.6, "weights, from the score alone (expert: weight)", va="center", fontsize=8)
    _names(axis, grid)
    pieces = []
    for token in range(len(ids)):
        x = 0.0
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            pieces.append(Rectangle((x, token + 0.1), weight, 0.8))
            if weight > most * 0.025:
                words = f"{expert}: {weight:.3f}" if weight > most * 0.08 else str(expert)
                axis.text(x + weight / 2, token + 0.53, words, **_MIDDLE, fontsize=7)
            x += weight
        axis.text(x + 0.008 * most, token + 0.53, f"Σ {x:.3f}", va="center", fontsize=8, weight="bold")
    axis.add_collection(PatchCollection(pieces, facecolor="#f0f0f0", edgecolor="#333333", linewidths=0.8))


def _names(axis, grid: ScoreGrid) -> None:
    for token, text in enumerate(grid.data["tokens"]):
        short = drawable(text if len(text) <= 11 else text[:10] + "…", "monospace")
        where = {"x": -0.01, "y": token + 0.5, "transform": axis.get_yaxis_transform()}
        axis.text(s=short, ha="right", va="center", fontsize=8, family="monospace", parse_math=False, **where)
