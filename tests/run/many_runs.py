"""Many runs in one start of the processes: rank program, and `run_many`, which starts it.

Most of a run's time goes into imports. Each turn here is a run's own parts: prepare, load, canary, generate, trace,
compare; the reference works once for all of them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from moe_course.errors import MoECourseError
from moe_course.launch import emit, launch
from moe_course.options import RunOptions
from moe_course.prompts import DEFAULT_PROMPTS
from moe_course.rank_program import run_rank


def run_many(
    ranks: int, cells: list[dict], new_tokens: int, prompts: tuple[str, ...] = DEFAULT_PROMPTS, timeout: float = 280
) -> list[dict]:
    """The result (`moe_course.run/1`) of each cell: options of a run on `ranks` processes, in one start of them."""
    request = json.dumps({"cells": cells, "new_tokens": new_tokens, "prompts": prompts})
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    from warm import warm_starts  # here, and not in the ranks, which import this file

    with warm_starts():
        ended = launch([request], ranks, module="many_runs", env=env, timeout=timeout)
    assert ended.returncode == 0, (ended.error, ended.output[-20:])
    results = [event["result"] for event in ended.events if event["event"] == "turn"]
    assert len(results) == len(cells)
    return results


class Answer:
    """A reference whose answer is there already."""

    def __init__(self, tensors):
        self.finish = lambda: tensors


def main(cells: list[dict], new_tokens: int, prompts: list[str]) -> int:
    def body(guard, rank: int) -> None:
        from moe_course.comm import dist
        from moe_course.job import prepare
        from moe_course.part import carried_by, take_part
        from moe_course.result import build_result
        from moe_course.run import _join_trace, _request
        from moe_course.verify import Reference

        options = RunOptions(prompts=tuple(prompts), max_new_tokens=new_tokens, check=True, dtype="float32")
        first = prepare(replace(options, world_size=int(os.environ["WORLD_SIZE"])))
        reference = Reference(_request(first, None)) if rank == 0 else None
        world = dist.init(first.plan, "cpu", 60)
        carriers = {"gloo": world}
        answer = None
        for cell in cells:
            trace = Path(cell["trace"]) if "trace" in cell else None
            job = prepare(replace(options, **cell | {"trace": trace}))
            if job.transport not in carriers:
                carriers[job.transport] = carried_by(job.transport, world)
            try:
                everybody, facts = take_part(job, carriers[job.transport], guard, lambda *args, **fields: None)
            except MoECourseError as error:
                raise type(error)(f"{cell}: {error}") from error
            if rank == 0:
                answer = answer or Answer(reference.finish())
                result, _ = build_result(job, everybody, answer, facts)
                if trace is not None:
                    _join_trace(job, everybody, facts)
                emit("turn", result=result)
        world.barrier()
        dist.close()

    return run_rank(body)


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
