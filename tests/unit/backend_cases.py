"""One problem for all traffic shapes, and what a run of a shape shows: rows, bytes, who sent how many to whom.

Used by the tests of the backends in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from layer_cases import Batch, Weights, batches, fixed_route, make_batch, make_config, make_layer, make_weights, oracle

from moe_course.backends import BACKENDS
from moe_course.backends.configure import Backend
from moe_course.backends.traffic import RowBytes, Traffic
from moe_course.combine import accumulator
from moe_course.comm.base import Comm
from moe_course.comm.ledger import Ledger
from moe_course.comm.sim import run_threads
from moe_course.expert_map import Placement, make_placement
from moe_course.rows import RowInvariance

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SIZES = {8: (8, 2, 64, 48), 10: (10, 4, 64, 32), 256: (256, 8, 32, 16)}  # E -> E, K, H, I
#: R -> ranks of each node, uneven wherever they can be.
NODES = {1: (1,), 2: (1, 1), 3: (2, 1), 4: (3, 1), 8: (1, 4, 3)}
#: The shapes that bring finished rows home; `no_dp_ep` is for ranks that share rows.
SHAPES = tuple(name for name in BACKENDS if name != "no_dp_ep")
FIXED = tuple(name for name in SHAPES if hasattr(BACKENDS[name], "MAX_NUM_TOKENS"))


@dataclass(frozen=True)
class Problem:
    """Weights, a placement with uneven nodes, batches, and the output of each with its shared expert or without."""

    weights: Weights
    placement: Placement
    batches: dict[str, Batch]
    expected: dict[str, list[torch.Tensor]]

    @property
    def most_rows(self) -> int:
        """Rows of the fullest rank: the smallest T_max that holds all batches."""
        return max(len(rows) for batch in self.batches.values() for rows in batch.hidden_states)

    def shared(self, name: str) -> bool:
        """Is the shared expert in this batch's output? In every second one."""
        return list(self.batches).index(name) % 2 == 0


@cache
def make_problem(ranks: int, experts: int, strategy: str, dtype: torch.dtype) -> Problem:
    """The hard batches of `layer_cases`, one with experts twice in a row, and ids that are not contiguous either."""
    weights = make_weights(make_config(*SIZES[experts]), dtype)
    placement = make_placement(ranks, experts, strategy, ranks_per_node=NODES[ranks])
    found = batches(ranks, placement, weights.config, dtype)
    odd = found["non-contiguous rows"]
    turned = [[part.T.contiguous().T for part in parts] for parts in (odd.topk_weights, odd.topk_ids)]
    found["non-contiguous rows"] = Batch(odd.hidden_states, *turned)
    twice = make_batch([rank % 3 for rank in range(ranks)], weights.config, dtype, seed=9)
    for ids in twice.topk_ids:
        ids[:, 1] = ids[:, 0]
    found["an expert twice in a row"] = twice
    numbered = enumerate(found.items())
    expected = {name: oracle(batch, weights, placement, shared=n % 2 == 0) for n, (name, batch) in numbered}
    return Problem(weights, placement, found, expected)


@dataclass
class Seen:
    """What one rank got and sent for one batch."""

    output: torch.Tensor
    ledger: Ledger


def backend(name: str, **options: Any) -> Backend:
    return Backend(BACKENDS[name], **options)


def run_batch(comm: Comm, weights: Weights, placement: Placement, batch: Batch, module: Any, **more: Any) -> Seen:
    """One rank's rows through one layer with fixed routing; see `make_layer` for the keywords."""
    rank, stages = comm.rank, more.pop("stages", None)
    route = fixed_route(batch.topk_weights[rank], batch.topk_ids[rank]).route
    stages = replace(stages, route=route) if stages else fixed_route(batch.topk_weights[rank], batch.topk_ids[rank])
    comm.ledger = Ledger()
    layer = make_layer(weights, placement, comm, module, stages=stages, **more)
    return Seen(layer(batch.hidden_states[rank]), comm.ledger)


def run_problem(problem: Problem, modules: dict[str, Any]) -> tuple[dict[tuple[str, str], list[Seen]], RowInvariance]:
    """All batches through all modules in one group: `(shape, batch)` -> what each rank saw."""

    def rank_function(comm: Comm) -> tuple[dict[tuple[str, str], Seen], RowInvariance | None]:
        found = {
            (name, batch): run_batch(
                comm, problem.weights, problem.placement, problem.batches[batch], module, shared=problem.shared(batch)
            )
            for name, module in modules.items()
            for batch in problem.batches
        }
        layer = make_layer(problem.weights, problem.placement, comm, modules[next(iter(modules))])
        return found, layer.row_invariance() if comm.rank == 0 else None

    results = run_threads(problem.placement.ep_size, rank_function, timeout=60)
    return {key: [found[key] for found, _ in results] for key in results[0][0]}, results[0][1]


def sizes_of(hidden: int, dtype: torch.dtype, combine_dtype: torch.dtype | None = None, row: int = 0) -> RowBytes:
    """Bytes of rows: as they are, or `row` for one that is packed; sums and outputs in `combine_dtype` if given."""
    partial = combine_dtype or accumulator(dtype)
    return RowBytes(
        row or hidden * dtype.itemsize, hidden * partial.itemsize, hidden * (combine_dtype or dtype).itemsize
    )


def miscounted(seen: list[Seen], traffic: Traffic, sizes: RowBytes) -> list[str]:
    """Where what ranks counted differs from what the routing must move: pairs of ranks, rows received, bytes."""
    ledger = Ledger.merge(one.ledger for one in seen)
    ranks, wrong = len(seen), []
    counted = torch.zeros(ranks, ranks, dtype=torch.int64)
    for entry in ledger.as_rows():
        counted[entry["src"], entry["dst"]] += entry["rows"]
    due = traffic.dispatch.sum(0) + traffic.combine.sum(0)
    due.fill_diagonal_(0)  # what stays is no traffic
    if not torch.equal(counted, due):
        wrong.append(f"rows from rank to rank {counted.tolist()}, expected {due.tolist()}")
    total = ledger.total()
    for what, ours, theirs in [
        ("rows sent", total.rows, traffic.dispatch_rows + traffic.combine_rows),
        ("rows received", ledger.rows_received, total.rows),
        ("payload", total.payload, traffic.payload(sizes)),
    ]:
        if ours != theirs:
            wrong.append(f"{what}: {ours}, expected {theirs}")
    return wrong


def padding_of(placement: Placement, traffic: Traffic, capacity: int, sizes: RowBytes) -> int:
    """Bytes of `low_latency`'s segments that hold no row, both ways, from the definition: room minus rows."""
    room = torch.tensor([placement.num_local(rank) * capacity for rank in range(placement.ep_size)])
    empty = [room - traffic.dispatch[0], room.unsqueeze(1) - traffic.combine[0]]  # [R, R] each, to and from an owner
    remote = [int(rows.sum() - rows.diagonal().sum()) for rows in empty]
    return remote[0] * sizes.dispatch + remote[1] * sizes.contribution


def poison(monkeypatch) -> None:
    """Buffers that are born uninitialised are full of NaN, bytes as well: all bits set are NaN in every dtype."""

    def poisoned(make: Callable) -> Callable:
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(255 if tensor.dtype == torch.uint8 else 85)

        return made

    for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty",))):
        for name in names:
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
