"""Stage 4: the permutation, the kernel, what it does with routes it has not got, and two independent references."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import Batch, differences, make_batch, make_config, make_layer, make_weights, oracle

from moe_course.backends import allgather_reducescatter
from moe_course.combine import accumulator, sum_contributions
from moe_course.comm.sim import run_threads
from moe_course.dispatch import Dispatched, permute_by_expert
from moe_course.errors import ConfigError
from moe_course.expert_map import determine_expert_map, make_placement
from moe_course.experts import local_experts, to_local
from moe_course.rows import row_invariance, row_multiple

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "permute.json").read_text())


def dispatched(rows, ids, weights, **more) -> Dispatched:
    return Dispatched(rows, None, ids, weights, None, more.pop("layout", "rows"), None)


def dense(rows, ids, weights, w13, w2, expert_map=None):
    """Every route by itself, in the widest dtype; foreign routes and -1 give nothing."""
    output = torch.zeros(len(rows), w2.shape[1], dtype=torch.float64)
    for t, k in torch.ones_like(ids).nonzero().tolist():
        expert = int(ids[t, k])
        local = expert if expert_map is None or expert < 0 else int(expert_map[expert])
        if local >= 0:
            gate, up = (w13[local].double() @ rows[t].double()).chunk(2)
            output[t] += float(weights[t, k]) * (w2[local].double() @ (F.silu(gate) * up))
    return output


# -- permutation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_permutation_vectors(vector):
    """Order and offsets of vLLM's `moe_permute`, of the local routes."""
    local = to_local(torch.tensor(vector["ids"]), torch.tensor(vector["expert_map"]), vector["num_local"])
    routes, counts = permute_by_expert(local, vector["num_local"])
    assert routes.tolist() == vector["order"]
    assert [0, *counts.cumsum(0).tolist()] == vector["offsets"]


@given(st.lists(st.lists(st.integers(-1, 4), min_size=3, max_size=3), max_size=6))
def test_permutation_is_stable_and_complete(ids):
    """Routes stand by expert, in row order within one; -1 is left out; nothing is lost."""
    ids = torch.tensor(ids, dtype=torch.int64).view(-1, 3)
    routes, counts = permute_by_expert(ids, 5)
    flat = ids.flatten().tolist()
    assert routes.tolist() == sorted((i for i, e in enumerate(flat) if e >= 0), key=lambda i: (flat[i], i))
    assert counts.tolist() == [flat.count(expert) for expert in range(5)]


def test_ids_and_weights_stay_paired():
    """Both keep the shape [T, K]: on rank 1 only (row 0, local 1) and (row 1, local 2) live.

    huggingface/transformers#45473 expanded one of them to [T, E_local].
    """
    ids = torch.tensor([[0, 5], [6, 1], [2, 3]], dtype=torch.int32)
    weights = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]])
    _, expert_map = determine_expert_map(2, 1, 8)
    local = to_local(ids, expert_map, 4)
    assert local.tolist() == [[-1, 1], [2, -1], [-1, -1]]

    scaled = torch.arange(1.0, 5.0).view(4, 1, 1)  # local expert e multiplies by e + 1
    w13 = torch.eye(8).repeat(2, 1).expand(4, -1, -1).contiguous()
    w2 = scaled * torch.eye(8) / F.silu(torch.ones(1))
    output = local_experts(dispatched(torch.ones(3, 8), ids, weights), w13, w2, expert_map)
    expected = torch.tensor([0.3 * 2, 0.6 * 3, 0.0]).view(3, 1).expand(3, 8)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


# -- values ----------------------------------------------------------------------------------------------------------


