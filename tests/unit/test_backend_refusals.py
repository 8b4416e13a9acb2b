"""What a backend does not take is refused, by all ranks or by the one that is wrong, and never read otherwise."""

from __future__ import annotations

import pytest
import torch
from backend_cases import SHAPES, backend
from layer_cases import fixed_route, make_batch, make_config, make_layer, make_weights

from moe_course.backends import BACKENDS
from moe_course.backends.configure import configure
from moe_course.comm.ledger import Ledger
from moe_course.comm.sim import run_threads
from moe_course.errors import ConfigError, ExchangeMismatch, RankLost
from moe_course.expert_map import make_placement
from moe_course.stages import Stages

CONFIG = make_config(10, 4, 64, 32)


@pytest.mark.parametrize("wrong", [10, 2**31 - 1, -2])
@pytest.mark.parametrize("name", BACKENDS)
def test_ids_of_another_numbering_are_refused(name, wrong):
    placement, batch = make_placement(2, 10), make_batch([3, 3], CONFIG, torch.float32, seed=1)

    def fn(comm):
        ids = batch.topk_ids[comm.rank].clone()
        ids[1, 2] = wrong
        parts = batch.hidden_states[comm.rank], batch.topk_weights[comm.rank], ids
        backend(name).dispatch(*parts, comm=comm, placement=placement)

    with pytest.raises(ConfigError, match=rf"topk_ids reach from .*{wrong}.*, expected -1 … 9"):
        run_threads(2, fn)


@pytest.mark.parametrize("name", SHAPES)
def test_experts_that_return_too_few_rows_do_not_get_stale_ones_added(name):
    """On the second call buffers hold rows of the first."""
    weights, placement = make_weights(CONFIG, torch.float32), make_placement(2, 10)
    batch = make_batch([4, 3], CONFIG, torch.float32, seed=2)

    def fn(comm):
        layer = make_layer(weights, placement, comm, backend(name), shared=False)
        good = layer.stages.experts
        mine = [part[comm.rank] for part in (batch.hidden_states, batch.topk_weights, batch.topk_ids)]
        layer.routed(*mine)
        cut = (lambda out: out[:, :-1]) if name == "low_latency" else (lambda out: out[:-1])
        layer.stages = Stages(experts=(lambda *args: cut(good(*args))) if comm.rank else good)
        layer.routed(*mine)

    with pytest.raises((ConfigError, ExchangeMismatch, RankLost)):
        run_threads(2, fn)


def test_windows_of_two_sizes_are_told_apart():
    """Both are there on both ranks; then one rank means the other one."""
    placement, batch = make_placement(2, 10), make_batch([2, 3], CONFIG, torch.float32, seed=3)

    def fn(comm):
        parts = [part[comm.rank] for part in (batch.hidden_states, batch.topk_weights, batch.topk_ids)]
        for capacity in (4, 6, 6 if comm.rank else 4):
            configure("one_sided", max_num_tokens=capacity).dispatch(*parts, comm=comm, placement=placement)

    with pytest.raises(ExchangeMismatch, match="window differ: rank 0 has 1, rank 1 has 2"):
        run_threads(2, fn)


@pytest.mark.parametrize("name", [shape for shape in SHAPES if shape != "allgather_reducescatter"])
def test_formats_of_other_kinds_do_not_pass_for_each_other(name):
    """fp8 and int8 rows with one scale each are as wide; the header tells them apart."""
    placement, batch = make_placement(2, 10), make_batch([2, 3], CONFIG, torch.float32, seed=3)

    def fn(comm):
        parts = [part[comm.rank] for part in (batch.hidden_states, batch.topk_weights, batch.topk_ids)]
        module = configure(name, format="int8_token" if comm.rank else "fp8_token")
        module.dispatch(*parts, comm=comm, placement=placement)

    with pytest.raises(ExchangeMismatch, match="dtype differ: rank 0 has uint8, rank 1 has int8"):
        run_threads(2, fn)


@pytest.mark.parametrize("order", [(1.0, 2.0**-9, -1.0), (1.0, -1.0, 2.0**-9), (2.0**-9, 1.0, -1.0)])
@pytest.mark.parametrize("name", [*SHAPES, "no_dp_ep"])
def test_narrow_sums_come_home_narrow_and_are_added_in_fp32(name, order):
    """Three ranks, one partial sum each, exact in bfloat16; added in bfloat16 they give 0 in two of the orders."""
    placement = make_placement(3, 3)
    ids, weights = torch.arange(3, dtype=torch.int32).view(1, 3), torch.ones(1, 3)

    def fn(comm):
        def experts(dispatched, w13, w2, expert_map):
            if dispatched.layout == "padded":
                return torch.full((*dispatched.hidden_states.shape[:2], 16), order[comm.rank])
            return torch.full((len(dispatched.hidden_states), 16), order[comm.rank])

        more = {"stages": Stages(experts=experts, route=fixed_route(weights, ids).route), "shared": False}
        config = make_config(3, 3, 16, 8)
        module = configure(name, combine_dtype=torch.bfloat16, max_num_tokens=2)
        layer = make_layer(make_weights(config, torch.float32), placement, comm, module, **more)
        return layer.routed(torch.zeros(1, 16), weights, ids)

    for output in run_threads(3, fn):
        assert torch.equal(output, torch.full((1, 16), 2.0**-9))


def test_every_block_of_padded_segments_is_metadata():
    """Eight fields, the mark, and a count for each of the sender's sections, to every peer, both ways."""
    placement, batch = make_placement(3, 10), make_batch([2, 0, 1], CONFIG, torch.float32, seed=1)

    def fn(comm):
        layer = make_layer(make_weights(CONFIG, torch.float32), placement, comm, backend("low_latency"), shared=False)
        comm.ledger = Ledger()
        layer.routed(*[part[comm.rank] for part in (batch.hidden_states, batch.topk_weights, batch.topk_ids)])
        return comm.ledger.total().metadata

    local = [4, 3, 3]
    assert run_threads(3, fn) == [2 * 8 * ((9 + 10) + (9 + 3 * local[rank])) for rank in range(3)]
