"""Codes and scales as one byte row: neither can travel without the other.

gloo refuses to send fp8 ("Invalid scalar type", pytorch/pytorch#111131), and a scale that arrives with another row
is wrong without a sign. Bytes side by side settle both. They are in this machine's byte order.

Built in: notebook 07.
"""

from __future__ import annotations

import torch

from moe_course.errors import ConfigError
from moe_course.quant.formats import GROUP_SIZE, format_named, scales_per_row

_SCALE_BYTES = 4  # float32, or int32 with four exponents


def row_bytes(fmt: str, hidden_size: int, group_size: int = GROUP_SIZE, exponents: bool = False) -> int:
    """Bytes of one packed row: `H` codes and its scales. "fp8_group" of 6144 numbers: 6144 + 48 * 4 = 6336.

    Args:
        exponents: scales are packed by `pack_exponents`; only for "fp8_group_ue8m0".

    Raises ConfigError as `scales_per_row`, and for `exponents` of another format.
    """
    return hidden_size + _SCALE_BYTES * _scales_wide(fmt, hidden_size, group_size, exponents)


def pack(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`q [..., H]` and `scales [..., G]` (fp32, or int32 exponents) -> uint8 `[..., H + 4 G]`, scales last.

    Raises ConfigError when they have different rows, or when the dtypes are others.
    """
    if q.shape[:-1] != scales.shape[:-1]:
        raise ConfigError(f"codes are {list(q.shape)}, scales are {list(scales.shape)}: each row needs its own scales")
    if q.element_size() != 1 or scales.dtype not in (torch.float32, torch.int32):
        raise ConfigError(f"codes are {q.dtype} and scales {scales.dtype}; expected one byte, and float32 or int32")
    return torch.cat([_bytes(q), _bytes(scales)], dim=-1)


def unpack(
    packed: torch.Tensor, fmt: str, hidden_size: int, group_size: int = GROUP_SIZE, exponents: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `pack` was given: `(q [..., H], scales [..., G])`, copies.

    Args:
        packed: uint8 `[..., row_bytes(...)]`.
        exponents: return the scales as the int32 they travelled as; `unpack_exponents` reads them.

    Raises ConfigError for rows of another width: sender and receiver differ in format, hidden or group size.
    """
    width = row_bytes(fmt, hidden_size, group_size, exponents)
    if packed.dtype != torch.uint8 or packed.shape[-1] != width:
        raise ConfigError(
            f"packed rows are {list(packed.shape)} {packed.dtype}; {fmt} rows of {hidden_size} numbers "
            f"(group size {group_size}) have {width} uint8; all ranks need the same format and sizes"
        )
    codes, scales = packed[..., :hidden_size], packed[..., hidden_size:]
    return (
        _typed(codes, format_named(fmt).dtype),
        _typed(scales, torch.int32 if exponents else torch.float32),
    )


def _scales_wide(fmt: str, hidden_size: int, group_size: int, exponents: bool) -> int:
    groups = scales_per_row(fmt, hidden_size, group_size)
    if not exponents:
        return groups
    if not format_named(fmt).power_of_two:
        raise ConfigError(f"{fmt}: scales are no powers of two and cannot travel as exponents; use fp8_group_ue8m0")
    return -(-groups // 4)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # flat first: an empty tensor counts as contiguous whatever its strides are, and then cannot be seen as bytes
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat.view(*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size())


def _typed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # a copy, always: the scales of a single row are contiguous as they are and may start where float32 cannot
    flat = part.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
    return flat.view(*part.shape[:-1], part.shape[-1] // dtype.itemsize)
