"""Rank program of `moe-course bench headers`: one header to every peer, over gloo and over plain sockets, in turns."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from moe_course.comm import dist as comm_dist
from moe_course.comm.wire import Wire
from moe_course.launch import emit
from moe_course.rank_program import run_rank

TIMES = 100  # exchanges in one block


def main(rounds: int) -> int:
    def body(guard, rank: int) -> None:
        store, rank, size = comm_dist.join_store(60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        group, wire = dist.new_group(list(range(size))), Wire(store, "bench", rank, size, 60)
        message = torch.zeros(10 + 2 * size, dtype=torch.int64)  # as long as a header is
        messages = torch.zeros(size, len(message), dtype=torch.int64)
        places = [memoryview(row.numpy()).cast("B") for row in messages.unbind()]
        peers = [peer for peer in range(size) if peer != rank]

        def over_gloo() -> None:
            works = [group.recv([messages[peer]], peer, 0) for peer in peers]
            works += [group.send([message], peer, 0) for peer in peers]
            for work in works:
                work.wait()

        def over_sockets() -> None:
            wire.exchange(places[rank], places)

        times: dict[str, list[float]] = {"gloo": [], "sockets": []}
        for _ in range(rounds + 1):  # the first one warms up
            for name, step in (("gloo", over_gloo), ("sockets", over_sockets)):
                began = time.perf_counter()
                for _ in range(TIMES):
                    step()
                times[name].append((time.perf_counter() - began) / TIMES)
        if rank == 0:
            emit("measured", times={name: seconds[1:] for name, seconds in times.items()})
        dist.barrier()

    return run_rank(body)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
