"""Rank program of the drill `pipeline`: two stages of TP 2 x DP 2, and rows that leave a stage as slices.

Within a stage every TP rank may keep its slice of the rows from layer to layer (sequence-parallel residuals). A
stage hands on whole rows. Here it forgets to gather them first.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from moe_course.backends import BACKENDS
from moe_course.comm import dist as comm_dist
from moe_course.comm.base import Comm
from moe_course.comm.sim import run_threads
from moe_course.config import MoEConfig
from moe_course.errors import ExchangeMismatch
from moe_course.flags import ParallelConfig
from moe_course.launch import emit
from moe_course.layer import MoELayer
from moe_course.modes import make_mode
from moe_course.parallel import make_plan
from moe_course.rank_program import run_rank

ROWS = 6  # of each data-parallel rank
CONFIG = MoEConfig(64, 32, 16, 2, ("sparse",) * 4)
PARALLEL = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, pipeline_parallel_size=2)


def hand_on(pipe: Comm, rows: torch.Tensor, expected: int) -> torch.Tensor:
    """Rows of the first stage on the second. Raises ExchangeMismatch on both when they are not all of them."""
    sends, pipe.layer = pipe.rank == 0, CONFIG.num_hidden_layers // 2
    try:
        return pipe.all_to_all_rows(
            rows if sends else rows[:0],
            [0, len(rows)] if sends else [0, 0],
            receive_counts=[0, 0] if sends else [expected, 0],
        ).rows
    except ExchangeMismatch as error:
        raise ExchangeMismatch(
            f"pipeline boundary: {error}; a stage hands on whole rows, gather sequence-parallel slices over TP first"
        ) from error


def make_layer(plan, mode, number: int) -> MoELayer:
    """Layer `number` with weights that every rank can make for itself."""
    generator = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    config, mine = CONFIG, plan.placement.experts_of(mode.ep_rank)
    experts, inter, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    gate, w13, w2 = normal(experts, hidden), normal(experts, 2 * inter, hidden), normal(experts, hidden, inter)
    backend = BACKENDS[plan.backend.name]
    return MoELayer(
        config,
        plan.placement,
        mode.dispatch,
        backend,
        gate_weight=gate,
        bias=torch.zeros(experts),
        w13=w13[mine],
        w2=w2[mine],
        mode=mode,
        layer=number,
    )


def whole_rows(dp: int) -> torch.Tensor:
    """What the four layers make of one data-parallel rank's rows, computed by one process without any exchange."""
    rows = torch.randn(ROWS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(dp))
    for number in range(CONFIG.num_hidden_layers):
        rows = rows + run_threads(1, _one_process, number, rows)[0]
    return rows


def _one_process(comm: Comm, number: int, rows: torch.Tensor) -> torch.Tensor:
    plan = make_plan(ParallelConfig(), CONFIG)
    return make_layer(plan, make_mode(plan, comm), number)(rows)


def main(guard_on: bool = True) -> int:
    def body(guard, rank: int) -> None:
        plan = make_plan(PARALLEL, CONFIG)
        world = comm_dist.init(plan, "cpu", timeout=10)
        mode, mine = make_mode(plan, world), plan.rank(rank)
        pipe = world.split(plan.groups["pp"])
        rows = torch.randn(ROWS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(mine.dp))
        layers = {number: make_layer(plan, mode, number) for number in mine.layers}
        if mine.pp == 0:
            for layer in layers.values():
                rows = rows + layer(rows)
            rows = rows[mode.own_rows(len(rows))]  # the fault: a slice leaves the stage
        if guard_on:
            rows = hand_on(pipe, rows, ROWS)
        elif mine.pp == 0:
            dist.send(rows, pipe.members[1])
        else:
            rows = torch.empty(ROWS, CONFIG.hidden_size)  # as many as there ought to be
            dist.recv(rows, pipe.members[0])
        if mine.pp == 1:
            for layer in layers.values():
                rows = rows + layer(rows)
            wrong = [i for i, row in enumerate(rows) if not torch.allclose(row, whole_rows(mine.dp)[i], atol=1e-4)]
            if wrong and mine.dp == mine.tp == 0:
                emit("wrong", text=f"rows {wrong} of {ROWS} are not those of one process; nobody noticed")

    return run_rank(body, guard_on)


if __name__ == "__main__":
    sys.exit(main("--no-guard" not in sys.argv))
