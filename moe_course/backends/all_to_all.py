"""One row per route: a token's row goes out once for each of its experts, and each expert's output comes home.

K (1 - 1/R) rows travel per token each way, whatever their destinations have in common. Experts return raw outputs;
the source, which has the weights, weights and adds them. Not in vLLM; plain all-to-all expert parallelism as in
torchtitan and transformers. Built in: notebooks 07 and 09.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.backends.traffic import Traffic, check_ranks, owners
from moe_course.combine import weigh_and_sum
from moe_course.comm.base import Comm
from moe_course.dispatch import Dispatched
from moe_course.expert_map import Placement
from moe_course.fits import check_routing

CAPABILITIES = {"output_is_reduced": True, "layout": "routes", "weights_applied_by": "source"}


@dataclass(frozen=True)
class Sent:
    """What the way home needs: which routes went out, in which order, and how many went and came."""

    routes: torch.Tensor  # [n] flat positions row * K + k, by owner
    owner: torch.Tensor  # [T, K]
    topk_weights: torch.Tensor  # [T, K]
    matrix: torch.Tensor  # [R, R]


def dispatch(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    comm: Comm,
    placement: Placement,
) -> Dispatched:
    """One row for every route to an expert here, `[M, H]`, sources in rank order; `topk_ids` is `[M, 1]`."""
    check_routing(hidden_states, topk_weights, topk_ids, comm.world_rank)
    owner = owners(topk_ids, placement)
    routes = _by_owner(owner)
    counts = torch.bincount(owner.view(-1)[routes], minlength=comm.world_size).tolist()
    arrived = comm.all_to_all_rows(
        hidden_states[routes // topk_ids.shape[1]], counts, topk_ids.reshape(-1, 1)[routes], borrow=True
    )
    handle = Sent(routes, owner, topk_weights, arrived.matrix)
    return Dispatched(arrived.rows, None, arrived.metadata[0], None, None, "routes", handle)


def combine(expert_output: torch.Tensor, dispatched: Dispatched, *, comm: Comm) -> torch.Tensor:
    """Send every output back the way its row came; weight and add them where the row belongs. `[T, H]`."""
    sent: Sent = dispatched.handle
    received, expected = sent.matrix[:, comm.rank].tolist(), sent.matrix[comm.rank].tolist()
    home = comm.all_to_all_views(expert_output, received, receive_counts=expected)
    (t, k), hidden = sent.owner.shape, expert_output.shape[1]
    contributions = expert_output.new_zeros(t * k, hidden)
    for routes, outputs in zip(sent.routes.split(expected), home, strict=True):
        contributions[routes] = outputs
    return weigh_and_sum(contributions.view(t, k, hidden), sent.topk_weights, sent.owner)


def slots(topk_ids: torch.Tensor, dispatched: Dispatched, *, comm: Comm, placement: Placement):
    """`(send_row, receive_row)`, each `[T, K]` int64: place among the routes to that owner, here and there."""
    sent: Sent = dispatched.handle
    owner = sent.owner.view(-1)[sent.routes].cpu()
    counts = sent.matrix[comm.rank].to(owner.device)
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    before = sent.matrix[: comm.rank].sum(0)
    send, receive = torch.full((2, topk_ids.numel()), -1)
    send[sent.routes.cpu()] = place
    receive[sent.routes.cpu()] = place + before[owner]
    return send.view(topk_ids.shape), receive.view(topk_ids.shape)


def traffic(topk_ids_per_rank: list[torch.Tensor], placement: Placement) -> Traffic:
    """A row for each route to its owner; an output for each route back."""
    topk_ids_per_rank = check_ranks(topk_ids_per_rank, placement)
    rows = torch.stack([_counts(owners(ids, placement), placement.ep_size) for ids in topk_ids_per_rank])
    return Traffic(rows.unsqueeze(0), rows.T.unsqueeze(0), "contributions")


def _by_owner(owner: torch.Tensor) -> torch.Tensor:
    """Flat positions of all routes with an owner, by owner; rows and k in order within one."""
    flat = owner.view(-1)
    live = (flat >= 0).nonzero().flatten()
    return live[flat[live].argsort(stable=True)]


def _counts(owner: torch.Tensor, ranks: int) -> torch.Tensor:
    return torch.bincount(owner[owner >= 0].cpu(), minlength=ranks)
