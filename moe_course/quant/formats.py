"""Rows as one-byte codes and fp32 scales, and back: `x` is about `q * s`.

Upstream has several rules for a scale, and they differ in their last bit. That bit decides codes at a rounding
boundary, so each format says which rule it follows. All arithmetic is fp32, whatever the rows are.

Built in: notebook 07.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from moe_course.errors import ConfigError
from moe_course.gradients import no_gradient
from moe_course.quant.exponents import round_up_to_power_of_two

#: Numbers along H that share a scale. vLLM's `block_shape` [128, 128] means 128 x 128 for weights, 1 x 128 for rows.
GROUP_SIZE = 128
_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Format:
    """How rows become codes.

    Attributes:
        name: the key in `FORMATS`.
        dtype: of the codes, one byte each.
        limit: the largest code; the smallest is `-limit`.
        scale_per: "group" of numbers along H, "row", or "tensor": all rows of the call.
        power_of_two: scales are rounded up to a power of two (ue8m0).
        reciprocal: the scale is `absmax * (1 / limit)` and not `absmax / limit`; the last bit differs now and then.
        least_absmax: a smaller `absmax` is taken for this one.
        least_scale: a smaller scale is replaced by this one.
    """

    name: str
    dtype: torch.dtype
    limit: float
    scale_per: Literal["group", "row", "tensor"]
    power_of_two: bool = False
    reciprocal: bool = False
    least_absmax: float = 0.0
    least_scale: float = 0.0


def _fp8(name: str, scale_per: Literal["group", "row", "tensor"], **more) -> Format:
    return Format(name, torch.float8_e4m3fn, 448.0, scale_per, **more)


_OF_GROUPS = {"reciprocal": True, "least_absmax": 1e-10}
_LEAST_SCALE = 1 / (448 * 512)  # vLLM csrc `min_scaling_factor`: small rows do not use the whole range of codes

#: Format name -> rule. fp8 is e4m3fn everywhere; the fnuz variant of older ROCm (limit 224) is not here.
#: Sources: `per_token_group_quant_fp8`, the same with `use_ue8m0`, `dynamic_per_token_scaled_fp8_quant`,
#: `dynamic_scaled_fp8_quant` with the floor of `QuantFP8.forward_native`, `float_to_int8_rn`.
FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        _fp8("fp8_group", "group", **_OF_GROUPS),
        _fp8("fp8_group_ue8m0", "group", power_of_two=True, **_OF_GROUPS),
        _fp8("fp8_token", "row", least_scale=_LEAST_SCALE),
        _fp8("fp8_tensor", "tensor", least_scale=_LEAST_SCALE),
        Format("int8_token", torch.int8, 127.0, "row", least_absmax=1e-10),
    )
}


def format_named(fmt: str) -> Format:
    """The format of that name. Raises ConfigError for an unknown one."""
    if fmt not in FORMATS:
        raise ConfigError(f"dispatch format is {fmt!r}, known values: {', '.join(FORMATS)}")
    return FORMATS[fmt]


def scales_per_row(fmt: str, hidden_size: int, group_size: int = GROUP_SIZE) -> int:
    """How many scales a row of `hidden_size` numbers has: `H / group_size`, or 1.

    Raises ConfigError where groups do not divide the row; upstream asserts the same.
    """
    if format_named(fmt).scale_per != "group":
        return 1
    if group_size < 1 or hidden_size % group_size or not hidden_size:
        raise ConfigError(
            f"{fmt}: hidden size {hidden_size} is not a multiple of group size {group_size}; "
            "use a format with one scale for each row, such as fp8_token or int8_token, where the backend takes it"
        )
    return hidden_size // group_size


def quantize(rows: torch.Tensor, fmt: str, group_size: int = GROUP_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows -> codes and scales.

    Zeros become code 0 under a small positive scale, so nothing is ever divided by zero. A NaN or an Inf makes its
    scale NaN or Inf, and then everything under that scale comes back as NaN: the group, the row, or for "fp8_tensor"
    all rows of the call. (A kernel that takes maxima with `fmaxf` loses a NaN here.)

    Args:
        rows: `[..., H]` fp32, bf16, fp16 or fp64, any strides; `M` may be 0.
        fmt: a name in `FORMATS`.
        group_size: numbers per scale, for the formats with groups.

    Returns:
        `(q, scales)`: `q [..., H]` in the format's dtype; `scales [..., H / group_size]` or `[..., 1]`, fp32.
        "fp8_tensor" repeats its one scale for every row, so that rows of several ranks can be put side by side.
        Give it the rows that count and no others: padding would have a say in the scale.

    Raises:
        ConfigError: unknown format, a group size that does not divide H, rows that are not floating point, or rows
            whose gradient would be lost: rounding has none.
    """
    no_gradient(f"quantize to {fmt}", "rounding has no gradient; wrap the call in torch.no_grad()", rows=rows)
    form = format_named(fmt)
    if not rows.ndim or not rows.shape[-1]:
        raise ConfigError(f"{fmt}: rows are {list(rows.shape)}, expected [..., H] with H of at least 1")
    groups = scales_per_row(fmt, rows.shape[-1], group_size)
    if rows.dtype not in _ROW_DTYPES:
        raise ConfigError(f"{fmt}: rows are {rows.dtype}, expected one of {_ROW_DTYPES}; quantise rows once, at most")
    grouped = rows.detach().float().unflatten(-1, (groups, rows.shape[-1] // groups))  # [..., G, H / G]
    absmax = grouped.abs().amax(-1)  # [..., G]; the maximum of a NaN is NaN
    if form.scale_per == "tensor" and absmax.numel():
        absmax = absmax.amax().expand_as(absmax)
    absmax = absmax.clamp(min=form.least_absmax)
    scales = absmax * (1 / form.limit) if form.reciprocal else absmax / form.limit
    scales = scales.clamp(min=form.least_scale)
    if form.power_of_two:
        scales = round_up_to_power_of_two(scales)
    # the scale fits the largest number, so for finite rows this clamp cuts a last bit at most
    codes = (grouped / scales.unsqueeze(-1)).clamp(-form.limit, form.limit).flatten(-2)  # [..., H]
    if form.dtype == torch.int8:  # a cast would cut; round() takes halves to the even code, as fp8 casts do
        codes = codes.round().nan_to_num(0.0)  # int8 has no NaN: the scale keeps it
    return codes.to(form.dtype), scales.contiguous()


def dequantize(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes and scales -> rows: the product in fp32, rounded once to `dtype`.

    Rows next to the largest number of `dtype` can come back as Inf, since their code may have been rounded up.

    Args:
        q: `[..., H]` fp8 or int8.
        scales: `[..., G]` fp32; each holds for `H / G` numbers. Packed exponents go through `unpack_exponents` first.
        dtype: of the result.

    Raises:
        ConfigError: scales of other rows than the codes, of a number that does not divide H, or not fp32.
    """
    groups = scales.shape[-1] if scales.ndim else 0
    if scales.dtype != torch.float32 or not groups or scales.shape[:-1] != q.shape[:-1] or q.shape[-1] % groups:
        raise ConfigError(
            f"scales are {list(scales.shape)} {scales.dtype}, codes are {list(q.shape)}; expected float32 "
            f"{[*q.shape[:-1], 'G']} with G a divisor of {q.shape[-1]} (packed exponents: unpack_exponents first)"
        )
    grouped = q.float().unflatten(-1, (groups, q.shape[-1] // groups))  # [..., G, H / G]
    return (grouped * scales.unsqueeze(-1)).flatten(-2).to(dtype)
