"""Stage 4: the experts of this rank compute the rows they were sent.

Source: vLLM `RoutedExperts` (`w13`: gate rows, then up rows) and its standard kernels, which weight and sum over
k themselves. Built in: notebook 03.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from moe_course.combine import accumulator, sum_contributions
from moe_course.dispatch import Dispatched, permute_by_expert
from moe_course.errors import ConfigError
from moe_course.fits import check_ids, check_lines, check_map, check_places, check_weights
from moe_course.quant import dequantize
from moe_course.rows import padded_rows, padding_for


def local_experts(
    dispatched: Dispatched, w13: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """Compute every local route, in whatever layout the rows came.

    Args:
        dispatched: see `Dispatched`. Quantised rows (with `scales`) are first brought to the dtype of the weights.
        w13: `[E_local, 2I, H]`; w2: `[E_local, H, I]`, model dtype.
        expert_map: `[E]` global -> local, -1 elsewhere; None when this rank owns all experts.

    Returns:
        Layout "rows" with weights: `[M, H]`, a row's weighted contributions added in k order, in
        `accumulator(dtype)`. Layouts without weights get raw expert outputs in the model's dtype: "routes" `[M, H]`,
        "padded" `[E_local, C, H]`. What has no local route, and what lies behind a count, is zero.

    Raises:
        ConfigError: an id outside 0 … E-1, a layout this kernel does not take, or rows, ids, weights and matrices that
            do not fit together.
    """
    with_weights = dispatched.topk_weights is not None
    if dispatched.layout == "padded" and not with_weights:
        return _padded_outputs(dispatched, w13, w2)
    if dispatched.layout not in ("rows", "routes") or with_weights != (dispatched.layout == "rows"):
        raise ConfigError(
            f"local_experts takes layout 'rows' with weights, 'routes' and 'padded' without, got "
            f"{dispatched.layout!r} {'with' if with_weights else 'without'} them"
        )
    check_lines(dispatched)
    hidden_states, (m, k) = plain_rows(dispatched, w13.dtype), dispatched.topk_ids.shape
    check_weights(hidden_states, w13, w2)
    routes, outputs = route_outputs(hidden_states, dispatched.topk_ids, w13, w2, expert_map)
    if not with_weights:
        raw = outputs.new_zeros(m, w2.shape[1])
        raw[routes] = outputs
        return raw
    acc = accumulator(hidden_states.dtype)
    weights = dispatched.topk_weights.reshape(-1, 1)[routes].to(acc)  # [n, 1]
    contributions = outputs.new_zeros(m * k, w2.shape[1], dtype=acc)  # [M*K, H]
    contributions[routes] = outputs.to(acc) * weights
    return sum_contributions(contributions.view(m, k, w2.shape[1]).unbind(1))  # [M, H]; -1 fails for M = 0


def _padded_outputs(dispatched: Dispatched, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The first rows of each expert count, see `expert_num_tokens`; the others are never read."""
    check_places(dispatched)
    rows, counts = dispatched.hidden_states, dispatched.expert_num_tokens.long()
    local, capacity = rows.shape[:2]
    used = (torch.arange(capacity, device=rows.device) < counts.unsqueeze(1)).view(-1)  # [E_local * C]
    scales = None if dispatched.scales is None else dispatched.scales.flatten(0, 1)[used]
    values = plain_rows(replace(dispatched, hidden_states=rows.flatten(0, 1)[used], scales=scales), w13.dtype)
    outputs = values.new_zeros(local * capacity, w2.shape[1])
    check_weights(values, w13, w2, local)
    outputs[used] = grouped_swiglu(values, counts, w13, w2)
    return outputs.view(local, capacity, w2.shape[1])


def plain_rows(dispatched: Dispatched, dtype: torch.dtype) -> torch.Tensor:
    """The rows as the weights take them: quantised ones in `dtype`, others as they are."""
    if dispatched.scales is None:
        return dispatched.hidden_states
    return dequantize(dispatched.hidden_states, dispatched.scales, dtype)


def route_outputs(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The unweighted output of every route computed here.

    Returns:
        `(routes, outputs)`: `routes [n]` int64, flat positions `row * K + k`; `outputs [n, H]` model dtype.
    """
    local_ids = to_local(topk_ids, expert_map, len(w13))
    routes, counts = permute_by_expert(local_ids, len(w13))
    rows = hidden_states[routes // topk_ids.shape[1]]  # [n, H], expert order
    return routes, grouped_swiglu(rows, counts, w13, w2)


def to_local(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """Global ids -> local rows, -1 for "no route" and for experts elsewhere. `[M, K]` int64.

    Raises ConfigError for an id beyond the map, which belongs to another numbering, and for those that are not `[M, K]`
    signed integers.
    """
    check_ids("topk_ids", topk_ids)
    check_map(expert_map)
    ids = topk_ids.long()
    known = num_experts if expert_map is None else len(expert_map)
    if ids.numel() and (int(ids.max()) >= known or int(ids.min()) < -1):
        raise ConfigError(f"topk_ids reach from {int(ids.min())} to {int(ids.max())}, expected -1 … {known - 1}")
    if expert_map is None:
        return ids
    return torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)


def grouped_swiglu(rows: torch.Tensor, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """`w2(silu(w1 x) * (w3 x))` for rows sorted by expert: `[n, H]` -> `[n, H]`.

    Each expert's group is padded so that a row's bits do not depend on its neighbours (`moe_course/rows.py`).
    """
    if not len(counts):  # a rank without experts
        return rows.new_zeros(0, w2.shape[1])
    multiple = max(padding_for(w13), padding_for(w2))
    padded = padded_rows(counts, multiple)  # [E_local]
    ends = padded.cumsum(0)
    # place of row i in the padded buffer: start of its group + its position in the group
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    place = torch.arange(len(rows), device=rows.device) + shift.repeat_interleave(counts)
    buffer = rows.new_zeros(int(ends[-1]), rows.shape[1])
    buffer[place] = rows
    gate, up = grouped_linear(buffer, w13, ends).chunk(2, dim=-1)  # gate rows first
    return grouped_linear(F.silu(gate) * up, w2, ends)[place]


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """One product per expert: rows `[ends[e-1], ends[e])` times `weight[e].T`; `[n, in]` -> `[n, out]`."""
    # the kernel knows no float64 and no empty input
    if len(rows) and rows.dtype != torch.float64 and _aligned(rows) and _aligned(weight):
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends.to(torch.int32))
    groups = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([F.linear(group, w) for group, w in zip(groups, weight, strict=True)])


def _aligned(matrix: torch.Tensor) -> bool:
    """Do its rows, or its columns, lie number by number and start on 16-byte boundaries, as the kernel asks?"""
    *outer, rows, columns = matrix.stride()
    across, line = (rows, matrix.shape[-1]) if columns == 1 else (columns, matrix.shape[-2]) if rows == 1 else (0, 1)
    # expanded lines lie on top of each other
    return across >= line and all(stride * matrix.element_size() % 16 == 0 for stride in (*outer, across))
