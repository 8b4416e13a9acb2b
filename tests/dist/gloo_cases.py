"""Rank functions for worker processes that need more than a `Comm`: whole layers, late ranks and dead ones."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from layer_cases import Batch, batches, fixed_route, make_config, make_layer, make_weights

from moe_course.backends.configure import configure
from moe_course.comm.base import Comm
from moe_course.comm.ledger import Ledger
from moe_course.errors import MoECourseError
from moe_course.expert_map import Placement, make_placement

SHAPES = {8: (8, 2, 64, 48), 10: (10, 4, 64, 32), 256: (256, 8, 32, 16)}  # E -> E, K, H, I


def layer_problem(ranks: int, experts: int, strategy: str, dtype: torch.dtype, backend: str):
    """Weights, placement and batches, the same in every process. Without dispatch all ranks hold all rows."""
    weights = make_weights(make_config(*SHAPES[experts]), dtype, seed=3)
    placement: Placement = make_placement(
        ranks, experts, strategy, ranks_per_node=max(1, ranks - 1)
    )  # two uneven nodes
    found = batches(ranks, placement, weights.config, dtype)
    if backend == "no_dp_ep":
        for name, batch in found.items():
            parts = (batch.hidden_states, batch.topk_weights, batch.topk_ids)
            found[name] = Batch(*([torch.cat(part)] * ranks for part in parts))
    return weights, placement, found


def layer_outputs(comm: Comm, experts: int, strategy: str, dtype: torch.dtype, backend: str) -> dict[str, Any]:
    """This rank's output of every batch, the verdict on row invariance, and the ledger."""
    weights, placement, found = layer_problem(comm.world_size, experts, strategy, dtype, backend)
    comm.ledger, comm.step = Ledger(), 0
    module = configure(backend, max_num_tokens=8)  # at most 6 rows a rank; padding costs
    layer = make_layer(weights, placement, comm, module, layer=4)
    outputs = {}
    for name, batch in found.items():
        layer.stages = fixed_route(batch.topk_weights[comm.rank], batch.topk_ids[comm.rank])
        outputs[name] = layer(batch.hidden_states[comm.rank])
    return {"outputs": outputs, "verdict": layer.row_invariance(), "ledger": comm.ledger.as_rows()}


def many_layers(comm: Comm, asked: list[tuple]) -> list[dict[str, Any]]:
    """`layer_outputs` of several cells, one after the other."""
    return [layer_outputs(comm, *cell) for cell in asked]


def failure(comm: Comm) -> dict[str, Any]:
    """What a barrier with a missing rank ends with, and after how long."""
    comm.layer, started = 3, time.monotonic()
    try:
        comm.barrier()
    except MoECourseError as error:
        return {"kind": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started}
    return {"kind": None, "message": "", "seconds": time.monotonic() - started}


def late(comm: Comm, rank: int) -> dict[str, Any]:
    """`rank` sleeps for a minute, the others meet in a barrier."""
    if comm.rank == rank:
        time.sleep(60)
    return failure(comm)


def killed(comm: Comm, rank: int, moment: str) -> dict[str, Any]:
    """`rank` is killed "before" the others meet in a barrier, or "during" it."""
    if comm.rank == rank:
        time.sleep(0.0 if moment == "before" else 1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0 if moment == "before" else 0.0)
    return failure(comm)


def objects(comm: Comm) -> list[Any] | None:
    """A picklable object of every rank on rank 0."""
    return comm.gather_objects({"rank": comm.rank, "rows": list(range(comm.rank))})


def many_pairs(comm: Comm, times: int) -> list[float]:
    """Four ranks make the groups [0, 1] and [2, 3] again and again; sums of rank + 1."""
    return [float(comm.split([[0, 1], [2, 3]]).all_reduce(torch.tensor([[comm.rank + 1.0]]))) for _ in range(times)]
