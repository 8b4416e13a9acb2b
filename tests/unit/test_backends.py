"""Every traffic shape in threads against the slow reference: the same bits, and exactly the bytes it must move."""

from __future__ import annotations

import pytest
import torch
from backend_cases import (
    DTYPES,
    FIXED,
    SHAPES,
    SIZES,
    Seen,
    backend,
    make_problem,
    miscounted,
    padding_of,
    run_batch,
    run_problem,
    sizes_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import Batch, differences, make_batch, make_config, make_layer, make_weights, oracle
from mode_cases import Case, two_stage_layer

from moe_course import quant
from moe_course.backends import BACKENDS
from moe_course.combine import accumulator
from moe_course.comm.sim import run_threads
from moe_course.expert_map import determine_expert_map, make_placement
from moe_course.experts import local_experts
from moe_course.modes import make_mode
from moe_course.rows import row_invariance

GRID = [(experts, "linear", dtype) for experts in SIZES for dtype in DTYPES if experts == 10 or dtype == "fp32"]
GRID += [(10, "round_robin", dtype) for dtype in DTYPES] + [(256, "round_robin", "bf16")]
SMALL = make_config(10, 4, 64, 32)


def fitting(capacity: int, **options) -> dict:
    """All shapes, with T_max where they have one."""
    return {name: backend(name, max_num_tokens=capacity if name in FIXED else None, **options) for name in SHAPES}


def together(weights, placement, batch: Batch, modules: dict, **more) -> dict[str, list[Seen]]:
    """One batch through all shapes in one group: shape -> what each rank saw. Routed half only."""

    def rank_function(comm):
        more_here = {"shared": False} | more
        return {n: run_batch(comm, weights, placement, batch, module, **more_here) for n, module in modules.items()}

    results = run_threads(placement.ep_size, rank_function)
    return {name: [found[name] for found in results] for name in modules}


def promised(weights):
    """Does this machine promise equal bits for products of these widths?"""
    return row_invariance(
        [(w.shape[2], w.shape[1]) for w in (weights.w13, weights.w2)], weights.w13.dtype, weights.w13.device
    )


# -- the same rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "strategy", "dtype"), GRID)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_shape_equals_the_oracle_and_moves_what_it_must(ranks, experts, strategy, dtype):
    """All batches through all shapes in one group, T_max exactly as large as needed: rows, bytes, padding."""
    problem = make_problem(ranks, experts, strategy, DTYPES[dtype])
    placement, capacity = problem.placement, problem.most_rows
    modules = fitting(capacity)
    found, verdict = run_problem(problem, modules)
    wrong, sizes = {}, sizes_of(problem.weights.config.hidden_size, DTYPES[dtype])
    for (name, batch), seen in found.items():
        traffic = modules[name].traffic(problem.batches[batch].topk_ids, placement)
        words = differences([one.output for one in seen], problem.expected[batch], verdict)
        words += miscounted(seen, traffic, sizes)
        padding = padding_of(placement, traffic, capacity, sizes) if name == "low_latency" else 0
        if (counted := sum(one.ledger.total().padding for one in seen)) != padding:
            words.append(f"padding: {counted}, expected {padding}")
        if words:
            wrong[name, batch] = words
    assert not wrong


@settings(max_examples=15)
@given(st.data())
def test_shapes_agree_on_random_problems(data):
    """Ragged counts, any ids, also twice in a row or -1, any nodes: all shapes give one result, to the bit."""
    nodes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3), label="ranks of each node"))
    ranks = sum(nodes)
    experts, top_k = data.draw(st.integers(ranks, 12), label="E"), data.draw(st.integers(1, 4), label="K")
    strategy = data.draw(st.sampled_from(["linear", "round_robin"]), label="strategy")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), label="dtype")
    counts = data.draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks), label="rows")
    hidden = data.draw(st.sampled_from([32, 5]), label="H")  # rows of an odd number of bytes, too
    weights = make_weights(make_config(experts, min(top_k, experts), hidden, 16), dtype)
    placement = make_placement(ranks, experts, strategy, ranks_per_node=nodes)
    batch = make_batch(counts, weights.config, dtype, seed=sum(counts))
    for ids in batch.topk_ids:
        chosen = data.draw(st.lists(st.integers(-1, experts - 1), min_size=ids.numel(), max_size=ids.numel()))
        ids.copy_(torch.tensor(chosen, dtype=torch.int32).view(ids.shape))
    found = together(weights, placement, batch, fitting(16))  # an expert twice in a row takes two places
    first, verdict = [seen.output for seen in found[SHAPES[0]]], promised(weights)
    assert not differences(first, oracle(batch, weights, placement, shared=False), verdict)
    for name in SHAPES[1:]:
        assert not differences([seen.output for seen in found[name]], first, verdict), name


