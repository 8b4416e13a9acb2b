"""A comparison as text and as a picture. Built in: notebook 00."""

from __future__ import annotations

from moe_course.lessons.judging.compare import Table


def as_text(table: Table) -> list[str]:
    """Aligned lines, `expected | yours`, a `<` behind rows that differ."""
    halves = [_padded(half) for half in (table.expected, table.yours)]
    widths = [max((len(line) for line in half), default=0) for half in halves]
    label = max((len(name) for name in table.labels), default=0)
    wide = max(widths[0], len("expected"))
    lines = [f"  {'':{label}}  {'expected':{wide}} | yours".rstrip()]
    for i, name in enumerate(table.labels):
        mark = "   <" if any(row == i for row, _ in table.marked) else ""
        lines.append(
            f"  {name:>{label}}  {halves[0][i]:{wide}} | {halves[1][i]:{widths[1] if mark else 0}}{mark}".rstrip()
        )
    return lines


def _padded(half: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*half, strict=True)]
    return [" ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in half]


def as_picture(table: Table, title: str) -> bytes:
    """A PNG with both tables side by side; what differs has a frame, a colour and bold digits. The same every time."""
    from matplotlib.figure import Figure

    from moe_course.viz.picture import png

    columns = len(table.expected[0]) if table.expected else 1
    rows = max(len(table.labels), 1)
    cell = 0.22 + 0.085 * max(
        (len(text) for half in (table.expected, table.yours) for row in half for text in row), default=1
    )
    label = 0.2 + 0.085 * max(map(len, table.labels), default=0)
    width, height = max(2 * columns * cell + 2 * label + 0.9, 0.085 * len(title) + 0.4), 0.3 * rows + 0.8
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    axes.text(0.15, 0.22, title, fontsize=10, va="center", color="#222222")
    for name, half, left in (
        ("expected", table.expected, label),
        ("yours", table.yours, 2 * label + columns * cell + 0.5),
    ):
        axes.text(left, 0.55, name, fontsize=9, va="center", color="#555555")
        for i, row in enumerate(half):
            y = 0.7 + 0.3 * i
            axes.text(left - 0.08, y + 0.15, table.labels[i], fontsize=8, ha="right", va="center", color="#777777")
            for j, text in enumerate(row):
                _cell(axes, left + j * cell, y, cell, text, name == "yours" and (i, j) in table.marked)
    return png(figure)


def _cell(axes, x: float, y: float, width: float, text: str, wrong: bool) -> None:
    from matplotlib.patches import Rectangle

    face, edge, line = ("#fde0dc", "#b3261e", 1.8) if wrong else ("#f5f5f5", "#ffffff", 1.0)
    axes.add_patch(
        Rectangle((x + 0.015, y + 0.015), width - 0.03, 0.27, facecolor=face, edgecolor=edge, linewidth=line)
    )
    weight, colour = ("bold", "#8c1d18") if wrong else ("normal", "#222222")
    axes.text(
        x + width / 2,
        y + 0.155,
        text,
        fontsize=9,
        family="monospace",
        ha="center",
        va="center",
        weight=weight,
        color=colour,
    )
