"""One rank of a group of processes: joins the group, then runs the cases it is sent until its input closes.

Requests come on standard input and replies go to standard output; what anything prints goes to standard error.
The process ends at once when its parent does, because its input then closes.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import traceback
from typing import BinaryIO

from gloo_wire import read_message, write_message


def collect(stream: BinaryIO, inbox: queue.Queue) -> None:
    try:
        while True:
            inbox.put(read_message(stream))
    except BaseException:
        os._exit(0)


def main() -> None:
    inbox: queue.Queue = queue.Queue()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=collect, args=(sys.stdin.buffer, inbox), daemon=True).start()

    import torch

    from moe_course.comm.dist import init
    from moe_course.config import MoEConfig
    from moe_course.parallel import ParallelConfig, make_plan

    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    config = MoEConfig(
        hidden_size=8,
        moe_intermediate_size=8,
        n_routed_experts=2 * world_size,
        num_experts_per_tok=2,
        mlp_layer_types=("sparse",),
    )
    plan = make_plan(ParallelConfig(data_parallel_size=world_size), config)
    comm = init(plan, device="cpu", timeout=float(os.environ["GROUP_TIMEOUT"]))
    write_message(replies, ("ready", None))
    while True:
        case, args = inbox.get()
        module, function = case.split(":")
        try:
            reply = ("done", getattr(importlib.import_module(module), function)(comm, *args))
        except BaseException:
            reply = ("failed", traceback.format_exc())
        write_message(replies, reply)


if __name__ == "__main__":
    main()
