"""The layer in threads against the slow reference. All traffic shapes on all batches: `test_backends.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_cases import (
    Batch,
    batches,
    differences,
    fixed_route,
    make_batch,
    make_config,
    make_layer,
    make_weights,
    oracle,
)

from moe_course.backends import BACKENDS, allgather_reducescatter, no_dp_ep
from moe_course.comm.sim import run_threads
from moe_course.dispatch import Dispatched
from moe_course.errors import CheckpointError, ConfigError, ExchangeMismatch, RankLost
from moe_course.expert_map import determine_expert_map, make_placement
from moe_course.experts import local_experts
from moe_course.stages import Stages

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SHAPES = {8: (8, 2, 64, 48), 10: (10, 4, 64, 32), 256: (256, 8, 32, 16)}  # E -> E, K, H, I


def run_layer(weights, placement, batch: Batch, backend, *, shared=True, experts=None, **more):
    """Every rank's output of one batch and the verdict of the layer."""

    def rank_function(comm):
        stages = fixed_route(batch.topk_weights[comm.rank], batch.topk_ids[comm.rank])
        stages = replace(stages, experts=experts or stages.experts, **more)
        layer = make_layer(weights, placement, comm, backend, shared=shared, stages=stages)
        return layer(batch.hidden_states[comm.rank]), layer.row_invariance()

    results = run_threads(placement.ep_size, rank_function)
    return [output for output, _ in results], results[0][1]


def replicated(batch: Batch, ranks: int) -> tuple[Batch, Batch]:
    """All rows of a batch on every rank, and the same rows once."""
    whole = [torch.cat(parts) for parts in (batch.hidden_states, batch.topk_weights, batch.topk_ids)]
    return Batch(*([part] * ranks for part in whole)), Batch(*([part] for part in whole))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "routed-only"])
