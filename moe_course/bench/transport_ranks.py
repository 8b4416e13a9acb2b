"""Rank program of `moe-course bench transports`: the same rows over gloo and over shared memory, in turns.

`primitive` is the exchange alone, `dist.all_to_all_single` against what stands in its place on shared memory;
`operation` is `all_to_all_rows`, header, comparison and ledger included. Shared memory is read in place, source by
source, and own rows stay where they are ("shm, views"); read in place as one tensor ("shm"); or copied out of it
("shm, copied").
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from moe_course.comm import dist as comm_dist
from moe_course.comm import shm
from moe_course.config import MoEConfig
from moe_course.flags import ParallelConfig
from moe_course.launch import emit
from moe_course.options import TINY
from moe_course.parallel import make_plan
from moe_course.rank_program import run_rank

#: Bytes a rank sends, its own part included -> calls in a block. Some short blocks have the machine to themselves.
TIMES = {4 << 10: 20, 64 << 10: 20, 1 << 20: 4, 8 << 20: 4}
WIDTH = 256  # fp32: 1 KB a row


def variants(gloo, over_shm, rows: torch.Tensor) -> dict[str, dict]:
    """Part -> name -> a function that moves `[n, WIDTH]` rows, an equal share to everybody, and returns what came."""
    size, n = gloo.world_size, len(rows) // gloo.world_size
    counts, matrix = [n] * size, torch.full((size, size), n)
    packed, out = [rows.view(torch.uint8)], torch.empty_like(rows)

    def single() -> torch.Tensor:
        dist.all_to_all_single(out, rows, group=gloo._rows)
        return out

    return {
        "primitive": {
            "gloo": single,
            "shm, views": lambda: over_shm._all_to_all_views(packed, matrix),
            "shm": lambda: over_shm._all_to_all(packed, matrix, True)[0].view(torch.float32),
            "shm, copied": lambda: over_shm._all_to_all(packed, matrix, False)[0].view(torch.float32),
        },
        "operation": {
            "gloo": lambda: gloo.all_to_all_rows(rows, counts).rows,
            "shm, views": lambda: over_shm.all_to_all_views(rows, counts),
            "shm": lambda: over_shm.all_to_all_rows(rows, counts, borrow=True).rows,
            "shm, copied": lambda: over_shm.all_to_all_rows(rows, counts).rows,
        },
    }


def in_one(received) -> torch.Tensor:
    """What came as one fp32 tensor, for the comparison: views are lists by source, of rows or of their parts."""
    if isinstance(received, torch.Tensor):
        return received
    return torch.cat([rows if isinstance(rows, torch.Tensor) else rows[0].view(torch.float32) for rows in received])


def measure(ways: dict, times: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one call, a figure for each round; all ways take turns. The first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in list(ways) if turn % 2 else reversed(ways):
            began = time.perf_counter()
            for _ in range(times):
                ways[name]()
            found[name].append((time.perf_counter() - began) / times)
    return {name: seconds[1:] for name, seconds in found.items()}


def main(rounds: int) -> int:
    def body(guard, rank: int) -> None:
        store, rank, size = comm_dist.join_store(60)
        plan = make_plan(ParallelConfig(data_parallel_size=size), MoEConfig.from_pretrained(TINY))
        gloo = comm_dist.init(plan, "cpu", 60, store)
        over_shm = shm.over(gloo)
        for nbytes, times in TIMES.items():
            rows = torch.randn(nbytes // 4 // WIDTH, WIDTH, generator=torch.Generator().manual_seed(rank))
            for part, ways in variants(gloo, over_shm, rows).items():
                expected = ways["gloo"]().clone()
                for name, way in ways.items():
                    if not torch.equal(in_one(way()), expected):
                        raise RuntimeError(f"{name} delivers other rows than gloo at {nbytes} bytes")
                seconds = measure(ways, times, rounds)
                if rank == 0:
                    emit("measured", part=part, bytes=nbytes, times=seconds)
        over_shm.barrier()
        over_shm.close()
        comm_dist.close()

    return run_rank(body)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
