"""Every legal parallel mode in threads against one process: rows, routes, bytes; and wrong modes that are caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_cases import make_batch, make_config, make_weights
from mode_cases import (
    DTYPES,
    Case,
    build,
    far_apart,
    findings,
    legal_cases,
    make_batches,
    make_problem,
    one_process,
    own_slice,
    payload_by_hand,
    run_case,
    two_stage_layer,
    watch,
)

from moe_course.backends import BACKENDS
from moe_course.comm.sim import run_threads
from moe_course.errors import ConfigError, ExchangeMismatch, PlanMismatch
from moe_course.layer import MoELayer
from moe_course.modes import Mode, make_mode, plain_mode
from moe_course.stages import Stages

CASES = legal_cases(8)
#: E -> batches; all of them where the experts do not divide.
NAMES = {
    8: ("ragged", "all experts of a row on one rank", "own router"),
    10: None,
    256: ("ragged", "own router"),
}
EVEN = ("routes and whole rows of -1",)  # as many rows on every DP rank: no header can disagree
TP2_DP2, TP2_DP2_SP = Case(tp=2, dp=2), Case(tp=2, dp=2, sp=True)


def compare(case: Case, experts: int, dtype: str = "fp32", **more: Any) -> list[str]:
    """Run a case in threads; what differs from one process."""
    make_problem(case, experts, DTYPES[dtype])  # once for all threads
    return findings(case, experts, dtype, run_threads(case.world, lambda c: run_case(c, case, experts, dtype, **more)))


# -- the same result -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", NAMES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_mode_gives_the_result_of_one_process(case, experts):
    """To the bit where the machine promises it; routes computed, rows and bytes that travelled; every hard batch."""
    assert not compare(case, experts, names=NAMES[experts])


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
@pytest.mark.parametrize("case", [case for case in CASES if case.flat in (1, 4, 6)], ids=str)
def test_other_dtypes(case, dtype):
    assert not compare(case, 10, dtype, names=("ragged", "all experts of a row on one rank", "own router"))


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, dp=2, pp=2),
        Case(tp=2, dp=2, sp=True, pp=2),
        Case(tp=2, dp=2, ep=False, external_dp=2),
        Case(tp=2, pcp=2, external_dp=2),
        Case(pp=2, external_dp=2),
        Case(tp=2, dp=1, pp=2, external_dp=2),
    ],
    ids=str,
)
def test_stages_and_copies_have_groups_of_their_own(case):
    """Pipeline stages and copies of the deployment have other rows, and never meet in a layer."""
    assert not compare(case, 10, names=("ragged", "all rows to one expert"))


@pytest.mark.parametrize("tp", [2, 4])
def test_round_robin_without_dispatch(tp):
    """The one mode in which vLLM's default path keeps that placement: TP + EP, more than one expert group."""
    case = Case(tp=tp, strategy="round_robin")
    assert case.plan(make_problem(case, 10, torch.float32).config).placement.strategy == "round_robin"
    assert not compare(case, 10)


@pytest.mark.parametrize("case", [Case(dp=4), Case(tp=4), TP2_DP2, TP2_DP2_SP, Case(tp=2, pcp=2)], ids=str)
def test_fourteen_experts_on_four_ranks(case):
    """Shares of 4, 4, 3 and 3. vllm-project/vllm-ascend#16384 refused to start with them."""
    placement = case.plan(make_problem(case, 14, torch.float32).config).placement
    assert [placement.num_local(rank) for rank in range(4)] == [4, 4, 3, 3]
    assert not compare(case, 14)


def test_the_two_stage_oracle_is_the_reference_where_there_is_one_stage():
    """And it differs from it, in the last bits alone, where there are two: the comparison can tell them apart."""
    case = TP2_DP2
    weights = make_problem(case, 10, torch.float32)
    batch, owner = make_batches(case, weights)["ragged"], case.owners(10)
    once = one_process(replace(case, sp=True), batch, weights)
    assert all(map(torch.equal, two_stage_layer(batch, weights, owner, [[0, 1, 2, 3]]), once))
    twice = two_stage_layer(batch, weights, owner, case.columns())
    assert case.columns() == [[0, 2], [1, 3]]
    assert not all(map(torch.equal, twice, once)) and not far_apart(twice, once)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case.ep and case.flat in (4, 8)], ids=str)
