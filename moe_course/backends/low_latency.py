"""A fixed place for everything: one row per route into segments `[E_local, T_max]` of a size known beforehand.

No counts are exchanged first, so there is one message each way; on gloo, which ends a process when sizes differ, the
sizes go before it. Experts get `[E_local, R * T_max, H]` and counts, rows behind a count hold anything. They return raw
outputs; the source weights and adds them, as DeepEP's combine kernel does. A rank with more than T_max rows makes all
ranks raise CapacityExceeded.

The price is memory: most places stay empty. DeepEP's kernel writes each row straight into its place, one message per
route and one count per expert, so empty places cost it no bytes; nor do they on shared memory. gloo and NCCL have no
such write here: they carry whole segments, and empty places travel along as padding.

Source: DeepEP's low-latency kernels (`internode_ll.cu : dispatch`), vLLM `deepep_ll.py` and `nixl_ep.py`. Built in:
notebook 09.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.backends import all_to_all
from moe_course.backends.traffic import Traffic, owners
from moe_course.combine import weigh_and_sum
from moe_course.comm.base import Comm
from moe_course.comm.padded import slots as slots_of
from moe_course.dispatch import Dispatched
from moe_course.errors import ConfigError
from moe_course.expert_map import Placement
from moe_course.fits import check_routing

CAPABILITIES = {"output_is_reduced": True, "layout": "padded", "weights_applied_by": "combine"}
MAX_NUM_TOKENS = 256  # vLLM's default of max_num_batched_tokens with this backend


@dataclass(frozen=True)
class Sent:
    """What the way home needs. A section is an expert; sections are in the order of owners and their local ids."""

    routes: torch.Tensor  # [n] flat positions row * K + k of what went out, by section
    owner: torch.Tensor  # [T, K]
    topk_weights: torch.Tensor  # [T, K]
    counts: torch.Tensor  # [R, all sections]: what every rank sent to every section
    sections: torch.Tensor  # [R, R]: sections[s, d] go from rank s to rank d
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
    """`[E_local, R * T_max, H]`: each expert's rows, sources in rank order, and `expert_num_tokens`.

    Args:
        max_num_tokens: T_max, the same on all ranks.

    Raises:
        CapacityExceeded: on all ranks, when one has more rows than T_max, or a row that names an expert twice.
        ConfigError: rows, weights and ids that do not fit together.
    """
    check_routing(hidden_states, topk_weights, topk_ids, comm.world_rank)
    owner = owners(topk_ids, placement)
    local = torch.tensor([placement.num_local(rank) for rank in range(comm.world_size)])
    first = (local.cumsum(0) - local).to(owner.device)  # first section of each owner
    live = (owner.view(-1) >= 0).nonzero().flatten()
    ids = topk_ids.reshape(-1)[live].long()
    section = first[owner.view(-1)[live]] + placement.local.to(ids.device)[ids]
    order = section.argsort(stable=True)
    routes = live[order]
    sections = local.expand(comm.world_size, -1)
    arrived = comm.all_to_all_padded(
        hidden_states[routes // topk_ids.shape[1]],
        torch.bincount(section, minlength=int(local.sum())),
        sections,
        max_num_tokens,
        len(hidden_states),
    )
    counts = torch.stack(arrived.counts)
    handle = Sent(routes, owner, topk_weights, counts, sections, max_num_tokens)
    rows = hidden_states.new_empty(int(local[comm.rank]), comm.world_size * max_num_tokens, hidden_states.shape[1])
    here = _of(handle, slice(None), comm.rank)  # [R, E_local]
    for segment, theirs, places in zip(arrived.segments, here, _places(handle, comm.rank), strict=True):
        if len(places):
            used = slots_of(theirs, max_num_tokens).to(rows.device)
            rows.flatten(0, 1)[places.to(rows.device)] = segment.flatten(0, 1)[used]
    expert_num_tokens = here.sum(0)
    no_ids = topk_ids.new_empty(0, topk_ids.shape[1])
    return Dispatched(rows, None, no_ids, None, expert_num_tokens.int().to(rows.device), "padded", handle)


def combine(expert_output: torch.Tensor, dispatched: Dispatched, *, comm: Comm) -> torch.Tensor:
    """Every raw output goes back into the segment its row came from; weights and sums are the source's. `[T, H]`."""
    sent: Sent = dispatched.handle
    held = int(sent.sections[comm.rank, comm.rank]), comm.world_size * sent.capacity
    if expert_output.shape[:2] != held:
        raise ConfigError(
            f"rank {comm.world_rank}: the experts returned {list(expert_output.shape)}, expected {list(held)} rows: "
            "combine needs one for each place, in their order"
        )
    outputs = expert_output.flatten(0, 1)
    places = torch.cat(_places(sent, comm.rank)).to(outputs.device)
    counts = _of(sent, slice(None), comm.rank).reshape(-1)
    home = comm.all_to_all_padded(outputs[places], counts, sent.sections.T, sent.capacity, 0)
    t, k = sent.owner.shape
    contributions = expert_output.new_zeros(t * k, expert_output.shape[2])
    rows = [
        segment.flatten(0, 1)[slots_of(_of(sent, comm.rank, owner), sent.capacity).to(outputs.device)]
        for owner, segment in enumerate(home.segments)
    ]
    contributions[sent.routes] = torch.cat(rows)
    return weigh_and_sum(contributions.view(t, k, expert_output.shape[2]), sent.topk_weights, sent.owner)


def slots(topk_ids: torch.Tensor, dispatched: Dispatched, *, comm: Comm, placement: Placement):
    """`(send_row, receive_row)`, each `[T, K]` int64: place in the segment for that owner, and, flattened, there."""
    sent: Sent = dispatched.handle
    send, receive = torch.full((2, topk_ids.numel()), -1)
    ranks, routes = range(comm.world_size), sent.routes.cpu()
    send[routes] = torch.cat([slots_of(_of(sent, comm.rank, owner), sent.capacity) for owner in ranks])
    receive[routes] = torch.cat([_places(sent, owner)[comm.rank] for owner in ranks])
    return send.view(topk_ids.shape), receive.view(topk_ids.shape)


def traffic(topk_ids_per_rank: list[torch.Tensor], placement: Placement) -> Traffic:
    """As `all_to_all`: a row for each route to its owner, an output for each back. Padding is not in it."""
    return all_to_all.traffic(topk_ids_per_rank, placement)


def _of(sent: Sent, source: int | slice, owner: int) -> torch.Tensor:
    """Rows from `source` for each expert of `owner`: `[E_owner]`; from a slice of sources `[n, E_owner]`."""
    first = int(sent.sections[0, :owner].sum())  # every rank has the same sections
    return sent.counts[source, first : first + int(sent.sections[0, owner])]


def _places(sent: Sent, owner: int) -> tuple[torch.Tensor, ...]:
    """Where every source's rows lie in `owner`'s `[E_owner * R * T_max]`: in each expert lower sources come first.

    One tensor per source, its rows by expert.
    """
    counts = _of(sent, slice(None), owner)  # [R, E_owner]
    stride = len(counts) * sent.capacity
    start = torch.arange(counts.shape[1]) * stride + counts.cumsum(0) - counts
    flat = counts.reshape(-1)
    within = torch.arange(int(flat.sum())) - (flat.cumsum(0) - flat).repeat_interleave(flat)
    return (within + start.reshape(-1).repeat_interleave(flat)).split(counts.sum(1).tolist())
