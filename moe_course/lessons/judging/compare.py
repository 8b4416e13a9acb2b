"""Expected against yours, value by value: the first thing that differs, as a sentence and as two small tables.

Built in: notebook 00.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

ROWS, COLUMNS = 8, 8  # a table shows at most so many, around the first difference
NOTHING = "·"


@dataclass(frozen=True)
class Table:
    """Two tables of one shape: `labels[i]` names row i; `marked` are the (row, column) that differ."""

    labels: list[str]
    expected: list[list[str]]
    yours: list[list[str]]
    marked: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Difference:
    """What differs: a sentence that starts with a verb, and the table; None where there is nothing to draw.

    Attributes:
        cure: what to do, where the values are right and only their dtype is not; no reason for wrong values fits then.
    """

    what: str
    table: Table | None = None
    cure: str | None = None


def difference(expected: Any, yours: Any, tolerance: float = 0.0) -> Difference | None:
    """The first difference, or None. Types, dtypes and shapes first, then values; NaN equals NaN."""
    if isinstance(expected, torch.Tensor):
        return _of_tensors(expected, yours, tolerance)
    if isinstance(expected, list | tuple) and isinstance(yours, list | tuple):
        return _of_lists(list(expected), list(yours), tolerance)
    if isinstance(expected, float) and isinstance(yours, int | float) and not isinstance(yours, bool):
        same = abs(expected - yours) <= tolerance or (expected != expected and yours != yours)
        return None if same else Difference(f"is {_shown(yours)}, expected {_shown(expected)}")
    if type(expected) is type(yours) and expected == yours:
        return None
    return Difference(f"is {_shown(yours)}, expected {_shown(expected)}")


def _of_lists(expected: list, yours: list, tolerance: float) -> Difference | None:
    if all(_number(item) for item in (*expected, *yours)):
        if len(expected) == len(yours) and all(
            difference(a, b, tolerance) is None for a, b in zip(expected, yours, strict=True)
        ):
            return None
        pairs = enumerate(zip(expected, yours, strict=False))
        first = next((i for i, (a, b) in pairs if difference(a, b, tolerance)), min(len(expected), len(yours)))
        part = _window(first, max(len(expected), len(yours)), COLUMNS)
        cut = ([items[part.start : part.stop]] for items in (expected, yours))
        return Difference(f"is {_shown(yours)}, expected {_shown(expected)}", _table(*cut, [""], tolerance))
    if len(expected) != len(yours):
        return Difference(f"has {len(yours)} parts, expected {len(expected)}")
    for place, (a, b) in enumerate(zip(expected, yours, strict=True)):
        if found := difference(a, b, tolerance):
            return replace(found, what=f"[{place}] {found.what}")
    return None


def _of_tensors(expected: torch.Tensor, yours: Any, tolerance: float) -> Difference | None:
    if not isinstance(yours, torch.Tensor):
        return Difference(f"is {_shown(yours)}, expected a tensor {_kind(expected)}")
    if (yours.layout, yours.device) != (expected.layout, expected.device):
        ours, theirs = (f"{_kind(t)}, {str(t.layout)[6:]}, on {t.device}" for t in (expected, yours))
        return Difference(f"is {theirs}; expected {ours}")
    if yours.dtype != expected.dtype or yours.shape != expected.shape:
        table = _tensor_table(expected, yours, tolerance) if yours.dim() == expected.dim() else None
        what = f"is {_kind(yours)}, expected {_kind(expected)}"
        if yours.shape == expected.shape and not table.marked:  # two equal halves would explain nothing
            return Difference(what, cure=f"these values are right, their dtype is not: .to({expected.dtype})")
        return Difference(what, table)
    wrong = _wrong(expected, yours, tolerance)
    if not wrong.any():
        return None
    many = f"differs in {int(wrong.sum())} of {wrong.numel()} numbers" if wrong.numel() > 1 else "differs"
    return Difference(many, _tensor_table(expected, yours, tolerance))


def _wrong(expected: torch.Tensor, yours: torch.Tensor, tolerance: float) -> torch.Tensor:
    if expected.dtype == torch.bool or not (expected.is_floating_point() and tolerance):
        equal = expected == yours
    else:
        equal = ((expected.double() - yours.double()).abs() <= tolerance) | (expected == yours)
    if expected.is_floating_point():
        equal |= expected.isnan() & yours.isnan()
    return ~equal


def _tensor_table(expected: torch.Tensor, yours: torch.Tensor, tolerance: float) -> Table:
    """Rows are the first dimension; of three or more, all but the last are rows. Only what is shown becomes a list."""
    grids = [_as_grid(tensor) for tensor in (expected, yours)]
    height, width = (max(grid.shape[axis] for grid in grids) for axis in (0, 1))
    first = _first_wrong(*grids, tolerance)
    rows, columns = _window(first[0], height, ROWS), _window(first[1], width, COLUMNS)
    cut = [grid[rows.start : rows.stop, columns.start : columns.stop].tolist() for grid in grids]
    longest = max(expected, yours, key=len) if expected.dim() == 2 else expected
    return _table(*cut, [_label(row, longest.shape[:-1]) for row in rows] if expected.dim() > 1 else [""], tolerance)


def _as_grid(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor.detach().reshape(1, -1)
    return tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_zeros(0, tensor.shape[-1])


def _first_wrong(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> tuple[int, int]:
    """(row, column) of the first place where two grids differ, also by having no number there."""
    height, width = (min(a.shape[axis], b.shape[axis]) for axis in (0, 1))
    if height and width:
        a_part, b_part = a[:height, :width], b[:height, :width]
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        if a.dtype != b.dtype or a.is_floating_point():
            a_part, b_part = a_part.to(wide), b_part.to(wide)
        alike = (a_part == b_part) | (a_part.isnan() & b_part.isnan())
        if a.is_floating_point() and b.is_floating_point():
            alike |= (a_part - b_part).abs() <= tolerance
        if a.shape[1] != width or b.shape[1] != width:
            alike = alike[:1]  # the row ends too early or too late
        if not alike.all():
            return divmod(int((~alike).flatten().to(torch.uint8).argmax()), width)
    return (0, width) if a.shape[1] != b.shape[1] else (height if a.shape[0] != b.shape[0] else 0, 0)


def _label(row: int, shape: torch.Size) -> str:
    if row >= shape.numel():
        return str(row)
    place = []
    for size in reversed(shape):
        row, last = divmod(row, size)
        place.insert(0, str(last))
    return ",".join(place)


def _table(expected: list[list], yours: list[list], labels: list[str], tolerance: float) -> Table:
    height = max(len(expected), len(yours))
    width = max((len(row) for row in (*expected, *yours)), default=0)
    grids = [[[*row, *[None] * (width - len(row))] for row in grid] for grid in (expected, yours)]
    for grid in grids:
        grid += [[None] * width] * (height - len(grid))
    wrong = {
        (r, c) for r in range(height) for c in range(width) if not _alike(grids[0][r][c], grids[1][r][c], tolerance)
    }
    first = min(wrong, default=(0, 0))
    rows = _window(first[0], height, ROWS)
    columns = _window(first[1], width, COLUMNS)
    shown = [[[_cell(grid[r][c]) for c in columns] for r in rows] for grid in grids]
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            if (r, c) in wrong and shown[0][i][j] == shown[1][i][j]:  # they differ behind the digits shown
                for half, grid in zip(shown, grids, strict=True):
                    half[i][j] = f"{grid[r][c]:.9g}" if isinstance(grid[r][c], float) else half[i][j]
    marked = frozenset((i, j) for i, r in enumerate(rows) for j, c in enumerate(columns) if (r, c) in wrong)
    names = [labels[r] if r < len(labels) else str(r) for r in rows]
    return Table(names, shown[0], shown[1], marked)


def _window(first: int, size: int, most: int) -> range:
    begin = max(0, min(first - 2, size - most))
    return range(begin, min(size, begin + most))


def _alike(a: Any, b: Any, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    return a == b or (a != a and b != b) or (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= tolerance)


def _cell(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {_kind(value)}"
    if isinstance(value, int | float | str | bool | None):
        return repr(value)
    if isinstance(value, list | tuple) and len(value) <= 12 and all(_number(item) for item in value):
        return "[" + ", ".join(map(_cell, value)) + "]"
    return f"a {type(value).__name__}"  # no repr: it may hold an address