def test_fewer_experts_than_ranks_are_refused(case):
    """With expert parallelism; slices of three experts are as good as any."""
    config = make_config(3, 2, 32, 64)
    with pytest.raises(ConfigError, match=f"3 experts cannot be spread over {case.flat} EP ranks"):
        case.plan(config)
    if not case.sp:
        assert replace(case, ep=False).plan(config).moe.tp_size == case.flat


@pytest.mark.parametrize("case", [case for case in CASES if not case.ep and case.flat > 1], ids=str)
def test_experts_that_cannot_be_cut_are_refused(case):
    inter = 840 + 1  # a multiple of nothing below 9
    with pytest.raises(ConfigError, match=f"moe_intermediate_size 841 cannot be cut into {case.flat} equal parts"):
        case.plan(make_config(10, 2, 32, inter))
    assert case.plan(make_config(10, 2, 32, inter - 1)).moe.tp_size == case.flat
    assert replace(case, ep=True).plan(make_config(10, 2, 32, inter)).moe.tp_size == 1


@pytest.mark.parametrize(
    ("ranks", "case"), [(1, Case(tp=2)), (2, Case(dp=4)), (4, Case(tp=2)), (4, Case(dp=2))], ids=str
)
def test_a_plan_for_another_number_of_ranks_is_refused(ranks, case):
    """On all ranks, with both numbers. EleutherAI/lm-evaluation-harness#3734: processes that believed in a group."""
    plan = case.plan(make_problem(case, 8, torch.float32).config)

    def rank_function(comm):
        with pytest.raises(PlanMismatch) as caught:
            make_mode(plan, comm)
        return str(caught.value)

    for rank, message in enumerate(run_threads(ranks, rank_function, timeout=5)):
        assert message == f"rank {rank}: the plan is for {case.world} ranks, the group has {ranks}"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("catalogue", "rank 1: placement is for 4 EP ranks, the group has 2"),
        ("rows", "rank 1: rows travel among 2 ranks, the placement there is for 4"),
    ],
)
def test_a_placement_for_another_group_is_refused(place, words):
    """ep_size must be the size of the group, in the catalogue of experts and in the one the rows travel by."""
    weights = make_problem(Case(dp=2), 8, torch.float32)
    plans = {ranks: Case(dp=ranks).plan(weights.config) for ranks in (2, 4)}

    def rank_function(comm):
        plan, mode = plans[2], make_mode(plans[2], comm)
        if place == "catalogue":
            plan = replace(plan, placement=plans[4].placement)
        else:
            mode = replace(mode, placement=plans[4].placement)
        with pytest.raises(ConfigError) as caught:
            build(comm, plan, weights, mode=mode)
        return str(caught.value)

    assert run_threads(2, rank_function, timeout=5)[1] == words


def test_the_groups_are_not_part_of_state_dict():
    """Nothing that a checkpoint or an initialiser could overwrite. vllm-project/vllm#47206."""
    weights = make_problem(TP2_DP2, 10, torch.float32)
    layers = run_threads(4, lambda comm: build(comm, TP2_DP2.plan(weights.config), weights))
    before = layers[1].expert_map.clone(), layers[1].mode.placement.owner.clone()
    for tensor in layers[1].state_dict().values():
        tensor.zero_()
    layers[1].load_state_dict(layers[0].state_dict())
    assert torch.equal(layers[1].expert_map, before[0]) and torch.equal(layers[1].mode.placement.owner, before[1])


# -- what a layer does on its groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_partial_sums_meet_once(case):
    """Sizes of the groups that are summed over multiply to the ranks that hold partial sums of a row."""
    plan = case.plan(make_problem(case, 10, torch.float32).config)
    sizes = [len(plan.groups[kind][0]) for kind in (plan.dispatch_group, plan.reduce_group) if kind]
    assert torch.tensor(sizes).prod() == case.flat


