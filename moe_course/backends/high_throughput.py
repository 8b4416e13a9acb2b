"""One row per destination rank: a token's row goes once to each rank that has at least one of its experts.

As many rows travel as a token has distinct remote ranks, at most min(K, R - 1). The row takes all its ids and weights
along; experts weight and add their part, and one partial sum per rank comes home. Source: DeepEP's high-throughput
kernels of one node (`intranode.cu`), vLLM `deepep_ht.py`; MoRI and FlashInfer's two-sided all-to-all send the same.
Across nodes DeepEP and MoRI forward once per node instead: see `two_hop`, with `reduce_in_node`. Built in: notebooks 07
and 09.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.backends.traffic import Traffic, check_ranks, destinations, owners
from moe_course.combine import sum_of_owners
from moe_course.comm.base import Comm
from moe_course.dispatch import Dispatched
from moe_course.errors import ConfigError
from moe_course.expert_map import Placement
from moe_course.fits import check_routing

CAPABILITIES = {"output_is_reduced": True, "layout": "rows", "weights_applied_by": "experts"}


@dataclass(frozen=True)
class Sent:
    """What the way home needs."""

    going: torch.Tensor  # [T, R] bool: which rows went where
    rows: torch.Tensor  # [n] the rows that went out, by destination
    matrix: torch.Tensor  # [R, R]


def dispatch(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    comm: Comm,
    placement: Placement,
) -> Dispatched:
    """The rows with an expert here, `[M, H]`, sources in rank order; ids of other ranks' experts become -1."""
    check_routing(hidden_states, topk_weights, topk_ids, comm.world_rank)
    going = destinations(topk_ids, placement)
    rows = going.T.nonzero()[:, 1]  # by destination, rows in order
    arrived = comm.all_to_all_rows(
        hidden_states[rows], going.sum(0).tolist(), topk_weights[rows], topk_ids[rows], borrow=True
    )
    weights, ids = arrived.metadata
    ids = torch.where(owners(ids, placement) == comm.rank, ids, -1)
    counts = count_experts(ids, placement, comm.rank)
    return Dispatched(arrived.rows, None, ids, weights, counts, "rows", Sent(going, rows, arrived.matrix))


def combine(expert_output: torch.Tensor, dispatched: Dispatched, *, comm: Comm) -> torch.Tensor:
    """One partial sum per row and owner comes home; owners are added in rank order. `[T, H]`."""
    sent: Sent = dispatched.handle
    received, expected = sent.matrix[:, comm.rank].tolist(), sent.matrix[comm.rank].tolist()
    home = comm.all_to_all_views(expert_output, received, receive_counts=expected)
    return sum_of_owners(home, sent.rows, len(sent.going))


def slots(topk_ids: torch.Tensor, dispatched: Dispatched, *, comm: Comm, placement: Placement):
    """`(send_row, receive_row)`, each `[T, K]` int64: place among the rows to that owner, here and there."""
    sent: Sent = dispatched.handle
    owner = owners(topk_ids, placement)
    place = (sent.going.long().cumsum(0) - 1).cpu().gather(1, owner.clamp(min=0).cpu())
    before = sent.matrix[: comm.rank].sum(0)[owner.clamp(min=0).cpu()]
    live = owner.cpu() >= 0
    return torch.where(live, place, -1), torch.where(live, place + before, -1)


def traffic(topk_ids_per_rank: list[torch.Tensor], placement: Placement) -> Traffic:
    """A row for each destination rank; a partial sum for each back."""
    topk_ids_per_rank = check_ranks(topk_ids_per_rank, placement)
    rows = torch.stack([destinations(ids, placement).sum(0).cpu() for ids in topk_ids_per_rank])
    return Traffic(rows.unsqueeze(0), rows.T.unsqueeze(0))


def count_experts(topk_ids: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """Routes for each expert of `rank`, in the order of its weights: `[E_local]` int32."""
    live = topk_ids[topk_ids >= 0].long()
    local = placement.local.to(live.device)[live].long()
    return torch.bincount(local, minlength=placement.num_local(rank)).int()


def upstream_ids(topk_ids: torch.Tensor, rank: int, placement: Placement) -> torch.Tensor:
    """The ids as vLLM hands them to the experts: an id that is surely elsewhere in the place of -1. `[M, K]`.

    DeepEP returns local ids with -1. vLLM makes global ids of them, and of -1 the last expert on rank 0, the first
    one on all others; the expert map then says -1 again. It does so for linear placement, vLLM's with this backend.

    Raises:
        ConfigError: the expert that stands for "elsewhere" is on this rank, which would compute routes of -1: with one
            rank, and on rank 0 where round robin gives it the last expert.

    Source: `deepep_ht.py : DeepEPHTPrepareAndFinalize._receiver`.
    """
    foreign = placement.num_experts - 1 if rank == 0 else 0
    if int(placement.owner[foreign]) == rank:
        raise ConfigError(
            f"rank {rank} owns expert {foreign}, which stands for -1 in vLLM's form of the ids (EP size "
            f"{placement.ep_size}, {placement.strategy} placement); use linear placement on two ranks or more, or keep "
            "the ids with their -1"
        )
    return torch.where(owners(topk_ids, placement) == rank, topk_ids, foreign)
