"""What a rank does between joining its peers and handing in: load, check, generate, write its trace.

Built in: notebook 13.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from moe_course.comm.base import Comm
from moe_course.comm.ledger import Ledger
from moe_course.glm.generate import generate
from moe_course.guard.faults import Faults, chain
from moe_course.guard.known_layer import KnownLayer
from moe_course.guard.witness import Witness
from moe_course.options import RunOptions
from moe_course.quant import QuantError, error
from moe_course.stages import Stages
from moe_course.static_shapes import CapturedExperts
from moe_course.trace.record import Recorder


def carried_by(transport: str, world: Comm) -> Comm:
    """The group of all ranks on the transport of a run: the joined world itself, or shared memory over it."""
    if transport != "shm":
        return world
    from moe_course.comm import shm

    return shm.over(world)


def take_part(job, comm: Comm, guard, report: Callable[..., None]) -> tuple[list[dict] | None, dict]:
    """Run one job on this rank. Every rank must call it.

    Args:
        job: this rank's `Job`.
        comm: all ranks of the plan.
        guard: this rank's `guard.setup.Guard`.
        report: called with an event and its fields.

    Returns:
        What every rank hands in, on rank 0, None elsewhere; and facts of this rank: seconds to load, row invariance.
    """
    began, options, rank = time.perf_counter(), job.options, comm.rank
    mine = job.plan.rank(rank)
    lead = mine.tp == 0 and mine.pcp == 0  # of the ranks that share rows, this one speaks
    recorder = Recorder(trace=options.trace is not None, values=options.trace_values)
    losses = QuantLosses(job.backend.format)
    captured = _captured_experts(job, rank) if options.static_shapes else None
    stages = Stages() if captured is None else Stages(experts=captured)
    if job.own is not None:
        stages = _witness(job, comm, stages).stages()
    model = Faults(options.fault_specs(), rank).load(
        job, comm, chain(recorder, losses if losses.fmt else None), checked=options.guard, stages=stages
    )
    if options.trace:
        recorder.watch(model)
    invariance = model.blocks[0].layer.row_invariance() if model.blocks else None
    report("loaded", experts=len(mine.experts), params=model.params, bytes_read=model.report.bytes_read)
    guard.check_model(model, job, comm)
    if captured is not None and model.blocks:
        captured.capture(model.blocks[0].layer.w13, model.blocks[0].layer.w2)
    ledgers = {"prefill": Ledger(), "decode": Ledger()}
    comm.ledger = ledgers["prefill"]  # groups, audit and canary are not part of the run either
    comm.barrier()
    loaded_s = time.perf_counter() - began

    passes: dict[str, int] = {}

    def on_phase(phase: str, number: int) -> None:
        comm.ledger = ledgers[phase]
        passes[phase] = number

    def on_pass(step: int, token_ids, places: list[tuple[int, int]]) -> None:
        recorder.on_pass(step, token_ids, places)
        if rank == 0:
            report("step", step=step, steps=passes["prefill"] + options.max_new_tokens - 1)

    waited = comm.shared.waited_s
    generations, timing = generate(
        model,
        job.mine(mine.dp),
        options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        stop_at_eos=options.stop_at_eos,
        eos_token_id=job.tokenizer.eos_token_id,
        keep_logits=options.check,
        on_token=lambda index, token: report("token", prompt=index, token=token) if lead else None,
        on_pass=on_pass,
        on_phase=on_phase,
    )
    waited = comm.shared.waited_s - waited
    comm.ledger = Ledger()  # what the trace and the report cost is not part of the run
    if options.trace:
        _write_trace(options, rank, comm, recorder, model)
    everybody = comm.gather_objects(
        {
            "rank": rank,
            "lead": lead,
            "generations": generations if lead else [],
            "timing": timing,
            "waited_s": waited,
            "ledgers": ledgers,
            "ledger": Ledger.merge(ledgers.values()),
            "report": model.report,
            "params": model.params,
            "expert_bytes": model.expert_bytes,
            "routed": recorder.routed() if options.check else {},
            "rows_per_pass": recorder.rows_per_pass(),
            "guard": guard.seconds | guard.audited,
            "quant_losses": losses.found,
            "peak_rss": peak_rss(),
        }
    )
    return everybody, {"loaded_s": loaded_s, "invariance": invariance}


class QuantLosses:
    """Receiver of layer events: how much the rows of each layer's first pass with rows lose when quantised."""

    def __init__(self, fmt: str | None):
        self.fmt = fmt
        self.found: dict[int, QuantError] = {}  # layer -> error

    def __call__(self, stage: str, layer, **tensors) -> None:
        if stage == "route" and self.fmt is not None and layer.layer not in self.found:
            rows = tensors["hidden_states"]
            if len(rows):
                self.found[layer.layer] = error(rows, self.fmt)


def _witness(job, comm: Comm, base: Stages) -> Witness:
    """Your own stages, next to those of the run."""
    compare = {"known_pass": job.options.guard, "real_passes": job.options.check}
    return Witness(job.own, comm, job.plan.backend.name, job.backend, base, job.device, **compare)


def _captured_experts(job, rank: int) -> CapturedExperts:
    """The experts stage for fixed shapes: those of the run, and those of the known pass of the canary."""
    plan, capacity = job.plan, job.backend.capacity
    known = KnownLayer(plan.placement, 1, plan.parallel.data_parallel_size, bool(plan.config.n_shared_experts))
    ranks = len(plan.groups[plan.dispatch_group][0])
    return CapturedExperts(sorted({ranks * capacity, ranks * max(capacity, known.stride)}), rank=rank)


def _write_trace(options: RunOptions, rank: int, comm, recorder, model) -> None:
    from moe_course.trace.trace import write_rank
    from moe_course.trace.values import collect_values

    extra = collect_values(comm, recorder, model.config) if options.trace_values and recorder.knows_places else {}
    write_rank(options.trace, rank, recorder, extra)


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    import resource

    try:  # Linux: unlike getrusage, not inherited from the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