@pytest.mark.parametrize("case", CASES, ids=str)
def test_places_of_all_ranks(case):
    """Whole experts or a slice, and the members of each group, counted by hand: tp fastest, then pcp, then dp."""
    plan, everybody = case.plan(make_config(10, 2, 32, 840)), list(range(case.flat))
    for rank, mode in enumerate(run_threads(case.flat, lambda comm: make_mode(plan, comm))):
        whole = case.ep and case.flat > 1
        places = (rank, case.flat, 0, 1) if whole else (0, 1, rank, case.flat)
        assert (mode.ep_rank, mode.ep_size, mode.moe_tp_rank, mode.moe_tp_size) == places
        tp_peers = [peer for peer in everybody if peer // case.tp == rank // case.tp]
        column = [peer for peer in everybody if peer % case.tp == rank % case.tp]
        travels = case.dp > 1 or case.pcp > 1
        split = tp_peers if case.sp else column if case.pcp > 1 else None
        assert mode.travels == travels
        assert mode.dispatch.members == (column if travels and not case.sp else everybody)
        assert (mode.reduce and mode.reduce.members) == (tp_peers if case.tp > 1 and not case.sp else None)
        assert (mode.split and mode.split.members) == split
        used = [mode.dispatch, mode.reduce, mode.split]
        assert len(mode.groups()) == len({tuple(group.members) for group in used if group})  # none is made twice


def test_kinds_with_the_same_groups_share_one():
    """Two pipeline stages of TP + EP: the EP groups are the TP groups, and nobody pays for them twice."""
    plan = Case(tp=2, pp=2).plan(make_config(10, 2, 32, 12))

    def rank_function(comm):
        mode = make_mode(plan, comm)
        return mode.dispatch is mode.reduce, mode.dispatch.members

    assert run_threads(4, rank_function) == [(True, [0, 1])] * 2 + [(True, [2, 3])] * 2


def calls_of_one_layer(comm, case: Case) -> list[tuple[str, list[int]]]:
    """(operation, world ranks) of each collective of one forward; only the first DP rank has rows."""
    weights = make_problem(case, 8, torch.float32)
    layer = build(comm, case.plan(weights.config), weights)
    calls = []

    def counted(group, name):
        call = getattr(group, name)

        def wrapper(*args, **more):
            calls.append((name, group.members))
            return call(*args, **more)

        setattr(group, name, wrapper)

    for group in layer.mode.groups():
        for name in ("all_gather_rows", "reduce_scatter_rows", "all_to_all_rows", "all_reduce", "barrier", "split"):
            counted(group, name)
    layer(torch.ones(0 if case.holder(comm.rank) else 3, 32))
    return calls


GATHER, SCATTER, SUM = "all_gather_rows", "reduce_scatter_rows", "all_reduce"


@pytest.mark.parametrize(
    ("case", "rank", "calls"),
    [
        (Case(), 0, []),
        (Case(tp=2), 1, [(SUM, [0, 1])]),
        (Case(tp=2, ep=False), 1, [(SUM, [0, 1])]),
        (Case(dp=2), 1, [(GATHER, [0, 1]), (SCATTER, [0, 1])]),
        (Case(dp=2, ep=False), 1, [(GATHER, [0, 1]), (SCATTER, [0, 1])]),
        (Case(pcp=2), 1, [(GATHER, [0, 1]), (SCATTER, [0, 1]), (GATHER, [0, 1])]),
        (TP2_DP2, 1, [(GATHER, [1, 3]), (SCATTER, [1, 3]), (SUM, [0, 1])]),
        (TP2_DP2, 2, [(GATHER, [0, 2]), (SCATTER, [0, 2]), (SUM, [2, 3])]),
        (replace(TP2_DP2, ep=False), 2, [(GATHER, [0, 2]), (SCATTER, [0, 2]), (SUM, [2, 3])]),
        (TP2_DP2_SP, 2, [(GATHER, [0, 1, 2, 3]), (SCATTER, [0, 1, 2, 3]), (GATHER, [2, 3])]),
        (Case(tp=2, pcp=2), 2, [(GATHER, [0, 2]), (SCATTER, [0, 2]), (SUM, [2, 3]), (GATHER, [0, 2])]),
        (
            Case(tp=2, dp=2, pp=2),
            7,
            [(GATHER, [3, 7]), (SCATTER, [3, 7]), (SUM, [6, 7])],
        ),
    ],
    ids=str,
)
def test_collectives_of_one_layer(case, rank, calls):
    """Which, in what order, over whom; the same number on all ranks, also on those without rows."""
    found = run_threads(case.world, calls_of_one_layer, case)
    assert found[rank] == calls
    assert len({tuple(name for name, _ in mine) for mine in found}) == 1


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (Case(tp=2), 0),
        (Case(dp=4), 3 * 10),
        (Case(pcp=4), 3 * 10),
        (TP2_DP2, 2 * 10),
        (TP2_DP2_SP, 3 * 10),
        (Case(tp=2, pcp=2), 2 * 10),
    ],
    ids=str,
)
def test_rows_are_dispatched_by_one_rank_each(case, rows):
    """Of each column: ten rows, each sent once to every other rank of the group it travels in."""
    weights = make_problem(case, 8, torch.float32)
    counts = [10 // case.dp] * case.dp
    counts[0] += 10 - sum(counts)
    batch = make_batch(counts, weights.config, torch.float32, seed=1)

    def rank_function(comm):
        return watch(comm, build(comm, case.plan(weights.config), weights), batch.hidden_states[case.holder(comm.rank)])

    seen = run_threads(case.world, rank_function)
    assert sum(one.dispatched for one in seen) == rows
    columns = 1 if case.sp else case.tp  # without SP every TP rank has all rows, and takes them to its own column
    for column in range(columns):
        taken = torch.cat([one.rows for rank, one in enumerate(seen) if rank % columns == column])
        assert sorted(taken.tolist()) == sorted(torch.cat(batch.hidden_states).tolist())


# -- reports from elsewhere, as small as they get --------------------------------------------------------------------


def over_the_ep_group(comm, plan, weights, **more):
    """Every TP rank dispatches all rows it shares with the others, to everybody."""
    mine = plan.rank(comm.rank)
    mode = Mode(comm, plan.placement, None, None, mine.ep_rank, plan.moe.ep_size)
    return build(comm, plan, weights, mode=mode, **more)


@pytest.mark.parametrize(
    ("case", "make", "routes", "sent"),
    [
        (TP2_DP2, build, 24, 2 * 12),
        (TP2_DP2_SP, build, 24, 3 * 12),
        (TP2_DP2, over_the_ep_group, 48, 3 * 24),
    ],
    ids=["rows shared", "sequence parallel", "known-wrong"],
)
def test_no_route_is_computed_twice(case, make, routes, sent):
    """TP 2 x DP 2, 6 rows on each DP rank, K = 2. vllm-project/vllm#24982: the right rows by twice the work."""
    weights = make_problem(case, 8, torch.float32)
    batch = make_batch([6, 6], weights.config, torch.float32, seed=0)

    def rank_function(comm, make):
        rows = batch.hidden_states[case.holder(comm.rank)]
        return watch(comm, make(comm, case.plan(weights.config), weights), rows)

    seen = run_threads(4, rank_function, make)
    assert (sum(one.live for one in seen), sum(one.dispatched for one in seen)) == (routes, sent)
    right = run_threads(4, rank_function, build)
    assert not far_apart([one.output for one in seen], [one.output for one in right])


def constant_experts(value: float):
    """An expert stage that answers with this partial sum for every row."""
    return lambda dispatched, w13, w2, expert_map: torch.full_like(dispatched.hidden_states, value)


class SharedExpertOfThree(MoELayer):
    """The shared expert, complete on every rank, answers 3."""

    def shared_expert(self, hidden_states):
        return torch.full_like(hidden_states, 3.0)


class AddedBeforeTheSum(SharedExpertOfThree):
    """Shared output joins the partial sums and is summed over the TP ranks with them."""

    def forward(self, hidden_states):
        topk_weights, topk_ids = self.stages.route(hidden_states, self.gate_weight, self.bias, self.config)
        dispatched = self.backend.dispatch(
            hidden_states, topk_weights, topk_ids, comm=self.comm, placement=self.mode.placement
        )
        partial = self.stages.experts(dispatched, self.w13, self.w2, self.expert_map)
        return self.mode.reduce.all_reduce(self.shared_expert(hidden_states) + partial)


@pytest.mark.parametrize(("kind", "value"), [(SharedExpertOfThree, 33), (AddedBeforeTheSum, 36)])
def test_shared_expert_is_added_once(kind, value):
    """Routed partial sums 10 and 20 on two TP ranks, shared 3. vllm-project/vllm#49378 summed the shared part twice."""
    case = Case(tp=2)
    weights = make_problem(case, 8, torch.float32)

    def rank_function(comm):
        stages = Stages(experts=constant_experts([10.0, 20.0][comm.rank]))
        layer = build(comm, case.plan(weights.config), weights, stages=stages, kind=kind)
        sums, reduce = [], layer.mode.reduce.all_reduce
        layer.mode.reduce.all_reduce = lambda rows, dtype=None: sums.append(len(rows)) or reduce(rows, dtype)
        return layer(torch.ones(2, 32)).unique().tolist(), sums

    assert run_threads(2, rank_function) == [([value], [2])] * 2


@pytest.mark.parametrize(
    ("shared_is", "values"),
    [("whole", [22, 33]), ("sliced", [2, 30]), ("sliced and summed", [32, 32])],
)
def test_shared_expert_of_split_rows_is_whole(shared_is, values):
    """Rows 2 and 3 on two TP ranks, shared expert 1 x + 10 x. vllm-project/vllm#37856 sliced it over other rows."""
    case = TP2_DP2_SP
    one = F.silu(torch.ones(1))
    # a row is [x, 1]; the gate reads the one, the two columns of w2 add 1 x and 10 x
    w13 = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [10.0, 0.0]])
    w2 = torch.tensor([[1.0, 1.0], [0.0, 0.0]]) / one
    weights = make_weights(make_config(8, 2, 2, 4), torch.float32)
    weights = replace(weights, w2=torch.zeros_like(weights.w2), shared=(w13, w2))

    class Summed(MoELayer):
        def shared_expert(self, hidden_states):
            return self.mode.split.all_reduce(super().shared_expert(hidden_states))

    def rank_function(comm):
        tp = comm.rank % 2
        shared = weights.shared if shared_is == "whole" else (w13[tp::2], w2[:, tp : tp + 1])
        kind = Summed if shared_is == "sliced and summed" else MoELayer
        layer = build(comm, case.plan(weights.config), weights, shared=shared, kind=kind)
        return layer(torch.tensor([[2.0, 1.0], [3.0, 1.0]]))[:, 0]

    for found in run_threads(4, rank_function):
        torch.testing.assert_close(found, torch.tensor(values).float())


