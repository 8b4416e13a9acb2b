"""Rank program of `moe-course backends`: measure, and let rank 0 hand over what all ranks saw."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_course.comm import dist as comm_dist
from moe_course.config import MoEConfig
from moe_course.cost.compare import Job, measure
from moe_course.flags import ParallelConfig
from moe_course.launch import RESULT_ENV, emit
from moe_course.options import TINY
from moe_course.parallel import make_plan
from moe_course.rank_program import run_rank
from moe_course.targets import write_json

_TENSORS = ("ids", "rank", "batch")


def write_job(job: Job, folder: Path) -> Path:
    """The job as a file that ranks read."""
    rest = {field.name: getattr(job, field.name) for field in fields(job) if field.name not in _TENSORS}
    file = folder / "job.safetensors"
    tensors = {name: getattr(job, name).contiguous() for name in _TENSORS}
    save_file(tensors, file, metadata={"job": json.dumps(rest)})
    return file


def read_job(file: str | Path) -> Job:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        rest = json.loads(opened.metadata()["job"])
    if isinstance(rest["ranks_per_node"], list):
        rest["ranks_per_node"] = tuple(rest["ranks_per_node"])
    return Job(**load_file(file), **rest)


def main(file: str, transport: str, timeout: float) -> int:
    def body(guard, rank: int) -> None:
        job = read_job(file)
        plan = make_plan(ParallelConfig(data_parallel_size=job.world_size), MoEConfig.from_pretrained(TINY))
        world = comm_dist.init(plan, "cpu", timeout)
        comm = world
        if transport == "shm":
            from moe_course.comm import shm

            comm = shm.over(world)
        with torch.inference_mode():
            found = measure(comm, job, lambda done: emit("round", done=done) if rank == 0 else None)
        parts = world.gather_objects(found)
        if rank == 0:
            write_json(Path(os.environ[RESULT_ENV]), {"verdict": "measured", "parts": parts})
        world.barrier()
        if comm is not world:
            comm.close()
        comm_dist.close()

    return run_rank(body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
