"""One copy per node, forwarded inside the node: what crosses the slow network is cut, not what moves in all.

First hop: a row goes once to each node with at least one of its experts, to the rank there with the sender's place
in its own node. Second hop: that rank hands it to the ranks of its node that own the experts. Home it goes the same
way, one partial sum per owner; with `reduce_in_node` the forwarding rank adds those of its node and sends one.

Source: DeepEP's internode kernels, which forward over NVLink: what vLLM's `deepep_high_throughput` takes across nodes,
always with sums in the node, and `deepep_v2` in hybrid mode. MoRI's `internode_v1.hpp` does the same. Built in:
notebook 09.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from moe_course.backends.high_throughput import count_experts
from moe_course.backends.traffic import Traffic, check_ranks, destinations, owners
from moe_course.combine import sum_of_owners
from moe_course.comm.base import Comm
from moe_course.dispatch import Dispatched
from moe_course.expert_map import Placement
from moe_course.fits import check_routing

CAPABILITIES = {"output_is_reduced": True, "layout": "rows", "weights_applied_by": "experts"}


@dataclass(frozen=True)
class Sent:
    """What the way home needs, on the rank that sent, on the one that forwarded, and on the one that owns experts."""

    going: torch.Tensor  # [T, R] bool: which rows of this rank go to which owner
    rows: torch.Tensor  # [n] rows that went out, by forwarding rank
    first: torch.Tensor  # [R, R]: rows from source to forwarding rank
    onward: torch.Tensor  # [m, R] bool: which rows this rank forwarded to which owner
    second: torch.Tensor  # [R, R]: rows from forwarding rank to owner
    via: torch.Tensor  # [R, R]: via[s, d] forwards from rank s to rank d
    reduce_in_node: bool


def dispatch(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    comm: Comm,
    placement: Placement,
    reduce_in_node: bool = False,
) -> Dispatched:
    """The rows with an expert here, `[M, H]`, forwarding ranks in rank order; ids of other ranks' experts become -1.

    Args:
        reduce_in_node: add a node's partial sums before they cross to the source. Fewer rows, another order of
            addition: not the same bits as the other backends.

    Raises ConfigError for rows, weights and ids that do not fit together.
    """
    check_routing(hidden_states, topk_weights, topk_ids, comm.world_rank)
    via = forwarders(placement)
    going = destinations(topk_ids, placement)
    copies = _to_forwarders(going, via[comm.rank])  # [T, R]
    rows = copies.T.nonzero()[:, 1]
    there = comm.all_to_all_rows(
        hidden_states[rows], copies.sum(0).tolist(), topk_weights[rows], topk_ids[rows], borrow=True
    )
    weights, ids = there.metadata
    onward = destinations(ids, placement)
    onward[:, ~_same_node(placement, comm.rank).to(onward.device)] = False
    mine = onward.T.nonzero()[:, 1]
    arrived = comm.all_to_all_rows(there.rows[mine], onward.sum(0).tolist(), weights[mine], ids[mine], borrow=True)
    weights, ids = arrived.metadata
    ids = torch.where(owners(ids, placement) == comm.rank, ids, -1)
    handle = Sent(going, rows, there.matrix, onward, arrived.matrix, via, reduce_in_node)
    return Dispatched(arrived.rows, None, ids, weights, count_experts(ids, placement, comm.rank), "rows", handle)


def combine(expert_output: torch.Tensor, dispatched: Dispatched, *, comm: Comm) -> torch.Tensor:
    """Partial sums go to the rank that forwarded, from there to the source, which adds them in rank order. `[T, H]`."""
    sent: Sent = dispatched.handle
    rank = comm.rank
    received, expected = sent.second[:, rank].tolist(), sent.second[rank].tolist()
    back = comm.all_to_all_rows(expert_output, received, receive_counts=expected, borrow=True)

    forwarded = sent.onward.T.nonzero()[:, 1]  # the row of each partial sum, owners in rank order
    came = sent.first[:, rank]  # rows from each source
    if sent.reduce_in_node:
        partials, per_row = sum_of_owners([back.rows], forwarded, len(sent.onward)), torch.ones_like(sent.onward.sum(1))
    else:
        partials, per_row = back.rows[forwarded.argsort(stable=True)], sent.onward.sum(1)
    source = torch.arange(comm.world_size).repeat_interleave(came).to(per_row.device)
    counts = torch.bincount(source.repeat_interleave(per_row), minlength=comm.world_size).tolist()

    due, rows = _due(sent, rank)
    home = comm.all_to_all_views(partials.to(expert_output.dtype), counts, receive_counts=due)
    return sum_of_owners(home, rows, len(sent.going))


def slots(topk_ids: torch.Tensor, dispatched: Dispatched, *, comm: Comm, placement: Placement):
    """`(send_row, receive_row, via_rank)`, each `[T, K]` int64: place among the rows to the forwarding rank, place
    among those the owner got, and who forwards.

    Where a row lies at its owner depends on rows of other ranks that took the same way, so every rank must call this.
    """
    sent: Sent = dispatched.handle
    owner = owners(topk_ids, placement).cpu()
    to, going = owner.clamp(min=0), sent.going.cpu()
    via = sent.via[comm.rank][to]
    send = (_to_forwarders(going, sent.via[comm.rank]).long().cumsum(0) - 1).gather(1, via)
    counts = going.long().sum(0, keepdim=True)  # [1, R]: rows to each owner
    everybody = comm.all_gather_rows(counts.to(topk_ids.device)).rows.cpu()  # [R, R]
    lower = torch.arange(comm.world_size) < comm.rank
    same_way = (sent.via == sent.via[comm.rank]) & lower.unsqueeze(1)  # [R, R]: lower sources, same forwarder
    forwarders_before = torch.stack([sent.second[: int(v), d].sum() for d, v in enumerate(sent.via[comm.rank])])
    before = (everybody * same_way).sum(0) + forwarders_before  # [R]
    receive = (going.long().cumsum(0) - 1).gather(1, to) + before[to]
    return tuple(torch.where(owner >= 0, column, -1) for column in (send, receive, via))


def traffic(topk_ids_per_rank: list[torch.Tensor], placement: Placement, reduce_in_node: bool = False) -> Traffic:
    """Two hops each way. Home: a partial sum per owner on both, or with `reduce_in_node` one per node on the second."""
    topk_ids_per_rank = check_ranks(topk_ids_per_rank, placement)
    size, via = placement.ep_size, forwarders(placement)
    first, second, home = torch.zeros(3, size, size, dtype=torch.int64)
    for rank, ids in enumerate(topk_ids_per_rank):
        going = destinations(ids, placement).cpu()
        copies = _to_forwarders(going, via[rank])
        first[rank] += copies.sum(0)
        second.index_put_((via[rank], torch.arange(size)), going.sum(0), accumulate=True)
        owners_home = torch.zeros(size, dtype=torch.int64).index_add(0, via[rank], going.sum(0))
        home[:, rank] += copies.sum(0) if reduce_in_node else owners_home
    return Traffic(torch.stack([first, second]), torch.stack([second.T, home]))


def forwarders(placement: Placement) -> torch.Tensor:
    """`[R, R]` int64: who forwards from rank s to rank d. In its own node a rank does so itself.

    In another node it is the rank with the sender's place, counted round where that node is smaller.
    """
    return _forwarders(tuple(map(tuple, placement.nodes)))


@cache
def _forwarders(nodes: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    size = sum(map(len, nodes))
    via = torch.empty(size, size, dtype=torch.int64)
    for sources in nodes:
        for place, source in enumerate(sources):
            for node in nodes:
                via[source, list(node)] = source if node == sources else node[place % len(node)]
    return via


def _to_forwarders(going: torch.Tensor, via: torch.Tensor) -> torch.Tensor:
    """`[T, R]` bool: which rows go to which forwarding rank, once each."""
    copies = torch.zeros(going.shape, dtype=torch.int64, device=going.device)
    return copies.index_add(1, via.to(going.device), going.long()) > 0


def _same_node(placement: Placement, rank: int) -> torch.Tensor:
    mine = torch.zeros(placement.ep_size, dtype=torch.bool)
    for node in placement.nodes:
        mine[node] = rank in node
    return mine


def _due(sent: Sent, rank: int) -> tuple[list[int], torch.Tensor]:
    """Partial sums due from each forwarding rank, and the row of each in the order of their arrival."""
    via = sent.via[rank].to(sent.going.device)
    per_way = torch.zeros(sent.going.shape, dtype=torch.int64, device=via.device).index_add(1, via, sent.going.long())
    if sent.reduce_in_node:
        per_way = (per_way > 0).long()
    each = per_way.T  # [R, T]
    rows = torch.arange(len(sent.going), device=via.device).expand(each.shape)
    return each.sum(1).tolist(), rows.reshape(-1).repeat_interleave(each.reshape(-1))