@pytest.mark.parametrize(
    ("case", "reduced", "values"),
    [
        (TP2_DP2, True, [15, 15, 15, 15]),
        (TP2_DP2, False, [5, 10, 5, 10]),
        (replace(TP2_DP2, ep=False), True, [15, 15, 15, 15]),
        (TP2_DP2_SP, True, [15, 15, 15, 15]),
        (Case(tp=2, pcp=2), True, [15, 15, 15, 15]),
        (Case(tp=2, pcp=2), False, [5, 10, 5, 10]),
        (Case(tp=4), True, [15, 15, 15, 15]),
        (Case(dp=4), True, [15, 15, 15, 15]),
    ],
    ids=str,
)
def test_partial_sums_of_all_ranks_are_added(case, reduced, values):
    """Ranks hold 1, 2, 4 and 8. sgl-project/sglang#32963 summed over one of two groups: 5, 10, 5 and 10."""
    weights = make_problem(case, 8, torch.float32)

    def rank_function(comm):
        mode = make_mode(case.plan(weights.config), comm)
        mode = mode if reduced else replace(mode, reduce=None)
        stages = Stages(experts=constant_experts(2.0**comm.rank))
        layer = build(comm, case.plan(weights.config), weights, mode=mode, shared=None, stages=stages)
        return layer(torch.ones(3, 32)).unique().tolist()

    assert run_threads(4, rank_function) == [[value] for value in values]


