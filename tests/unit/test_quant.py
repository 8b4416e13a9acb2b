"""Quantised rows against golden bits, exact fractions and a bound; wrong rules on purpose, and all are caught."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import quant_slow as slow
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_course.errors import ConfigError
from moe_course.quant import FORMATS, dequantize, error, error_bound, formats, quantize, scales_per_row
from moe_course.quant.exponents import round_up_to_power_of_two

FP8 = torch.float8_e4m3fn


def hexes(tensor: torch.Tensor) -> list[str]:
    return [slow.hex_of(value) for value in tensor.flatten().tolist()]


def check_golden(quantize_rows, case: dict, group_size: int = 4) -> None:
    """Raise AssertionError unless scales, codes and what comes back are those of the golden case, to the bit."""
    q, scales = quantize_rows(torch.tensor(case["rows"], dtype=torch.float32), case["fmt"], group_size)
    wanted = case["scales"]
    assert hexes(scales) == [text for row in wanted for text in (row if isinstance(row, list) else [row])]
    assert q.float().tolist() == case["codes"]
    if case.get("back"):
        back = dequantize(q, scales, torch.float32)
        assert torch.equal(back, torch.tensor(case["back"], dtype=torch.float32))


def every_golden(quantize_rows, golden) -> None:
    for case in (*golden("quant")["groups_of_4"], *golden("quant")["one_scale"]):
        check_golden(quantize_rows, case)


def check_reciprocal(quantize_rows, case: dict) -> None:
    """One group in which the last bit of the scale decides a code."""
    group = torch.tensor([[slow.from_hex(text) for text in case["group"]]])
    q, scales = quantize_rows(group, "fp8_group", 2)
    assert hexes(scales) == [case["scale"]]
    assert q.float()[0].tolist() == [448, case["code"]]


def check_slow(quantize_rows, rows: torch.Tensor, fmt: str, group_size: int) -> None:
    """Raise AssertionError unless every byte and every scale bit is that of the slow implementation."""
    codes, scales = slow.quantize(rows.float().tolist(), fmt, group_size)
    q, s = quantize_rows(rows, fmt, group_size)
    assert s.tolist() == scales
    assert q.view(torch.uint8).tolist() == codes


def spread_rows(m: int, h: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows with numbers of very different size, and zeros."""
    generator = torch.Generator().manual_seed(m * h)
    rows = torch.randn(m, h, generator=generator) * torch.exp2(torch.randint(-20, 20, (m, 1), generator=generator))
    rows *= torch.exp2(torch.randint(-9, 3, (m, h), generator=generator))
    return rows.masked_fill(torch.rand(m, h, generator=generator) < 0.1, 0.0).to(dtype)


# -- the cast ------------------------------------------------------------------------------------------------------


def test_torch_reads_all_256_codes_as_the_definition_says():
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float().tolist()
    for code, number in enumerate(numbers):
        if slow.decode(code) is None:
            assert math.isnan(number)
        else:
            assert number == float(slow.decode(code))
            assert math.copysign(1, number) == (-1 if code & 128 else 1)


def test_rounding_at_every_midpoint_and_one_step_beside_it():
    values = []
    for low, high in zip(slow.POSITIVE, slow.POSITIVE[1:], strict=False):
        middle = torch.tensor(float((low + high) / 2))
        below = torch.nextafter(middle, torch.tensor(0.0))
        above = torch.nextafter(middle, torch.tensor(1e9))
        values += [float(low), below.item(), middle.item(), above.item(), float(high)]
    values += [-value for value in values]
    wanted = [slow.encode(value) for value in values]
    # the largest is 448, so the scale is 1 and the codes are the numbers themselves
    q, scales = quantize(torch.tensor([values]), "fp8_token")
    assert scales.tolist() == [[1.0]]
    assert q.view(torch.uint8)[0].tolist() == wanted
    rounded_up = [slow.POSITIVE.index(min(p for p in slow.POSITIVE if p >= abs(v))) for v in values]
    assert [code & 127 for code in wanted] != rounded_up


# -- golden values, and rules that are wrong -----------------------------------------------------------------------


def test_golden_values(golden):
    every_golden(quantize, golden)


def test_the_last_bit_of_the_scale_decides_a_code(golden):
    check_reciprocal(quantize, golden("quant")["reciprocal"])


