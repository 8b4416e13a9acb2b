"""What stages refuse: tensors that do not belong together would give other numbers, or an error about an index.

Each function raises ConfigError with the field, what it is, and what it needs to be. The stages call them first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_course.errors import ConfigError
from moe_course.rows import TOLERANCE

if TYPE_CHECKING:
    from moe_course.dispatch import Dispatched

#: Dtypes of expert ids. No unsigned ones: -1 is an id, too.
ID_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


def check_ids(name: str, ids: torch.Tensor) -> None:
    """Raise ConfigError unless expert ids are `[rows, K]` of a signed integer dtype."""
    if ids.ndim != 2:
        raise ConfigError(f"{name} are {list(ids.shape)}, expected [T, K]: a line of ids for each row")
    if ids.dtype not in ID_DTYPES:
        raise ConfigError(
            f"{name} are {ids.dtype}, expected int32 or int64, where -1 is no route; use .to(torch.int32)"
        )


def check_routing(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, rank: int) -> None:
    """What every backend's dispatch is given: rows `[T, H]`, and weights and ids `[T, K]`, in one place.

    Raises ConfigError, with the rank, for other shapes, for ids that are no signed integers, and for two devices.
    """
    check_ids(f"rank {rank}: topk_ids", topk_ids)
    if hidden_states.ndim != 2 or len(topk_ids) != len(hidden_states) or topk_weights.shape != topk_ids.shape:
        raise ConfigError(
            f"rank {rank}: hidden_states are {list(hidden_states.shape)}, topk_weights {list(topk_weights.shape)}, "
            f"topk_ids {list(topk_ids.shape)}; expected [T, H], [T, K] and [T, K]: a row, its weights and its ids"
        )
    if not hidden_states.device == topk_weights.device == topk_ids.device:
        raise ConfigError(
            f"rank {rank}: hidden_states are on {hidden_states.device}, topk_weights on {topk_weights.device}, "
            f"topk_ids on {topk_ids.device}; bring all three to one device"
        )


def check_map(expert_map: torch.Tensor | None) -> None:
    """`[E]`, global id to local row; None where one rank has all."""
    if expert_map is not None and (expert_map.ndim != 1 or expert_map.dtype not in ID_DTYPES):
        raise ConfigError(
            f"expert_map is {list(expert_map.shape)} {expert_map.dtype}, expected [E] int32, -1 for experts elsewhere"
        )


def check_lines(dispatched: Dispatched) -> None:
    """Layouts "rows" and "routes": a line of ids, and of weights where they travel, for each row."""
    rows, ids, weights = dispatched.hidden_states, dispatched.topk_ids, dispatched.topk_weights
    check_ids("topk_ids", ids)
    fits = weights.shape == ids.shape if dispatched.layout == "rows" else ids.shape[1] == 1
    if rows.ndim != 2 or len(rows) != len(ids) or not fits:
        raise ConfigError(
            f"layout {dispatched.layout!r}: hidden_states are {list(rows.shape)}, topk_ids {list(ids.shape)}, "
            f"topk_weights {None if weights is None else list(weights.shape)}; expected "
            + ("[M, H], [M, K] and [M, K]" if dispatched.layout == "rows" else "[M, H], [M, 1] and None")
        )


def check_weights(rows: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, experts: int | None = None) -> None:
    """Rows `[…, H]` and the two matrices of each expert, in one dtype and place; `experts`: how many have rows."""
    shapes = (w13.ndim == w2.ndim == 3) and len(w13) == len(w2) == (len(w13) if experts is None else experts)
    if not shapes or w13.shape[1] != 2 * w2.shape[2] or not rows.shape[-1] == w13.shape[2] == w2.shape[1]:
        here = "" if experts is None else f" of {experts} experts"
        raise ConfigError(
            f"rows{here} are {list(rows.shape)}, w13 is {list(w13.shape)}, w2 {list(w2.shape)}; expected rows of H "
            "numbers, [E_local, 2I, H] and [E_local, H, I]"
        )
    if not (rows.dtype == w13.dtype == w2.dtype and rows.device == w13.device == w2.device):
        raise ConfigError(
            f"rows are {rows.dtype} on {rows.device}, w13 is {w13.dtype} on {w13.device}, w2 {w2.dtype} on "
            f"{w2.device}; bring them to one dtype and device, as in rows.to(w13)"
        )
    if w13.dtype not in TOLERANCE:
        known = ", ".join(str(dtype) for dtype in TOLERANCE)
        raise ConfigError(f"w13 and w2 are {w13.dtype}, expected one of {known}; dequantise the matrices first")


def check_places(dispatched: Dispatched) -> None:
    """Layout "padded": `[E_local, C, H]`, and how many of its C places each expert uses."""
    rows, counts = dispatched.hidden_states, dispatched.expert_num_tokens
    if rows.ndim != 3 or counts is None or counts.shape != rows.shape[:1]:
        raise ConfigError(
            f"padded hidden_states are {list(rows.shape)}, expert_num_tokens "
            f"{None if counts is None else list(counts.shape)}; expected [E_local, C, H] and [E_local]"
        )
    if len(counts) and (int(counts.max()) > rows.shape[1] or int(counts.min()) < 0):
        raise ConfigError(
            f"expert_num_tokens {counts.tolist()} do not fit: an expert has 0 … {rows.shape[1]} rows here"
        )
