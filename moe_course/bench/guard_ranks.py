"""Rank program of `moe-course bench guard`: the same steps with the guard, and without header or watchdog.

Without means: no header is sent at all. The counts, which never change here, are those of an earlier step. So the
difference is all that headers, their comparison and the watchdog cost, the exchange of counts included.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from moe_course.comm import dist as comm_dist
from moe_course.config import MoEConfig
from moe_course.flags import ParallelConfig
from moe_course.glm.model import load
from moe_course.guard.watchdog import Watchdog, place
from moe_course.launch import emit
from moe_course.options import TINY
from moe_course.parallel import make_plan
from moe_course.rank_program import run_rank

PREFILL = (4, 128)  # prompts and tokens of each: 512 rows a rank; a decode step follows one of them
STEPS = {"prefill": 2, "decode": 20}  # in one block: short, so that both variants see the same machine


class Bare:
    """In a `with` block exchanges send no header: they get the messages of the step that was recorded."""

    def __init__(self, comm):
        self.comm, self.messages, self.next = comm, [], 0
        self.real = comm._exchange

    def record(self, step) -> None:
        """Run one step with headers and keep what they said."""

        def keep(message: torch.Tensor, what: str) -> torch.Tensor:
            self.messages.append(self.real(message, what))
            return self.messages[-1]

        self.messages, self.comm._exchange = [], keep
        step()
        self.comm._exchange = self.real

    def __enter__(self) -> None:
        self.next, self.comm.shared.compare = 0, False

        def recall(message: torch.Tensor, what: str) -> torch.Tensor:
            found = self.messages[self.next % len(self.messages)]
            self.next += 1
            return found

        self.comm._exchange = recall

    def __exit__(self, *error) -> None:
        self.comm._exchange, self.comm.shared.compare = self.real, True


def measure(comm, store, step, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step with and without guard, one figure for each round; the two take turns."""
    bare, found = Bare(comm), {"guard": [], "bare": []}
    for _ in range(3):
        step()
    bare.record(step)
    for turn in range(rounds):
        for variant in ("guard", "bare") if turn % 2 else ("bare", "guard"):
            comm.barrier()
            if variant == "guard":
                dog = Watchdog(store.clone(), comm.rank, comm.shared, [place()] * comm.world_size, 10.0)
                dog.start()
                found["guard"].append(_time(step, steps))
                dog.stop("returned")
            else:
                with bare:
                    found["bare"].append(_time(step, steps))
    return found


def _time(step, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def main(rounds: int) -> int:
    def body(guard, rank: int) -> None:
        store, rank, size = comm_dist.join_store(60)
        plan = make_plan(ParallelConfig(data_parallel_size=size), MoEConfig.from_pretrained(TINY))
        comm = comm_dist.init(plan, "cpu", 60, store)
        model = load(TINY, comm, plan)
        prompts = torch.randint(1, 256, PREFILL, generator=torch.Generator().manual_seed(rank))
        from transformers import DynamicCache

        def prefill() -> None:
            model.shell(input_ids=prompts, use_cache=False, logits_to_keep=1)

        cache = DynamicCache(config=model.shell.config)

        def decode() -> None:
            model.shell(input_ids=prompts[:1, :1], cache=cache, use_cache=True, logits_to_keep=1)
            cache.crop(-1)  # every step has the same context

        with torch.inference_mode():
            model.shell(input_ids=prompts[:1], cache=cache, use_cache=True, logits_to_keep=1)
            for name, step in (("prefill", prefill), ("decode", decode)):
                times = measure(comm, store, step, STEPS[name], rounds)
                if rank == 0:
                    emit("measured", step=name, times=times, **summary(times))
        comm.barrier()
        comm_dist.close()

    return run_rank(body)


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Share of a guarded step that the guard takes: of the fastest rounds, and the median over rounds."""
    guard, bare = times["guard"], times["bare"]
    return {
        "guard_ms": 1e3 * min(guard),
        "bare_ms": 1e3 * min(bare),
        "share_of_fastest": 1 - min(bare) / min(guard),
        "share_median": statistics.median(1 - b / g for g, b in zip(guard, bare, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else 8))
