"""No rows travel: every rank already holds the rows its experts need.

For one EP rank, or for EP ranks that share rows (TP + EP): then the partial sums still owe an all-reduce,
which the layer adds because `output_is_reduced` is False. Source: vLLM `no_dp_ep.py`. Built in: notebook 06.
"""

from __future__ import annotations

import torch

from moe_course.backends.traffic import Traffic, check_ranks, owners
from moe_course.comm.base import Comm
from moe_course.dispatch import Dispatched
from moe_course.expert_map import Placement
from moe_course.fits import check_routing

CAPABILITIES = {"output_is_reduced": False, "layout": "rows", "weights_applied_by": "experts"}


def dispatch(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    comm: Comm,
    placement: Placement,
) -> Dispatched:
    """Own rows `[T, H]`, unchanged. Routes of other ranks' experts become -1."""
    check_routing(hidden_states, topk_weights, topk_ids, comm.world_rank)
    here = torch.where(owners(topk_ids, placement) == comm.rank, topk_ids, -1)
    return Dispatched(hidden_states, None, here, topk_weights, None, "rows", None)


def combine(expert_output: torch.Tensor, dispatched: Dispatched, *, comm: Comm) -> torch.Tensor:
    """The partial sums `[T, H]` of this rank's experts, as they are."""
    return expert_output


def slots(topk_ids: torch.Tensor, dispatched: Dispatched, *, comm: Comm, placement: Placement):
    """`(send_row, receive_row)`, each `[T, K]` int64: both are the row itself."""
    rows = torch.arange(len(topk_ids)).unsqueeze(1).expand(topk_ids.shape)
    return rows, rows


def traffic(topk_ids_per_rank: list[torch.Tensor], placement: Placement) -> Traffic:
    """None. A sum over ranks that share rows is counted with the mode (`modes.py`)."""
    check_ranks(topk_ids_per_rank, placement)
    none = torch.zeros(1, placement.ep_size, placement.ep_size, dtype=torch.int64)
    return Traffic(none, none)
