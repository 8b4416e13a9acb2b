"""Power-of-two scales (ue8m0): one byte each, four to an int32.

A float32 that is a power of two has an empty mantissa, so its exponent byte is all there is to send.

Source: vLLM `per_token_group_quant_fp8_packed_for_deepgemm`; 255 is NaN, as in `torch.float8_e8m0fnu`.
Built in: notebook 07.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_course.errors import ConfigError

_MANTISSA = (1 << 23) - 1
_NOT_FINITE = 255


def round_up_to_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """`2^ceil(log2(s))` of positive normal fp32 numbers, from their bits; NaN and Inf stay.

    Not `exp2(ceil(log2(s)))`: one step above a power of two, the fp32 logarithm is already rounded to it.
    """
    bits = scales.contiguous().view(torch.int32)
    exponent = bits >> 23  # no sign: scales are positive
    up = ((exponent + (bits & _MANTISSA != 0)) << 23).view(torch.float32)
    return torch.where(scales.isfinite(), up, scales)


def pack_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two `[..., G]` fp32 -> `[..., ceil(G / 4)]` int32; the first group is the lowest byte.

    NaN and Inf become 255, which comes back as NaN. Bytes behind the last group are 0.

    Raises ConfigError for a scale that is no power of two: its mantissa would be lost without a word.
    """
    bits = scales.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 255
    lost = (bits & _MANTISSA != 0) | (bits < (1 << 23))  # a mantissa, a sign, zero
    lost &= scales.isfinite()
    if lost.any():
        value = scales[lost][0].item()
        raise ConfigError(f"scale {value!r} is not a power of two; pack exponents of format fp8_group_ue8m0 only")
    padded = F.pad(exponent.to(torch.uint8), (0, -scales.shape[-1] % 4))  # [..., 4 * ceil(G / 4)]
    return padded.contiguous().view(-1).view(torch.int32).view(*scales.shape[:-1], padded.shape[-1] // 4)


def unpack_exponents(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """`[..., ceil(G / 4)]` int32 -> `[..., G]` fp32 with `G = groups`.

    Raises ConfigError for another width or dtype.
    """
    words = -(-groups // 4)
    if packed.dtype != torch.int32 or packed.shape[-1] != words:
        raise ConfigError(
            f"packed exponents are {list(packed.shape)} {packed.dtype}; {groups} groups need {words} int32 a row"
        )
    exponent = packed.contiguous().view(-1).view(torch.uint8).view(*packed.shape[:-1], 4 * words)
    exponent = exponent[..., :groups].int()
    # byte 0 is 2^-127, which float32 writes with a mantissa bit
    bits = torch.where(exponent > 0, exponent << 23, 1 << 22).int()
    return torch.where(exponent == _NOT_FINITE, torch.nan, bits.view(torch.float32))
