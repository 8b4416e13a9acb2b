"""e4m3 and all five formats once more, slowly: exact fractions and `struct`, no torch arithmetic.

Written from the format's definition (one sign, four exponent bits with bias 7, three mantissa bits, no infinities,
0x7F is NaN), so that it can disagree with torch's casts.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from fractions import Fraction


def f32(value: float) -> float:
    """To the nearest fp32. One fp32 operation done in fp64 and rounded by this is the fp32 operation."""
    return struct.unpack("f", struct.pack("f", value))[0]


def hex_of(value: float) -> str:
    return struct.pack(">f", value).hex()


def from_hex(text: str) -> float:
    return struct.unpack(">f", bytes.fromhex(text))[0]


def decode(code: int) -> Fraction | None:
    """The number an e4m3fn byte stands for; None for NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return None
    size = (
        Fraction(mantissa, 8) * Fraction(1, 64) if exponent == 0 else (1 + Fraction(mantissa, 8)) * _two(exponent - 7)
    )
    return -size if code & 128 else size


def _two(power: int) -> Fraction:
    return Fraction(2) ** power


POSITIVE = [decode(code) for code in range(127)]  # rising: 0 … 448


def encode(value: float) -> int:
    """The byte of the nearest number, a tie to the even byte; |value| is at most 448."""
    sign, size = (128, Fraction(-value)) if math.copysign(1, value) < 0 else (0, Fraction(value))
    above = bisect_left(POSITIVE, size)
    if POSITIVE[above] == size:
        return sign | above
    below, up = size - POSITIVE[above - 1], POSITIVE[above] - size
    if below == up:
        return sign | (above if above % 2 == 0 else above - 1)
    return sign | (above if up < below else above - 1)


def power_of_two_above(scale: float) -> float:
    mantissa, exponent = math.frexp(scale)  # 0.5 <= mantissa < 1
    return math.ldexp(1, exponent - 1 if mantissa == 0.5 else exponent)


def scale_of(numbers: list[float], fmt: str) -> float:
    """The fp32 scale of the numbers that share it."""
    absmax = max(abs(number) for number in numbers)
    if fmt == "int8_token":
        return f32(max(absmax, f32(1e-10)) / 127)
    if fmt in ("fp8_token", "fp8_tensor"):
        return max(f32(absmax / 448), f32(1 / (448 * 512)))
    scale = f32(max(absmax, f32(1e-10)) * f32(1 / 448))
    return power_of_two_above(scale) if fmt == "fp8_group_ue8m0" else scale


def code_of(number: float, scale: float, fmt: str) -> int:
    """The byte of one number, as an unsigned int."""
    quotient = f32(number / scale)
    if fmt == "int8_token":
        return round(max(-127.0, min(127.0, quotient))) & 255  # Python rounds halves to even
    return encode(max(-448.0, min(448.0, quotient)))


def quantize(rows: list[list[float]], fmt: str, group_size: int) -> tuple[list[list[int]], list[list[float]]]:
    """`(bytes, scales)` of rows of fp32 numbers."""
    codes, scales = [], []
    everything = [number for row in rows for number in row]
    for row in rows:
        width = group_size if fmt.startswith("fp8_group") else len(row)
        groups = [row[start : start + width] for start in range(0, len(row), width)]
        scales.append([scale_of(everything if fmt == "fp8_tensor" else group, fmt) for group in groups])
        codes.append([code_of(x, s, fmt) for group, s in zip(groups, scales[-1], strict=True) for x in group])
    return codes, scales
