"""Rank program of the drill `capacity`: buffers for a fixed number of rows, and one rank that brings more."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from moe_course.comm import dist as comm_dist
from moe_course.comm.base import Comm
from moe_course.config import MoEConfig
from moe_course.errors import CapacityExceeded
from moe_course.flags import ParallelConfig
from moe_course.parallel import make_plan
from moe_course.rank_program import run_rank

T_MAX, WIDTH = 8, 64


def check_capacity(comm: Comm, rows: int, t_max: int) -> None:
    """Raise the same CapacityExceeded on all ranks if one of them has more rows than a fixed buffer holds."""
    counts = comm.all_gather_rows(torch.tensor([[rows]])).rows.flatten().tolist()
    over = [rank for rank, count in enumerate(counts) if count > t_max]
    if over:
        raise CapacityExceeded(
            f"rank {comm.members[over[0]]} has {counts[over[0]]} rows, T_max is {t_max}: "
            "a buffer of fixed size cannot hold them; raise T_max on all ranks (vLLM: --max-num-batched-tokens), "
            "or send fewer rows"
        )


def main(guard_on: bool = True) -> int:
    def body(guard, rank: int) -> None:
        config = MoEConfig(WIDTH, 8, 8, 2, ("sparse",))
        comm = comm_dist.init(make_plan(ParallelConfig(data_parallel_size=2), config), "cpu", timeout=10)
        rows = torch.full((T_MAX + (rank == 1), WIDTH), float(rank))
        if guard_on:
            check_capacity(comm, len(rows), T_MAX)
        gathered = torch.empty(2 * T_MAX, WIDTH)
        dist.all_gather_into_tensor(gathered, rows)  # shapes are fixed, nobody asks

    return run_rank(body, guard_on)


if __name__ == "__main__":
    sys.exit(main("--no-guard" not in sys.argv))
