"""What quantised rows cost in precision, and what they save in bytes. Built in: notebook 07."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.quant.formats import GROUP_SIZE, dequantize, quantize
from moe_course.quant.wire import row_bytes


@dataclass(frozen=True)
class QuantError:
    """Rows against what comes back of them.

    Attributes:
        max_abs: largest difference of any number.
        relative_rms: root of the mean squared difference, over that of the mean squared rows; 0 without rows.
        bytes_before, bytes_after: of one row in its own dtype, and packed with its scales.
    """

    max_abs: float
    relative_rms: float
    bytes_before: int
    bytes_after: int


def error(rows: torch.Tensor, fmt: str, group_size: int = GROUP_SIZE) -> QuantError:
    """Quantise rows `[..., H]`, bring them back in their dtype, and compare in fp64.

    A NaN or Inf in the rows makes both errors NaN. Raises ConfigError as `quantize`.
    """
    back = dequantize(*quantize(rows, fmt, group_size), rows.dtype)
    wanted = rows.detach().double()
    lost = back.double() - wanted
    power = wanted.square().sum()
    return QuantError(
        max_abs=float(lost.abs().amax()) if lost.numel() else 0.0,
        relative_rms=0.0 if power == 0 else float((lost.square().sum() / power).sqrt()),
        bytes_before=rows.shape[-1] * rows.element_size(),
        bytes_after=row_bytes(fmt, rows.shape[-1], group_size),
    )


def error_bound(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """How far finite fp32 rows can be from `dequantize(q, scales, torch.float32)`: `[..., H]` fp64.

    Half the step between codes there, times the scale. Steps of e4m3 double with every power of two and are 2^-9
    below 2^-6; steps of int8 are 1. On top come the roundings of the fp32 quotient, product and limit, 2^-21 of the
    code.
    """
    codes = q.float().abs().double()
    if q.dtype == torch.int8:
        half_step = torch.full_like(codes, 0.5)
    else:
        _, exponent = torch.frexp(codes.clamp(min=2.0**-6))  # codes are 0.5 … 1 times 2^exponent
        half_step = torch.exp2(exponent.double() - 5)
    grouped = (half_step + codes * 2.0**-21).unflatten(-1, (scales.shape[-1], q.shape[-1] // scales.shape[-1]))
    return (grouped * scales.double().unsqueeze(-1)).flatten(-2)
