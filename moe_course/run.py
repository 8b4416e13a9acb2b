"""The rank program: what every process of a run does, from the first line to the verdict.

    torchrun --standalone --nproc-per-node 2 -m moe_course.run --prompt "def add(a, b):"

`moe-course run` starts the same program under torchrun by itself. Built in: notebook 13.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from moe_course.config import MoEConfig
from moe_course.errors import BackendUnavailable, ConfigError, MoECourseError, RankLost, VerificationFailed
from moe_course.launch import EVENTS_ENV, RESULT_ENV, die_with_parent, emit
from moe_course.options import RunOptions
from moe_course.result import SCHEMA, build_result, write_json
from moe_course.tokenizer import load_tokenizer

_WAIT_FOR_AGENT_S = 1.5  # lets torchrun see which rank died before those that only lost it end as well


def rank_main(options: RunOptions) -> int:
    """Run this rank; returns its exit code. Errors are one line on stderr that names the rank."""
    rank = int(os.environ["RANK"])
    emit("start", pid=os.getpid())
    die_with_parent()
    try:
        _run(options, rank)
    except MoECourseError as error:
        message = str(error)
        emit("error", kind=type(error).__name__, message=message[:1500], exit_code=error.exit_code)
        print(f"error: rank {rank}: {message}", file=sys.stderr, flush=True)
        if rank == 0 and options.json_file and not isinstance(error, VerificationFailed):
            with contextlib.suppress(ConfigError):  # that may be what failed
                write_json(options.json_file, {"schema": SCHEMA, "error": f"rank 0: {message}", "verdict": "failed"})
        if isinstance(error, RankLost):
            time.sleep(_WAIT_FOR_AGENT_S)
        return error.exit_code
    except Exception as error:  # not one of ours: the traceback is worth more than a line, the launcher gets both
        emit("error", kind=type(error).__name__, message=f"{type(error).__name__}: {error}"[:1500], exit_code=1)
        raise
    return 0


def _run(options: RunOptions, rank: int) -> None:
    began = time.perf_counter()
    config = MoEConfig.from_pretrained(options.model)
    tokenizer = load_tokenizer(options.model, config)
    prompts = [tokenizer.encode(prompt) for prompt in options.prompts]
    options.check_against(config, [len(tokens) for tokens in prompts])

    import torch

    from moe_course.comm import dist as comm_dist
    from moe_course.comm.ledger import Ledger
    from moe_course.glm.generate import generate
    from moe_course.glm.model import check_supported, load
    from moe_course.parallel import ParallelConfig, make_plan
    from moe_course.trace.record import Recorder
    from moe_course.verify import Reference

    check_supported(config, options.model)
    world_size = options.resolved_world_size()
    report = _reporter(options, tokenizer, rank, world_size)
    parallel = ParallelConfig(
        data_parallel_size=world_size,
        enable_expert_parallel=options.enable_expert_parallel,
        all2all_backend=options.all2all_backend,
        expert_placement_strategy=options.expert_placement_strategy,
    )
    plan = make_plan(parallel, config)
    device = comm_dist.pick_device(options.device)
    transport = _transport(options.transport, device)
    dtype = _dtype(options.dtype, device)
    greedy = options.temperature == 0
    reference = None
    if rank == 0:
        report("plan", plan=plan.as_dict(), model=str(options.model), device=device.type, transport=transport)
        if options.check and greedy:  # early: it works while the ranks load
            reference = Reference(_request(options, config, prompts, None))
    try:
        comm = comm_dist.init(plan, options.device, options.exchange_timeout)
        recorder = Recorder(values=options.trace_values)
        model = load(options.model, comm, plan, dtype=dtype, device=device, on_event=recorder)
        invariance = model.blocks[0].layer.row_invariance() if model.blocks else None
        report(
            "loaded", experts=plan.placement.num_local(rank), params=model.params, bytes_read=model.report.bytes_read
        )
        comm.barrier()
        loaded_s = time.perf_counter() - began

        def on_pass(step: int, token_ids: torch.Tensor, places: list[tuple[int, int]]) -> None:
            recorder.on_pass(step, token_ids, places)
            if rank == 0:
                report("step", step=step, steps=options.max_new_tokens)

        generations, timing = generate(
            model,
            {index: tokens for index, tokens in enumerate(prompts) if index % world_size == rank},
            options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
            stop_at_eos=options.stop_at_eos,
            eos_token_id=tokenizer.eos_token_id,
            keep_logits=options.check,
            on_token=lambda index, token: report("token", prompt=index, token=token),
            on_pass=on_pass,
        )
        ledger, comm.ledger = comm.ledger, Ledger()  # what the trace and the report cost is not part of the run
        if options.trace:
            _write_trace(options, rank, comm, recorder, model)
        everybody = comm.gather_objects(
            {
                "rank": rank,
                "generations": generations,
                "timing": timing,
                "ledger": ledger,
                "report": model.report,
                "params": model.params,
                "expert_bytes": model.expert_bytes,
                "routed": _routed(recorder),
                "rows_per_pass": {(e["step"], e["layer"]): e["topk_ids"] for e in recorder.passes},
                "peak_rss": peak_rss(),
            }
        )
        if rank == 0:
            if options.check and not greedy:
                tokens = {g.index: g.tokens for part in everybody for g in part["generations"]}
                reference = Reference(_request(options, config, prompts, [tokens[i] for i in range(len(prompts))]))
            if reference is not None:
                report("checking")
            facts = {"device": device.type, "transport": transport, "dtype": str(dtype).removeprefix("torch.")}
            facts |= {"loaded_s": loaded_s, "invariance": invariance}
            result, comparison = build_result(options, config, plan, tokenizer, prompts, everybody, reference, facts)
            result["wall_s"] = round(time.perf_counter() - began, 3)
            _publish(options, result)
            if options.trace:
                _join_trace(options, plan, prompts)
            if comparison is not None and not comparison.equal and result["verdict"] == "different":
                raise VerificationFailed("; ".join(comparison.failures[:3]))
        comm.barrier()
        reference = None
    finally:
        if reference is not None:
            reference.cancel()
    comm_dist.close()


def _reporter(options: RunOptions, tokenizer, rank: int, world_size: int) -> Callable[..., None]:
    """Where events go: to the launcher; without one, rank 0 shows its own."""
    if os.environ.get(EVENTS_ENV):
        return emit
    if rank:
        return lambda event, **fields: None
    from rich.console import Console

    from moe_course.console import RunDisplay

    display = RunDisplay(Console(), options.prompts, tokenizer, 1, options.max_new_tokens)
    return lambda event, **fields: display.on_event({"event": event, "rank": rank} | fields)


def _request(options: RunOptions, config: MoEConfig, prompts: list[list[int]], tokens: list[list[int]] | None) -> dict:
    return {
        "model": str(options.model),
        "architecture": config.architecture,
        "dtype": "float32" if options.dtype == "auto" else options.dtype,
        "prompts": prompts,
        "tokens": tokens,
        "max_new_tokens": options.max_new_tokens,
        "stop_at_eos": options.stop_at_eos,
        "eos_token_id": config.eos_token_id,
    }


def _transport(asked: str, device) -> str:
    fits = "nccl" if device.type == "cuda" else "gloo"
    if asked not in ("auto", fits):
        raise BackendUnavailable(f"--transport {asked} does not carry {device.type} tensors here; use auto or {fits}")
    return fits


def _dtype(asked: str, device):
    import torch

    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, asked)


def _routed(recorder) -> dict:
    """(prompt, layer) -> position -> sorted expert ids of this rank's rows."""
    routed: dict = defaultdict(dict)
    for entry in recorder.passes:
        for row, (prompt, position) in enumerate(entry["places"]):
            routed[prompt, entry["layer"]][position] = entry["topk_ids"][row].sort().values
    return dict(routed)


def _publish(options: RunOptions, result: dict) -> None:
    """Write the JSON; to the launcher if there is one, otherwise print the summary here."""
    if options.json_file:
        write_json(options.json_file, result)
    if os.environ.get(RESULT_ENV):
        write_json(Path(os.environ[RESULT_ENV]), result)
    else:
        from moe_course.console import print_result

        print_result(result)


def _write_trace(options: RunOptions, rank: int, comm, recorder, model) -> None:
    from moe_course.trace.trace import write_rank
    from moe_course.trace.values import collect_values

    extra = collect_values(comm, recorder, model.config) if options.trace_values else {}
    write_rank(options.trace, rank, recorder, extra)


def _join_trace(options: RunOptions, plan, prompts: list[list[int]]) -> None:
    from moe_course.trace.trace import write_joined

    texts = [{"prompt": text, "tokens": tokens} for text, tokens in zip(options.prompts, prompts, strict=True)]
    meta = {"world_size": plan.world_size, "model": str(options.model), "plan": plan.as_dict(), "prompts": texts}
    write_joined(options.trace, meta)


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    try:  # Linux: unlike getrusage, not inherited from the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    from moe_course.cli import main

    sys.exit(main(["run", *sys.argv[1:]]))
