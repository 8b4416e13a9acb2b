"""Backends with one fault each: what the comparisons must notice.

A fault takes a backend and pytest's `monkeypatch`, and returns what stands in for the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from moe_course.backends import two_hop
from moe_course.combine import sum_of_owners, weigh_and_sum

ROWS = ("allgather_reducescatter", "high_throughput", "two_hop", "one_sided")  # weights travel, experts apply them
TO_OWNERS = ("high_throughput", "two_hop", "one_sided")  # partial sums of owners come home
ROUTES = ("all_to_all", "low_latency")  # raw outputs come home


def changed(
    backend: Any, before: Callable | None = None, after: Callable | None = None, combine: Callable | None = None
):
    """The backend with other arguments, another answer of dispatch, or another combine."""

    def dispatch(hidden_states, topk_weights, topk_ids, *, comm, placement):
        mine = hidden_states, topk_weights, topk_ids
        mine = before(*mine, placement) if before else mine
        dispatched = backend.dispatch(*mine, comm=comm, placement=placement)
        return after(dispatched) if after else dispatched

    return SimpleNamespace(
        CAPABILITIES=backend.CAPABILITIES, dispatch=dispatch, combine=combine or backend.combine, module=backend.module
    )


def weights_applied_twice(backend, patch):
    return changed(backend, before=lambda rows, weights, ids, placement: (rows, weights**2, ids))


def minus_one_is_the_last_expert(backend, patch):
    def before(rows, weights, ids, placement):
        return rows, weights, torch.where(ids < 0, placement.num_experts - 1, ids)

    return changed(backend, before=before)


def local_ids_are_sent(backend, patch):
    def before(rows, weights, ids, placement):
        return rows, weights, torch.where(ids < 0, -1, placement.local[ids.clamp(min=0).long()])

    return changed(backend, before=before)


def rows_of_two_sources_swapped(backend, patch):
    """Ids and weights in their order, rows with the last source first."""

    def after(dispatched):
        rows = dispatched.hidden_states
        return replace(dispatched, hidden_states=rows.flip(1 if dispatched.layout == "padded" else 0))

    return changed(backend, after=after)


def numbers_of_the_other_side(backend, patch):
    """Combine reads what came home as if it lay in the order of this rank's own rows, not of the way it went."""
    if backend.module.__name__.endswith(ROUTES):
        return changed(
            backend, after=lambda d: replace(d, handle=replace(d.handle, routes=d.handle.routes.sort().values))
        )
    wrong = lambda partials, rows, n: sum_of_owners(partials, rows.sort().values, n)  # noqa: E731
    patch.setattr(backend.module, "sum_of_owners", wrong)
    return backend


def owners_from_the_last_one(backend, patch):
    """What came home is added in the reverse order: other bits, nothing else."""
    if backend.module.__name__.endswith(ROUTES):
        patch.setattr(backend.module, "weigh_and_sum", lambda c, w, o: weigh_and_sum(c.flip(1), w.flip(1), o.flip(1)))
    else:
        wrong = lambda partials, rows, n: sum_of_owners([torch.cat(partials).flip(0)], rows.flip(0), n)  # noqa: E731
        patch.setattr(backend.module, "sum_of_owners", wrong)
    return backend


def all_routes_of_a_row_at_once(backend, patch):
    """Weighted outputs are added in k order, whoever owns the expert: no partial sums, other bits."""
    patch.setattr(backend.module, "weigh_and_sum", lambda c, w, o: weigh_and_sum(c, w, torch.where(o < 0, o, 0)))
    return backend


def forwards_in_the_wrong_order(backend, patch):
    """The forwarding rank hands on the partial sums of a row with the last owner first."""

    def combine(expert_output, dispatched, *, comm):
        sent, rank = dispatched.handle, comm.rank
        received, expected = sent.second[:, rank].tolist(), sent.second[rank].tolist()
        back = comm.all_to_all_rows(expert_output, received, receive_counts=expected)
        forwarded = sent.onward.T.nonzero()[:, 1]
        order = len(forwarded) - 1 - forwarded.flip(0).argsort(stable=True)
        source = torch.arange(comm.world_size).repeat_interleave(sent.first[:, rank])
        counts = torch.bincount(source.repeat_interleave(sent.onward.sum(1)), minlength=comm.world_size).tolist()
        due, rows = two_hop._due(sent, rank)
        home = comm.all_to_all_rows(back.rows[order], counts, receive_counts=due)
        return sum_of_owners([home.rows], rows, len(sent.going))

    return changed(backend, combine=combine)


def ranks_without_rows_stay_away(backend, patch):
    """Combine returns early where no row of this rank is waited for."""

    def combine(expert_output, dispatched, *, comm):
        handle = dispatched.handle
        own = next((len(getattr(handle, name)) for name in ("owner", "going") if hasattr(handle, name)), None)
        if (handle[comm.rank] if own is None else own) == 0:
            return expert_output.new_zeros(0, expert_output.shape[-1])
        return backend.combine(expert_output, dispatched, comm=comm)

    return changed(backend, combine=combine)


def a_row_to_every_rank(backend, patch):
    """Right, but for the bytes."""
    patch.setattr(
        backend.module, "destinations", lambda ids, placement: torch.ones(len(ids), placement.ep_size, dtype=torch.bool)
    )
    return backend


def no_row_behind_the_last(backend, patch):
    """Counts by expert are one too small."""

    def after(dispatched):
        return replace(dispatched, expert_num_tokens=(dispatched.expert_num_tokens - 1).clamp(min=0))

    return changed(backend, after=after)


def pad_rows_computed(backend, patch):
    """Every row of a segment is said to be in use."""

    def after(dispatched):
        counts = torch.full_like(dispatched.expert_num_tokens, dispatched.hidden_states.shape[1])
        return replace(dispatched, expert_num_tokens=counts)

    return changed(backend, after=after)


def unused_rows_computed(backend, patch):
    """Rows of a window that nobody filled keep the ids that lie there."""
    wrong = lambda ids, placement: torch.zeros_like(ids).long()  # noqa: E731
    patch.setattr(backend.module, "owners", wrong)
    return backend


def places_off_by_one(backend, patch):
    """Outputs are read one place behind their row."""

    def combine(expert_output, dispatched, *, comm):
        behind = expert_output.flatten(0, 1).roll(-1, 0).view(expert_output.shape)
        return backend.combine(behind, dispatched, comm=comm)

    return changed(backend, combine=combine)


#: Fault -> shapes, and how it shows: "rows" differ beyond the last bits, "bits" differ, "bytes", "routes" computed.
FAULTS: dict[Callable, tuple[tuple[str, ...], str]] = {
    weights_applied_twice: (ROWS + ROUTES, "rows"),
    minus_one_is_the_last_expert: (ROWS + ROUTES, "rows"),
    local_ids_are_sent: (ROWS + ROUTES, "rows"),
    rows_of_two_sources_swapped: (ROWS + ROUTES, "rows"),
    numbers_of_the_other_side: (TO_OWNERS + ROUTES, "rows"),
    owners_from_the_last_one: (TO_OWNERS + ROUTES, "bits"),
    all_routes_of_a_row_at_once: (ROUTES, "bits"),
    forwards_in_the_wrong_order: (("two_hop",), "bits"),
    a_row_to_every_rank: (TO_OWNERS, "bytes"),
    no_row_behind_the_last: (("low_latency",), "rows"),
    places_off_by_one: (("low_latency",), "rows"),
    pad_rows_computed: (("low_latency",), "routes"),
    unused_rows_computed: (("one_sided",), "routes"),
}