@pytest.mark.parametrize("experts", SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_replicated_rows_without_dispatch_equal_the_oracle(ranks, experts, shared, dtype):
    """TP + EP: all ranks hold all rows, nothing is dispatched, one all-reduce; every rank has the oracle's rows."""
    weights = make_weights(make_config(*SHAPES[experts]), dtype, seed=1)
    placement = make_placement(ranks, experts)
    everywhere, once = replicated(batches(ranks, placement, weights.config, dtype)["ragged"], ranks)
    outputs, verdict = run_layer(weights, placement, everywhere, no_dp_ep, shared=shared)
    expected = oracle(once, weights, placement, shared=shared)
    assert not differences(outputs, expected * ranks, verdict)


@pytest.mark.parametrize("name", BACKENDS)
def test_wider_rows_are_padded_further(name):
    """A shape whose products need another padding than the small ones on some processors."""
    weights = make_weights(make_config(8, 3, 256, 64), torch.float32)
    placement = make_placement(2, 8)
    batch = make_batch([9, 2], weights.config, torch.float32, seed=3)
    everywhere, once = replicated(batch, 2)
    if name == "no_dp_ep":
        outputs, verdict = run_layer(weights, placement, everywhere, no_dp_ep)
        expected = oracle(once, weights, placement) * 2
    else:
        outputs, verdict = run_layer(weights, placement, batch, BACKENDS[name])
        expected = oracle(batch, weights, placement)
    assert not differences(outputs, expected, verdict)


def test_two_torch_threads_give_the_same_bits(torch_threads):
    weights = make_weights(make_config(10, 4, 64, 32), torch.float32)
    placement = make_placement(3, 10)
    batch = make_batch([5, 0, 9], weights.config, torch.float32, seed=1)
    outputs, verdict = run_layer(weights, placement, batch, allgather_reducescatter)
    assert not differences(outputs, oracle(batch, weights, placement), verdict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_both_backends_agree_with_each_other_and_with_real_routing(dtype):
    """The layer's own router: an all-gather run and a replicated run give one rank's rows the same output."""
    weights = make_weights(make_config(10, 4, 64, 32), dtype)
    placement = make_placement(4, 10)
    batch = make_batch([4, 0, 7, 1], weights.config, dtype, seed=9)
    whole = torch.cat(batch.hidden_states)

    def rank_function(comm):
        apart = make_layer(weights, placement, comm, allgather_reducescatter)
        together = make_layer(weights, placement, comm, no_dp_ep)
        return apart(batch.hidden_states[comm.rank]), together(whole), apart.row_invariance()

    results = run_threads(4, rank_function)
    first = torch.cat([output for output, _, _ in results])
    assert not differences([first], [results[0][1]], results[0][2])


@pytest.mark.parametrize("name", BACKENDS)
def test_routed_half_takes_ids_directly(name):
    """`layer.routed` is the layer without router and shared expert."""
    weights = make_weights(make_config(8, 2, 64, 48), torch.float32)
    placement = make_placement(2, 8, "round_robin")
    batch = make_batch([3, 3], weights.config, torch.float32, seed=2)
    batch.topk_ids[1][0] = -1
    if name == "no_dp_ep":
        batch = Batch(*([parts[0]] * 2 for parts in (batch.hidden_states, batch.topk_weights, batch.topk_ids)))

    def rank_function(comm):
        layer = make_layer(weights, placement, comm, BACKENDS[name])
        rank = comm.rank
        rows = layer.routed(batch.hidden_states[rank], batch.topk_weights[rank], batch.topk_ids[rank])
        return rows, layer.row_invariance()

    results = run_threads(2, rank_function)
    expected = oracle(batch, weights, placement, shared=False)
    assert not differences([rows for rows, _ in results], expected, results[0][1])


# -- known-wrong variants: the comparison above must notice them ------------------------------------------------------


def k_order_reversed(dispatched, w13, w2, expert_map):
    turned = replace(dispatched, topk_ids=dispatched.topk_ids.flip(1), topk_weights=dispatched.topk_weights.flip(1))
    return local_experts(turned, w13, w2, expert_map)


def partials_rounded(dispatched, w13, w2, expert_map):
    return local_experts(dispatched, w13, w2, expert_map).bfloat16().float()


def weights_applied_twice(dispatched, w13, w2, expert_map):
    return local_experts(replace(dispatched, topk_weights=dispatched.topk_weights**2), w13, w2, expert_map)


def weights_of_the_neighbour(dispatched, w13, w2, expert_map):
    return local_experts(replace(dispatched, topk_weights=dispatched.topk_weights.roll(1, 1)), w13, w2, expert_map)


def up_before_gate(dispatched, w13, w2, expert_map):
    return local_experts(dispatched, torch.cat(w13.chunk(2, dim=1)[::-1], dim=1), w2, expert_map)


def minus_one_is_the_last_expert(dispatched, w13, w2, expert_map):
    ids = torch.where(dispatched.topk_ids < 0, len(expert_map) - 1, dispatched.topk_ids)
    return local_experts(replace(dispatched, topk_ids=ids.int()), w13, w2, expert_map)


def last_row_forgotten(dispatched, w13, w2, expert_map):
    rows = local_experts(dispatched, w13, w2, expert_map)
    rows[-1:] = 0
    return rows


@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [
        (k_order_reversed, torch.float32),
        (partials_rounded, torch.bfloat16),
        (weights_applied_twice, torch.float32),
        (weights_of_the_neighbour, torch.float32),
        (up_before_gate, torch.float32),
        (minus_one_is_the_last_expert, torch.float32),
        (last_row_forgotten, torch.float32),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_wrong_experts_are_caught(wrong, dtype):
    weights = make_weights(make_config(10, 4, 64, 32), dtype)
    placement = make_placement(3, 10)
    batch = make_batch([6, 0, 9], weights.config, dtype, seed=1)
    expected = oracle(batch, weights, placement)
    right, verdict = run_layer(weights, placement, batch, allgather_reducescatter)
    assert not differences(right, expected, verdict)
    if wrong in (k_order_reversed, partials_rounded) and not verdict.exact:
        pytest.xfail("last bits can only be compared where row invariance is promised")
    outputs, _ = run_layer(weights, placement, batch, allgather_reducescatter, experts=wrong)
    assert differences(outputs, expected, verdict)


def test_partials_added_in_arrival_order_are_caught():
    """Fixed k order is not enough: the partial sums of the ranks have an order too."""
    weights = make_weights(make_config(10, 8, 64, 32), torch.float32)
    placement = make_placement(4, 10)
    batch = make_batch([6, 6, 6, 6], weights.config, torch.float32, seed=1)

    def from_the_last_rank(expert_output, dispatched: Dispatched, *, comm):
        slices = expert_output.split(dispatched.handle)
        parts = comm.all_to_all_rows(torch.cat(slices), dispatched.handle).rows.view(4, -1, expert_output.shape[1])
        total = parts[3].clone()
        for part in reversed(parts[:3]):
            total += part
        return total

    outputs, verdict = run_layer(
        weights, placement, batch, allgather_reducescatter, shared=False, combine=from_the_last_rank
    )
    if not verdict.exact:
        pytest.xfail("last bits can only be compared where row invariance is promised")
    assert differences(outputs, oracle(batch, weights, placement, shared=False), verdict)
    assert not differences([rows.double() for rows in outputs], [rows.double() for rows in outputs], verdict)


# -- the scale, once, on the routed part ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("shared", "factor"), [(False, 2.5), (True, 3.5)], ids=["routed-only", "with-shared"])
def test_scale_applies_once_and_only_to_the_routed_part(name, shared, factor):
    """Experts that return a row of ones as it is, two of them at one half each, scale 2.5. vllm-project/vllm#24119."""
    hidden = 8
    config = make_config(4, 2, hidden, hidden)
    one = torch.eye(hidden)
    w13 = torch.cat([one, one])
    w2 = one / torch.nn.functional.silu(torch.ones(1))
    weights = replace(
        make_weights(config, torch.float32),
        gate=torch.zeros(4, hidden),
        bias=torch.tensor([0.0, 0.3, 0.0, 0.2]),  # chooses 1 and 3, one on each rank
        w13=w13.repeat(4, 1, 1),
        w2=w2.repeat(4, 1, 1),
        shared=(w13, w2),
    )
    placement = make_placement(2, 4)
    rows = torch.ones(3, hidden)
    outputs = run_threads(2, lambda comm: make_layer(weights, placement, comm, BACKENDS[name], shared=shared)(rows))
    for output in outputs:
        torch.testing.assert_close(output, factor * rows, rtol=0, atol=1e-5)


# -- every rank joins every layer ------------------------------------------------------------------------------------


def three_passes(comm, weights, placement, *, idle_returns_early=False):
    """Three layers for tokens per rank [3, 0], [0, 3], [0, 0]; outputs and the operations this rank took part in."""
    calls = []

    def counted(name, call):
        def wrapper(*args, **more):
            calls.append((comm.layer, name))
            return call(*args, **more)

        return wrapper

    for name in ("all_gather_rows", "reduce_scatter_rows", "all_to_all_rows", "all_reduce", "barrier"):
        setattr(comm, name, counted(name, getattr(comm, name)))
    outputs = []
    for step, counts in enumerate([[3, 0], [0, 3], [0, 0]]):
        rows = make_batch(counts, weights.config, torch.float32, seed=step).hidden_states[comm.rank]
        comm.step = step
        for number in range(3):
            layer = make_layer(weights, placement, comm, allgather_reducescatter, layer=number)
            if len(rows) or not idle_returns_early:
                rows = layer(rows)
        outputs.append(rows)
    return outputs, calls


def test_idle_ranks_join_every_layer():
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)
    alone, _ = run_threads(1, three_passes_alone, weights)[0]
    (first, calls), (second, other_calls) = run_threads(2, three_passes, weights, make_placement(2, 8))
    assert calls == other_calls
    assert calls == [(number, op) for number in [0, 1, 2] * 3 for op in ("all_gather_rows", "reduce_scatter_rows")]
    assert [rows.shape for rows in first] == [(3, 64), (0, 64), (0, 64)]
    assert [rows.shape for rows in second] == [(0, 64), (3, 64), (0, 64)]
    assert all(rows.dtype == torch.float32 for rows in first + second)
    torch.testing.assert_close(first[0], alone[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(second[1], alone[1], rtol=0, atol=1e-5)


def three_passes_alone(comm, weights):
    """The same rows on one rank, whoever owned them."""
    outputs, placement = [], make_placement(1, weights.config.n_routed_experts)
    for step in range(3):
        batch = make_batch([[3, 0], [0, 3], [0, 0]][step], weights.config, torch.float32, seed=step)
        rows = torch.cat(batch.hidden_states)
        for _ in range(3):
            rows = make_layer(weights, placement, comm, allgather_reducescatter)(rows)
        outputs.append(rows)
    return outputs, []


def test_a_rank_that_leaves_early_without_tokens_is_caught():
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)

    def rank_function(comm):
        three_passes(comm, weights, make_placement(2, 8), idle_returns_early=True)

    with pytest.raises((ExchangeMismatch, RankLost)):
        run_threads(2, rank_function)


# -- stages of your own ----------------------------------------------------------------------------------------------


def test_each_stage_can_be_replaced():
    """All five own functions are called, in order, and the layer uses what they return."""
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)
    batch = make_batch([4], weights.config, torch.float32, seed=0)
    calls = []

    def route(hidden_states, gate_weight, bias, config):
        calls.append("route")
        return batch.topk_weights[0], batch.topk_ids[0]

    def expert_map(ep_size, ep_rank, num_experts, strategy):
        calls.append("expert_map")
        return determine_expert_map(ep_size, ep_rank, num_experts, strategy)

    def dispatch(hidden_states, topk_weights, topk_ids, *, comm, placement):
        calls.append("dispatch")
        return Dispatched(hidden_states, None, topk_ids, topk_weights, None, "rows", None)

    def experts(dispatched, w13, w2, expert_map):
        calls.append("experts")
        return local_experts(dispatched, w13, w2, expert_map)

    def combine(expert_output, dispatched, *, comm):
        calls.append("combine")
        return expert_output

    stages = Stages(route=route, expert_map=expert_map, dispatch=dispatch, experts=experts, combine=combine)
    placement = make_placement(1, 8)

    def rank_function(comm):
        layer = make_layer(weights, placement, comm, allgather_reducescatter, stages=stages)
        return layer(batch.hidden_states[0]), layer.row_invariance()

    output, verdict = run_threads(1, rank_function)[0]
    assert calls == ["expert_map", "route", "dispatch", "experts", "combine"]
    assert not differences([output], oracle(batch, weights, placement), verdict)


def test_a_stage_that_computes_something_else_changes_the_output():
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)
    batch = make_batch([3, 2], weights.config, torch.float32, seed=0)

    def nothing(dispatched, w13, w2, expert_map):
        return torch.zeros_like(dispatched.hidden_states)

    outputs, _ = run_layer(weights, make_placement(2, 8), batch, allgather_reducescatter, shared=False, experts=nothing)
    assert all(torch.equal(rows, torch.zeros_like(rows)) for rows in outputs)


def test_own_map_with_another_count_is_refused():
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)
    stages = Stages(expert_map=lambda *args: (3, torch.full((8,), -1, dtype=torch.int32)))
    with pytest.raises(ConfigError, match="says 3 local experts, placement says 4"):
        run_threads(
            2, lambda comm: make_layer(weights, make_placement(2, 8), comm, allgather_reducescatter, stages=stages)
        )


