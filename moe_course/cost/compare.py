"""The same rows through every shape, for real: dispatch, experts, combine, on any transport, in turns.

What a rank does is `measure`; it runs in threads as well as in processes. Built in: notebooks 10 and 11.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_course.backends.configure import Backend, configure
from moe_course.combine import accumulator
from moe_course.comm.base import Comm
from moe_course.comm.ledger import Entry, Ledger
from moe_course.cost.replay import Shown
from moe_course.dispatch import Dispatched
from moe_course.expert_map import Placement, make_placement
from moe_course.experts import local_experts
from moe_course.rows import row_invariance

NOT_COUNTED = ("barrier", "window")  # they keep the measurement in step, and make windows once
BASE = "allgather_reducescatter"  # outputs are compared with this one's


@dataclass(frozen=True)
class Job:
    """What all ranks measure; JSON-ready but for `ids`, `rank` and `batch`.

    Attributes:
        ids: `[N, K]` int32, rows of all passes and ranks; rank, batch: `[N]`, whose row it is, and in which pass.
        lines: name, shape and reduce_in_node of each way to measure.
    """

    ids: torch.Tensor
    rank: torch.Tensor
    batch: torch.Tensor
    lines: list[list]
    world_size: int
    experts: int
    strategy: str
    ranks_per_node: int | tuple[int, ...]
    hidden_size: int
    inter: int
    dtype: str
    dispatch_quant: str | None
    max_num_tokens: int
    rounds: int
    seed: int

    @property
    def placement(self) -> Placement:
        return make_placement(self.world_size, self.experts, self.strategy, ranks_per_node=self.ranks_per_node)

    @property
    def passes(self) -> int:
        return int(self.batch.max()) + 1

    def ids_per_rank(self, batch: int) -> list[torch.Tensor]:
        """`topk_ids` of each rank in one pass."""
        now = self.batch == batch
        return [self.ids[now & (self.rank == r)] for r in range(self.world_size)]

    def backends(self) -> dict[Shown, Backend]:
        """Each line with its configured backend."""
        options = {"max_num_tokens": self.max_num_tokens, "format": self.dispatch_quant}
        return {
            line: configure(line.shape, **options, **line.options) for line in (Shown(*each) for each in self.lines)
        }


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a pass; `everybody`: those of all ranks, as ranks that share rows have them."""

    rows: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    everybody: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    first: int  # place of this rank's first row among all


def measure(comm: Comm, job: Job, on_round: Callable[[int], None] = lambda done: None) -> dict:
    """What this rank saw: seconds of dispatch and combine per round, its ledger, and how outputs differ.

    Both are entered by all ranks at once, and experts are not timed: who computes longer does not make others wait.
    """
    placement, dtype = job.placement, getattr(torch, job.dtype)
    w13, w2 = expert_weights(job, placement.experts_of(comm.rank))
    expert_map = torch.where(placement.owner == comm.rank, placement.local, -1)
    batches = [_batch(job, number, comm.rank, dtype) for number in range(job.passes)]
    backends = job.backends()
    seconds: dict[str, list[float]] = {line.name: [] for line in backends}
    sent: dict[str, Entry] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    for round_ in range(job.rounds + 1):  # the first one warms up, makes windows, and gives the outputs
        lines = list(backends)
        lines = lines[round_ % len(lines) :] + lines[: round_ % len(lines)]  # nobody always comes first
        for line in lines:
            comm.ledger, spent, found = Ledger(), 0.0, []
            for number, batch in enumerate(batches):
                comm.step = number
                output, took = _pass(comm, line.shape, backends[line], batch, placement, (w13, w2, expert_map))
                spent += took
                found.append(output.to(dtype))
            if round_ == 0:
                outputs[line.name] = found
            else:
                seconds[line.name].append(spent / len(batches))
                sent[line.name] = _sent(comm.ledger)
        on_round(round_)
    verdict = row_invariance([(job.hidden_size, 2 * job.inter), (job.inter, job.hidden_size)], dtype, w13.device)
    return {
        "rank": comm.rank,
        "seconds": seconds,
        "sent": {name: vars(entry) for name, entry in sent.items()},
        "difference": {name: _difference(found, outputs[BASE]) for name, found in outputs.items()},
        "exact": verdict.exact,
        "exact_reason": verdict.reason,
    }