def by_division(rows, fmt, group_size):
    """`absmax / 448` instead of `absmax * (1 / 448)`."""
    return with_rule(rows, fmt, group_size, reciprocal=False)


def floor_on_scale(rows, fmt, group_size):
    """1e-10 clamps the scale and not absmax."""
    return with_rule(rows, fmt, group_size, least_absmax=0.0, least_scale=1e-10)


def no_floor(rows, fmt, group_size):
    return with_rule(rows, fmt, group_size, least_absmax=0.0, least_scale=0.0)


def with_rule(rows, fmt, group_size, **wrong):
    right = dict(FORMATS)
    FORMATS.update({name: replace(form, **wrong) for name, form in right.items()})
    try:
        return quantize(rows, fmt, group_size)
    finally:
        FORMATS.update(right)


def rounding_down_the_exponent(rows, fmt, group_size):
    """ue8m0 with floor instead of ceil: the largest numbers no longer fit."""
    q, scales = quantize(rows, fmt, group_size)
    if fmt != "fp8_group_ue8m0":
        return q, scales
    _, raw = quantize(rows, "fp8_group", group_size)
    scales = torch.exp2(torch.floor(torch.log2(raw)))
    return (rows.unflatten(1, (-1, group_size)) / scales.unsqueeze(-1)).clamp(-448, 448).flatten(1).to(FP8), scales


def scales_of_the_neighbour(rows, fmt, group_size):
    """Every row with the scales of the row before it."""
    q, scales = quantize(rows, fmt, group_size)
    return q, scales.roll(1, 0)


def groups_along_the_rows(rows, fmt, group_size):
    """Groups of equal columns of several rows, as in a 128 x 128 block: one scale for all rows."""
    q, scales = quantize(rows, fmt, group_size)
    return q, scales.amax(0, keepdim=True).expand_as(scales)


def always_up(rows, fmt, group_size):
    """Away from zero instead of to the nearest code."""
    q, scales = quantize(rows, fmt, group_size)
    back = dequantize(q, scales, torch.float32)
    short = (back.abs() < rows.abs()) & (q.float().abs() < FORMATS[fmt].limit)
    return (q.view(torch.uint8) + short.to(torch.uint8)).view(q.dtype), scales


def half_away_from_zero(rows, fmt, group_size):
    q, scales = quantize(rows, fmt, group_size)
    if fmt != "int8_token":
        return q, scales
    codes = rows / scales
    return (codes.sign() * (codes.abs() + 0.5).floor()).to(torch.int8), scales


CAUGHT_BY_GOLDEN = [
    floor_on_scale,
    no_floor,
    rounding_down_the_exponent,
    scales_of_the_neighbour,
    groups_along_the_rows,
    always_up,
    half_away_from_zero,
]


@pytest.mark.parametrize("wrong", CAUGHT_BY_GOLDEN, ids=lambda wrong: wrong.__name__)
def test_wrong_rules_miss_the_golden_values(wrong, golden):
    with pytest.raises(AssertionError):
        every_golden(wrong, golden)


def test_division_misses_the_last_bit(golden):
    case = golden("quant")["reciprocal"]
    with pytest.raises(AssertionError):
        check_reciprocal(by_division, case)
    check_reciprocal(by_division, case | {"scale": case["scale_by_division"], "code": case["code_by_division"]})


# -- all bits, against the slow implementation ---------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_bits_equal_the_slow_implementation(fmt, dtype):
    rows = spread_rows(7, 48)
    rows = rows.clamp(-6e4, 6e4).to(dtype)
    check_slow(quantize, rows, fmt, 8)
    check_slow(quantize, rows.t().contiguous().t(), fmt, 8)  # other strides
    check_slow(quantize, torch.cat([rows, rows])[::2], fmt, 16)


@pytest.mark.parametrize("wrong", [by_division, floor_on_scale, always_up], ids=lambda wrong: wrong.__name__)
def test_the_slow_implementation_catches_wrong_rules(wrong):
    with pytest.raises(AssertionError):
        check_slow(wrong, torch.cat([spread_rows(16, 48), spread_rows(1, 48) * 2**-40]), "fp8_group", 4)


