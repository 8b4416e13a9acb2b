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

from moe_course.errors import ConfigError


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float64 for float64 models, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_contributions(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add tensors strictly from first to last. Returns a new tensor.

    Raises ConfigError for none at all, and for those that are not of one shape and dtype.
    """
    kinds = {(tensor.shape, tensor.dtype) for tensor in contributions}
    if len(kinds) != 1:
        found = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in kinds) or "none"
        raise ConfigError(f"contributions are {found}; expected at least one, and all of one shape and dtype")
    total = contributions[0].clone()
    for contribution in contributions[1:]:
        total += contribution
    return total


def sum_of_owners(partials: Sequence[torch.Tensor], rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Add the partial sums that came home, row by row in the order in which they lie here: `[num_rows, H]`.

    Args:
        partials: tensors `[n, H]`, those of lower owner ranks first; at least one, perhaps without rows.
        rows: `[sum n]` int64, which row each belongs to. A row without any is zero.

    Raises:
        ConfigError: partial sums of other shapes, more or fewer of them than `rows` has, or a row beyond `num_rows`.
    """
    came = [list(part.shape) for part in partials]
    widths = {part.shape[1:] for part in partials}
    if len(widths) != 1 or rows.ndim != 1 or sum(map(len, partials)) != len(rows):
        raise ConfigError(f"partial sums are {came}, rows {list(rows.shape)}; expected [n, H] each, and a row for each")
    try:
        counts = torch.bincount(rows, minlength=num_rows)  # looks for rows below 0 by itself; on a GPU each look waits
    except RuntimeError as error:
        raise ConfigError(f"rows cannot be counted: {error}; expected int64, 0 … {num_rows - 1}") from None
    if len(counts) > num_rows:
        raise ConfigError(f"rows reach to {len(counts) - 1}, expected 0 … {num_rows - 1}")
    order = rows.argsort(stable=True)
    place = torch.empty_like(order)  # which of its row's partial sums is it?
    place[order] = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows[order]]
    most = int(counts.max()) if num_rows else 0
    like = partials[0]
    slots = like.new_zeros(num_rows, max(most, 1), *like.shape[1:], dtype=accumulator(like.dtype))
    done = 0
    for part in partials:
        here = slice(done, done + len(part))
        slots[rows[here], place[here]] = part.to(slots.dtype)
        done += len(part)
    return sum_contributions(slots.unbind(1))


def weigh_and_sum(contributions: torch.Tensor, weights: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """The recipe for raw expert outputs: weight them, add each owner's in k order, then the owners in rank order.

    Args:
        contributions: `[T, K, H]`, the experts' outputs.
        weights: `[T, K]` fp32; owner: `[T, K]` int64, the rank of each route's expert, -1 for no route.

    Returns:
        `[T, H]` in `accumulator(dtype)`.

    Raises:
        ConfigError: shapes that do not belong together.
    """
    if contributions.ndim != 3 or not contributions.shape[:2] == weights.shape == owner.shape:
        raise ConfigError(
            f"contributions are {list(contributions.shape)}, weights {list(weights.shape)}, owner {list(owner.shape)}; "
            "expected [T, K, H], [T, K] and [T, K]"
        )
    if owner.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"owner is {owner.dtype}, expected int64, as -1 is no route; use .long() on signed numbers")
    acc = accumulator(contributions.dtype)
    live = owner >= 0
    far = int(owner.max()) + 1 if owner.numel() else 0
    order = torch.where(live, owner, far).argsort(dim=1, stable=True)  # [T, K], routes of -1 last
    owner, live = owner.gather(1, order), live.gather(1, order)
    total = partial = contributions.new_zeros(len(contributions), contributions.shape[2], dtype=acc)
    before = owner.new_full((len(owner),), -1)
    for k in range(owner.shape[1]):
        route = order[:, k]
        rows = torch.arange(len(route), device=route.device)
        weighted = contributions[rows, route].to(acc) * weights[rows, route].unsqueeze(1).to(acc)
        weighted = torch.where(live[:, k : k + 1], weighted, 0)  # not a product: what lies there may be NaN
        same = (owner[:, k] == before).unsqueeze(1)
        total = torch.where(same, total, total + partial)
        partial = torch.where(same, partial + weighted, weighted)
        before = owner[:, k]
    return total + partial
