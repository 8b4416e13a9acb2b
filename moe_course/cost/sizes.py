"""Bytes: of a row, of what travels along with it, and of buffers of a fixed size. Built in: notebook 11."""

from __future__ import annotations

from moe_course.backends.traffic import RowBytes
from moe_course.cost.memory import FP32, ITEMSIZE
from moe_course.errors import ConfigError
from moe_course.quant import row_bytes

#: What DeepEP's own tests count for each selected expert, next to row and scales: 16 bytes.
_SELECTION_EXTRA = 16
_ALIGN = 16  # bytes; rows in a window of `one_sided` start on such a boundary


def row_sizes(
    hidden_size: int, dtype: str = "bfloat16", dispatch_quant: str | None = None, combine_dtype: str | None = None
) -> RowBytes:
    """Bytes of a row that goes out, of a partial sum, and of one expert's output.

    Args:
        dtype: of the model's rows, a key of `ITEMSIZE`.
        dispatch_quant: quantised before it goes out, a name of `quant.FORMATS`: "fp8_group" of 6144 numbers has 6336.
        combine_dtype: of all that comes home. None: partial sums in the accumulator's, outputs in the model's.

    Raises ConfigError for unknown names, and for a hidden size that the format cannot cut into groups.
    """
    for name, value in (("dtype", dtype), ("combine dtype", combine_dtype or dtype)):
        if value not in ITEMSIZE:
            raise ConfigError(f"{name} is {value!r}, known values: {', '.join(ITEMSIZE)}")
    out = row_bytes(dispatch_quant, hidden_size) if dispatch_quant else hidden_size * ITEMSIZE[dtype]
    if combine_dtype is not None:
        return RowBytes(out, hidden_size * ITEMSIZE[combine_dtype], hidden_size * ITEMSIZE[combine_dtype])
    return RowBytes(out, hidden_size * max(FP32, ITEMSIZE[dtype]), hidden_size * ITEMSIZE[dtype])


def metadata_per_row(shape: str, top_k: int) -> int:
    """Bytes that go out with each row: int32 ids and float32 weights of all K routes where the experts weight.

    A row for one route needs no weight, as the source applies it, and its id only where no place says it.
    """
    if shape in ("no_dp_ep", "low_latency"):
        return 0
    if shape == "all_to_all":
        return FP32
    return top_k * 2 * FP32


def padding_per_row(shape: str, top_k: int, dispatch_row: int) -> int:
    """Bytes that `one_sided` fills up each row of `dispatch_row` bytes with, and its routing, to a multiple of 16."""
    return -(dispatch_row + metadata_per_row(shape, top_k)) % _ALIGN if shape == "one_sided" else 0


def selection_bytes(hidden_size: int, fp8: bool = True) -> int:
    """Bytes that DeepEP's low-latency figures count for each (token, expert) pair, also where it stays at home.

    Dispatch in fp8: H codes, a float32 scale for each 128, and 16 bytes. In bf16, and for combine: 2 H.
    """
    return hidden_size + hidden_size // 128 * FP32 + _SELECTION_EXTRA if fp8 else 2 * hidden_size


def padded_buffer(num_experts: int, max_num_tokens: int, row: int) -> int:
    """Bytes of the receive buffers of the padded shape for one layer, `[E_local, R * T_max]` rows on each rank.

    E_local * R is E, so one rank needs `E * T_max * row` whatever R is.
    """
    return num_experts * max_num_tokens * row


def padded_fill(num_experts: int, top_k: int) -> float:
    """Share of those places that hold a row, on average, when every rank brings T_max rows: K / E."""
    return top_k / num_experts
