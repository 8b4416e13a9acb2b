"""Exercise of notebook 00: add what two ranks say, row by row."""

from __future__ import annotations

import torch

from moe_course.combine import sum_contributions
from moe_course.lessons.exercise import Case, Exercise, Look


def combine_rows(on_rank_0: torch.Tensor, on_rank_1: torch.Tensor) -> torch.Tensor:
    """Add the partial sums of two ranks: `[T]` and `[T]` -> `[T]`, in source order."""
    return sum_contributions([on_rank_0, on_rank_1])


def _cases(seed: int) -> list[Case]:
    """Rows of rank 1 are 100, 101, …; expert e answers `1000 * e + row`; experts 0 and 1 live on rank 0."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for title, tokens in (("1 token", 1), ("3 tokens", 3), ("no token", 0), ("6 tokens", 6)):
        rows = 100 * seed + torch.arange(tokens)
        ids = torch.rand(tokens, 4, generator=generator).argsort(dim=1)[:, :2]  # [T, K], two different experts
        says = 1000 * ids + rows[:, None]
        cases.append(Case(title, ((says * (ids < 2)).sum(dim=1), (says * (ids >= 2)).sum(dim=1))))
    return cases


def _why(case: Case, look: str, expected: torch.Tensor, yours: object) -> str | None:
    on_rank_0, on_rank_1 = case.args
    if not isinstance(yours, torch.Tensor) or yours.shape != expected.shape or yours.dtype != expected.dtype:
        return None
    for rank, (mine, other) in enumerate(((on_rank_0, on_rank_1), (on_rank_1, on_rank_0))):
        if torch.equal(yours, other):
            return f"what rank {rank} says is missing"
        if torch.equal(yours, expected + mine):
            return f"what rank {rank} says is added twice"
    if torch.equal(yours.sort().values, expected.sort().values):
        return "the numbers are right and stand in other rows: a row has to come home to its own token"
    return None


COMBINE_ROWS = Exercise(
    number="0.1",
    name="combine_rows",
    answer=combine_rows,
    cases=_cases,
    looks=(Look("the sum"),),
    why=_why,
    also=(sum_contributions,),
    short="def combine_rows(on_rank_0, on_rank_1):\n    return on_rank_0 + on_rank_1",
)

EXERCISES = (COMBINE_ROWS,)
