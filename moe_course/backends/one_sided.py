"""Rows are written straight into the memory of the rank that needs them, and read there in place.

As many rows travel as a token has distinct remote ranks. A window on every rank holds T_max rows of each source;
what a source did not fill has ids of -1. The partial sums come home the same way. It needs memory that ranks share:
threads, or shared memory on one host. Source: vLLM `flashinfer_nvlink_one_sided` (`[R * runtime_max, H]`, ids of -1
in unused rows). Built in: notebook 09.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.backends import high_throughput
from moe_course.backends.traffic import Traffic, destinations, owners
from moe_course.combine import sum_of_owners
from moe_course.comm.base import Comm, Window
from moe_course.comm.packing import from_bytes, join, row_bytes, to_bytes
from moe_course.dispatch import Dispatched
from moe_course.errors import ConfigError
from moe_course.expert_map import Placement
from moe_course.fits import check_routing

CAPABILITIES = {"output_is_reduced": True, "layout": "rows", "weights_applied_by": "experts"}
MAX_NUM_TOKENS = 256
_ALIGN = 16  # bytes; a row in a window starts on such a boundary


@dataclass(frozen=True)
class Sent:
    """What the way home needs."""

    going: torch.Tensor  # [T, R] bool: which rows went where
    matrix: torch.Tensor  # [R, R]
    capacity: int  # T_max


def dispatch(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    comm: Comm,
    placement: Placement,
    max_num_tokens: int = MAX_NUM_TOKENS,
) -> Dispatched:
    """`[R * T_max, H]`, a view of this rank's window: row i of rank s is at s * T_max + i.

    Args:
        max_num_tokens: T_max, the same on all ranks.

    Raises:
        CapacityExceeded: on all ranks, when one has more rows than T_max.
        BackendUnavailable: on a transport without memory to share.
    """
    check_routing(hidden_states, topk_weights, topk_ids, comm.world_rank)
    parts = to_bytes(hidden_states, (topk_weights, topk_ids), comm.world_rank)
    routing = sum(part.shape[1] for part in parts[1:])
    fill = -(row_bytes(hidden_states) + routing) % _ALIGN
    packed = join([*parts, parts[0].new_zeros(len(hidden_states), fill)])  # [T, B]
    window = _window(comm, "rows", comm.world_size * max_num_tokens, packed)
    going = destinations(topk_ids, placement)
    matrix = comm.open(window, going.sum(0).tolist(), hidden_states, topk_weights, topk_ids, capacity=max_num_tokens)
    for peer in range(comm.world_size):
        comm.put(window, peer, comm.rank * max_num_tokens, packed[going[:, peer]], metadata=routing, padding=fill)
    comm.flush(window)
    arrived = comm.wait(window)  # [R * T_max, B]

    first = row_bytes(hidden_states)
    rows = arrived[:, :first].view(hidden_states.dtype)  # in place
    weights = from_bytes(arrived[:, first : first + parts[1].shape[1]], topk_weights)
    ids = from_bytes(arrived[:, first + parts[1].shape[1] : first + routing], topk_ids)
    used = torch.arange(max_num_tokens) < matrix[:, comm.rank].unsqueeze(1)  # [R, T_max]
    ids = torch.where(used.view(-1, 1).to(ids.device), ids, -1)
    ids = torch.where(owners(ids, placement) == comm.rank, ids, -1)
    counts = high_throughput.count_experts(ids, placement, comm.rank)
    return Dispatched(rows, None, ids, weights, counts, "rows", Sent(going, matrix, max_num_tokens))


def combine(expert_output: torch.Tensor, dispatched: Dispatched, *, comm: Comm) -> torch.Tensor:
    """Partial sums are written into the source's window; it adds the owners in rank order. `[T, H]`."""
    sent: Sent = dispatched.handle
    mine, capacity = sent.matrix[comm.rank].tolist(), sent.capacity
    if len(expert_output) != comm.world_size * capacity:
        raise ConfigError(
            f"rank {comm.world_rank}: the experts returned {len(expert_output)} rows for {comm.world_size * capacity} "
            "that were dispatched; combine needs one for each, in their order"
        )
    window = _window(comm, "partial sums", comm.world_size * capacity, expert_output)
    comm.open(window, sent.matrix[:, comm.rank].tolist(), expert_output)
    for source, n in enumerate(sent.matrix[:, comm.rank].tolist()):
        comm.put(window, source, comm.rank * capacity, expert_output[source * capacity : source * capacity + n])
    comm.flush(window)
    home = comm.wait(window)
    partials = [home[owner * capacity : owner * capacity + n] for owner, n in enumerate(mine)]
    return sum_of_owners(partials, sent.going.T.nonzero()[:, 1], len(sent.going))


def slots(topk_ids: torch.Tensor, dispatched: Dispatched, *, comm: Comm, placement: Placement):
    """`(send_row, receive_row)`, each `[T, K]` int64: place among the rows to that owner, and in its window."""
    sent: Sent = dispatched.handle
    owner = owners(topk_ids, placement).cpu()
    place = (sent.going.long().cumsum(0) - 1).cpu().gather(1, owner.clamp(min=0))
    send = torch.where(owner >= 0, place, -1)
    return send, torch.where(owner >= 0, place + comm.rank * sent.capacity, -1)


def traffic(topk_ids_per_rank: list[torch.Tensor], placement: Placement) -> Traffic:
    """As `high_throughput`: a row for each destination rank, a partial sum for each back."""
    return high_throughput.traffic(topk_ids_per_rank, placement)


def _window(comm: Comm, use: str, rows: int, like: torch.Tensor) -> Window:
    """The window of this group for rows like these, made at first use."""
    key = (use, rows, *like.shape[1:], like.dtype)
    if key not in comm.buffers:
        comm.buffers[key] = comm.window((rows, *like.shape[1:]), like.dtype)
    return comm.buffers[key]