def expert_weights(job: Job, experts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`w13 [n, 2I, H]` and `w2 [n, H, I]` of some experts; the same on whatever rank they are."""
    dtype, w13, w2 = getattr(torch, job.dtype), [], []
    for expert in experts:
        generator = torch.Generator().manual_seed(job.seed * 1_000_003 + expert)
        w13.append(torch.randn(2 * job.inter, job.hidden_size, generator=generator) * job.hidden_size**-0.5)
        w2.append(torch.randn(job.hidden_size, job.inter, generator=generator) * job.inter**-0.5)
    return torch.stack(w13).to(dtype), torch.stack(w2).to(dtype)


def rows_of(job: Job, batch: int, rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states `[n, H]` and routing weights `[n, K]` of a rank in a pass; random, the same everywhere."""
    generator = torch.Generator().manual_seed((job.seed * 1009 + batch) * 65_537 + rank)
    rows = torch.randn(n, job.hidden_size, generator=generator).to(getattr(torch, job.dtype))
    return rows, torch.rand(n, job.ids.shape[1], generator=generator) + 0.1


def _batch(job: Job, number: int, rank: int, dtype: torch.dtype) -> Batch:
    ids = job.ids_per_rank(number)
    made = [rows_of(job, number, r, len(one)) for r, one in enumerate(ids)]
    everybody = torch.cat([rows for rows, _ in made]), torch.cat([w for _, w in made]), torch.cat(ids)
    return Batch(*made[rank], ids[rank], everybody, sum(len(one) for one in ids[:rank]))


def _pass(comm: Comm, shape: str, backend: Backend, batch: Batch, placement: Placement, experts) -> tuple:
    """One pass through one shape: output `[T, H]` in accumulator precision, seconds of dispatch and combine."""
    shared = shape == "no_dp_ep"
    rows, weights, ids = batch.everybody if shared else (batch.rows, batch.weights, batch.ids)
    comm.barrier()
    began = time.perf_counter()
    dispatched: Dispatched = backend.dispatch(rows, weights, ids, comm=comm, placement=placement)
    there = time.perf_counter()
    computed = local_experts(dispatched, *experts)
    comm.barrier()
    back = time.perf_counter()
    output = backend.combine(computed, dispatched, comm=comm)
    if shared:  # every rank holds a partial sum of every row
        output = comm.all_reduce(output)
    took = time.perf_counter() - back + there - began
    return (output[batch.first : batch.first + len(batch.rows)] if shared else output).clone(), took


def _sent(ledger: Ledger) -> Entry:
    total = Entry()
    for (op, _, _, _), entry in ledger.entries.items():
        if op not in NOT_COUNTED:
            total.add(entry)
    return total


def _difference(found: list[torch.Tensor], base: list[torch.Tensor]) -> float:
    """Largest difference over all passes, relative to the largest value; 0 for the same bits."""
    largest = 0.0
    for ours, theirs in zip(found, base, strict=True):
        if not torch.equal(ours, theirs):
            scale = max(1.0, float(theirs.double().abs().max()))
            gap = float((ours.double() - theirs.double()).abs().max()) / scale
            largest = max(largest, gap if gap == gap else float("inf"), 1e-300)
    return largest


def shared_bound(job: Job) -> tuple[int, int]:
    """Rows and bytes of an ordered all-reduce of all rows, all passes: twice T (R - 1) partial sums."""
    rows = 2 * len(job.ids) * (job.world_size - 1)
    return rows, rows * job.hidden_size * accumulator(getattr(torch, job.dtype)).itemsize