def test_own_map_with_other_experts_is_refused():
    """As many experts as the placement says, but others: their rows would be dropped without a word."""
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)
    stages = Stages(
        expert_map=lambda size, rank, experts, strategy: determine_expert_map(size, rank, experts, "round_robin")
    )
    with pytest.raises(ConfigError):
        run_threads(
            2, lambda comm: make_layer(weights, make_placement(2, 8), comm, allgather_reducescatter, stages=stages)
        )


@pytest.mark.parametrize("name", BACKENDS)
def test_events_come_after_each_stage(name):
    """`on_event` sees route, dispatch, experts and combine once per call, with what they produced."""
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)
    rows = make_batch([3], weights.config, torch.float32, seed=0).hidden_states[0]

    def rank_function(comm):
        events = []
        layer = make_layer(
            weights,
            make_placement(2, 8),
            comm,
            BACKENDS[name],
            layer=5,
            on_event=lambda stage, layer, **tensors: events.append((stage, layer.layer, sorted(tensors))),
        )
        layer(rows)
        return events

    assert run_threads(2, rank_function)[0] == [
        ("route", 5, ["hidden_states", "topk_ids", "topk_weights"]),
        ("dispatch", 5, ["dispatched", "topk_ids"]),
        ("experts", 5, ["expert_output"]),
        ("combine", 5, ["output"]),
    ]


