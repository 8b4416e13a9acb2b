"""Rows that travel in one pass, from rank to rank, counted by the backend that moved them.

Built in: notebook 13.
"""

from __future__ import annotations

import torch

from moe_course.backends import BACKENDS
from moe_course.expert_map import Placement, make_placement
from moe_course.layout import rank_groups

#: Transports on which a padded buffer is not sent whole: only rows that count are written into the peer's memory.
_NO_PADDING = ("shm",)


def placement_of(meta: dict) -> Placement:
    """Who owns which expert, from a trace's `meta.json`."""
    plan = meta["plan"]
    nodes = tuple(plan.get("nodes") or [plan["ep_size"]])
    return make_placement(plan["ep_size"], meta["experts"], plan["placement"], "as traced", nodes)


def groups_of(meta: dict) -> dict[str, list[list[int]]]:
    """All groups of the run's ranks, by kind."""
    return rank_groups(meta["world_size"], **{axis: meta["plan"].get(axis, 1) for axis in ("dp", "pp", "pcp", "tp")})


def group_of(meta: dict, kind: str, rank: int) -> list[int]:
    """The ranks of a rank's group."""
    return next(group for group in groups_of(meta)[kind] if rank in group)


def wire_of(meta: dict, placement: Placement, ids: list[torch.Tensor]) -> dict[str, list[list[int]]]:
    """What travels both ways for the routing of one pass.

    Args:
        ids: `topk_ids` `[T_r, K]` of the rows that each rank took through the layer; -1 is no route.

    Returns:
        `{"dispatch": [[source, destination, rows, empty places, bytes], …], "combine": …}`, hop by hop. `bytes` are
        those of the rows; an empty place of a padded buffer costs as much as a row, where the transport sends it.
    """
    plan, sizes, shape = meta["plan"], meta["sizes"], meta["shape"]
    groups = groups_of(meta)
    found: dict[str, list[list[int]]] = {"dispatch": [], "combine": []}
    if plan.get("dispatch_group", "ep") is not None:
        module = BACKENDS[shape]
        options = {"reduce_in_node": True} if meta["reduce_in_node"] else {}
        padded = meta["capacity"] if shape == "low_latency" and meta["transport"] not in _NO_PADDING else None
        for members in groups[plan.get("dispatch_group", "ep")]:
            ep = next(group for group in groups["ep"] if members[0] in group)
            local = placement.within([ep.index(rank) for rank in members])
            traffic = module.traffic([ids[rank] for rank in members], local, **options)
            home = sizes["partial"] if traffic.returns == "partials" else sizes["contribution"]
            held = [local.num_local(rank) * padded if padded else None for rank in range(len(members))]
            for hop in traffic.dispatch:
                found["dispatch"] += _entries(hop, members, sizes["dispatch"], [held] * len(members))
            for hop in traffic.combine:
                found["combine"] += _entries(hop, members, home, [[n] * len(members) for n in held])
    if plan.get("reduce_group"):
        for members in groups[plan["reduce_group"]]:
            found["combine"] += _all_reduce(max(len(ids[rank]) for rank in members), members, _sum_bytes(meta))
    if plan.get("split_group"):
        width = meta["hidden_size"] * getattr(torch, meta["rows_dtype"]).itemsize
        for members in groups[plan["split_group"]]:
            rows = torch.tensor([[len(ids[rank])] * len(members) for rank in members])  # finished rows, to everybody
            found["combine"] += _entries(rows, members, width)
    return found


def _entries(rows: torch.Tensor, members: list[int], width: int, held: list[list] | None = None) -> list[list[int]]:
    """One entry for each pair of ranks that something goes between. `held[s][d]`: places between them, or None."""
    found = []
    for s, source in enumerate(members):
        for d, destination in enumerate(members):
            n = int(rows[s, d])
            empty = (held[s][d] or n) - n if held else 0
            if s != d and (n or empty):
                found.append([source, destination, n, empty, n * width])
    return found


def _all_reduce(rows: int, members: list[int], width: int) -> list[list[int]]:
    """A partial sum of each row to the rank that adds it up, and the sum to everybody, as `Comm.all_reduce` does."""
    base, rest = divmod(rows, len(members))
    shares = torch.tensor([base + (place < rest) for place in range(len(members))])
    to_adder = shares.expand(len(members), -1)
    return _entries(to_adder + to_adder.T, members, width)


def _sum_bytes(meta: dict) -> int:
    """Bytes of a partial sum that ranks with shared rows exchange: after a dispatch always in the accumulator's."""
    if meta["plan"].get("dispatch_group", "ep") is None:
        return meta["sizes"]["partial"]
    return meta["hidden_size"] * max(4, getattr(torch, meta["rows_dtype"]).itemsize)
