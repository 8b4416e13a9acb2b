"""Exercise of notebook 13: one token's output from the contributions of its experts, to the bit."""

from __future__ import annotations

import functools
from itertools import permutations

import torch

from moe_course.combine import weigh_and_sum
from moe_course.lessons.exercise import Case, Exercise, Look

#: Of so many routes all orders are tried; more come only after these were right to the bit.
SMALL = 3


def explain_token(weights: torch.Tensor, owners: torch.Tensor, contributions: torch.Tensor) -> torch.Tensor:
    """`[K]` fp32, `[K]` int64 and `[K, H]` fp32 -> `[H]`: each owner's share in k order, then owners in rank order."""
    return weigh_and_sum(contributions[None], weights[None], owners[None])[0]


def _cases(seed: int) -> list[Case]:
    """Numbers of very different size, so that another order of addition gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    kinds = {
        "1 route": (16, [0]),
        "2 routes, 2 owners": (16, [1, 0]),
        "3 routes of one owner": (16, [2, 2, 2]),
        "8 routes, owners 0 to 3 in turn": (16, [0, 1, 2, 3, 0, 1, 2, 3]),
        "8 routes, owners mixed, rank 1 has none; 24 numbers in a row": (24, [3, 0, 2, 0, 3, 2, 2, 0]),
    }
    cases = []
    for title, (hidden, ranks) in kinds.items():
        weights = torch.rand(len(ranks), generator=generator) + 0.05
        weights = 2.5 * weights / weights.sum()
        size = 10.0 ** torch.randint(-2, 3, (len(ranks), 1), generator=generator)
        contributions = torch.randn(len(ranks), hidden, generator=generator) * size
        cases.append(Case(title, (weights, torch.tensor(ranks), contributions)))
    return cases


def _why(case: Case, look: str, expected: torch.Tensor, yours: object) -> str | None:
    weights, owners, contributions = case.args
    if not isinstance(yours, torch.Tensor) or yours.shape != expected.shape:
        return None
    if torch.allclose(yours.float(), contributions.sum(0), atol=1e-4):
        return "the weights are missing: a contribution counts as much as the router said"
    if torch.allclose(yours.float() * len(weights), expected, rtol=1e-4, atol=1e-4) and len(weights) > 1:
        return "this is a mean; contributions are added, the weights see to the rest"
    if torch.allclose(yours.float(), expected, rtol=1e-4, atol=1e-3):
        if len(weights) <= SMALL and not _only_reordered(weights[:, None] * contributions, yours):
            return (
                "nearly: the terms are right and the last bits are not, in any order. Round each product weight * "
                "contribution to fp32, then add in fp32: the routes of one owner in the order of k, then the owners "
                "from rank 0 on. A fused multiply-add, a matrix product or fp64 rounds elsewhere"
            )
        return (
            "nearly: the terms are right and their order is not. Add up the routes of one owner first, in the order "
            "of k, then the owners from rank 0 on"
        )
    for owner in owners.unique().tolist():
        kept = owners != owner
        if torch.allclose(yours.float(), (weights[kept, None] * contributions[kept]).sum(0), rtol=1e-4, atol=1e-3):
            return f"what rank {owner} says is missing"
    return None


def _only_reordered(terms: torch.Tensor, yours: torch.Tensor) -> bool:
    """Is every number of `yours` `[H]` what some order of adding `terms` `[K, H]` gives?"""
    sums = torch.stack([functools.reduce(torch.add, order) for order in permutations(terms)])  # [K!, H]
    return bool((sums == yours).any(0).all())


EXPLAIN_TOKEN = Exercise(
    number="13.1",
    name="explain_token",
    answer=explain_token,
    cases=_cases,
    looks=(Look("the output"),),
    why=_why,
    also=(weigh_and_sum,),
)

EXERCISES = (EXPLAIN_TOKEN,)