# -- wrong weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("gate_weight", (7, 64)),
        ("gate_weight", (8, 32)),
        ("w13", (3, 64, 64)),
        ("w13", (8, 64, 64)),
        ("w13", (4, 32, 64)),
        ("w2", (4, 32, 64)),
        ("w2", (4, 64, 64)),
    ],
)
def test_weights_of_a_wrong_shape_are_refused(field, shape):
    """The error names the rank, the tensor and both shapes."""
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)

    def rank_function(comm):
        make_layer(weights, make_placement(2, 8), comm, allgather_reducescatter, **{field: torch.zeros(shape)})

    with pytest.raises(CheckpointError, match=f"rank 0.*{field}") as caught:
        run_threads(2, rank_function)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("part", ["shared w13", "shared w2", "bias"])
def test_shared_expert_and_bias_of_a_wrong_shape_are_refused(part):
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)
    w13, w2 = weights.shared
    wrong = {
        "shared w13": replace(weights, shared=(w13[:, :32], w2)),
        "shared w2": replace(weights, shared=(w13, w2[:32])),
        "bias": replace(weights, bias=weights.bias[:7]),
    }[part]
    with pytest.raises(CheckpointError):
        run_threads(1, lambda comm: make_layer(wrong, make_placement(1, 8), comm, allgather_reducescatter))


def test_weights_of_two_dtypes_are_refused():
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)

    def rank_function(comm):
        make_layer(weights, make_placement(1, 8), comm, allgather_reducescatter, w2=weights.w2.bfloat16())

    with pytest.raises(ConfigError, match="float32.*bfloat16"):
        run_threads(1, rank_function)


def test_placement_for_another_group_is_refused():
    weights = make_weights(make_config(8, 2, 64, 32), torch.float32)
    with pytest.raises(ConfigError, match="placement is for 4 EP ranks, the group has 2"):
        run_threads(2, lambda comm: make_layer(weights, make_placement(4, 8), comm, allgather_reducescatter))
