"""Scales of a quantised checkpoint: cut to the rank's experts, one per block, never stretched to fit.

Two real faults live here. A scale vector of all experts met weights of the local ones, or one scale was broadcast
over all of them (sgl-project/sglang#23531). And a shard boundary fell inside a 128-block, whose one scale cannot be
cut (vllm-project/vllm#48173).

Source: vLLM `w13_weight_scale_inv [E_local, 2 ceil(I / 128), ceil(H / 128)]`. Built in: notebook 07.
"""

from __future__ import annotations

import torch

from moe_course.errors import ConfigError
from moe_course.expert_map import Placement

BLOCK = (128, 128)


def experts_scales(scales: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """The scales of the experts that `rank` owns, in the order of its weight rows: `[E, ...]` -> `[E_local, ...]`.

    Raises ConfigError for scales that are not one per expert; a single one is not spread over all.
    """
    if scales.ndim == 0 or len(scales) != placement.num_experts:
        raise ConfigError(
            f"rank {rank}: expert scales are {list(scales.shape)}, the layer has {placement.num_experts} experts; "
            "give one scale for each expert, by global id"
        )
    return scales[placement.experts_of(rank)]


def expert_dequantize(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights with one scale per expert, or one per part: `[E_local, N, K]` in `dtype`.

    Args:
        weight: `[E_local, N, K]` fp8 or int8.
        scales: `[E_local]`, or `[E_local, P]` for P matrices of equal height in a row (`w13`: gate 0, up 1), fp32.

    Raises ConfigError when the scales are of other experts than the weights, even where they would broadcast.
    """
    parts = scales.shape[1] if scales.ndim == 2 else 1
    if scales.ndim not in (1, 2) or len(scales) != len(weight) or not parts or weight.shape[1] % parts:
        raise ConfigError(
            f"expert scales are {list(scales.shape)}, weights are {list(weight.shape)}; expected [{len(weight)}] or "
            f"[{len(weight)}, parts]: cut the scales to this rank's experts with experts_scales"
        )
    cut = weight.float().unflatten(1, (parts, weight.shape[1] // parts))  # [E_local, P, N / P, K]
    return (cut * scales.reshape(len(weight), parts, 1, 1)).flatten(1, 2).to(dtype)


def block_dequantize(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] = BLOCK, parts: int = 1
) -> torch.Tensor:
    """Weights with one scale per block, the last block of each side possibly smaller: `[..., N, K]` in `dtype`.

    Args:
        weight: `[..., N, K]` fp8 or int8.
        scales: `[..., parts * ceil(N / parts / block[0]), ceil(K / block[1])]` fp32.
        parts: matrices of equal height in `weight`, each with blocks of its own: 2 for `w13`.

    Raises ConfigError for scales of another shape, leading dimensions included: nothing is broadcast.
    """
    *lead, n, k = weight.shape
    height = n // parts
    expected = [*lead, parts * -(-height // block[0]), -(-k // block[1])]
    if n % parts or list(scales.shape) != expected:
        raise ConfigError(
            f"block scales are {list(scales.shape)}; weights {list(weight.shape)} in {parts} part(s) with blocks "
            f"{block[0]} x {block[1]} need {expected}"
        )
    of_row = torch.arange(height, device=weight.device) // block[0]  # [N / parts]
    of_row = torch.cat([of_row + part * (expected[-2] // parts) for part in range(parts)])  # [N]
    of_column = torch.arange(k, device=weight.device) // block[1]
    return (weight.float() * scales[..., of_row, :][..., of_column]).to(dtype)


def slice_block_scales(
    scales: torch.Tensor, dim: int, rank: int, ranks: int, size: int, block: int = BLOCK[0]
) -> torch.Tensor:
    """The scales of one of `ranks` equal slices of a weight dimension, for experts cut by tensor parallelism.

    Args:
        scales: block scales of one matrix (not `w13`: slice gate and up each).
        dim: their dimension that follows the sliced one.
        size: numbers of the sliced dimension, e.g. I; `block` of them share a scale.

    Raises ConfigError where slices are unequal, or end inside a block: its scale cannot be cut.
    """
    if size % ranks:
        raise ConfigError(f"rank {rank}: {size} numbers cannot be cut into {ranks} equal slices")
    if scales.shape[dim] != -(-size // block):
        raise ConfigError(
            f"rank {rank}: {scales.shape[dim]} block scales for {size} numbers in blocks of {block}, "
            f"expected {-(-size // block)}"
        )
    width = size // ranks
    if ranks > 1 and width % block:
        raise ConfigError(
            f"rank {rank}: a slice of {width} numbers ends inside a scale block of {block} ({size} cut by {ranks}); "
            f"choose a tensor parallel size that leaves a multiple of {block}, or keep experts whole (EP)"
        )
    first = rank * width // block
    return scales.narrow(dim, first, -(-width // block))
