"""Two small exercises, one with ranks, and functions as notebook cells leave them."""

from __future__ import annotations

import linecache
from itertools import count

import torch

from moe_course.lessons.exercise import Case, Exercise, Look

CELLS = count()


def cell(text: str, name: str = "f", **earlier):
    """A function as a notebook cell leaves it: its text in linecache, its names among those of earlier cells."""
    filename = f"<cell {next(CELLS)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    names = {"__name__": "__main__", "torch": torch, **earlier}
    exec(compile(text, filename, "exec", dont_inherit=True), names)
    return names[name]


def scale(rows, factor):
    return rows * factor


def scale_cases(seed: int) -> list[Case]:
    rows = torch.arange(3).unsqueeze(1) + 100 * seed
    return [Case("1 row", (rows[:1], 2)), Case("3 rows", (rows, 3)), Case("no row", (rows[:0], 3))]


SCALE = Exercise(
    "9.1", "scale", scale, scale_cases, (Look("shape", lambda x: list(x.shape)), Look("rows")), seconds=0.6
)


def gather(rows, ids, *, comm):
    gathered = comm.all_gather_rows(rows, ids)
    return gathered.rows, gathered.metadata[0]


def gather_cases(seed: int) -> list[Case]:
    def ranks(*counts):
        return [
            (100.0 * rank + torch.arange(n).unsqueeze(1).expand(n, 3), torch.full((n, 1), rank + seed))
            for rank, n in enumerate(counts)
        ]

    return [Case("2 ranks, one row", ranks=ranks(0, 1)), Case("3 ranks", ranks=ranks(2, 0, 1))]


GATHER = Exercise(
    "9.2",
    "gather",
    gather,
    gather_cases,
    (Look("rows", lambda result: result[0]), Look("ids", lambda result: result[1])),
    row_bytes=lambda case: 12,
    why=lambda case, look, expected, yours: (
        "rows went twice" if look == "cost" and yours.rows > expected.rows else None
    ),
    seconds=1,
)
