"""`meta.json`: what a reader of a trace needs to know about the run. Built in: notebook 13."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import torch

from moe_course.backends.capabilities import current_name
from moe_course.options import RunOptions

#: Options that say where results go, or how the run is watched: another run of the same rows may choose its own.
_NOT_KEPT = {"trace", "trace_values", "report", "json_file", "timings", "timeout", "warn_after", "time_limit", "check"}


def describe(job, everybody: list[dict], exact: bool) -> dict:
    """All fields of `trace.schema.META` but those that are counted in the files.

    Args:
        job: rank 0's `Job`.
        everybody: what each rank handed in after the run, in rank order.
        exact: did the layer's probe find that rows get the same bits in every batch?
    """
    options, plan, config, travel = job.options, job.plan, job.config, job.travel
    generations = {g.index: g for part in everybody for g in part["generations"]}
    new_tokens = [generations[index].tokens for index in range(len(job.prompts))]
    occurring = sorted({token for tokens in (*job.prompts, *new_tokens) for token in tokens})
    return {
        "world_size": plan.world_size,
        "model": str(options.model),
        "plan": plan.as_dict(),
        "prompts": [
            {"prompt": text, "tokens": tokens} for text, tokens in zip(options.prompts, job.prompts, strict=True)
        ],
        "new_tokens": new_tokens,
        "token_text": {str(token): job.tokenizer.decode([token]) for token in occurring},
        "backend": plan.backend.name if plan.dispatch_group is None else current_name(plan.parallel.all2all_backend),
        "shape": plan.shape,
        "transport": job.transport,
        "device": job.device.type,
        "threads": torch.get_num_threads(),
        "hidden_size": config.hidden_size,
        "experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "rows_dtype": str(job.dtype).removeprefix("torch."),
        "sizes": {name: getattr(travel.sizes, name) for name in ("dispatch", "partial", "contribution")},
        "capacity": job.backend.capacity,
        "prefill_passes": everybody[0]["timing"].prefill_passes,
        "dispatch_quant": options.dispatch_quant,
        "combine_dtype": options.combine_dtype,
        "reduce_in_node": options.reduce_in_node,
        "exact": exact and not options.static_shapes,  # all places in one product: maybe added in another order
        "clock": _clock(job.device.type),
        "options": _kept(options, plan),
    }


def _clock(device: str) -> dict:
    """Whose time the spans are in. `time.monotonic_ns` is one clock for all processes of a host."""
    here, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    hosts = max(1, -(-world // max(here, 1)))
    notes = [] if hosts == 1 else [f"ranks ran on {hosts} hosts, and their clocks differ: compare times of one rank"]
    if device == "cuda":
        notes.append("host time: a kernel that was queued in a span may run after it")
    return {"source": "time.monotonic_ns", "hosts": hosts, "comparable": hosts == 1, "note": "; ".join(notes)}


def _kept(options: RunOptions, plan) -> dict:
    """Options that differ from the defaults, with the sizes that were worked out."""
    found = {"world_size": plan.world_size}
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name in _NOT_KEPT or value == option.default:
            continue
        found[option.name] = (
            str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        )
    nodes = plan.as_dict()["nodes"]
    if len(nodes) > 1:  # on several hosts nobody may have said so
        found["ranks_per_node"] = ",".join(map(str, nodes))
    return found