FLOATS = st.floats(-(2.0**99), 2.0**99, width=32)


@given(st.lists(st.lists(FLOATS, min_size=8, max_size=8), min_size=1, max_size=4), st.sampled_from([*FORMATS]))
def test_bits_scales_and_bound_of_any_rows(rows, fmt):
    tensor = torch.tensor(rows)
    check_slow(quantize, tensor, fmt, 4)
    q, scales = quantize(tensor, fmt, 4)
    assert (scales > 0).all() and scales.isfinite().all()
    lost = (dequantize(q, scales, torch.float32).double() - tensor.double()).abs()
    assert (lost <= error_bound(q, scales)).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_bound_is_reached_and_wrong_codes_are_beyond_it(fmt):
    rows = spread_rows(40, 64)
    q, scales = quantize(rows, fmt, 16)
    share = (dequantize(q, scales, torch.float32).double() - rows.double()).abs() / error_bound(q, scales)
    assert 0.95 < share.max() <= 1
    q, scales = scales_of_the_neighbour(rows, fmt, 16)
    if fmt != "fp8_tensor":
        assert ((dequantize(q, scales, torch.float32).double() - rows).abs() > error_bound(q, scales)).any()
    q, scales = always_up(rows, fmt, 16)
    assert ((dequantize(q, scales, torch.float32).double() - rows).abs() > error_bound(q, scales)).any()


def test_the_bound_counts_the_roundings_of_fp32_too():
    """Beside a midpoint the fp32 quotient may fall on it, and the code on the farther side."""
    beyond = 0
    for absmax in (1.0, 0.3, 12.7, 5.1):
        scale = quantize(torch.tensor([[absmax]]), "fp8_group", 1)[1].item()
        middles = [
            slow.f32(float((low + up) / 2) * scale) for low, up in zip(slow.POSITIVE, slow.POSITIVE[1:], strict=False)
        ]
        middles = torch.tensor(middles)
        row = torch.cat(
            [torch.tensor([absmax]), middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(middles * 2)]
        )
        q, scales = quantize(row.unsqueeze(0), "fp8_group", len(row))
        lost = (dequantize(q, scales, torch.float32).double() - row.double()).abs()
        bound = error_bound(q, scales)
        assert (lost <= bound).all()
        beyond += (lost > bound - q.float().double().abs() * 2.0**-21 * scales.double()).sum().item()
    assert beyond > 0


# -- power-of-two scales ------------------------------------------------------------------------------------------


@given(st.floats(2.0**-43, 2.0**120, width=32))
def test_powers_of_two_are_rounded_up(scale):
    up = round_up_to_power_of_two(torch.tensor([scale])).item()
    assert up == slow.power_of_two_above(scale)
    assert up / 2 < scale <= up


def test_one_step_above_a_power_of_two_the_logarithm_is_too_coarse():
    scale = torch.nextafter(torch.tensor([0.015625]), torch.tensor([1.0]))
    assert round_up_to_power_of_two(scale).item() == 2**-5
    assert torch.exp2(torch.ceil(torch.log2(scale))).item() == 2**-6


@given(st.lists(FLOATS, min_size=8, max_size=8))
def test_quantising_again_changes_nothing(row):
    first = dequantize(*quantize(torch.tensor([row]), "fp8_group_ue8m0", 4), torch.float32)
    q, scales = quantize(first, "fp8_group_ue8m0", 4)
    assert torch.equal(dequantize(q, scales, torch.float32), first)
    again, scales_again = quantize(dequantize(q, scales, torch.float32), "fp8_group_ue8m0", 4)
    assert torch.equal(scales_again, scales) and torch.equal(again.float(), q.float())


def test_a_largest_code_of_224_moves_to_the_scale_below():
    """230 rounds to 224, which half the scale holds as 448: the numbers stay, their codes double, once."""
    q, scales = quantize(torch.tensor([[230.0, 3.0]]), "fp8_group_ue8m0", 2)
    assert (q.float().tolist(), scales.tolist()) == ([[224, 3]], [[1]])
    again, scales = quantize(dequantize(q, scales, torch.float32), "fp8_group_ue8m0", 2)
    assert (again.float().tolist(), scales.tolist()) == ([[448, 6]], [[0.5]])


