"""Around the five stages: which group rows travel in, who adds up what shared rows left undone, who owns which rows.

A parallel mode changes nothing inside a stage. It decides on which group the stages meet:

* TP ranks share their rows. Without dispatch, or with a dispatch per DP group, each holds a partial sum of every
  row, and the TP group adds them up.
* Sequence-parallel MoE and prefill context parallelism give every rank a slice of the shared rows instead. Each row
  is dispatched by one rank, and the finished rows are gathered.
* Without expert parallelism every rank holds a slice of each expert's matrices; its partial sum is that of its slice.

Source: vLLM `FM/config.py`, `DeepseekV2MoE.forward`, `naive_dp_ep.py`, `MoERunner.forward`. Built in: notebook 06.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from moe_course.backends.traffic import RowBytes
from moe_course.comm.base import Comm
from moe_course.errors import PlanMismatch
from moe_course.expert_map import Placement
from moe_course.parallel import Plan


@dataclass(frozen=True)
class Mode:
    """The groups one rank meets in.

    Attributes:
        dispatch: rows travel in this group; `placement` is the catalogue in its rank numbers.
        reduce: partial sums of rows that its ranks share are added up in this group; None when there are none.
        split: rows are split over this group before the router and gathered after the shared expert; None: kept.
        ep_rank, ep_size: place in the EP group, for the expert map. 0 of 1 when expert parallelism is off.
        moe_tp_rank, moe_tp_size: which slice of every expert's matrices is here.
        travels: does `dispatch` move rows at all?
    """

    dispatch: Comm
    placement: Placement
    reduce: Comm | None = None
    split: Comm | None = None
    ep_rank: int = 0
    ep_size: int = 1
    moe_tp_rank: int = 0
    moe_tp_size: int = 1
    travels: bool = True

    def own_rows(self, n: int) -> slice:
        """Which of `n` shared rows this rank takes through the layer: all, or its even share, in rank order.

        vLLM pads to a multiple of the group; here the last shares are shorter, or empty.
        """
        if self.split is None:
            return slice(0, n)
        share = -(-n // self.split.world_size)
        return slice(min(n, self.split.rank * share), min(n, (self.split.rank + 1) * share))

    def all_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Every rank's finished rows, in rank order: what the next layer expects."""
        return rows if self.split is None else self.split.all_gather_rows(rows).rows

    def groups(self) -> list[Comm]:
        """The groups in use, without repetition."""
        found: list[Comm] = []
        for comm in (self.dispatch, self.reduce, self.split):
            if comm is not None and comm not in found:
                found.append(comm)
        return found


def plain_mode(comm: Comm, placement: Placement, backend: ModuleType) -> Mode:
    """Expert parallelism over one group: its ranks dispatch to each other, or share their rows and add up."""
    owes_sum = not backend.CAPABILITIES["output_is_reduced"] and comm.world_size > 1
    travels = backend.CAPABILITIES["output_is_reduced"]
    return Mode(comm, placement, comm if owes_sum else None, None, comm.rank, comm.world_size, travels=travels)


def make_mode(plan: Plan, world: Comm) -> Mode:
    """Split the world of one deployment into the groups its plan needs. Every rank must call it.

    Raises PlanMismatch when the world has another number of ranks than the plan.
    """
    if world.world_size != plan.world_size:  # before anybody waits for ranks that are not there
        raise PlanMismatch(
            f"rank {world.world_rank}: the plan is for {plan.world_size} ranks, the group has {world.world_size}"
        )
    mine, moe = plan.rank(world.rank), plan.moe
    groups: dict[str, Comm] = {}

    def group(kind: str) -> Comm:
        members = mine.groups[kind]
        if members == world.members:
            return world
        key = str(plan.groups[kind])  # two kinds of the same groups share one
        if key not in groups:
            groups[key] = world.split(plan.groups[kind])
        return groups[key]

    dispatch = group(plan.dispatch_group or "ep")
    reduce = group(plan.reduce_group) if plan.reduce_group else None
    split = group(plan.split_group) if plan.split_group else None
    ep_ranks = [mine.groups["ep"].index(rank) for rank in dispatch.members]
    if moe.use_ep:
        placement = plan.placement if len(ep_ranks) == moe.ep_size else plan.placement.within(ep_ranks)
        ep_rank, tp_rank = mine.ep_rank, 0
    else:
        placement, ep_rank, tp_rank = plan.placement.sliced(dispatch.rank, dispatch.world_size), 0, mine.ep_rank
    travels = plan.dispatch_group is not None
    return Mode(dispatch, placement, reduce, split, ep_rank, moe.ep_size, tp_rank, moe.tp_size, travels)


def payload_bound(
    plan: Plan,
    backend: ModuleType,
    ids_per_rank: list[torch.Tensor],
    sizes: RowBytes,
    row_bytes: int,
    sum_bytes: int,
) -> int:
    """Bytes of rows a mode must move for one pass through one layer, over all ranks.

    Args:
        ids_per_rank: `topk_ids` of the rows each world rank took through the layer.
        sizes: bytes of a row that is dispatched, and of what comes home.
        row_bytes: bytes of a row in the model's dtype: finished rows are gathered in it.
        sum_bytes: bytes of a row in the accumulator's dtype: sums that were dispatched are reduced in it.

    Counts dispatch and combine, an ordered all-reduce (a partial sum to its adder and the sum to everybody: twice
    T - 1 rows for each shared row), and the gathering of split rows.
    """
    groups, total = plan.groups, 0
    if plan.dispatch_group is not None:
        for members in groups[plan.dispatch_group]:
            placement = plan.placement
            if plan.moe.use_ep:
                ep = next(g for g in groups["ep"] if members[0] in g)
                placement = placement.within([ep.index(rank) for rank in members])
            else:
                placement = placement.sliced(0, len(members))
            ids = [ids_per_rank[rank] for rank in members]
            total += backend.traffic(ids, placement).payload(sizes)
    if plan.reduce_group is not None:
        partial = sizes.partial if plan.dispatch_group is None else sum_bytes
        for members in groups[plan.reduce_group]:
            total += 2 * len(ids_per_rank[members[0]]) * (len(members) - 1) * partial
    if plan.split_group is not None:
        for members in groups[plan.split_group]:
            total += sum(len(ids_per_rank[rank]) for rank in members) * (len(members) - 1) * row_bytes
    return total