def test_256_ranks_in_one_process():
    """One expert each, ragged, nodes of 8: real dispatch, experts and combine."""
    ranks = 256
    weights = make_weights(make_config(ranks, 8, 32, 16), torch.float32)
    placement = make_placement(ranks, ranks, ranks_per_node=8)
    batch = make_batch([(5 * rank + 3) % 4 for rank in range(ranks)], weights.config, torch.float32, seed=1)
    module = BACKENDS["high_throughput"]

    def rank_function(comm):
        rank = comm.rank
        mine = [part[rank] for part in (batch.hidden_states, batch.topk_weights, batch.topk_ids)]
        dispatched = module.dispatch(*mine, comm=comm, placement=placement)
        _, expert_map = determine_expert_map(ranks, rank, ranks)
        w13, w2 = weights.w13[rank : rank + 1], weights.w2[rank : rank + 1]
        output = module.combine(local_experts(dispatched, w13, w2, expert_map), dispatched, comm=comm)
        return Seen(output, comm.ledger)

    seen = run_threads(ranks, rank_function, timeout=120)
    expected = oracle(batch, weights, placement, shared=False)
    assert not differences([one.output for one in seen], expected, promised(weights))
    assert not miscounted(seen, module.traffic(batch.topk_ids, placement), sizes_of(32, torch.float32))


@pytest.mark.parametrize("case", [Case(tp=2, dp=2), Case(tp=2, dp=3)], ids=str)
def test_every_shape_in_a_column_of_ranks_that_share_rows(case):
    """Of TP x DP, a column owns only some of the experts, others are nobody's there; the TP group adds the columns."""
    weights = make_weights(SMALL, torch.float32)
    plan = case.plan(SMALL)
    batch = make_batch([3, 0, 4][: case.dp], SMALL, torch.float32, seed=2)
    expected = two_stage_layer(batch, weights, case.owners(10), case.columns())

    def rank_function(comm):
        mode, rank = make_mode(plan, comm), case.holder(comm.rank)
        layers = {name: make_layer(weights, plan.placement, comm, m, mode=mode) for name, m in fitting(4).items()}
        mine = [part[rank] for part in (batch.hidden_states, batch.topk_weights, batch.topk_ids)]
        return {name: layer.shared_expert(mine[0]) + layer.routed(*mine) for name, layer in layers.items()}

    results = run_threads(case.world, rank_function)
    for name in SHAPES:
        outputs = [found[name] for found in results]
        assert not differences(outputs, [expected[case.holder(rank)] for rank in range(case.world)], promised(weights))


def test_a_column_knows_its_hosts():
    """Hosts of 3, 1 and 4 ranks, every second rank: two, none and two are left, and rows are forwarded among those."""
    placement = make_placement(8, 16, ranks_per_node=(3, 1, 4)).within([0, 2, 4, 6])
    assert placement.nodes == [[0, 1], [2, 3]]
    assert BACKENDS["two_hop"].forwarders(placement).tolist() == [[0, 0, 2, 2], [1, 1, 3, 3]] * 2
    assert make_placement(4, 8).within([1, 3]).nodes == [[0, 1]]
    assert make_placement(4, 8).within((1, 2)).owner.equal(make_placement(4, 8).within(range(1, 3)).owner)


