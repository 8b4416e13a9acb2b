"""Run a recorded run again, with its ranks as threads of this process, and compare the two traces.

Same prompts, plan, backend and code; only what carries the rows differs. Built in: notebook 13.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch

from moe_course.comm.sim import run_threads
from moe_course.errors import TraceError
from moe_course.guard.setup import Guard
from moe_course.job import prepare
from moe_course.options import RunOptions
from moe_course.part import take_part
from moe_course.rows import TOLERANCE
from moe_course.trace.meta import describe
from moe_course.trace.schema import COLUMNS, OUTPUTS, VALUES
from moe_course.trace.trace import Trace, write_joined

SHOWN = 5  # differences that are told one by one


def simulate(recorded: Trace | str | Path, timeout: float = 60) -> Trace:
    """The same run on threads of this process, recorded: prompts, plan, backend, and values where the run had them.

    Args:
        recorded: a trace, or its folder.
        timeout: seconds a rank waits for its peers in one exchange.

    Raises TraceError for a run whose options this version does not know, and what `run_here` raises.
    """
    trace = recorded if isinstance(recorded, Trace) else Trace.load(recorded)
    with _torch_threads(trace.meta["threads"]):
        return run_here(_options(trace.meta), timeout)


def run_here(options: RunOptions, timeout: float = 60) -> Trace:
    """Run these options with ranks as threads of this process, on its CPU, and return the trace.

    Values are recorded if `options.trace_values` says so; `trace` and `transport` are not looked at, and experts are
    not compiled for fixed shapes. Raises what `job.prepare` raises, and what the ranks raise.
    """
    with tempfile.TemporaryDirectory(prefix="moe-course-here-") as folder, _alone():
        here = {"trace": Path(folder) / "trace", "transport": "auto", "static_shapes": False, "device": "cpu"}
        job = prepare(replace(options, **here))

        def body(comm):
            # the guard's questions are asked between processes; threads of one share all answers
            return take_part(job, comm, Guard(False, comm.rank), lambda *event, **fields: None)

        everybody, facts = run_threads(job.plan.world_size, body, timeout=timeout)[0]
        exact = facts["invariance"] is None or facts["invariance"].exact
        write_joined(job.options.trace, describe(job, everybody, exact) | {"transport": "threads"})
        return Trace.load(job.options.trace)


def same(a: Trace, b: Trace) -> list[str]:
    """What differs between two traces, record by record; empty when nothing does. Times are not compared.

    Ids and places must be equal. Weights and values must be equal to the bit where both machines give a row the same
    bits in every batch (`meta["exact"]`), else to the tolerance of the dtype.
    """
    found = [
        f"{name}: {a.meta[name]!r} and {b.meta[name]!r}"
        for name in ("world_size", "backend", "rows_dtype", "prompts", "new_tokens")
        if a.meta[name] != b.meta[name]
    ]
    if len(a) != len(b):
        return [*found, f"{len(a)} routes and {len(b)}"]
    exact = a.meta["exact"] and b.meta["exact"]
    tolerance = 0.0 if exact else TOLERANCE[getattr(torch, a.meta["rows_dtype"])]
    for name in COLUMNS:
        limit = tolerance if name == "weight" else 0.0
        found += _differences(name, a.columns[name], b.columns[name], limit, lambda at: _route(a, at))
    if a.meta["values"] and b.meta["values"] and not found:
        for rank in range(a.meta["world_size"]):
            one, other = a.values(rank), b.values(rank)
            for name in (*OUTPUTS, *VALUES):
                limit = tolerance if name in VALUES else 0.0
                found += _differences(f"rank {rank}, {name}", one[name], other[name], limit, "entry {}".format)
    return found


def _differences(name: str, a: torch.Tensor, b: torch.Tensor, tolerance: float, where) -> list[str]:
    if a.shape != b.shape:
        return [f"{name}: shapes {list(a.shape)} and {list(b.shape)}"]
    off = (a - b).abs() > tolerance * a.abs().clamp(min=1) if tolerance else a != b
    bad = off.flatten(1).any(dim=1) if off.ndim > 1 else off
    places = bad.nonzero().flatten().tolist()
    told = [
        f"{name} of {where(at)}: {a[at].flatten()[:3].tolist()} and {b[at].flatten()[:3].tolist()}"
        for at in places[:SHOWN]
    ]
    return told + ([f"{name}: {len(places)} of {len(a)} records differ"] if len(places) > SHOWN else [])


def _route(trace: Trace, at: int) -> str:
    step, layer, rank, row, k = (int(trace.columns[n][at]) for n in ("step", "layer", "source_rank", "row", "k"))
    return f"step {step}, layer {layer}, rank {rank}, row {row}, k {k}"


def _options(meta: dict) -> RunOptions:
    """The options of a recorded run."""
    known, kept = {field.name: field for field in fields(RunOptions)}, dict(meta["options"])
    for name in sorted(set(kept) - set(known)):
        raise TraceError(f"meta.json: option {name} of the run is not known to this version; it knows {sorted(known)}")
    for name, value in kept.items():
        if isinstance(value, list):
            kept[name] = tuple(value)
        elif value is not None and "Path" in str(known[name].type):
            kept[name] = Path(value)
    return RunOptions(**kept | {"trace_values": meta["values"]})


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    """As many torch threads as the recorded ranks had: what the model around the layers computes depends on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _alone() -> Iterator[None]:
    """The environment without torchrun's variables: inside a rank of another run this one still has its own size."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ |= kept