# -- known-wrong modes: the comparison must notice them --------------------------------------------------------------


class _Twice:
    """A group that adds up twice."""

    def __init__(self, comm):
        self.comm = comm

    def all_reduce(self, rows, dtype=None):
        return self.comm.all_reduce(self.comm.all_reduce(rows, dtype), dtype)


class _OwnRowsOnly(Mode):
    """Nothing is gathered."""

    def all_rows(self, rows):
        return rows


class _OthersLeftZero(Mode):
    """The right shape, and only the own rows in it."""

    def all_rows(self, rows):
        before, after = self.split.rank, self.split.world_size - 1 - self.split.rank
        return F.pad(rows, (0, 0, len(rows) * before, len(rows) * after))


class _EverySecondRow(Mode):
    """Rows are taken like cards and put back like slices."""

    def own_rows(self, n):
        return slice(self.split.rank, None, self.split.world_size)


class _LastRankFirst(Mode):
    """The first rows go to the last rank."""

    def own_rows(self, n):
        share, place = n // self.split.world_size, self.split.world_size - 1 - self.split.rank
        return slice(place * share, (place + 1) * share)


def summed_over_the_dp_group(comm, plan, weights):
    mode = make_mode(plan, comm)
    return build(comm, plan, weights, mode=replace(mode, reduce=mode.dispatch))


