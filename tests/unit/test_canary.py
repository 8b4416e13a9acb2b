"""The known pass: silent in every legal mode, and every known fault is told in the words a reader needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from layer_cases import make_config, make_weights

from moe_course.backends import BACKENDS
from moe_course.comm.ledger import Entry
from moe_course.comm.sim import run_threads
from moe_course.dispatch import Dispatched
from moe_course.errors import ConfigError, VerificationFailed
from moe_course.expert_map import make_placement
from moe_course.experts import local_experts
from moe_course.guard.canary import canary
from moe_course.guard.known_layer import GATE, KnownLayer
from moe_course.guard.symptoms import Here, describe
from moe_course.layer import MoELayer
from moe_course.modes import make_mode, plain_mode
from moe_course.parallel import ParallelConfig, make_plan
from moe_course.stages import Stages

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class Case:
    """Sizes of the axes. `sp`: sequence-parallel MoE."""

    tp: int = 1
    dp: int = 1
    pcp: int = 1
    ep: bool = True
    sp: bool = False

    def __str__(self) -> str:
        sizes = [f"{axis}{n}" for axis in ("tp", "pcp", "dp") if (n := getattr(self, axis)) > 1]
        return "-".join([*(sizes or ["one"]), *([] if self.ep else ["sliced"]), *(["sp"] if self.sp else [])])

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pcp

    def plan(self, config):
        flags = ParallelConfig(
            tensor_parallel_size=self.tp,
            data_parallel_size=self.dp,
            prefill_context_parallel_size=self.pcp,
            enable_expert_parallel=self.ep,
            sequence_parallel_moe=None if self.sp else False,
        )
        return make_plan(flags, config)


CASES = [
    Case(tp, dp, pcp, ep, sp)
    for tp, dp, pcp in ((t, d, p) for t in (1, 2, 3) for d in (1, 2, 3, 4) for p in (1, 2, 3) if t * d * p <= 6)
    for ep in (True, False)
    for sp in (False, True)
    if not (dp > 1 and pcp > 1) and (not sp or (ep and tp > 1 and dp > 1))
]


def build(comm, case: Case, *, experts=10, dtype=torch.float32, kind=MoELayer, plan=None, **more) -> MoELayer:
    """The layer of one rank with random weights: the pass must not depend on them."""
    config = make_config(experts, min(4, experts), 16, 24)
    plan = plan or case.plan(config)
    mode = more.pop("mode", None) or make_mode(plan, comm)
    weights = make_weights(config, dtype)
    w13, w2 = weights.w13[plan.rank(comm.rank).experts], weights.w2[plan.rank(comm.rank).experts]
    inter = 24 // mode.moe_tp_size  # the mode's slice, whatever the plan says
    return kind(
        config,
        plan.placement,
        comm,
        BACKENDS[plan.backend.name],
        gate_weight=weights.gate,
        bias=weights.bias,
        w13=w13[:, : 2 * inter],
        w2=w2[:, :, :inter],
        mode=mode,
        **{"shared": weights.shared, "layer": 3} | more,
    )


def verdicts(case: Case, make=build, **more) -> list[str]:
    """What each rank raises, or an empty text."""

    def rank(comm):
        try:
            canary(make(comm, case, **more))
        except VerificationFailed as error:
            return str(error)
        return ""

    return run_threads(case.world, rank)


def verdict(case: Case, make=build, **more) -> str:
    """What all ranks raise alike, in one line."""
    found = verdicts(case, make, **more)
    assert len(set(found)) == 1 and "\n" not in found[0], found
    return found[0]


# -- nothing is wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_legal_mode_passes(case):
    """With uneven experts; another dtype and shape each time so that all of them occur often."""

    def rank(comm):
        for n, (experts, dtype) in enumerate([(10, "fp32"), (14, "bf16"), (7, "fp64")]):
            layer = build(comm, case, experts=experts, dtype=DTYPES[dtype], **({} if n else {"shared": None}))
            canary(layer)
            canary(layer, plan=case.plan(layer.config))

    run_threads(case.world, rank)


def round_robin(comm, case, **more):
    plan = case.plan(make_config(10, 4, 16, 24))
    return build(comm, case, plan=replace(plan, placement=make_placement(plan.moe.ep_size, 10, "round_robin")), **more)


@pytest.mark.parametrize("case", [case for case in CASES if case.ep and case.world > 1], ids=str)
def test_round_robin_passes(case):
    assert verdict(case, make=round_robin, dtype=torch.bfloat16) == ""


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("experts", [1, 2, 5, 256])
def test_one_rank_with_any_number_of_experts_passes(experts, dtype):
    assert verdict(Case(), experts=experts, dtype=dtype) == ""


def test_many_experts_on_eight_ranks_pass():
    assert verdict(Case(dp=8), experts=256, dtype=torch.bfloat16) == ""


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_silu_of_the_gate_is_exact(dtype):
    """What the pass rests on. silu(32) would not be exact in float64."""
    gate = torch.full((33,), GATE, dtype=dtype)
    assert torch.equal(F.silu(gate), gate)
    assert not torch.equal(F.silu(torch.tensor([32.0], dtype=torch.float64)), torch.tensor([32.0], dtype=torch.float64))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("experts", [8, 10, 256])
def test_rows_reach_everything(experts, ranks):
    """Each holder of rows visits all experts; one row visits all owners it can, one visits one owner; some routes
    are -1; holders have different numbers of rows, and one has none."""
    placement = make_placement(ranks, experts)
    known = KnownLayer(placement, 1, 4, True)
    counts = [len(known.numbers(holder)) for holder in range(4)]
    assert len(set(counts)) == 4 and counts[2] == 0
    for holder in (0, 1, 3):
        weights, ids = known.routing(known.numbers(holder))
        owners = [{int(placement.owner[e]) for e in row if e >= 0} for row in ids.tolist()]
        assert set(ids.flatten().tolist()) == {-1, *range(experts)}
        assert max(map(len, owners)) == min(ranks, known.routes) and min(map(len, owners)) == 0
        home = min(placement.num_local(holder % ranks), known.routes)  # routes of the row with one owner
        assert any(len(o) == 1 and (row >= 0).sum() == home for o, row in zip(owners, ids, strict=True))
        assert all(len(set(row)) == known.routes for row in weights.tolist())
        assert not (weights[1:] == weights[:-1]).any()


# -- something is wrong ----------------------------------------------------------------------------------------------


class ReducesTwice(MoELayer):
    def routed(self, *args):
        return self.mode.reduce.all_reduce(super().routed(*args))


class NeverReduces(MoELayer):
    def routed(self, *args):
        mode, self.mode = self.mode, replace(self.mode, reduce=None)
        routed = super().routed(*args)
        self.mode = mode
        return routed


class SharedInTheSum(MoELayer):
    """Every rank adds the shared expert to its partial sum, then the partial sums are added up."""

    def forward(self, hidden_states):
        rows = hidden_states[self.mode.own_rows(len(hidden_states))]
        reduce = self.mode.reduce
        self.mode = replace(self.mode, reduce=None)
        partial = self.routed(rows, *self.stages.route(rows, self.gate_weight, self.bias, self.config))
        return self.mode.all_rows(reduce.all_reduce(partial + self.shared_expert(rows)))


class ForgetsShared(MoELayer):
    def shared_expert(self, hidden_states):
        return torch.zeros_like(hidden_states)


class SharedOfOtherRows(MoELayer):
    def shared_expert(self, hidden_states):
        return super().shared_expert(hidden_states.roll(1, 0))


class SharedGateUpSwapped(MoELayer):
    def shared_expert(self, hidden_states):
        w13, w2 = self.shared
        up, gate = F.linear(hidden_states, w13).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w2)


class ScalesAgain(MoELayer):
    def routed(self, *args):
        return super().routed(*args) * self.config.routed_scaling_factor


class HalvesShared(MoELayer):
    def shared_expert(self, hidden_states):
        return super().shared_expert(hidden_states) / 2


class NotRounded(MoELayer):
    def forward(self, hidden_states):
        return super().forward(hidden_states).double()


class ForgetsItsSlice(MoELayer):
    """Gathered rows stay where they are: a rank keeps its own slice twice."""

    def forward(self, hidden_states):
        mode, self.mode = self.mode, replace(self.mode, split=None)
        output = super().forward(hidden_states[mode.own_rows(len(hidden_states))])
        self.mode = mode
        gathered = mode.all_rows(output)
        return gathered.roll(1, 0)


def weights_squared(dispatched, *args):
    return local_experts(replace(dispatched, topk_weights=dispatched.topk_weights**2), *args)


def weights_forgotten(dispatched, *args):
    return local_experts(replace(dispatched, topk_weights=torch.ones_like(dispatched.topk_weights)), *args)


def weights_reversed(dispatched, *args):
    return local_experts(replace(dispatched, topk_weights=dispatched.topk_weights.flip(1)), *args)


def up_before_gate(dispatched, w13, w2, expert_map):
    return local_experts(dispatched, torch.cat([*reversed(w13.chunk(2, dim=1))], dim=1), w2, expert_map)


def shifted_by_one(dispatched, w13, w2, expert_map):
    return local_experts(dispatched, w13.roll(1, 0), w2.roll(1, 0), expert_map)


def global_ids_as_local(dispatched, w13, w2, expert_map):
    ids = dispatched.topk_ids
    return local_experts(replace(dispatched, topk_ids=torch.where(ids >= 0, ids % len(w13), -1)), w13, w2, None)


def unwritten(dispatched, *args):
    out = local_experts(dispatched, *args)
    out[(dispatched.topk_ids < 0).all(1)] = float("nan")
    return out


def minus_one_is_the_last_expert(dispatched, *args):
    """Routes of -1 go to expert E - 1; here only on the rank that owns it, as ids of others are -1, too."""
    ids, expert_map = dispatched.topk_ids, args[-1]
    if expert_map is not None:
        return local_experts(dispatched, *args)
    return local_experts(replace(dispatched, topk_ids=torch.where(ids < 0, len(args[0]) - 1, ids)), *args)


def nothing(dispatched, *args):
    return local_experts(dispatched, *args) * 0


def columns_lost(dispatched, w13, w2, expert_map):
    """A kernel that stops too early: row numbers from 4 on have lost a bit."""
    w2 = w2.clone()
    w2[:, :, 3:] = 0
    return local_experts(dispatched, w13, w2, expert_map)


def rows_reversed(expert_output, dispatched, *, comm):
    backend = BACKENDS["no_dp_ep" if dispatched.handle is None else "allgather_reducescatter"]
    return backend.combine(expert_output, dispatched, comm=comm).flip(0)


def own_partials_only(expert_output, dispatched, *, comm):
    return expert_output.split(dispatched.handle)[comm.rank]


def combined_twice(expert_output, dispatched, *, comm):
    return BACKENDS["allgather_reducescatter"].combine(comm.all_reduce(expert_output), dispatched, comm=comm)


TP, TP4, SLICED, DP, DP3 = Case(tp=2), Case(tp=4), Case(tp=2, ep=False), Case(dp=2), Case(dp=3)
DP_SLICED, TPDP, TPDP_SLICED = Case(dp=3, ep=False), Case(tp=2, dp=2), Case(tp=2, dp=2, ep=False)
SP, PCP, PCP_TP, ONE = Case(tp=2, dp=2, sp=True), Case(pcp=2), Case(tp=2, pcp=2), Case()
SUMMED = [TP, SLICED, TPDP, TPDP_SLICED, PCP_TP]  # partial sums of shared rows
EVERY = [ONE, TP, SLICED, DP, DP_SLICED, TPDP, SP, PCP, PCP_TP]

FAULTS = {
    ReducesTwice: (SUMMED, "routed output is 2 x what it should be: partial sums were reduced twice"),
    NeverReduces: (SUMMED, "partial sums were never reduced"),
    SharedInTheSum: (SUMMED, "shared expert was added 2 times"),
    ForgetsShared: (EVERY, "shared expert was never added"),
    SharedOfOtherRows: (EVERY, "shared expert worked on other rows"),
    SharedGateUpSwapped: (EVERY, "gate and up rows of the shared expert changed places"),
    HalvesShared: (EVERY, "shared expert is 0.5 x what it should be"),
    NotRounded: ([ONE, DP, SP], "the layer returned torch.float64"),
    minus_one_is_the_last_expert: ([ONE, SLICED, DP_SLICED], "a route of -1 was computed: row "),
    nothing: (EVERY, "no contribution of any expert arrived"),
    ScalesAgain: (EVERY, "routed output is 2.5 x what it should be: routed_scaling_factor was applied once more"),
    ForgetsItsSlice: ([SP, PCP, PCP_TP], "rows came home in another order: row 0 holds row "),
    weights_squared: (EVERY, "weights were applied twice"),
    weights_forgotten: (EVERY, "weights were not applied at all"),
    weights_reversed: (EVERY, "weights were applied to the routes in reverse order"),
    up_before_gate: (EVERY, "gate and up rows of w13 changed places"),
    shifted_by_one: (EVERY, "expert ids were read in another numbering: row 0 met experts ["),
    unwritten: (EVERY, "holds NaN or infinity"),
    columns_lost: (
        [ONE, TP, DP, TPDP, SP, PCP],
        "routed output is wrong in a way that fits no known fault",
    ),
    rows_reversed: ([ONE, DP, DP_SLICED, TP, TPDP], "rows came home in another order: row 0 holds row "),
    own_partials_only: ([DP, DP3, DP_SLICED, PCP, SP], "partial sums were never reduced"),
    combined_twice: ([DP, DP_SLICED, SP, PCP], "x what it should be: sums were reduced twice"),
    global_ids_as_local: ([DP3], "expert ids were read in another numbering"),
}


def name_of(value) -> str:
    return getattr(value, "__name__", "-")


def with_fault(fault) -> dict:
    if isinstance(fault, type):
        return {"kind": fault}
    stage = "experts" if "expert_output" not in fault.__code__.co_varnames[:1] else "combine"
    return {"stages": Stages(**{stage: fault})}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("fault", "cases", "words"), [(f, *v) for f, v in FAULTS.items()], ids=lambda v: name_of(v))
def test_known_faults_are_told(fault, cases, words, dtype):
    for n, case in enumerate(cases):
        if n % 2 == (dtype == "bf16") or len(cases) == 1:
            said = verdict(case, dtype=DTYPES[dtype], **with_fault(fault))
            assert said.startswith("canary: ") and words in said, (str(case), said)
            assert ", layer 3" in said and "look " in said


def test_the_whole_message():
    """Words first, then both values, then where to look."""
    assert verdict(TP, kind=ReducesTwice) == (
        "canary: routed output is 2 x what it should be: partial sums were reduced twice, or each rank that shares "
        "rows dispatched them; rank 0, layer 3, row 0 with experts [0, 5, 1, 6, 2, 7, 3, 8]: the sum of weights that "
        "arrived is 3.98438, should be 1.99219; look at who adds up over ranks [0, 1]: one of combine and the layer, "
        "once; rank 1 saw errors, too"
    )


@pytest.mark.parametrize("case", [TP4, Case(tp=4, ep=False), Case(tp=4, dp=2)], ids=str)
def test_the_number_of_times_is_told(case):
    assert "routed output is 4 x what it should be" in verdict(case, kind=ReducesTwice)
    assert "shared expert was added 4 times" in verdict(case, kind=SharedInTheSum, dtype=torch.bfloat16)


def test_parts_are_told_apart_also_where_they_outnumber_the_rows():
    """64 owners: what arrived cannot be solved for any more, but it can be guessed."""
    known = KnownLayer(make_placement(64, 256), 1, 1, False)
    numbers = known.numbers(0)
    whole = known.routed(numbers)
    here = Here(rank=9, layer=3, part=0, met=list(range(64)), own=slice(None), reduced=list(range(64)), scale=2.5)
    for part in range(0, 64, 3):
        own = known.routed(numbers, part=part)
        here = replace(here, part=part)
        assert "its own EP rank's: partial sums were never reduced" in describe(known, numbers, own, here)
        assert f"partial sums of EP rank {part} are missing: " in describe(known, numbers, whole - own, here)
    assert "routed output is 64 x what it should be" in describe(known, numbers, whole * 64, here)


@pytest.mark.parametrize("case", [TPDP, Case(tp=3, dp=2)], ids=str)
def test_replicas_counted_again(case):
    """TP ranks send the rows they share to all EP ranks, each its copy; then the TP group adds up finished rows."""

    def make(comm, case, **more):
        class Replicas(MoELayer):
            def routed(self, hidden_states, topk_weights, topk_ids):
                backend = BACKENDS["allgather_reducescatter"]
                sent = backend.dispatch(hidden_states, topk_weights, topk_ids, comm=comm, placement=self.placement)
                partial = self.stages.experts(sent, self.w13, self.w2, self.expert_map)
                return self.mode.reduce.all_reduce(backend.combine(partial, sent, comm=comm)).to(hidden_states.dtype)

        return build(comm, case, kind=Replicas, **more)

    said = verdict(case, make=make)
    assert f"is {case.tp} x what it should be: partial sums were reduced twice, or each rank that shares rows" in said


@pytest.mark.parametrize("case", [Case(tp=3), DP3, TPDP, SP, Case(pcp=3), Case(tp=3, ep=False)], ids=str)
def test_an_owner_whose_partial_sums_are_missing_is_named(case):
    """Rank 1 computes nothing. It owns EP rank 1, or slice 1; where it shares rows, others lack its part."""

    def make(comm, case, **more):
        def lazy(dispatched, *args):
            return local_experts(dispatched, *args) * (comm.rank != 1)

        return build(comm, case, stages=Stages(experts=lazy), **more)

    said = verdict(case, make=make)
    assert f"partial sums of {'EP rank' if case.ep else 'slice'} 1 are missing" in said, said


def test_an_owner_counted_again_is_named():
    """One rank doubles what it contributes: neither a factor of the whole nor something missing."""

    def make(comm, case, **more):
        def eager(dispatched, *args):
            return local_experts(dispatched, *args) * (1 + (comm.rank == 2))

        return build(comm, case, stages=Stages(experts=eager), **more)

    assert "partial sums arrived another number of times than once: EP rank 2 2 times" in verdict(DP3, make=make)


# -- rows that travel by all-to-all ------------------------------------------------------------------------------------


def send(hidden_states, topk_weights, topk_ids, *, comm, placement):
    """Each owner gets the rows that need it, once. `handle`: what was sent, what came, how many rows there were."""
    owner = torch.where(topk_ids >= 0, placement.owner[topk_ids.long()], -1)  # [T, K]
    rows = [(owner == rank).any(1).nonzero().flatten() for rank in range(comm.world_size)]
    order, counts = torch.cat(rows), [len(part) for part in rows]
    came = comm.all_to_all_rows(hidden_states[order], counts, topk_weights[order], topk_ids[order], order)
    weights, ids, theirs = came.metadata
    ids = torch.where((ids >= 0) & (placement.owner[ids.long()] == comm.rank), ids, -1)
    handle = (order, counts, theirs, came.counts, len(hidden_states))
    return Dispatched(came.rows, None, ids, weights, None, "rows", handle)


def bring_home(expert_output, dispatched, *, comm, wrong_side=False):
    """Partial sums go back where their rows came from; row numbers are those that this rank sent."""
    order, counts, theirs, received, n = dispatched.handle
    back = comm.all_to_all_rows(expert_output, received, receive_counts=counts).rows
    if wrong_side:  # the row numbers that came with the rows of others
        order = theirs.repeat(len(order) // max(1, len(theirs)) + 1)[: len(order)] % n if n else order
    out = back.new_zeros(n, back.shape[1])
    for part, rows in zip(back.split(counts), order.split(counts), strict=True):
        out.index_add_(0, rows, part)
    return out


def from_the_wrong_side(expert_output, dispatched, *, comm):
    return bring_home(expert_output, dispatched, comm=comm, wrong_side=True)


@pytest.mark.parametrize("case", [DP, DP3, TPDP, SP, PCP, PCP_TP, Case(dp=4)], ids=str)
def test_own_dispatch_and_combine_pass_and_a_combine_with_the_wrong_ids_does_not(case):
    assert verdict(case, stages=Stages(dispatch=send, combine=bring_home), dtype=torch.bfloat16) == ""
    said = verdict(case, stages=Stages(dispatch=send, combine=from_the_wrong_side))
    assert "canary: routed output is wrong" in said or "came home" in said or "arrived" in said, said


# -- one rank alone, groups that are wrong themselves, no trace --------------------------------------------------------


@pytest.mark.parametrize("case", [DP3, TPDP, SP, PCP_TP, Case(tp=3, ep=False)], ids=str)
def test_a_fault_that_one_rank_sees_is_raised_by_all(case):
    """In a 2 x 2 grid the verdict crosses both groups; nobody waits for a rank that has left."""
    culprit = 1 if case is DP3 else case.world - 1  # rank 2 of DP3 has no rows

    def make(comm, case, **more):
        return build(comm, case, kind=ForgetsShared if comm.rank == culprit else MoELayer, **more)

    said = verdict(case, make=make)
    assert f"shared expert was never added; rank {culprit}, layer 3" in said
    assert ("saw errors, too" in said) == (case in (SP, PCP_TP))  # there, others get its rows


@pytest.mark.parametrize("case", [TP, TPDP, SLICED, PCP_TP], ids=str)
def test_a_mode_without_its_sum_is_caught(case):
    """The groups themselves are wrong. By the plan, ranks share rows; by the mode alone they might not."""

    def rank(comm):
        plan = case.plan(make_config(10, 4, 16, 24))
        layer = build(comm, case, mode=replace(make_mode(plan, comm), reduce=None))
        with pytest.raises(VerificationFailed) as caught:
            canary(layer, plan=plan)
        return str(caught.value)

    assert all("partial sums were never reduced" in said for said in run_threads(case.world, rank))


def test_a_mode_that_adds_up_finished_rows_is_caught():
    """TP ranks dispatch over the EP group, as data-parallel ranks do, and their rows are then added up."""

    def rank(comm):
        plan = TPDP.plan(make_config(10, 4, 16, 24))
        mode = make_mode(plan, comm)
        wrong = replace(mode, dispatch=comm, placement=plan.placement)
        with pytest.raises(VerificationFailed) as caught:
            canary(build(comm, TPDP, mode=wrong), plan=plan)
        return str(caught.value)

    assert all("routed output is 2 x what it should be" in said for said in run_threads(4, rank))


def test_the_plan_says_who_shares_rows():
    """By its groups this rank is data-parallel and all is well; by the plan it shares rows, and they are summed."""

    def rank(comm):
        plan = TP.plan(make_config(10, 4, 16, 24))

        class SumsFinishedRows(MoELayer):
            def routed(self, *args):
                return comm.all_reduce(super().routed(*args))

        backend = BACKENDS["allgather_reducescatter"]
        layer = build(comm, TP, mode=plain_mode(comm, plan.placement, backend), kind=SumsFinishedRows)
        layer.backend = backend
        with pytest.raises(VerificationFailed) as caught:
            canary(layer, plan=plan)
        return str(caught.value)

    assert all("routed output is 2 x what it should be: sums were" in said for said in run_threads(2, rank))


@pytest.mark.parametrize("kind", [MoELayer, ForgetsShared], ids=["fine", "failing"])
@pytest.mark.parametrize("case", [TPDP, PCP_TP], ids=str)
def test_no_trace_is_left(case, kind):
    """Ledger, layer, step, weights and events are as before, also after a failure."""

    def rank(comm):
        events = []
        layer = build(comm, case, kind=kind, on_event=lambda stage, *_, **__: events.append(stage))
        comm.ledger.add("barrier", 7, comm.rank, 0, Entry(payload=5))
        comm.layer, comm.step = 7, 11
        ledger, entries, weights = comm.ledger, comm.ledger.as_rows(), layer.w13.clone()
        attributes = {name: id(value) for name, value in vars(layer).items()}
        try:
            canary(layer)
        except VerificationFailed:
            assert kind is ForgetsShared
        assert comm.ledger is ledger and comm.ledger.as_rows() == entries and ledger.rows_received == 0
        assert all((group.layer, group.step) == (7, 11) for group in layer.mode.groups())
        assert not events and torch.equal(layer.w13, weights)
        assert {name: id(value) for name, value in vars(layer).items()} == attributes
        layer(torch.zeros(3, 16))  # the groups still work
        return events

    assert all(events == ["route", "dispatch", "experts", "combine"] for events in run_threads(case.world, rank))


def test_headers_show_the_step():
    """So that a mismatch in the pass cannot be taken for one of the run."""
    seen = []

    def combine(expert_output, dispatched, *, comm):
        seen.append((comm.layer, comm.step))
        return BACKENDS["allgather_reducescatter"].combine(expert_output, dispatched, comm=comm)

    assert verdict(DP, stages=Stages(combine=combine)) == ""
    assert seen == [(3, -1)] * 2


def test_an_error_of_a_stage_says_where_it_was_raised():
    def broken(dispatched, *args):
        raise KeyError("no such thing")

    with pytest.raises(KeyError) as caught:
        verdicts(DP, stages=Stages(experts=broken))
    assert any("known pass before generation" in note for note in caught.value.__notes__)


def test_values_where_no_expert_writes_are_told():
    class Noise(MoELayer):
        def routed(self, *args):
            output = super().routed(*args)
            output[:, -1] += 1
            return output

    assert "columns hold values that no expert writes" in verdict(DP, kind=Noise, shared=None)


def test_too_many_rows_are_refused_by_the_layer():
    """With both shapes, before anything is added to them."""

    def all_rows_kept(expert_output, dispatched, *, comm):
        return comm.all_reduce(expert_output)

    def rank(comm):
        canary(build(comm, DP, stages=Stages(combine=all_rows_kept), shared=None))

    with pytest.raises(ConfigError, match=r"combine returned \(11, 16\), expected"):
        run_threads(DP.world, rank)


@pytest.mark.parametrize("rank", range(4))
def test_two_turns_leave_no_rank_out(rank):
    """In one turn some rank has no rows, and what is wrong there alone goes unseen."""
    case = Case(dp=4)

    class TwiceOnOneRank(MoELayer):
        def routed(self, *args):
            return super().routed(*args) * (2 if self.comm.world_rank == rank else 1)

    def run(comm):
        layer, seen = build(comm, case, kind=TwiceOnOneRank), []
        for turn in range(2):
            try:
                canary(layer, plan=case.plan(layer.config), turn=turn)
            except VerificationFailed as error:
                seen.append(str(error))
        return seen

    for seen in run_threads(4, run):
        assert seen and all(f"rank {rank}" in text for text in seen)
