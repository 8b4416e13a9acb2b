"""What a recorded routing would move in every shape, beside a router without any preference. Built in: notebook 11."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from moe_course.backends import BACKENDS
from moe_course.backends.capabilities import SHAPES, across_nodes, names_of
from moe_course.backends.traffic import RowBytes, Traffic
from moe_course.cost import bounds
from moe_course.cost.imbalance import max_over_mean, routes_per_rank, uniform_max_over_mean
from moe_course.cost.routing import Routing, batches
from moe_course.cost.sizes import metadata_per_row, padded_buffer, padding_per_row, selection_bytes
from moe_course.expert_map import Placement

SCHEMA = "moe_course.replay/1"
_DRAWS, _MOST_DRAWN = 20, 200_000  # random routings for the comparison, and routes in all of them


@dataclass(frozen=True)
class Shown:
    """A line of the tables: a shape, with its options."""

    name: str
    shape: str
    reduce_in_node: bool = False

    @property
    def options(self) -> dict[str, bool]:
        return {"reduce_in_node": True} if self.reduce_in_node else {}


def shown(placement: Placement) -> list[Shown]:
    """All shapes that move rows; with several nodes also two hops that add up inside the node."""
    found = [Shown(name, name) for name in BACKENDS if name != "no_dp_ep"]
    if len(placement.nodes) > 1:
        found.insert(1 + [one.name for one in found].index("two_hop"), Shown("two_hop, sums in node", "two_hop", True))
    return found


def replay(
    routing: Routing,
    rank: torch.Tensor,
    placement: Placement,
    sizes: RowBytes,
    *,
    max_num_tokens: int = 256,
    hidden_size: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Rows, bytes and imbalance of a routing, for every shape. The content of `moe_course.replay/1`.

    `bytes` are those of rows. `padding_bytes` is what the transports of this package send besides: empty places, where
    whole segments travel (`low_latency` on gloo, NCCL and threads, not on shared memory), and rows filled up to a
    boundary (`one_sided`). The libraries behind `low_latency` send none: their empty places are memory, part of
    `buffer_bytes`, which each rank keeps for the rows of a layer; `fill` is how much of the places is in use.

    Args:
        rank: `[T]`, whose row it is.
        sizes: bytes of rows out and home.
        max_num_tokens: T_max of the shapes with fixed places; a rank's rows go through in batches of that many.
        hidden_size: H, for the bytes that DeepEP's low-latency figures count.
        progress: called with (layers done, all layers).
    """
    size, lines = placement.ep_size, shown(placement)
    own = [(rank == r).nonzero().flatten() for r in range(size)]
    seen: dict[str, list[Traffic]] = {line.name: [] for line in lines}
    expected: dict[str, list[Traffic]] = {line.name: [] for line in lines}
    load, known = [], {}
    for layer in range(len(routing.layers)):
        ids = routing.ids[:, layer]
        per_rank = [ids[rows] for rows in own]
        for line in lines:
            count = BACKENDS[line.shape].traffic
            seen[line.name].append(bounds.observed_traffic(count, per_rank, placement, **line.options))
        mixed = _rows_by_routes(per_rank)  # [R, K + 1]
        key = tuple(mixed.flatten().tolist())
        if key not in known:  # most files have as many routes in every layer
            known[key] = {line.name: _expected(line, placement, mixed) for line in lines}
        for line in lines:
            expected[line.name].append(known[key][line.name])
        load.append(routes_per_rank(ids, placement))
        progress(layer + 1, len(routing.layers))
    steps = [[len(rows) for rows in batch] for batch in batches(routing, rank, size, max_num_tokens)]
    return {
        "schema": SCHEMA,
        "file": routing.name,
        "rows": len(routing.ids),
        "layers": list(routing.layers),
        "top_k": routing.ids.shape[2],
        "routes": int((routing.ids >= 0).sum()),
        "experts": placement.num_experts,
        "world_size": size,
        "ranks_per_node": [len(node) for node in placement.nodes],
        "placement": placement.strategy,
        "placement_reason": placement.reason,
        "rows_per_rank": [len(rows) for rows in own],
        "experts_per_rank": [placement.num_local(r) for r in range(size)],
        "row_bytes": asdict(sizes),
        "max_num_batched_tokens": max_num_tokens,
        "batches": len(steps),
        "backends": [
            _line(line, bounds.add(seen[line.name]), bounds.add(expected[line.name]), placement, sizes)
            | _fixed(line, routing, bounds.add(seen[line.name]), placement, sizes, steps, max_num_tokens, hidden_size)
            for line in lines
        ],
        "imbalance": _imbalance(routing, load, placement),
        "notes": [*routing.notes, *notes_on_nodes(placement)],
    }


def notes_on_nodes(placement: Placement) -> list[str]:
    """Which names take another way than their shape, where ranks span nodes."""
    return across_nodes() if len(placement.nodes) > 1 else []


