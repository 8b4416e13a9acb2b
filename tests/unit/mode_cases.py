"""All legal combinations of TP, PCP and DP, one layer in each, and what one process makes of the same rows.

Used by the tests in threads and, in worker processes, by the tests on gloo. `two_stage_layer` is an oracle of its
own: torch and loops, nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from layer_cases import TOLERANCE, Batch, Weights, differences, make_batch, make_config, make_weights

from moe_course.backends import BACKENDS
from moe_course.backends.traffic import RowBytes
from moe_course.comm.base import Comm
from moe_course.comm.ledger import Ledger
from moe_course.config import MoEConfig
from moe_course.layer import MoELayer
from moe_course.lessons import reference
from moe_course.modes import Mode, make_mode, payload_bound
from moe_course.parallel import ParallelConfig, Plan, make_plan
from moe_course.router import route

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
#: E -> K, H and the width: I where experts are whole, columns per rank where they are sliced.
SHAPES = {8: (2, 32, 16), 10: (4, 32, 12), 14: (3, 32, 12), 256: (8, 16, 4)}


@dataclass(frozen=True)
class Case:
    """Sizes of the axes; `ep` off: experts are sliced; `sp`: sequence-parallel MoE, which needs tp and dp above 1."""

    tp: int = 1
    pcp: int = 1
    dp: int = 1
    ep: bool = True
    sp: bool = False
    pp: int = 1
    external_dp: int = 1
    strategy: str = "linear"  # round robin is only kept where no rows travel

    def __str__(self) -> str:
        sizes = [f"{name}{getattr(self, name)}" for name in ("external_dp", "pp", "tp", "pcp", "dp")]
        used = [size for size in sizes if not size.endswith(("dp1", "pp1", "tp1", "pcp1"))]
        return "-".join([*(used or ["one"]), "ep" if self.ep else "sliced"] + ["sp"] * self.sp)

    @property
    def flat(self) -> int:
        """Ranks of one EP group: those that share the experts of a layer."""
        return self.tp * self.pcp * self.dp

    @property
    def world(self) -> int:
        return self.flat * self.pp * self.external_dp

    @property
    def row_holders(self) -> int:
        """Different sets of rows: one for each DP rank, pipeline stage and copy of the deployment."""
        return self.external_dp * self.dp * self.pp

    def holder(self, rank: int) -> int:
        """Whose rows a world rank has; TP and PCP ranks share them, as attention is replicated."""
        return rank // (self.pcp * self.tp)

    def columns(self) -> list[list[int]]:
        """EP ranks by TP column, or all in one column where a row is finished in one stage."""
        if self.sp or not self.ep:
            return [list(range(self.flat))]
        return [list(range(tp, self.flat, self.tp)) for tp in range(self.tp)]

    def owners(self, experts: int) -> torch.Tensor:
        """EP rank of each expert. Linear: the first E % R ranks own one more. `[E]`"""
        if self.strategy == "round_robin":
            return torch.arange(experts) % self.flat
        counts = [experts // self.flat + (rank < experts % self.flat) for rank in range(self.flat)]
        return torch.tensor([rank for rank, n in enumerate(counts) for _ in range(n)])

    def plan(self, config: MoEConfig) -> Plan:
        flags = ParallelConfig(
            tensor_parallel_size=self.tp,
            data_parallel_size=self.dp,
            prefill_context_parallel_size=self.pcp,
            pipeline_parallel_size=self.pp,
            external_data_parallel_size=self.external_dp,
            enable_expert_parallel=self.ep,
            sequence_parallel_moe=None if self.sp else False,
            expert_placement_strategy=self.strategy,
        )
        return make_plan(flags, config)


def legal_cases(most: int) -> list[Case]:
    """All (tp, pcp, dp) with at most `most` ranks, EP on and off, sequence parallel on and off where it applies."""
    sizes = range(1, most + 1)
    found = []
    for tp, pcp, dp in ((tp, pcp, dp) for tp in sizes for pcp in sizes for dp in sizes):
        if tp * pcp * dp <= most and not (dp > 1 and pcp > 1):
            found += [Case(tp, pcp, dp), Case(tp, pcp, dp, ep=False)]
            if tp > 1 and dp > 1:
                found.append(Case(tp, pcp, dp, sp=True))
    return found


def make_problem(case: Case, experts: int, dtype: torch.dtype) -> Weights:
    """Weights of one layer. Sliced experts get as many columns for each rank, so that the slices are equal."""
    return _weights(experts, 1 if case.ep else case.flat, dtype, 2 if case.strategy == "round_robin" else 1)


@cache
def _weights(experts: int, slices: int, dtype: torch.dtype, n_group: int) -> Weights:
    top_k, hidden, width = SHAPES[experts]
    return make_weights(make_config(experts, top_k, hidden, width * slices, n_group=n_group), dtype, seed=2)


# -- rows ------------------------------------------------------------------------------------------------------------


def make_batches(case: Case, weights: Weights) -> dict[str, Batch]:
    """Rows and fixed routing of every row holder, by name."""
    config, dtype, ranks = weights.config, weights.w13.dtype, case.row_holders
    ragged = [(5 * rank + 3) % 7 for rank in range(ranks)] if ranks > 1 else [11]  # 3, 1, 6, 4, 2, 0, 5, 3

    def batch(counts: list[int], seed: int) -> Batch:
        return make_batch(counts, config, dtype, seed)

    found = {
        "ragged": batch(ragged, 1),
        "no rows on every second rank": batch([rank % 2 * 5 for rank in range(ranks)], 2),
        "no rows": batch([0] * ranks, 3),
        "one row": batch([0] * (ranks - 1) + [1], 4),
        "all rows to one expert": batch([3 + rank % 2 for rank in range(ranks)], 5),
        "routes and whole rows of -1": batch([4] * ranks, 6),
        "all experts of a row on one rank": batch([2 + rank % 3 for rank in range(ranks)], 7),
    }
    for ids in found["all rows to one expert"].topk_ids:
        ids[:, 1:] = -1
        ids[:, 0] = config.n_routed_experts - 1
    for rank, ids in enumerate(found["routes and whole rows of -1"].topk_ids):
        ids[0] = -1
        ids[1, rank % ids.shape[1]] = -1
        ids[2, 0] = ids[2, -1] = -1
    owner = case.owners(config.n_routed_experts)
    for rank, ids in enumerate(found["all experts of a row on one rank"].topk_ids):
        for row in range(len(ids)):
            targets = (owner == (row + rank + 1) % case.flat).nonzero().flatten()[: ids.shape[1]]
            ids[row] = F.pad(targets, (0, ids.shape[1] - len(targets)), value=-1)
    strided = [torch.stack([rows, -rows], dim=2)[:, :, 0] for rows in found["ragged"].hidden_states]
    found["ragged"] = replace(found["ragged"], hidden_states=strided)
    return found


def routed_by_layer(batch: Batch, weights: Weights) -> Batch:
    """The same rows with the router's answer, given to all rows of a holder at once."""
    answers = [route(rows, weights.gate, weights.bias, weights.config) for rows in batch.hidden_states]
    return Batch(batch.hidden_states, [weights for weights, _ in answers], [ids for _, ids in answers])


