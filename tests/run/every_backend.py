"""Rank program of test_backends.py: the same prompts through every backend on every transport, one after the other.

One start of the processes for all of them. Each turn is a run's own parts: prepare, load, canary, generate, compare.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

from moe_course.errors import MoECourseError
from moe_course.launch import emit
from moe_course.options import RunOptions
from moe_course.rank_program import run_rank


class Answer:
    """A reference whose answer is there already."""

    def __init__(self, tensors):
        self.finish = lambda: tensors


def main(cells: list[dict]) -> int:
    def body(guard, rank: int) -> None:
        from moe_course.comm import dist
        from moe_course.job import prepare
        from moe_course.part import carried_by, take_part
        from moe_course.result import build_result
        from moe_course.run import _request
        from moe_course.verify import Reference

        options = RunOptions(max_new_tokens=int(os.environ["NEW_TOKENS"]), check=True, dtype="float32")
        first = prepare(replace(options, world_size=int(os.environ["WORLD_SIZE"])))
        reference = Reference(_request(first, None)) if rank == 0 else None
        world = dist.init(first.plan, "cpu", 60)
        carriers = {"gloo": world}
        answer = None
        for cell in cells:
            job = prepare(replace(options, **cell))
            if job.transport not in carriers:
                carriers[job.transport] = carried_by(job.transport, world)
            try:
                everybody, facts = take_part(job, carriers[job.transport], guard, lambda *args, **fields: None)
            except MoECourseError as error:
                raise type(error)(f"{cell}: {error}") from error
            if rank == 0:
                answer = answer or Answer(reference.finish())
                result, _ = build_result(job, everybody, answer, facts)
                emit("turn", cell=cell, result=result)
        world.barrier()
        dist.close()

    return run_rank(body)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