def summed_over_half_of_the_group(comm, plan, weights):
    half = comm.split([[0, 1], [2, 3]])
    return build(comm, plan, weights, mode=replace(make_mode(plan, comm), reduce=half))


def not_summed(comm, plan, weights):
    return build(comm, plan, weights, mode=replace(make_mode(plan, comm), reduce=None))


def summed_twice(comm, plan, weights):
    mode = make_mode(plan, comm)
    return build(comm, plan, weights, mode=replace(mode, reduce=_Twice(mode.reduce)))


def split_rows_summed_too(comm, plan, weights):
    mode = make_mode(plan, comm)
    return build(comm, plan, weights, mode=replace(mode, reduce=mode.split))


def other_kind_of_mode(kind):
    def make(comm, plan, weights):
        return build(comm, plan, weights, mode=kind(**vars(make_mode(plan, comm))))

    make.__name__ = kind.__name__
    return make


def shared_added_before_the_sum(comm, plan, weights):
    backend = BACKENDS[plan.backend.name]

    def combine(expert_output, dispatched, *, comm):
        gate, up = F.linear(dispatched.hidden_states, weights.shared[0]).chunk(2, dim=-1)
        return backend.combine(expert_output, dispatched, comm=comm) + F.linear(F.silu(gate) * up, weights.shared[1])

    return build(comm, plan, weights, shared=None, stages=Stages(combine=combine))


def w2_of_the_neighbour(comm, plan, weights):
    def cut(w13, w2, rank, ranks):
        return own_slice(w13, w2, rank, ranks)[0], own_slice(w13, w2, (rank + 1) % ranks, ranks)[1]

    return build(comm, plan, weights, cut=cut)


def w2_every_second_column(comm, plan, weights):
    def cut(w13, w2, rank, ranks):
        return own_slice(w13, w2, rank, ranks)[0], w2[:, :, rank::ranks].contiguous()

    return build(comm, plan, weights, cut=cut)


def w13_in_one_piece(comm, plan, weights):
    """Rank 0 gets gate rows alone, the last rank up rows alone."""

    def cut(w13, w2, rank, ranks):
        return w13.chunk(ranks, dim=1)[rank], own_slice(w13, w2, rank, ranks)[1]

    return build(comm, plan, weights, cut=cut)


def slice_by_tp_rank(comm, plan, weights):
    """As many slices as ranks, and the same ones on every DP rank."""

    def cut(w13, w2, rank, ranks):
        return own_slice(w13, w2, rank % plan.parallel.tensor_parallel_size, ranks)

    return build(comm, plan, weights, cut=cut)


def ep_ranks_with_tp_slowest(comm, plan, weights):
    dp, tp = divmod(comm.rank, plan.parallel.tensor_parallel_size)
    return build(comm, plan, weights, mine=plan.placement.experts_of(tp * plan.parallel.data_parallel_size + dp))


def shared_rows_dispatched_over_the_ep_group(comm, plan, weights):
    return over_the_ep_group(comm, plan, weights)


def dispatched_over_the_ep_group_and_summed(comm, plan, weights):
    reduce = make_mode(plan, comm).reduce
    mode = replace(over_the_ep_group(comm, plan, weights).mode, reduce=reduce)
    return build(comm, plan, weights, mode=mode)


def every_rank_the_first_of_its_column(comm, plan, weights):
    """The catalogue of the whole EP group, used in the numbers of the DP group."""
    mode = make_mode(plan, comm)
    return build(comm, plan, weights, mode=replace(mode, placement=plan.placement.within([0, 1])))