def test_gate_comes_before_up():
    """One expert of one number: silu(1) * 2 = 1.4621; halves in the other order give 1.7616."""
    w13, w2 = torch.tensor([[[1.0], [2.0]]]), torch.ones(1, 1, 1)
    rows, ids, weights = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    assert float(local_experts(dispatched(rows, ids, weights), w13, w2, None)) == pytest.approx(1.4621, abs=5e-5)
    turned = local_experts(dispatched(rows, ids, weights), w13.flip(1), w2, None)
    assert float(turned) == pytest.approx(1.7616, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize(("hidden", "inter"), [(1, 1), (5, 3), (6, 10), (12, 20), (64, 48)])
def test_any_width(hidden, inter, dtype):
    """Widths whose rows do not start on 16-byte boundaries too; sums come in accumulator precision."""
    weights = make_weights(make_config(5, 3, hidden, inter), dtype)
    batch = make_batch([7], weights.config, dtype, seed=hidden)
    rows, routing, ids = batch.hidden_states[0], batch.topk_weights[0], batch.topk_ids[0]
    ids[2] = -1
    output = local_experts(dispatched(rows, ids, routing), weights.w13, weights.w2, None)
    assert output.dtype == accumulator(dtype)
    expected = dense(rows, ids, routing, weights.w13, weights.w2)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(
        output.double(), expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max()))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_partial_sums_of_all_ranks_add_up(strategy, dtype):
    """What each rank computes of the same rows is its own part, and the parts make the whole."""
    weights = make_weights(make_config(10, 4, 64, 32), dtype)
    batch = make_batch([9], weights.config, dtype, seed=3)
    rows, routing, ids = batch.hidden_states[0], batch.topk_weights[0], batch.topk_ids[0]
    placement = make_placement(4, 10, strategy)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    total = torch.zeros(9, 64, dtype=torch.float64)
    for rank in range(4):
        _, expert_map = determine_expert_map(4, rank, 10, strategy)
        mine = weights.of(placement, rank)
        output = local_experts(dispatched(rows, ids, routing), mine["w13"], mine["w2"], expert_map).double()
        expected = dense(rows, ids, routing, mine["w13"], mine["w2"], expert_map)
        torch.testing.assert_close(output, expected, rtol=0, atol=4 * tolerance)
        total += output
    torch.testing.assert_close(total, dense(rows, ids, routing, weights.w13, weights.w2), rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("case", ["zero rows", "no route at all", "one expert for all"])
def test_unbalanced_routes(case, dtype):
    weights = make_weights(make_config(6, 2, 64, 32), dtype)
    batch = make_batch([0 if case == "zero rows" else 5], weights.config, dtype, seed=3)
    rows, routing, ids = batch.hidden_states[0], batch.topk_weights[0], batch.topk_ids[0]
    if case == "no route at all":
        ids.fill_(-1)
    if case == "one expert for all":
        ids[:, 0], ids[:, 1] = 4, -1
    output = local_experts(dispatched(rows, ids, routing), weights.w13, weights.w2, None)
    assert (output.shape, output.dtype) == (rows.shape, accumulator(dtype))
    expected = dense(rows, ids, routing, weights.w13, weights.w2)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=4 * tolerance)
    if case == "no route at all":
        assert not output.any()


def test_non_contiguous_rows_give_the_same_bits():
    weights = make_weights(make_config(6, 2, 64, 32), torch.float32)
    batch = make_batch([8], weights.config, torch.float32, seed=3)
    rows, routing, ids = batch.hidden_states[0], batch.topk_weights[0], batch.topk_ids[0]
    expected = local_experts(dispatched(rows, ids, routing), weights.w13, weights.w2, None)
    strided = torch.stack([rows, rows + 1], dim=2)[..., 0]
    turned_ids, turned_weights = ids.t().contiguous().t(), routing.t().contiguous().t()
    output = local_experts(dispatched(strided, turned_ids, turned_weights), weights.w13, weights.w2, None)
    assert not strided.is_contiguous()
    assert torch.equal(output, expected)