# -- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_rows_and_padded_layouts(fmt):
    q, scales = quantize(torch.empty(0, 256, dtype=torch.bfloat16), fmt)
    wide = 2 if fmt.startswith("fp8_group") else 1
    assert (q.shape, q.dtype, scales.shape, scales.dtype) == ((0, 256), FORMATS[fmt].dtype, (0, wide), torch.float32)
    assert dequantize(q, scales, torch.bfloat16).shape == (0, 256)
    rows = spread_rows(6, 256)
    q, scales = quantize(rows.view(2, 3, 256), fmt)
    flat_q, flat_scales = quantize(rows, fmt)
    assert torch.equal(q.flatten(0, 1).float(), flat_q.float()) and torch.equal(scales.flatten(0, 1), flat_scales)
    assert scales.is_contiguous()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_not_finite_comes_back_as_nan_under_its_scale(fmt, bad):
    rows = torch.ones(3, 8)
    rows[1, 5] = bad
    q, scales = quantize(rows, fmt, 4)
    back = dequantize(q, scales, torch.float32)
    reached = torch.zeros(3, 8, dtype=torch.bool)
    if FORMATS[fmt].scale_per == "group":
        reached[1, 4:] = True
    else:
        reached[1 if FORMATS[fmt].scale_per == "row" else slice(None)] = True
    assert torch.equal(back.isnan(), reached)
    assert (back[~reached] - 1).abs().max() <= 2**-7 if not reached.all() else True
    assert math.isnan(error(rows, fmt, 4).relative_rms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_result_is_rounded_once(dtype):
    q, scales = quantize(spread_rows(5, 32, torch.bfloat16), "fp8_group", 8)
    product = q.double() * scales.double().repeat_interleave(8, 1)
    wanted = [[struct.unpack("f", struct.pack("f", x))[0] for x in row] for row in product.tolist()]
    assert torch.equal(dequantize(q, scales, dtype), torch.tensor(wanted).to(dtype))


def test_refusals_name_both_values():
    with pytest.raises(ConfigError, match=r"hidden size 200 is not a multiple of group size 128.*fp8_token"):
        quantize(torch.ones(2, 200), "fp8_group")
    with pytest.raises(ConfigError, match="group size 0"):
        quantize(torch.ones(2, 200), "fp8_group", 0)
    with pytest.raises(ConfigError, match=r"'fp4'.*fp8_group, fp8_group_ue8m0, fp8_token, fp8_tensor, int8_token"):
        quantize(torch.ones(2, 128), "fp4")
    with pytest.raises(ConfigError, match="float8_e4m3fn.*once"):
        quantize(torch.ones(2, 128).to(FP8), "fp8_group")
    q, scales = quantize(torch.ones(4, 128), "fp8_group", 32)
    for other in (scales[:1], scales[:, :3], scales.to(torch.int32), scales[:, :0], torch.tensor(1.0)):
        with pytest.raises(ConfigError, match="scales are"):  # a single row of scales would broadcast
            dequantize(q, other, torch.float32)
    assert quantize(torch.ones(2, 200), "int8_token")[1].shape == (2, 1)
    assert scales_per_row("fp8_group", 6144) == 48 and formats.GROUP_SIZE == 128


def test_the_report_counts_errors_and_bytes():
    rows = torch.randn(64, 6144, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = {fmt: error(rows, fmt) for fmt in FORMATS}
    assert all(report.bytes_before == 12288 for report in found.values())
    assert found["fp8_group"].bytes_after == 6336 and found["int8_token"].bytes_after == 6148
    # three mantissa bits: an rms near 2^-4 / sqrt(3) times the mean of a step; even steps do better on these rows
    assert 0.015 < found["fp8_group"].relative_rms < 0.04
    assert found["int8_token"].relative_rms < 0.01
    q, scales = quantize(rows, "fp8_group")
    lost = (dequantize(q, scales, torch.bfloat16).double() - rows.double()).abs()
    assert found["fp8_group"].max_abs == lost.max().item()
    assert found["fp8_group"].relative_rms == pytest.approx((lost.norm() / rows.double().norm()).item())
    nothing = error(rows[:0], "fp8_group")
    assert (nothing.max_abs, nothing.relative_rms, nothing.bytes_after) == (0.0, 0.0, 6336)
