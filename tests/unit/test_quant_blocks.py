"""Checkpoint scales that follow their experts and their blocks (bug reports sglang#23531 and vllm#48173)."""

from __future__ import annotations

import pytest
import torch
from layer_cases import Batch, fixed_route, make_config, make_layer, make_weights

from moe_course.backends import allgather_reducescatter
from moe_course.comm.sim import run_threads
from moe_course.errors import ConfigError
from moe_course.expert_map import make_placement
from moe_course.lessons import reference
from moe_course.quant.blocks import block_dequantize, expert_dequantize, experts_scales, slice_block_scales

FP8 = torch.float8_e4m3fn
GLOBAL = torch.arange(12) + 1.0  # expert e has scale 1 + e


# -- one scale per expert ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy, wanted", [("linear", [9, 10, 11, 12]), ("round_robin", [3, 6, 9, 12])], ids=["linear", "round_robin"]
)
def test_a_rank_uses_the_scales_of_its_own_experts(strategy, wanted):
    """Weights of ones show the scale they were multiplied by."""
    placement = make_placement(3, 12, strategy)
    ones = torch.ones(4, 2, 3, dtype=torch.int8)
    local = expert_dequantize(ones, experts_scales(GLOBAL, placement, 2), torch.float32)
    assert local.tolist() == (torch.ones(4, 2, 3) * torch.tensor(wanted).view(4, 1, 1)).tolist()
    for wrong in (GLOBAL[:4], GLOBAL[2 * 4 :] if strategy == "round_robin" else GLOBAL[2::3]):
        assert not torch.equal(expert_dequantize(ones, wrong, torch.float32), local)


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize("experts, ranks", [(12, 3), (10, 4)])
def test_the_ranks_together_equal_the_dequantised_model(strategy, experts, ranks):
    """int8 experts with very different scales, through the real layer on every rank, one of them without rows."""
    placement = make_placement(ranks, experts, strategy)
    weights = make_weights(make_config(experts, 3, 32, 16), torch.float32)
    scales13 = torch.stack(
        [torch.exp2(torch.arange(experts) % 5 - 9.0), torch.exp2(-torch.arange(experts) % 4 - 8.0)], 1
    )
    scales2 = torch.exp2(torch.arange(experts) % 3 - 8.0)
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randint(-127, 128, (experts, 32, 32), generator=generator, dtype=torch.int8)
    w2 = torch.randint(-127, 128, (experts, 32, 16), generator=generator, dtype=torch.int8)
    counts = [3, 0, 4, 1][:ranks]
    batch = Batch(
        [torch.randn(n, 32, generator=generator) for n in counts],
        [torch.rand(n, 3, generator=generator) for n in counts],
        [torch.rand(n, experts, generator=generator).topk(3).indices.int() for n in counts],
    )

    def outputs(scales_of):
        def rank_program(comm):
            mine = placement.experts_of(comm.rank)
            layer = make_layer(weights, placement, comm, allgather_reducescatter)
            layer.w13 = expert_dequantize(w13[mine], scales_of(scales13, comm.rank), torch.float32)
            layer.w2 = expert_dequantize(w2[mine], scales_of(scales2, comm.rank), torch.float32)
            layer.stages = fixed_route(batch.topk_weights[comm.rank], batch.topk_ids[comm.rank])
            return layer(batch.hidden_states[comm.rank])

        return run_threads(ranks, rank_program)

    half = scales13.repeat_interleave(16, 1).unsqueeze(2)  # gate rows, then up rows
    dense13, dense2 = w13 * half, w2 * scales2.view(-1, 1, 1)
    wanted = reference.moe_layer(
        batch.hidden_states, batch.topk_weights, batch.topk_ids, dense13, dense2, placement, weights.shared
    )
    for got, right in zip(outputs(lambda scales, rank: experts_scales(scales, placement, rank)), wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-4)
    first = outputs(lambda scales, rank: scales[: placement.num_local(rank)])  # every rank takes the low ids
    assert any(not torch.allclose(got, right, rtol=1e-2) for got, right in zip(first, wanted, strict=True))


def test_scales_are_never_broadcast():
    placement = make_placement(3, 12)
    ones = torch.ones(4, 2, 3, dtype=torch.int8)
    for wrong in (torch.ones(1), torch.ones(4), torch.tensor(1.0)):
        with pytest.raises(ConfigError, match=r"rank 1: expert scales are \[.*has 12 experts; give one scale"):
            experts_scales(wrong, placement, 1)
    for wrong in (GLOBAL, GLOBAL[:1], torch.tensor(1.0), torch.ones(1, 2), torch.ones(4, 3), torch.ones(4, 0)):
        with pytest.raises(ConfigError, match=r"expert scales are .*weights are \[4, 2, 3\].*experts_scales"):
            expert_dequantize(ones, wrong, torch.float32)
    one = make_placement(12, 12)  # one expert a rank: then one scale is right
    assert expert_dequantize(ones[:1], experts_scales(GLOBAL, one, 11), torch.float32)[0, 0, 0] == 12


# -- one scale per block -------------------------------------------------------------------------------------------

I, H = 320, 256  # three row blocks, the last with 64 rows


def fp8_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(FP8)


def block_scales(*shape: int) -> torch.Tensor:
    """Different for every block."""
    return torch.exp2(torch.arange(torch.tensor(shape).prod()).view(shape) % 7 - 3.0)


