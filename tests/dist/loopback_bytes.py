"""Program for a network namespace of its own: two ranks on gloo, and what the kernel counts on the way between them.

python loopback_bytes.py 65536 1048576      one line of JSON for each size of a message
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moe_course.comm.dist import init
from moe_course.comm.ledger import Ledger
from moe_course.config import MoEConfig
from moe_course.parallel import ParallelConfig, make_plan

EXCHANGES = 20
BLOCKS = 5  # on a busy machine TCP may send a packet twice; the least of some blocks is without that
WIDTH = 256  # fp32, 1 KB a row


def sent_by_the_host() -> int:
    # not /sys/class/net: that shows the network of whoever mounted it
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[9])


def measure(comm, nbytes: int) -> dict:
    """`EXCHANGES` times a message of `nbytes` to the peer, with a sixteenth of that as metadata; counted twice."""
    n = nbytes // 4 // WIDTH
    rows, ids = torch.ones(n + 1, WIDTH), torch.ones(n + 1, 8, dtype=torch.int64)
    counts = [n, 1] if comm.rank else [1, n]  # one row stays
    for _ in range(3):
        comm.all_to_all_rows(rows, counts, ids)  # connections and buffers
    comm.barrier()
    comm.ledger, before = Ledger(), sent_by_the_host()
    for _ in range(EXCHANGES):
        comm.all_to_all_rows(rows, counts, ids)
    comm.barrier()  # nobody sends any more
    counted = sent_by_the_host() - before
    total = comm.ledger.total()
    both = torch.tensor([[total.payload, total.metadata]])
    payload, metadata = comm.all_reduce(both)[0].tolist()
    return {"nbytes": nbytes, "payload": payload, "metadata": metadata, "counted": counted}


def rank_process(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"}
    config = MoEConfig(
        hidden_size=8, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, mlp_layer_types=("sparse",)
    )
    comm = init(make_plan(ParallelConfig(data_parallel_size=2), config), "cpu", 30)
    for nbytes in map(int, sys.argv[1:]):
        blocks = [measure(comm, nbytes) for _ in range(BLOCKS)]
        found = min(blocks, key=lambda one: one["counted"])
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    child = os.fork()
    try:
        rank_process(1 if child == 0 else 0)
    finally:
        if child == 0:
            os._exit(0)
    sys.exit(os.waitpid(child, 0)[1])
