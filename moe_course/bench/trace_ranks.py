"""Rank program of `moe-course bench trace`: the same steps with and without a trace, taking turns.

Three ways: "bare", a model nobody listens to; "ids", what every run keeps for its report (`Recorder(trace=False)`);
"trace", what `--trace` adds. A fourth, "values", is `--trace-values`, which copies rows and outputs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys

import torch

from moe_course.bench.guard_ranks import PREFILL, STEPS, _time
from moe_course.comm import dist as comm_dist
from moe_course.config import MoEConfig
from moe_course.flags import ParallelConfig
from moe_course.glm.model import load
from moe_course.launch import emit
from moe_course.options import TINY
from moe_course.parallel import make_plan
from moe_course.rank_program import run_rank
from moe_course.trace.record import Recorder

WAYS = ("bare", "ids", "trace", "values")
KINDS = {"ids": {"trace": False}, "trace": {}, "values": {"values": True}}


class Listening:
    """In a `with` block the model has a new recorder, as a run has; none for "bare". Nothing of it is left behind."""

    def __init__(self, model, way: str):
        self.model, self.way = model, way
        self.recorder: Recorder | None = None

    def __enter__(self) -> Recorder | None:
        if self.way == "bare":
            return None
        self.recorder = Recorder(**KINDS[self.way])
        for block in self.model.blocks:
            block.layer.on_event = self.recorder
        if self.recorder.trace:
            self.recorder.watch(self.model)
        return self.recorder

    def __exit__(self, *error) -> None:
        for block in self.model.blocks:
            block.layer.on_event = None
        if self.recorder is not None:
            self.recorder.unwatch()


def measure(comm, model, step, turns: int) -> dict[str, list[float]]:
    """Seconds of single steps, one for each way and turn.

    The ways take turns from step to step, so that what slows the machine for a while slows all of them; each turn
    begins with another way.
    """
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(3):
        step(None)
    for turn in range(turns):
        for place in range(len(WAYS)):
            way = WAYS[(turn + place) % len(WAYS)]
            with Listening(model, way) as recorder:
                comm.barrier()
                found[way].append(_time(lambda recorder=recorder: step(recorder), 1))
    return found


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds of each way's median step, and what a way adds to "bare": median over the turns, and its error.

    The error is half of what a notch in a box plot spans (McGill, Tukey and Larsen, 1978): two medians whose notches
    do not meet differ, with a confidence of about 95 %.
    """
    bare, found = times["bare"], {}
    for way, seconds in times.items():
        found[f"{way}_ms"] = 1e3 * statistics.median(seconds)
        added = [one / without - 1 for one, without in zip(seconds, bare, strict=True)]
        low, middle, high = statistics.quantiles(added, n=4)
        found[f"{way}_adds"], found[f"{way}_error"] = middle, 1.57 * (high - low) / math.sqrt(len(added))
    return found


def main(rounds: int) -> int:
    def body(guard, rank: int) -> None:
        store, rank, size = comm_dist.join_store(60)
        plan = make_plan(ParallelConfig(data_parallel_size=size), MoEConfig.from_pretrained(TINY))
        comm = comm_dist.init(plan, "cpu", 60, store)
        model = load(TINY, comm, plan)
        prompts = torch.randint(1, 256, PREFILL, generator=torch.Generator().manual_seed(rank))
        places = [(prompt, position) for prompt in range(PREFILL[0]) for position in range(PREFILL[1])]
        from transformers import DynamicCache

        cache = DynamicCache(config=model.shell.config)

        def prefill(recorder: Recorder | None) -> None:
            if recorder is not None:
                recorder.on_pass(0, prompts.flatten(), places)
            model.shell(input_ids=prompts, use_cache=False, logits_to_keep=1)

        def decode(recorder: Recorder | None) -> None:
            if recorder is not None:
                recorder.on_pass(1, prompts[0, :1], [(0, PREFILL[1])])
            model.shell(input_ids=prompts[:1, :1], cache=cache, use_cache=True, logits_to_keep=1)
            cache.crop(-1)  # every step has the same context

        with torch.inference_mode():
            model.shell(input_ids=prompts[:1], cache=cache, use_cache=True, logits_to_keep=1)
            for name, step in (("prefill", prefill), ("decode", decode)):
                times = measure(comm, model, step, rounds * STEPS[name])
                if rank == 0:
                    emit("measured", step=name, times=times, **summary(times))
        comm.barrier()
        comm_dist.close()

    return run_rank(body)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else 8))