def slow_blocks(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Element by element: row n, column k uses scale [n // 128, k // 128]."""
    rows = torch.empty(weight.shape)
    for n in range(weight.shape[0]):
        for start in range(0, weight.shape[1], 128):
            rows[n, start : start + 128] = weight[n, start : start + 128].float() * scales[n // 128, start // 128]
    return rows


def test_the_last_block_is_ragged():
    weight, scales = fp8_weight(I, H), block_scales(3, 2)
    dense = block_dequantize(weight, scales, torch.float32)
    assert torch.equal(dense, slow_blocks(weight, scales))
    shown = block_dequantize(torch.ones(I, 2, dtype=torch.int8), torch.tensor([[1.0], [2.0], [3.0]]), torch.float32)
    assert [shown[row, 0].item() for row in (0, 127, 128, 255, 256, 319)] == [1, 1, 2, 2, 3, 3]
    even = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(107)[:I]  # 320 rows shared out evenly: wrong
    assert not torch.equal(shown[:, 0], even)


def test_gate_and_up_have_blocks_of_their_own():
    """Row 320 of w13 is the first of `up` and uses scale row 3; blocks across both halves would say row 2."""
    w13 = torch.ones(1, 2 * I, H, dtype=torch.int8)
    scales = torch.arange(6.0).view(1, 6, 1).expand(1, 6, 2)
    dense = block_dequantize(w13, scales, torch.float32, parts=2)
    assert [dense[0, row, 0].item() for row in (256, 319, 320, 447, 448, 639)] == [2, 2, 3, 3, 4, 5]
    with pytest.raises(ConfigError, match=r"\[1, 6, 2\].*in 1 part\(s\).*need \[1, 5, 2\]"):
        block_dequantize(w13, scales, torch.float32)


def test_whole_experts_equal_dequantise_then_matmul():
    """E = 4 over R = 2, block scales cut to the rank's experts, against the dense oracle."""
    placement = make_placement(2, 4, "round_robin")
    w13, w2 = fp8_weight(4, 2 * I, H), fp8_weight(4, H, I, seed=1)
    scales13, scales2 = block_scales(4, 6, 2) / 16, block_scales(4, 2, 3) / 16
    dense13 = torch.stack(
        [torch.cat([slow_blocks(w[:I], s[:3]), slow_blocks(w[I:], s[3:])]) for w, s in zip(w13, scales13, strict=True)]
    )
    dense2 = torch.stack([slow_blocks(w, s) for w, s in zip(w2, scales2, strict=True)])
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(5, H, generator=generator), torch.randn(0, H)]
    ids = [torch.rand(len(r), 4, generator=generator).topk(2).indices.int() for r in rows]
    topk_weights = [torch.rand(len(r), 2, generator=generator) for r in rows]
    weights = make_weights(make_config(4, 2, H, I), torch.float32)

    def rank_program(comm):
        mine = placement.experts_of(comm.rank)
        layer = make_layer(weights, placement, comm, allgather_reducescatter)
        scales = experts_scales(scales13, placement, comm.rank), experts_scales(scales2, placement, comm.rank)
        layer.w13 = block_dequantize(w13[mine], scales[0], torch.float32, parts=2)
        layer.w2 = block_dequantize(w2[mine], scales[1], torch.float32)
        layer.stages = fixed_route(topk_weights[comm.rank], ids[comm.rank])
        return layer(rows[comm.rank])

    wanted = reference.moe_layer(rows, topk_weights, ids, dense13, dense2, placement, weights.shared)
    for got, right in zip(run_threads(2, rank_program), wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-2)


def test_a_slice_inside_a_block_is_refused():
    with pytest.raises(ConfigError, match=r"rank 1: a slice of 160 numbers ends inside a scale block of 128.*whole"):
        slice_block_scales(block_scales(3, 2), 0, 1, 2, I)
    with pytest.raises(ConfigError, match="320 numbers cannot be cut into 3"):
        slice_block_scales(block_scales(3, 2), 0, 0, 3, I)
    with pytest.raises(ConfigError, match="2 block scales for 320 numbers in blocks of 128, expected 3"):
        slice_block_scales(block_scales(3, 2), 1, 0, 1, I)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size, ranks", [(320, 1), (512, 2), (512, 4), (768, 3)])
def test_slices_between_blocks_keep_every_scale(dim, size, ranks):
    shape = (size, 128) if dim == 0 else (128, size)
    weight, scales = fp8_weight(*shape), block_scales(-(-size // 128)).view(-1, 1)
    scales = scales if dim == 0 else scales.t()
    dense, width = block_dequantize(weight, scales, torch.float32), size // ranks
    for rank in range(ranks):
        part = block_dequantize(
            weight.narrow(dim, rank * width, width), slice_block_scales(scales, dim, rank, ranks, size), torch.float32
        )
        assert torch.equal(part, dense.narrow(dim, rank * width, width))


def test_block_scales_are_never_broadcast():
    for wrong in (torch.ones(1, 2), torch.ones(3, 1), torch.ones(2, 2), torch.tensor(1.0), torch.ones(1, 3, 2)):
        with pytest.raises(ConfigError, match=r"block scales are .*weights \[320, 256\].*need \[3, 2\]"):
            block_dequantize(fp8_weight(I, H), wrong, torch.float32)
    with pytest.raises(ConfigError, match="in 2 part"):
        block_dequantize(fp8_weight(3, H), torch.ones(2, 2), torch.float32, parts=2)
    empty = block_dequantize(fp8_weight(0, I, H), torch.ones(0, 3, 2), torch.bfloat16)
    assert (empty.shape, empty.dtype) == ((0, I, H), torch.bfloat16)