# -- fewer bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [(2, 2), (3, 1), (1, 4, 3), (4,), (1, 1, 1, 1)], ids=str)
def test_sums_of_a_node(nodes):
    """`reduce_in_node`: to 1e-5, one sum per node on the second hop, and never more rows than without it."""
    ranks = sum(nodes)
    weights = make_weights(SMALL, torch.float32)
    placement = make_placement(ranks, 10, ranks_per_node=nodes)
    batch = make_batch([(5 * rank + 3) % 7 for rank in range(ranks)], SMALL, torch.float32, seed=3)
    batch.topk_ids[0][0] = -1
    modules = {"each": backend("two_hop"), "reduced": backend("two_hop", reduce_in_node=True)}
    found, expected = together(weights, placement, batch, modules), oracle(batch, weights, placement, shared=False)
    traffic = {name: module.traffic(batch.topk_ids, placement) for name, module in modules.items()}
    for name, seen in found.items():
        assert not miscounted(seen, traffic[name], sizes_of(64, torch.float32))
    for one, whole in zip(found["reduced"], expected, strict=True):
        torch.testing.assert_close(one.output, whole, rtol=0, atol=1e-5 * max([1.0, *whole.abs().flatten().tolist()]))
    assert traffic["reduced"].combine_rows <= traffic["each"].combine_rows
    if ranks == 4 and len(nodes) == 4:  # nothing to add up in a node of one
        assert not differences([seen.output for seen in found["reduced"]], expected, promised(weights))
    by_hand = 0  # rows that cross between nodes on the way home
    for rank, ids in enumerate(batch.topk_ids):
        mine = next(node for node in placement.nodes if rank in node)
        for row in ids.tolist():
            owners = {int(placement.owner[expert]) for expert in row if expert >= 0}
            by_hand += sum(bool(owners & set(node)) for node in placement.nodes if node != mine)
    far = traffic["reduced"].combine[1]
    node_of = torch.tensor([place for place, n in enumerate(nodes) for _ in range(n)])
    assert int(far[node_of.unsqueeze(1) != node_of].sum()) == by_hand


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("fmt", ["fp8_group", "fp8_token", "int8_token"])
def test_quantised_rows(fmt, before, dtype):
    """Scales belong to rows: every shape gives what one process makes of the rounded rows, in packed bytes."""
    weights, placement = make_weights(make_config(10, 4, 128, 32), dtype), make_placement(3, 10, ranks_per_node=(2, 1))
    batch = make_batch([3, 0, 5], weights.config, dtype, seed=5)
    batch.topk_ids[0][1] = -1
    rounded = [quant.dequantize(*quant.quantize(rows, fmt), dtype) for rows in batch.hidden_states]
    expected = oracle(Batch(rounded, batch.topk_weights, batch.topk_ids), weights, placement, shared=False)
    modules = fitting(5, format=fmt, before=before)
    width = quant.row_bytes(fmt, 128) if before else 0
    for name, seen in together(weights, placement, batch, modules).items():
        assert not differences([one.output for one in seen], expected, promised(weights)), name
        traffic = modules[name].traffic(batch.topk_ids, placement)
        assert not miscounted(seen, traffic, sizes_of(128, dtype, row=width)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_narrow_sums_on_the_way_home(dtype):
    """`combine_dtype` bfloat16: half the bytes of fp32, close, and by the bound; sums are still added in fp32."""
    weights, placement = make_weights(SMALL, dtype), make_placement(3, 10, ranks_per_node=(2, 1))
    batch = make_batch([3, 0, 5], SMALL, dtype, seed=5)
    expected = oracle(batch, weights, placement, shared=False)
    modules = fitting(5, combine_dtype=torch.bfloat16)
    for name, seen in together(weights, placement, batch, modules).items():
        traffic, sizes = modules[name].traffic(batch.topk_ids, placement), sizes_of(64, dtype, torch.bfloat16)
        assert not miscounted(seen, traffic, sizes), name
        assert sizes.partial == sizes.contribution == 128 < 64 * accumulator(dtype).itemsize
        for one, whole in zip(seen, expected, strict=True):
            limit = 2e-2 * max([1.0, *whole.abs().flatten().tolist()])
            torch.testing.assert_close(one.output, whole, rtol=0, atol=limit)
        exact = dtype == torch.bfloat16 and traffic.returns == "contributions"  # those are in that dtype anyway
        if promised(weights).exact:
            assert exact == (not differences([one.output for one in seen], expected, promised(weights))), name
