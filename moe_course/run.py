"""The rank program: what every process of a run does, from the first line to the verdict.

    torchrun --standalone --nproc-per-node 2 -m moe_course.run --prompt "def add(a, b):"

`moe-course run` starts the same program under torchrun by itself. Built in: notebook 13.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from moe_course.errors import ConfigError, MoECourseError, VerificationFailed
from moe_course.launch import EVENTS_ENV, PLAN_FILE, RESULT_ENV, emit
from moe_course.options import TINY, RunOptions
from moe_course.rank_program import run_rank
from moe_course.result import RESULT_FILE, SCHEMA, build_result
from moe_course.targets import write_json, write_text


def rank_main(options: RunOptions) -> int:
    """Run this rank; returns its exit code."""

    def on_error(error: MoECourseError) -> None:
        if os.environ["RANK"] == "0" and options.json_file and not isinstance(error, VerificationFailed):
            with contextlib.suppress(ConfigError):  # that may be what failed
                write_json(options.json_file, {"schema": SCHEMA, "error": f"rank 0: {error}", "verdict": "failed"})

    return run_rank(lambda guard, rank: _run(options, rank, guard), options.guard, on_error)


def _run(options: RunOptions, rank: int, guard) -> None:
    began = time.perf_counter()
    options, overrides = options.on_rank(rank)

    from moe_course.comm import dist as comm_dist

    job = guard.handshake(options, overrides)  # before transformers is imported, and before a row moves
    plan = job.plan

    from moe_course.guard.blame import naming
    from moe_course.part import carried_by, take_part
    from moe_course.verify import Reference

    report = _reporter(job, rank)
    greedy = options.temperature == 0
    reference = None
    if rank == 0:
        shown = _plan_text(job)
        if os.environ.get(RESULT_ENV):
            Path(os.environ[RESULT_ENV]).with_name(PLAN_FILE).write_text(shown)
        given = {} if os.environ.get(RESULT_ENV) else {"text": shown}
        carried = {"transport": job.transport, "reason": job.travel.reason}
        report("plan", model=str(options.model), device=job.device.type, **carried, **given)
        if options.check and greedy:  # early: it works while the ranks load
            reference = Reference(_request(job, None))
    try:
        comm = carried_by(job.transport, comm_dist.init(plan, options.device, options.timeout, guard.store))
        guard.watch(comm, options, report)
        joined_s = time.perf_counter() - began
        with naming(job.own):
            everybody, facts = take_part(job, comm, guard, report)
        facts["loaded_s"] += joined_s
        comm.barrier()  # the others are done: nobody waits for the reference but rank 0
        if rank == 0:
            if options.check and not greedy:
                tokens = {g.index: g.tokens for part in everybody for g in part["generations"]}
                reference = Reference(_request(job, [tokens[i] for i in range(len(job.prompts))]))
            if reference is not None:
                report("checking")
            result, comparison = build_result(job, everybody, reference, facts)
            result["wall_s"] = round(time.perf_counter() - began, 3)
            _publish(options, result)
            if options.trace:
                _join_trace(job, everybody, facts)
                write_json(options.trace / RESULT_FILE, result)
            if options.report:
                from moe_course.trace.report import report_of

                write_text(options.report, report_of(options.trace))
                report("report", file=str(options.report))
            if comparison is not None and not comparison.equal and result["verdict"] == "different":
                yours = f"; stages of yours: {', '.join(map(str, job.own.files.values()))}" if job.own else ""
                raise VerificationFailed("; ".join(comparison.failures[:3]) + yours)
        reference = None
    finally:
        if reference is not None:
            reference.cancel()
    comm_dist.close()


def _reporter(job, rank: int) -> Callable[..., None]:
    """Where events go: to the launcher; without one, rank 0 shows its own."""
    if os.environ.get(EVENTS_ENV):
        return emit
    if rank:
        return lambda event, **fields: None
    from rich.console import Console

    from moe_course.progress import RunDisplay

    display = RunDisplay(Console(), job.options.prompts, job.tokenizer, 1, job.options.max_new_tokens)
    return lambda event, **fields: display.on_event({"event": event, "rank": rank} | fields)


def _plan_text(job) -> str:
    """The plan as a table, for whoever shows it."""
    from rich.console import Console

    from moe_course.planner.table import print_plan

    console = Console(file=io.StringIO(), highlight=False, color_system=None)
    model = "the tiny model" if job.options.model == TINY else str(job.options.model)
    dtype = str(job.dtype).removeprefix("torch.")
    print_plan(console, job.plan, model=model, dtype=dtype, max_num_batched_tokens=job.options.max_num_batched_tokens)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _request(job, tokens: list[list[int]] | None) -> dict:
    options, config = job.options, job.config
    return {
        "model": str(options.reference_model or options.model),
        "architecture": config.architecture,
        "dtype": "float32" if options.dtype == "auto" else options.dtype,
        "prompts": job.prompts,
        "tokens": tokens,
        "max_new_tokens": options.max_new_tokens,
        "stop_at_eos": options.stop_at_eos,
        "eos_token_id": config.eos_token_id,
    }


def _publish(options: RunOptions, result: dict) -> None:
    """Write the JSON; to the launcher if there is one, otherwise print the summary here."""
    if options.json_file:
        write_json(options.json_file, result)
    if os.environ.get(RESULT_ENV):
        write_json(Path(os.environ[RESULT_ENV]), result)
    else:
        from moe_course.console import print_result

        print_result(result, timings=options.timings)


def _join_trace(job, everybody: list[dict], facts: dict) -> None:
    from moe_course.trace.meta import describe
    from moe_course.trace.trace import write_joined

    exact = facts["invariance"] is None or facts["invariance"].exact
    write_joined(job.options.trace, describe(job, everybody, exact))


if __name__ == "__main__":
    from moe_course.cli import main

    sys.exit(main(["run", *sys.argv[1:]]))
