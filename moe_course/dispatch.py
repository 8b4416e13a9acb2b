"""Stage 3: what every backend must deliver to the rank that owns the experts.

How rows travel differs from backend to backend (`moe_course/backends/`). What arrives does not: rows, their
global expert ids, their weights where the experts apply them, and a handle that finds the way back.

Source: vLLM `modular_kernel.py`, the 5-tuple returned by `prepare`. Built in: notebook 07.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_course.errors import ConfigError
from moe_course.fits import check_ids


@dataclass(frozen=True)
class Dispatched:
    """Rows as the local experts see them.

    Attributes:
        hidden_states: layout "rows": `[M, H]`, one row per token, all its routes in one line of `topk_ids`;
            "routes": `[M, H]`, one row per route; "padded": `[E_local, C, H]`.
        scales: scales of quantised rows, or None.
        topk_ids: `[M, K]` int32, **global** ids; -1 is a route that is not computed here.
        topk_weights: `[M, K]` fp32 where the experts apply them; None where source or combine do.
        expert_num_tokens: `[E_local]` int32 where the transport has counted, else None.
        layout: "rows", "routes" or "padded".
        handle: what the backend's `combine` needs to bring the rows home.
    """

    hidden_states: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    expert_num_tokens: torch.Tensor | None
    layout: str
    handle: Any


def permute_by_expert(local_ids: torch.Tensor, num_local_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the routes that are computed here by local expert, keeping row order within an expert.

    Args:
        local_ids: `[M, K]` local expert rows, -1 for routes of other ranks.

    Returns:
        `(routes, counts)`: `routes [n]` int64, flat positions `row * K + k` in expert order; `counts [E_local]`.

    Raises:
        ConfigError: ids that are not `[M, K]` signed integers, or one beyond the experts that are here.

    Source: vLLM `moe_permute` (its order and offsets are this function's golden vectors).
    """
    check_ids("local_ids", local_ids)
    flat = local_ids.reshape(-1).long()
    live = (flat >= 0).nonzero().flatten()
    experts, order = flat[live].sort(stable=True)
    counts = torch.bincount(experts, minlength=num_local_experts)
    if len(counts) > num_local_experts:
        raise ConfigError(
            f"local_ids reach {len(counts) - 1}, {num_local_experts} experts are here; experts elsewhere have -1"
        )
    return live[order], counts