SLICED, SLICED_TP2_DP2 = Case(tp=4, ep=False), Case(tp=2, dp=2, ep=False)
PCP = Case(pcp=2)
WRONG = [
    (summed_over_the_dp_group, TP2_DP2),
    (summed_over_the_dp_group, SLICED_TP2_DP2),
    (summed_over_half_of_the_group, Case(tp=4)),
    (summed_over_half_of_the_group, SLICED),
    (not_summed, Case(tp=2)),
    (not_summed, TP2_DP2),
    (not_summed, Case(tp=2, pcp=2)),
    (not_summed, SLICED),
    (summed_twice, Case(tp=2)),
    (summed_twice, TP2_DP2),
    (summed_twice, SLICED),
    (split_rows_summed_too, TP2_DP2_SP),
    (split_rows_summed_too, PCP),
    (other_kind_of_mode(_OwnRowsOnly), TP2_DP2_SP),
    (other_kind_of_mode(_OwnRowsOnly), PCP),
    (other_kind_of_mode(_OthersLeftZero), TP2_DP2_SP),
    (other_kind_of_mode(_EverySecondRow), TP2_DP2_SP),
    (other_kind_of_mode(_EverySecondRow), PCP),
    (other_kind_of_mode(_LastRankFirst), TP2_DP2_SP),
    (shared_added_before_the_sum, Case(tp=2)),
    (shared_added_before_the_sum, SLICED),
    (w2_of_the_neighbour, SLICED),
    (w2_of_the_neighbour, SLICED_TP2_DP2),
    (w2_every_second_column, SLICED),
    (w13_in_one_piece, SLICED),
    (slice_by_tp_rank, SLICED_TP2_DP2),
    (ep_ranks_with_tp_slowest, TP2_DP2),
    (ep_ranks_with_tp_slowest, TP2_DP2_SP),
    (shared_rows_dispatched_over_the_ep_group, TP2_DP2),
    (dispatched_over_the_ep_group_and_summed, TP2_DP2),
    (every_rank_the_first_of_its_column, TP2_DP2),
]


@pytest.mark.parametrize(("wrong", "case"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)))
def test_wrong_modes_are_caught(wrong, case):
    """No exchange of theirs disagrees, so only the comparison can tell."""
    assert not compare(case, 8, names=EVEN)
    found = compare(case, 8, names=EVEN, make=wrong)
    if wrong is shared_rows_dispatched_over_the_ep_group:  # nearly the same rows, by twice the work
        assert any("routes computed" in words for words in found) and any("payload" in words for words in found)
    else:
        assert any(": rank " in words for words in found), found


def test_a_sum_over_the_wrong_group_of_ragged_rows_is_refused():
    """Where the counts differ the headers already disagree."""
    with pytest.raises(ExchangeMismatch, match="all_reduce"):
        compare(TP2_DP2, 8, names=("ragged",), make=summed_over_the_dp_group)


@pytest.mark.parametrize(("sp", "order"), [(False, [[0, 1, 2, 3]]), (True, [[0, 2], [1, 3]])], ids=["shared", "sp"])
def test_sums_in_the_order_of_the_other_mode_are_caught(sp, order):
    """The last bits tell one stage from two; a wrong order inside a group cannot hide behind the tolerance."""
    case = replace(TP2_DP2, sp=sp)
    weights = make_problem(case, 10, torch.float32)
    batch = make_batches(case, weights)["ragged"]
    results = run_threads(4, lambda comm: run_case(comm, case, 10, names=("ragged",)))
    if not results[0]["verdict"].exact:
        pytest.xfail("last bits can only be compared where row invariance is promised")
    other = two_stage_layer(batch, weights, case.owners(10), order)
    outputs = [result["seen"]["ragged"].output for result in results]
    assert not all(torch.equal(rows, other[case.holder(rank)]) for rank, rows in enumerate(outputs))


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_payload_by_hand():
    """What the comparison expects, once with the numbers written out: rows of 128 bytes, 5 + 3 on two DP ranks."""
    counts, size = [5, 3], 128
    assert payload_by_hand(Case(dp=2), counts, size, size) == 8 * 2 * 128
    assert payload_by_hand(Case(tp=2), [8], size, size) == 2 * 8 * 128
    assert payload_by_hand(TP2_DP2, counts, size, size) == 16 * 2 * 128 + 2 * 8 * 128
    assert payload_by_hand(TP2_DP2_SP, counts, size, size) == 8 * 3 * 2 * 128 + 8 * 128
    assert payload_by_hand(Case(tp=2, pcp=2), [8], size, size) == 16 * 2 * 128 + 16 * 128 + 2 * 8 * 128


def test_without_a_mode_the_layer_takes_one_group():
    """The mode of a plan with one axis is the one the layer makes itself."""
    weights = make_problem(Case(), 10, torch.float32)
    for case in (Case(tp=3), Case(dp=3)):
        plan = case.plan(weights.config)

        def rank_function(comm, plan=plan):
            ours, own = make_mode(plan, comm), plain_mode(comm, plan.placement, BACKENDS[plan.backend.name])
            same = all(getattr(ours, name) is getattr(own, name) for name in ("dispatch", "reduce", "split"))
            return same, (ours.ep_rank, ours.ep_size) == (own.ep_rank, own.ep_size)

        assert run_threads(3, rank_function) == [(True, True)] * 3
