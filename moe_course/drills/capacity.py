"""Rank program of the drill `capacity`: buffers for a fixed number of rows, and one rank that brings more."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from moe_course.backends import low_latency
from moe_course.comm import dist as comm_dist
from moe_course.config import MoEConfig
from moe_course.flags import ParallelConfig
from moe_course.parallel import make_plan
from moe_course.rank_program import run_rank

T_MAX, WIDTH = 8, 64


def main(guard_on: bool = True) -> int:
    def body(guard, rank: int) -> None:
        config = MoEConfig(WIDTH, 8, 8, 2, ("sparse",))
        plan = make_plan(ParallelConfig(data_parallel_size=2), config)
        comm = comm_dist.init(plan, "cpu", timeout=10)
        rows = torch.full((T_MAX + (rank == 1), WIDTH), float(rank))
        if guard_on:
            ids = torch.arange(2, dtype=torch.int32).repeat(len(rows), 1)
            weights = torch.ones(ids.shape)
            low_latency.dispatch(rows, weights, ids, comm=comm, placement=plan.placement, max_num_tokens=T_MAX)
        gathered = torch.empty(2 * T_MAX, WIDTH)
        dist.all_gather_into_tensor(gathered, rows)  # shapes are fixed, nobody asks

    return run_rank(body, guard_on)


if __name__ == "__main__":
    sys.exit(main("--no-guard" not in sys.argv))
