"""Every rank gets every row; partial sums come back by reduce-scatter. vLLM's default.

R - 1 rows travel per token each way, whatever the router said. Source: vLLM `naive_dp_ep.py` and
`all2all.py : AgRsAll2AllManager`. Built in: notebooks 07 and 08.
"""

from __future__ import annotations

import torch

from moe_course.backends.traffic import Traffic, check_ranks, owners
from moe_course.combine import accumulator
from moe_course.comm.base import Comm
from moe_course.dispatch import Dispatched
from moe_course.expert_map import Placement
from moe_course.fits import check_routing

CAPABILITIES = {"output_is_reduced": True, "layout": "rows", "weights_applied_by": "experts"}


def dispatch(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    comm: Comm,
    placement: Placement,
) -> Dispatched:
    """All rows of the group in rank order, `[sum T, H]`. Routes of other ranks' experts become -1."""
    check_routing(hidden_states, topk_weights, topk_ids, comm.world_rank)
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(owners(ids, placement) == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def combine(expert_output: torch.Tensor, dispatched: Dispatched, *, comm: Comm) -> torch.Tensor:
    """Send every rank its slice of the partial sums and add up what arrives in rank order. `[T, H]`."""
    return comm.reduce_scatter_rows(expert_output, dispatched.handle, accumulator(expert_output.dtype))


def slots(topk_ids: torch.Tensor, dispatched: Dispatched, *, comm: Comm, placement: Placement):
    """`(send_row, receive_row)`, each `[T, K]` int64: the row here, and behind the rows of lower ranks there."""
    rows = torch.arange(len(topk_ids)).unsqueeze(1).expand(topk_ids.shape)
    return rows, rows + sum(dispatched.handle[: comm.rank])


def traffic(topk_ids_per_rank: list[torch.Tensor], placement: Placement) -> Traffic:
    """Each row to everybody, and a partial sum from everybody back, whatever the routing."""
    topk_ids_per_rank = check_ranks(topk_ids_per_rank, placement)
    rows = torch.tensor([len(ids) for ids in topk_ids_per_rank]).unsqueeze(1).repeat(1, placement.ep_size)
    return Traffic(rows.unsqueeze(0), rows.T.unsqueeze(0))
