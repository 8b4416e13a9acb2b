"""How unevenly routes fall on ranks: seen, and what chance alone makes of a router without any preference.

The slowest rank sets the pace, so the figure is max / mean over ranks. A step of few tokens is uneven although the
router is not. Built in: notebook 11.
"""

from __future__ import annotations

import numpy as np
import torch

from moe_course.backends.traffic import owners
from moe_course.expert_map import Placement


def routes_per_rank(topk_ids: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Routes that each rank's experts compute, `[R]` int64, of `topk_ids` `[T, K]`; -1 counts nowhere."""
    owner = owners(topk_ids, placement)
    return torch.bincount(owner[owner >= 0], minlength=placement.ep_size)


def max_over_mean(counts: torch.Tensor) -> float | None:
    """Largest of some counts over their mean; None where all are zero."""
    total = int(counts.sum())
    return int(counts.max()) * len(counts) / total if total else None


def uniform_max_over_mean(placement: Placement, top_k: int, tokens: int, *, draws: int = 100, seed: int = 0) -> float:
    """Mean of max / mean over ranks, if `tokens` rows in all choose K of E experts at random. Monte Carlo, seeded.

    Args:
        tokens: rows of all ranks together, at least 1.
        draws: random routings that are averaged.
    """
    generator = np.random.default_rng(seed)
    experts = [placement.num_local(rank) for rank in range(placement.ep_size)]  # which ones is all the same
    found = []
    for _ in range(draws):
        counts = generator.multivariate_hypergeometric(experts, top_k, size=tokens).sum(0)
        found.append(float(counts.max() / counts.mean()))
    return sum(found) / draws
