"""Quantised rows as bytes through real exchanges, packed exponents, and who quantises when."""

from __future__ import annotations

import math

import pytest
import quant_slow as slow
import torch

from moe_course.backends.select import AVAILABLE, OLD_NAMES, VENDOR_PACKAGES
from moe_course.comm.sim import run_threads
from moe_course.errors import BackendUnavailable, ConfigError
from moe_course.quant import (
    FORMATS,
    WHEN,
    dequantize,
    pack,
    pack_exponents,
    quantize,
    row_bytes,
    unpack,
    unpack_exponents,
    when,
)

COUNTS = (3, 0, 1, 5)  # rows per rank
H, GROUP = 42, 6  # H is no multiple of 4: scales of a lone row start where float32 may not


def words(hexes: list[str]) -> torch.Tensor:
    return torch.tensor([int.from_bytes(bytes.fromhex(text), "big", signed=True) for text in hexes], dtype=torch.int32)


def rows_of(rank: int, n: int) -> torch.Tensor:
    """Rows whose size depends on the rank, so that scales of another rank are wrong."""
    return torch.randn(n, H, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


# -- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_packing_loses_nothing(fmt, n):
    q, scales = quantize(rows_of(1, n), fmt, GROUP)
    packed = pack(q, scales)
    assert (packed.dtype, packed.shape) == (torch.uint8, (n, row_bytes(fmt, H, GROUP)))
    back_q, back_scales = unpack(packed, fmt, H, GROUP)
    assert back_q.dtype == q.dtype and torch.equal(back_q.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(back_scales, scales)
    # the layout itself: codes first, then four bytes for each scale
    if n:
        assert bytes(packed[0, :H].tolist()) == bytes(q.view(torch.uint8)[0].tolist())
        assert bytes(packed[0, H : H + 4].tolist())[::-1].hex() == slow.hex_of(scales[0, 0].item())
    # rows taken one by one, backwards, and out of a wider buffer
    for row in range(n):
        assert torch.equal(unpack(packed[row : row + 1], fmt, H, GROUP)[1], scales[row : row + 1])
    wider = torch.zeros(n, packed.shape[1] + 3, dtype=torch.uint8)
    wider[:, 1:-2] = packed
    assert torch.equal(unpack(wider[:, 1:-2].flip(0), fmt, H, GROUP)[1], scales.flip(0))
    assert torch.equal(pack(q.t().contiguous().t(), scales.t().contiguous().t()), packed)
    strange = torch.empty_strided((0, scales.shape[1]), (1, 7))  # nothing in it, so it counts as contiguous
    assert pack(q[:0], strange).shape == (0, packed.shape[1])
    padded = pack(q.unsqueeze(0), scales.unsqueeze(0))  # [E_local, C, B]
    assert torch.equal(unpack(padded, fmt, H, GROUP)[1], scales.unsqueeze(0))


def test_row_bytes(golden):
    for case in golden("quant")["row_bytes"]:
        assert row_bytes(case["fmt"], case["hidden"], exponents=case.get("exponents", False)) == case["bytes"]


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_several_ranks_keep_their_own_scales(fmt):
    """The exchange itself moves uint8, ragged, with an empty rank; fp8_tensor has another scale on every rank."""

    def gather(comm):
        q, scales = quantize(rows_of(comm.rank, COUNTS[comm.rank]), fmt, GROUP)
        received = comm.all_gather_rows(pack(q, scales))
        return received.counts, dequantize(*unpack(received.rows, fmt, H, GROUP), torch.float32)

    wanted = [dequantize(*quantize(rows_of(rank, n), fmt, GROUP), torch.float32) for rank, n in enumerate(COUNTS)]
    for counts, rows in run_threads(len(COUNTS), gather):
        assert counts == list(COUNTS)
        assert torch.equal(rows, torch.cat(wanted))
    # the same with the first rank's scales everywhere is far off
    wrong = dequantize(quantize(rows_of(3, 5), fmt, GROUP)[0], quantize(rows_of(0, 5), fmt, GROUP)[1], torch.float32)
    assert not torch.allclose(wrong, wanted[3], rtol=0.5)


def test_all_to_all_carries_bytes_to_their_owner():
    """Row i of a rank goes to rank i % R; what arrives is what that rank would have computed from the original."""

    def exchange(comm):
        rows = rows_of(comm.rank, COUNTS[comm.rank])
        owners = torch.arange(len(rows)) % comm.world_size
        order = owners.argsort(stable=True)
        send = torch.bincount(owners, minlength=comm.world_size).tolist()
        received = comm.all_to_all_rows(pack(*quantize(rows[order], "fp8_group", GROUP)), send)
        return dequantize(*unpack(received.rows, "fp8_group", H, GROUP), torch.float32)

    for rank, got in enumerate(run_threads(len(COUNTS), exchange)):
        mine = torch.cat([rows_of(source, n)[rank :: len(COUNTS)] for source, n in enumerate(COUNTS)])
        assert torch.equal(got, dequantize(*quantize(mine, "fp8_group", GROUP), torch.float32))


def test_refusals_of_the_wire_name_both_values():
    q, scales = quantize(torch.ones(4, 128), "fp8_group")
    packed = pack(q, scales)
    with pytest.raises(ConfigError, match=r"\[4, 132\].*64 numbers.*68 uint8.*same format"):
        unpack(packed, "fp8_group", 64, 64)
    with pytest.raises(ConfigError, match="int8"):
        unpack(packed.view(torch.int8), "fp8_group", 128)
    with pytest.raises(ConfigError, match=r"\[4, 128\].*\[1, 1\].*own scales"):
        pack(q, scales[:1])
    with pytest.raises(ConfigError, match="bfloat16"):
        pack(torch.ones(4, 128, dtype=torch.bfloat16), scales)
    with pytest.raises(ConfigError, match="float64"):
        pack(q, scales.double())
    with pytest.raises(ConfigError, match="fp8_group_ue8m0"):
        row_bytes("fp8_group", 128, exponents=True)
    with pytest.raises(ConfigError, match="hidden size 100.*group size 128"):
        row_bytes("fp8_group", 100)


# -- four exponents in an int32 ------------------------------------------------------------------------------------


def test_golden_exponents(golden):
    for case in golden("quant")["exponents"]:
        scales = torch.tensor([[slow.from_hex(text) for text in case["scales"]]])
        packed = pack_exponents(scales)
        assert torch.equal(packed, words(case["packed"]).unsqueeze(0))
        assert torch.equal(unpack_exponents(packed, scales.shape[1]), scales)
        highest_byte_first = packed.view(torch.uint8).view(1, -1, 4).flip(2).reshape(1, -1).view(torch.int32)
        assert not torch.equal(unpack_exponents(highest_byte_first, scales.shape[1]), scales)


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("groups", [1, 3, 4, 5, 48])
def test_exponents_travel_with_their_row(groups, n):
    rows = torch.randn(n, groups * 4, generator=torch.Generator().manual_seed(groups))
    q, scales = quantize(rows * torch.exp2(torch.arange(float(n)) * 7).view(n, 1), "fp8_group_ue8m0", 4)
    exponents = pack_exponents(scales.t().contiguous().t())
    assert (exponents.dtype, exponents.shape) == (torch.int32, (n, -(-groups // 4)))
    packed = pack(q, exponents)
    assert packed.shape == (n, row_bytes("fp8_group_ue8m0", groups * 4, 4, exponents=True))
    back_q, back = unpack(packed, "fp8_group_ue8m0", groups * 4, 4, exponents=True)
    assert torch.equal(back, exponents) and torch.equal(back_q.float(), q.float())
    assert torch.equal(unpack_exponents(back, groups), scales)


def test_every_exponent_byte_reads_as_torch_reads_it():
    if not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("this torch has no float8_e8m0fnu")
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    ours = unpack_exponents(codes.view(torch.int32), 256)
    assert torch.equal(ours[:, :255], codes.view(torch.float8_e8m0fnu).float()[:, :255])
    assert math.isnan(ours[0, 255])
    assert torch.equal(pack_exponents(ours[:, 1:255]).view(torch.uint8)[0, :254], codes[0, 1:255])


def test_exponents_refuse_what_they_would_lose():
    for scale in (0.75, -1.0, 0.0, 1e-42):
        with pytest.raises(ConfigError, match="not a power of two; pack exponents of format fp8_group_ue8m0"):
            pack_exponents(torch.tensor([[1.0, scale]]))
    lost = unpack_exponents(pack_exponents(torch.tensor([[math.nan, math.inf, 2.0]])), 3)
    assert lost.isnan().tolist() == [[True, True, False]]
    with pytest.raises(ConfigError, match=r"\[2, 1\].*5 groups need 2 int32"):
        unpack_exponents(torch.zeros(2, 1, dtype=torch.int32), 5)


# -- who quantises when --------------------------------------------------------------------------------------------


def test_every_backend_answers_for_every_format():
    assert set(WHEN) >= {"no_dp_ep", "all_to_all", "two_hop", *AVAILABLE, *OLD_NAMES, *VENDOR_PACKAGES}
    assert all(WHEN[old] == WHEN[new] for old, new in OLD_NAMES.items())
    for name, answers in WHEN.items():
        assert list(answers) == list(FORMATS)
        for fmt, answer in answers.items():
            if answer in ("before", "after"):
                assert when(name, fmt) == answer
                continue
            with pytest.raises(BackendUnavailable, match=f"'{name}' does not take {fmt} rows") as refused:
                when(name, fmt)
            assert answer in str(refused.value) and "it takes fp8_group" in str(refused.value)
            assert "\n" not in str(refused.value) and ". " not in str(refused.value)


@pytest.mark.parametrize(
    "name, fmt, answer",
    [
        ("no_dp_ep", "fp8_token", "before"),
        ("allgather_reducescatter", "fp8_tensor", "before"),
        ("deepep_high_throughput", "fp8_group", "before"),
        ("deepep_high_throughput", "fp8_tensor", "after"),
        ("deepep_low_latency", "fp8_group_ue8m0", "before"),
        ("deepep_low_latency", "fp8_token", "after"),
        ("nixl_ep", "fp8_group", "before"),
        ("nixl_ep", "fp8_tensor", "after"),
        ("deepep_v2", "fp8_token", "after"),
        ("mori_high_throughput", "fp8_token", "before"),
        ("flashinfer_nvlink_two_sided", "fp8_token", "before"),
        ("all_to_all", "int8_token", "before"),
        ("two_hop", "int8_token", "before"),
    ],
)
def test_who_quantises_when(name, fmt, answer):
    assert when(name, fmt) == answer


@pytest.mark.parametrize(
    "name, fmt, words",
    [
        ("deepep_high_throughput", "fp8_token", "never per token"),
        ("flashinfer_nvlink_one_sided", "fp8_token", "payload layout"),
        ("mori_low_latency", "fp8_tensor", "none per tensor"),
        ("mori_low_latency", "int8_token", "no layout for int8"),
    ],
)
def test_refusals_say_why(name, fmt, words):
    with pytest.raises(BackendUnavailable, match=words):
        when(name, fmt)


def test_unknown_names_are_refused():
    with pytest.raises(BackendUnavailable, match="'warp_drive' is not known.*two_hop"):
        when("warp_drive", "fp8_group")
    with pytest.raises(ConfigError, match="'fp4'"):
        when("two_hop", "fp4")
