"""Stage 5: who weights, who sums, and in which order.

The reduction recipe, followed by every backend and by the one-process oracle:

1. each owner rank sums the weighted contributions of a row in k order, in `accumulator(dtype)`;
2. the partial sums of the owner ranks are added in rank order;
3. the sum is rounded once to the model's dtype;
4. the layer returns `shared + routed`.

A fixed order makes all backends agree to the bit. Source: vLLM leaves the order to the backend
(`topk_weight_and_reduce.py`); DeepEP's combine sums per rank, then over ranks. Built in: notebook 08.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float64 for float64 models, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_contributions(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add tensors of one shape strictly from first to last; needs at least one. Returns a new tensor."""
    total = contributions[0].clone()
    for contribution in contributions[1:]:
        total += contribution
    return total