def _rows_by_routes(per_rank: list[torch.Tensor]) -> torch.Tensor:
    """How many rows of each rank have 0, 1, … K routes: `[R, K + 1]`."""
    top_k = per_rank[0].shape[1]
    return torch.stack([torch.bincount((ids >= 0).sum(1), minlength=top_k + 1) for ids in per_rank])


def _expected(line: Shown, placement: Placement, mixed: torch.Tensor) -> Traffic:
    """What random experts would move for as many rows with as many routes."""
    return bounds.add(
        [
            bounds.expected_traffic(line.shape, placement, mixed[:, k].tolist(), k, **line.options)
            for k in range(mixed.shape[1])
        ]
    )


def _line(line: Shown, seen: Traffic, expected: Traffic, placement: Placement, sizes: RowBytes) -> dict:
    bound, uniform = bounds.bound(seen, sizes, placement), bounds.bound(expected, sizes, placement)
    there, home = bound.dispatch, bound.combine
    return {
        "backend": line.name,
        "shape": line.shape,
        "stands_for": names_of(line.shape),
        "travels": SHAPES[line.shape].travels,
        "rows": {"dispatch": there.wire, "combine": home.wire},
        "rows_logical": {"dispatch": there.logical, "combine": home.logical},
        "rows_across_nodes": {"dispatch": there.across, "combine": home.across},
        "bytes": {"wire": bound.wire_bytes, "logical": bound.logical_bytes, "across_nodes": bound.across_bytes},
        "uniform": {
            "rows": {"dispatch": uniform.dispatch.wire, "combine": uniform.combine.wire},
            "rows_across_nodes": {"dispatch": uniform.dispatch.across, "combine": uniform.combine.across},
            "bytes": {"wire": uniform.wire_bytes, "logical": uniform.logical_bytes},
        },
        "observed_over_uniform": bound.wire_bytes / uniform.wire_bytes if uniform.wire_bytes else None,
    }


def _fixed(line, routing, seen, placement, sizes, steps, max_num_tokens, hidden_size) -> dict:
    """What metadata and places of a fixed size add, to bytes and to memory; see `replay`."""
    experts, size, layers = placement.num_experts, placement.ep_size, len(routing.layers)
    there = bounds.rows(seen.dispatch, placement)
    top_k = routing.ids.shape[2]
    per_row, filled = metadata_per_row(line.shape, top_k), padding_per_row(line.shape, top_k, sizes.dispatch)
    found = {
        "metadata_bytes": there.wire * per_row,
        "padding_bytes": there.wire * filled,
        "fill": None,
        "buffer_bytes": None,
    }
    if line.shape == "low_latency":
        places = sum(experts - placement.num_local(r) for r in range(size)) * max_num_tokens * len(steps) * layers
        out = places - there.wire
        return found | {
            "padding_bytes": out * (sizes.dispatch + sizes.contribution),
            "fill": there.logical / (experts * size * max_num_tokens * len(steps) * layers),
            "buffer_bytes": padded_buffer(experts, max_num_tokens, sizes.dispatch),
            "selection_bytes": int(there.logical)
            * (selection_bytes(hidden_size) + selection_bytes(hidden_size, False)),
        }
    if line.shape == "one_sided":
        return found | {
            "fill": there.logical / (size * size * max_num_tokens * len(steps) * layers),
            "buffer_bytes": size * max_num_tokens * sizes.dispatch,
        }
    return found


def _imbalance(routing: Routing, load: list[torch.Tensor], placement: Placement) -> dict:
    """Routes per rank, each layer by itself and all together; and what chance makes of as many rows."""
    figures = [max_over_mean(counts) for counts in load]
    live = [(figure, layer) for figure, layer in zip(figures, routing.layers, strict=True) if figure is not None]
    worst, where = max(live, default=(None, None), key=lambda one: one[0])
    rows, top_k = len(routing.ids), routing.ids.shape[2]
    draws = min(_DRAWS, _MOST_DRAWN // (rows * placement.ep_size))
    experts = torch.bincount(routing.ids[routing.ids >= 0].flatten(), minlength=placement.num_experts)
    return {
        "routes_per_rank": torch.stack(load).sum(0).tolist(),
        "max_over_mean": max_over_mean(torch.stack(load).sum(0)),
        "per_layer": figures,
        "mean_layer": sum(figure for figure, _ in live) / len(live) if live else None,
        "worst_layer": {"layer": where, "max_over_mean": worst},
        "uniform_layer": uniform_max_over_mean(placement, top_k, rows, draws=draws) if draws else None,
        "experts_never_chosen": int((experts == 0).sum()),
        "busiest_expert": {"expert": int(experts.argmax()), "over_mean": max_over_mean(experts)},
    }