def answer(batch: Batch) -> Callable:
    """A router that knows each row by its values, whichever rank asks and in whatever order."""
    known = {}
    for rows, weights, ids in zip(batch.hidden_states, batch.topk_weights, batch.topk_ids, strict=True):
        known |= {tuple(row): pair for row, *pair in zip(rows.tolist(), weights, ids, strict=True)}

    def route(hidden_states, gate_weight, bias, config):
        found = [known[tuple(row)] for row in hidden_states.tolist()]
        top_k = config.num_experts_per_tok
        weights = torch.stack([weights for weights, _ in found]) if found else torch.zeros(0, top_k)
        ids = torch.stack([ids for _, ids in found]) if found else torch.zeros(0, top_k, dtype=torch.int32)
        return weights, ids

    return route


# -- one layer on one rank -------------------------------------------------------------------------------------------


def own_slice(w13: torch.Tensor, w2: torch.Tensor, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slice `rank` of every expert: gate rows, then the same up rows, and those columns of `w2`."""
    width = w2.shape[2] // ranks
    first, end, inter = rank * width, (rank + 1) * width, w2.shape[2]
    return torch.cat([w13[:, first:end], w13[:, inter + first : inter + end]], dim=1), w2[:, :, first:end]


def build(
    comm: Comm,
    plan: Plan,
    weights: Weights,
    *,
    mode: Mode | None = None,
    mine: list[int] | None = None,
    cut: Callable = own_slice,
    kind: type[MoELayer] = MoELayer,
    **more: Any,
) -> MoELayer:
    """The layer of one rank of a plan. The keywords are where known-wrong versions differ."""
    mine = plan.rank(comm.rank).experts if mine is None else mine
    w13, w2 = weights.w13[mine], weights.w2[mine]
    if not plan.moe.use_ep:
        w13, w2 = cut(w13, w2, plan.rank(comm.rank).ep_rank, plan.moe.tp_size)
    return kind(
        weights.config,
        plan.placement,
        comm,
        BACKENDS[plan.backend.name],
        gate_weight=weights.gate,
        bias=weights.bias,
        w13=w13,
        w2=w2,
        mode=make_mode(plan, comm) if mode is None else mode,
        **{"shared": weights.shared, "layer": 3} | more,
    )


@dataclass
class Seen:
    """What one rank saw of one batch. Bytes are those it sent."""

    output: torch.Tensor
    rows: torch.Tensor | None = None  # [T, H], rows this rank asked the router for
    topk_ids: torch.Tensor | None = None  # [T, K]
    live: int = 0  # routes that reach its experts
    dispatched: int = 0  # rows sent until then
    payload: int = 0
    received: int = 0  # rows
    sent: int = 0


def watch(comm: Comm, layer: MoELayer, rows: torch.Tensor) -> Seen:
    """Run the layer once and count."""
    comm.ledger = ledger = Ledger()
    seen = Seen(torch.empty(0))

    def on_event(stage: str, _, **tensors: Any) -> None:
        if stage == "route":
            seen.rows, seen.topk_ids = tensors["hidden_states"], tensors["topk_ids"]
        elif stage == "dispatch":
            seen.live = int((tensors["dispatched"].topk_ids >= 0).sum())
            seen.dispatched = ledger.total().rows

    layer.on_event = on_event
    seen.output = layer(rows)
    total = ledger.total(layer=layer.layer)
    seen.payload, seen.sent, seen.received = total.payload, total.rows, ledger.rows_received
    return seen


def run_case(
    comm: Comm,
    case: Case,
    experts: int,
    dtype: str = "fp32",
    names: Iterable[str] | None = None,
    make: Callable[..., MoELayer] = build,
) -> dict[str, Any]:
    """One layer, all batches or those with these names; "own router" is "ragged" without fixed routing."""
    weights = make_problem(case, experts, DTYPES[dtype])
    batches, found = make_batches(case, weights), {}
    layer = make(comm, case.plan(weights.config), weights)
    own_router = layer.stages
    for name in names or [*batches, "own router"]:
        batch = batches["ragged" if name == "own router" else name]
        layer.stages = own_router if name == "own router" else replace(own_router, route=answer(batch))
        found[name] = watch(comm, layer, batch.hidden_states[case.holder(comm.rank)])
    return {"seen": found, "verdict": layer.row_invariance() if comm.rank == 0 else None}


# -- what one process makes of it ------------------------------------------------------------------------------------


def two_stage_layer(batch: Batch, weights: Weights, owner: torch.Tensor, columns: list[list[int]]) -> list:
    """Partial sums per owner in k order; added over the owners of a column, then over columns; rounded; shared +.

    A row is computed alone, as the first of 32 of which the others are zero. Output `[T, H]` of every holder.
    """

    def times(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (F.pad(row.unsqueeze(0), (0, 0, 0, 31)) @ weight.T)[0]

    def swiglu(row: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        both, half = times(row, w13), w2.shape[1]
        return times(F.silu(both[:half]) * both[half:], w2)

    outputs = []
    for rows, factors, ids in zip(batch.hidden_states, batch.topk_weights, batch.topk_ids, strict=True):
        acc = torch.float64 if rows.dtype == torch.float64 else torch.float32
        finished = []
        for row, row_factors, row_ids in zip(rows.contiguous(), factors, ids.tolist(), strict=True):
            total = torch.zeros(len(row), dtype=acc)
            for column in columns:
                column_sum = torch.zeros(len(row), dtype=acc)
                for rank in column:
                    partial = torch.zeros(len(row), dtype=acc)
                    for factor, expert in zip(row_factors.to(acc), row_ids, strict=True):
                        if expert >= 0 and owner[expert] == rank:
                            partial += factor * swiglu(row, weights.w13[expert], weights.w2[expert]).to(acc)
                    column_sum += partial
                total += column_sum
            finished.append(swiglu(row, *weights.shared) + total.to(row.dtype))
        outputs.append(torch.stack(finished) if finished else torch.zeros_like(rows))
    return outputs


def one_process(case: Case, batch: Batch, weights: Weights) -> list[torch.Tensor]:
    """The slow reference, or the two-stage oracle where rows are summed over two groups. One output per holder."""
    ranks, columns = case.flat, case.columns()
    owner = case.owners(weights.config.n_routed_experts)
    if not case.ep:  # as if one rank owned all of every expert
        ranks, owner = 1, torch.zeros_like(owner)
    if case.ep and len(columns) > 1 and len(columns[0]) > 1:
        return two_stage_layer(batch, weights, owner, columns)
    return reference.moe_layer(
        batch.hidden_states,
        batch.topk_weights,
        batch.topk_ids,
        weights.w13,
        weights.w2,
        SimpleNamespace(owner=owner, ep_size=ranks),
        weights.shared,
    )


def far_apart(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    """Where sliced experts are further away from whole ones than the tolerance, in words."""
    found = []
    for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        limit = TOLERANCE[theirs.dtype] * max([1.0, *theirs.abs().flatten().tolist()])
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            found.append(f"rank {rank}: {tuple(ours.shape)} {ours.dtype}, expected {tuple(theirs.shape)}")
        elif not torch.allclose(ours, theirs, rtol=0, atol=limit):
            found.append(f"rank {rank}: differs by up to {(ours - theirs).abs().max():.3g} ({limit:.3g} wanted)")
    return found


def payload_by_hand(case: Case, counts: list[int], row: int, partial: int) -> int:
    """Bytes of one batch over all ranks, from the sizes of the axes alone; `row` and `partial` are bytes of one."""
    n, tp, others = sum(counts), case.tp, max(case.dp, case.pcp) - 1
    if case.sp:  # each row once to all ranks and back, then to its TP peers
        return n * (case.flat - 1) * (row + partial) + n * (tp - 1) * row
    travel = n * tp * others * (row + partial)  # in each TP column
    gather = n * tp * others * row if case.pcp > 1 else 0
    return travel + gather + 2 * n * (tp - 1) * partial


def findings(case: Case, experts: int, dtype: str, results: list[dict[str, Any]]) -> list[str]:
    """All that differs from one process: rows, routes that were computed, rows and bytes that travelled."""
    weights = make_problem(case, experts, DTYPES[dtype])
    plan, verdict = case.plan(weights.config), results[0]["verdict"]
    batches = make_batches(case, weights)
    batches["own router"] = routed_by_layer(batches["ragged"], weights)
    exact = case.ep or case.flat == 1
    row, partial = (weights.w13.shape[2] * size for size in (DTYPES[dtype].itemsize, 8 if dtype == "fp64" else 4))
    found = []
    for name in results[0]["seen"]:
        batch, seen = batches[name], [result["seen"][name] for result in results]
        expected = one_process(case, batch, weights)
        expected = [expected[case.holder(rank)] for rank in range(case.world)]
        outputs = [one.output for one in seen]
        wrong = differences(outputs, expected, verdict) if exact else far_apart(outputs, expected)
        live = sum(int((ids >= 0).sum()) for ids in batch.topk_ids) * (1 if case.ep else case.flat)
        counts = [len(rows) for rows in batch.hidden_states]
        backend, sizes = BACKENDS[plan.backend.name], RowBytes(row, partial, row)
        bound = payload_bound(plan, backend, [one.topk_ids for one in seen], sizes, row, partial)
        for what, ours, theirs in [
            ("routes computed", sum(one.live for one in seen), live),
            ("rows received", sum(one.received for one in seen), sum(one.sent for one in seen)),
            ("payload", sum(one.payload for one in seen), payload_by_hand(case, counts, row, partial)),
            ("payload_bound", bound, payload_by_hand(case, counts, row, partial)),
        ]:
            if ours != theirs:
                wrong.append(f"{what}: {ours}, expected {theirs}")
        found += [f"{name}: {words}" for words in wrong]
    return found