@pytest.mark.parametrize("bad", [10, 255, -2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_of_another_numbering_are_refused(ranks, bad):
    """Local or physical ids where global ones are wanted; upstream would read beyond its map."""
    ids = torch.tensor([[0, bad]], dtype=torch.int32)
    _, expert_map = determine_expert_map(ranks, 0, 10)
    w13, w2 = torch.zeros(10 // ranks, 16, 8), torch.zeros(10 // ranks, 8, 8)
    with pytest.raises(ConfigError, match=f"{bad}.*expected -1 … 9"):
        local_experts(dispatched(torch.zeros(1, 8), ids, torch.zeros(1, 2)), w13, w2, expert_map)


@pytest.mark.parametrize("layout", ["padded", "routes"])
def test_other_layouts_are_refused(layout):
    empty = torch.zeros(0, 2)
    with pytest.raises(ConfigError, match=layout):
        local_experts(dispatched(torch.zeros(0, 8), empty.int(), empty, layout=layout), empty, empty, None)


def test_rows_without_weights_are_refused():
    with pytest.raises(ConfigError):
        empty = torch.zeros(0, 2)
        local_experts(dispatched(torch.zeros(0, 8), empty.int(), None), empty, empty, None)


# -- memory nobody has written ---------------------------------------------------------------------------------------


def poison(monkeypatch):
    """Make every buffer that is born uninitialised full of NaN (or of large integers)."""

    def poisoned(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 85)

        return made

    for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty",))):
        for name in names:
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_output_comes_from_unwritten_memory(monkeypatch, dtype):
    """Row 3 has no expert on rank 1, expert 2 gets no row: zeros, and the same output with poisoned buffers."""
    weights = make_weights(make_config(4, 2, 64, 32), dtype)
    placement = make_placement(2, 4)
    batch = make_batch([5, 3], weights.config, dtype, seed=1)
    for ids in batch.topk_ids:
        ids[:] = torch.tensor([0, 3])
    batch.topk_ids[0][3] = torch.tensor([1, 0])

    def rank_function(comm):
        layer = make_layer(weights, placement, comm, allgather_reducescatter)
        mine = [part[comm.rank] for part in (batch.hidden_states, batch.topk_weights, batch.topk_ids)]
        sent = allgather_reducescatter.dispatch(*mine, comm=comm, placement=placement)
        return local_experts(sent, layer.w13, layer.w2, layer.expert_map), layer.routed(*mine)

    clean = run_threads(2, rank_function)
    poison(monkeypatch)
    assert torch.empty(2).isnan().all()
    poisoned = run_threads(2, rank_function)
    assert not poisoned[1][0][3].any()
    for (partial, output), (clean_partial, clean_output) in zip(poisoned, clean, strict=True):
        assert not output.isnan().any()
        assert torch.equal(partial, clean_partial) and torch.equal(output, clean_output)


def test_a_kernel_that_leaves_rows_unwritten_would_be_caught(monkeypatch):
    """The poisoning shows an output buffer that starts uninitialised."""
    poison(monkeypatch)
    output = torch.empty(4, 2)
    output[:3] = 1
    assert output.isnan().any()


# -- independent implementations -------------------------------------------------------------------------------------


def hugging_face_config(experts: int, top_k: int, n_group: int = 1, topk_group: int = 1):
    from transformers import GlmMoeDsaConfig

    config = GlmMoeDsaConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=n_group,
        topk_group=topk_group,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        num_hidden_layers=1,
    )
    config._experts_implementation = "eager"
    return config


@pytest.mark.parametrize("experts", [16, 10])
@torch.no_grad()
def test_fp64_equals_the_experts_of_hugging_face(experts):
    """Package and oracle against `GlmMoeDsaExperts` on the same routing, to 1e-10."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaExperts

    weights = make_weights(make_config(experts, 4, 64, 32), torch.float64)
    batch = make_batch([23], weights.config, torch.float64, seed=6)
    rows, routing, ids = batch.hidden_states[0], batch.topk_weights[0], batch.topk_ids[0]
    theirs = GlmMoeDsaExperts(hugging_face_config(experts, 4)).double()
    theirs.gate_up_proj.copy_(weights.w13)
    theirs.down_proj.copy_(weights.w2)
    expected = theirs(rows, ids.long(), routing.double())
    output = local_experts(dispatched(rows, ids, routing), weights.w13, weights.w2, None)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    slow = oracle(batch, weights, make_placement(1, experts), shared=False)
    torch.testing.assert_close(slow[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("experts", "n_group", "topk_group"), [(16, 1, 1), (16, 4, 2), (10, 1, 1)])
@torch.no_grad()
def test_fp32_layer_equals_the_moe_block_of_hugging_face(experts, n_group, topk_group, ranks):
    """Router, bias, scale and shared expert included, to 1e-5."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaMoE

    weights = make_weights(make_config(experts, 4, 64, 32, n_group=n_group, topk_group=topk_group), torch.float32)
    theirs = GlmMoeDsaMoE(hugging_face_config(experts, 4, n_group, topk_group)).eval()
    theirs.gate.weight.copy_(weights.gate)
    theirs.gate.e_score_correction_bias.copy_(weights.bias)
    theirs.experts.gate_up_proj.copy_(weights.w13)
    theirs.experts.down_proj.copy_(weights.w2)
    gate, up = weights.shared[0].chunk(2)
    theirs.shared_experts.gate_proj.weight.copy_(gate)
    theirs.shared_experts.up_proj.weight.copy_(up)
    theirs.shared_experts.down_proj.weight.copy_(weights.shared[1])

    batch = make_batch([7, 0, 4][:ranks], weights.config, torch.float32, seed=8)
    placement = make_placement(ranks, experts)

    def rank_function(comm):
        with torch.no_grad():  # gradient mode belongs to the thread
            return make_layer(weights, placement, comm, allgather_reducescatter)(batch.hidden_states[comm.rank])

    expected = theirs(torch.cat(batch.hidden_states).unsqueeze(0))[0]
    output = torch.cat(run_threads(ranks, rank_function))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    without_bias = theirs.gate.e_score_correction_bias.zero_()
    assert not torch.allclose(theirs(torch.cat(batch.hidden_states).unsqueeze(0))[0], output, atol=1e-3), without_bias


# -- row invariance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("hidden", "inter"), [(64, 32), (64, 48), (256, 64), (32, 16), (6, 10)])
def test_a_row_does_not_depend_on_its_batch(torch_threads, hidden, inter, dtype):
    """A row alone, among others, and last instead of first: the same bits where the probe promises them."""
    weights = make_weights(make_config(6, 3, hidden, inter), dtype)
    batch = make_batch([19], weights.config, dtype, seed=2)
    rows, routing, ids = batch.hidden_states[0], batch.topk_weights[0], batch.topk_ids[0]
    verdict = row_invariance([(hidden, 2 * inter), (inter, hidden)], dtype, rows.device)

    def compute(picks):
        sent = dispatched(rows[picks], ids[picks], routing[picks])
        return local_experts(sent, weights.w13, weights.w2, None).to(dtype)

    together = compute(slice(None))
    alone = torch.cat([compute(slice(row, row + 1)) for row in range(len(rows))])
    turned = compute(torch.arange(len(rows)).flip(0)).flip(0)
    assert not differences([together, together], [alone, turned], verdict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_probe_promises_only_what_holds(torch_threads, dtype):
    """Fresh numbers: prefixes of every multiple, and the row at another place in the block."""
    for shape in [(64, 64), (32, 64), (256, 128), (64, 10), (128, 256)]:
        multiple = row_multiple(*shape, dtype)
        if multiple is None:
            continue
        generator = torch.Generator().manual_seed(99)
        rows = torch.randn(96, shape[0], generator=generator).to(dtype)
        weight = torch.randn(shape[1], shape[0], generator=generator).to(dtype)
        whole = F.linear(rows, weight)
        for n in range(multiple, 97, multiple):
            assert torch.equal(F.linear(rows[:n], weight), whole[:n]), (shape, n)
        moved = F.linear(rows.roll(5, 0), weight).roll(-5, 0)
        assert torch.equal(moved, whole), shape


def test_the_comparison_tells_last_bits_apart():
    """Where equality is promised one unit in the last place is a difference."""
    verdict = row_invariance([(64, 64)], torch.float32, torch.device("cpu"))
    rows = torch.ones(2, 2)
    nudged = torch.nextafter(rows, torch.tensor(2.0))
    assert bool(differences([nudged], [rows], verdict)) == verdict.exact
    assert differences([rows + 1e-3], [rows], verdict)


# -- order of the sum ------------------------------------------------------------------------------------------------


def test_contributions_are_added_from_first_to_last():
    """1, 2^-9 and -1 in bf16: the order decides between 0 and 0.001953125, and is always the one given."""
    one, small = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 2.0**-9, dtype=torch.bfloat16)
    for _ in range(20):
        assert float(sum_contributions([one, small, -one])) == 0.0
        assert float(sum_contributions([one, -one, small])) == 0.001953125
        assert float(sum_contributions([small, one, -one])) == 0.0
    assert float(sum_contributions([one])) == 1.0


def test_summing_leaves_its_inputs_alone():
    parts = [torch.ones(2), torch.ones(2)]
    total = sum_contributions(parts)
    assert total.tolist() == [2, 2]
    assert [part.tolist() for part in parts] == [[1, 1], [1, 1]]
    assert sum_contributions(parts[:1]).data_ptr() != parts[0].data_ptr()


def test_routes_are_summed_in_k_order_whatever_the_experts():
    """Three experts that return 1, 2^-26 and -1 times the row: fp32 keeps or loses the small one by its column."""
    factors = torch.tensor([1.0, 2.0**-26, -1.0]).view(3, 1, 1)
    w13 = torch.eye(8).repeat(2, 1).expand(3, -1, -1).contiguous()
    w2 = factors * torch.eye(8)
    rows = torch.full((1, 8), 1.0)
    unit = float(F.silu(torch.ones(1)))
    for order, expected in [([0, 1, 2], 0.0), ([0, 2, 1], unit * 2.0**-26), ([2, 0, 1], unit * 2.0**-26)]:
        ids = torch.tensor([order], dtype=torch.int32)
        output = local_experts(dispatched(rows, ids, torch.ones(1, 3)), w13, w2, None)
        assert output[0, 0].item() == pytest.approx(expected, rel=1e-6, abs=0), order


def test_oracle_takes_batches_of_any_rank():
    """The oracle itself: zero rows keep their shape, -1 adds nothing, the shared expert comes last."""
    weights = make_weights(make_config(6, 2, 64, 32), torch.float32)
    batch = make_batch([0, 2], weights.config, torch.float32, seed=0)
    nothing = Batch(batch.hidden_states, batch.topk_weights, [torch.full_like(ids, -1) for ids in batch.topk_ids])
    placement = make_placement(2, 6)
    routed = oracle(nothing, weights, placement, shared=False)
    assert routed[0].shape == (0, 64)
    assert not routed[1].any()
    only_shared = oracle(nothing, weights, placement)[1]
    gate, up = F.linear(batch.hidden_states[1], weights.shared[0]).chunk(2, dim=1)
    expected = F.linear(F.silu(gate) * up, weights.shared[1])
    torch.testing.assert_close(only_shared, expected, rtol=0, atol=1e-5)
