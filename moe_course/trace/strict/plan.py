"""Check that the fields of `meta.json` which follow from each other do so: plan, shape, bytes, clock.

A run works them out by `make_plan`, `travel` and `describe`; here they are worked out from what was stored. Built in:
notebook 13.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from moe_course import quant
from moe_course.backends.capabilities import SHAPES
from moe_course.backends.support import check_support
from moe_course.combine import accumulator
from moe_course.errors import MoECourseError, TraceError
from moe_course.options import RunOptions


def check_plan(file: Path, meta: dict) -> None:
    """Raises TraceError naming the field, its value, and what it must be by which others."""
    plan, world_size = meta["plan"], meta["world_size"]
    sizes = [plan[axis] for axis in ("dp", "pp", "pcp", "tp")]
    if prod(sizes) != world_size:
        told = " x ".join(map(str, sizes))
        raise TraceError(
            f"{file}: fields plan.dp x plan.pp x plan.pcp x plan.tp are {told} = {prod(sizes)}, expected world_size "
            f"{world_size}"
        )
    for name, fits, expected in (*_grouping(meta), *_bytes(file, meta), *_rest(meta)):
        if not fits:
            outer, _, inner = name.partition(".")
            value = meta[outer].get(inner) if inner else meta[outer]
            raise TraceError(f"{file}: field {name} is {value!r}, expected {expected}")
    try:
        check_support(meta["shape"], meta["transport"])
    except MoECourseError as error:
        raise TraceError(f"{file}: field transport is {meta['transport']!r}: {error}") from None


def _grouping(meta: dict) -> list[tuple[str, bool, str]]:
    """`(field, does it fit?, what it must be, and why)` of groups and hosts, as `make_plan` decides."""
    plan, shape = meta["plan"], meta["shape"]
    dp, pcp, tp = (plan[axis] for axis in ("dp", "pcp", "tp"))
    travels = dp > 1 or pcp > 1
    sliced = dp > 1 and tp > 1 and plan["split_group"] == "tp"  # sequence-parallel: TP ranks take slices of the rows
    over_ep = sliced or SHAPES[shape].over_ep
    groups = {
        "dispatch_group": None if not travels else "ep" if over_ep else "dp" if dp > 1 else "pcp",
        "split_group": "tp" if sliced else "pcp" if pcp > 1 else None,
        "reduce_group": "tp" if tp > 1 and not over_ep else None,
    }
    why = f"with plan.dp {dp}, plan.pcp {pcp}, plan.tp {tp}"
    moved = "another than 'no_dp_ep'" if travels else "'no_dp_ep'"
    return [
        ("plan.ep_size", plan["ep_size"] == meta["world_size"], f"{meta['world_size']}, the world_size"),
        ("shape", (shape == "no_dp_ep") != travels, f"{moved} {why}: rows travel where dp or pcp is above 1"),
        *((f"plan.{name}", plan[name] == group, f"{_told(group)} {why} and shape {shape!r}")
          for name, group in groups.items()),
        ("plan.nodes", sum(plan["nodes"]) == plan["ep_size"] and min(plan["nodes"], default=0) > 0,
         f"the number of ranks of each host, together {plan['ep_size']}"),
    ]  # fmt: skip


def _told(value: str | None) -> str:
    return "null" if value is None else repr(value)


def _bytes(file: Path, meta: dict) -> list[tuple[str, bool, str]]:
    """The same of the bytes of a row, as `travel` counts them."""
    hidden, fmt, dtype = meta["hidden_size"], meta["dispatch_quant"], getattr(torch, meta["rows_dtype"])
    narrow = None if meta["combine_dtype"] == "auto" else getattr(torch, meta["combine_dtype"])
    try:
        packed = fmt != "none" and quant.when(meta["backend"], fmt) == "before"
        sent = quant.row_bytes(fmt, hidden) if packed else hidden * dtype.itemsize
    except MoECourseError as error:
        raise TraceError(f"{file}: field dispatch_quant is {fmt!r}: {error}") from None
    expected = {
        "dispatch": sent,
        "partial": hidden * (narrow or accumulator(dtype)).itemsize,
        "contribution": hidden * (narrow or dtype).itemsize,
    }
    why = (
        f"for hidden_size {hidden}, rows_dtype {meta['rows_dtype']!r}, dispatch_quant {fmt!r}, combine_dtype "
        f"{meta['combine_dtype']!r}"
    )
    return [(f"sizes.{name}", meta["sizes"][name] == n, f"{n} {why}") for name, n in expected.items()]


def _rest(meta: dict) -> list[tuple[str, bool, str]]:
    """Places, options that are told twice, and what the clock says of itself."""
    clock, options, defaults = meta["clock"], meta["options"], RunOptions()
    places = options.get("max_num_batched_tokens", defaults.max_num_batched_tokens)
    capacity = places if SHAPES[meta["shape"]].fixed else None
    why = "null: it has no fixed places" if capacity is None else f"{capacity}, the run's max_num_batched_tokens"
    nodes = ",".join(map(str, meta["plan"]["nodes"]))
    nccl = "'nccl'" if meta["device"] == "cuda" else "another than 'nccl'"
    return [
        ("capacity", meta["capacity"] == capacity, f"{why} (shape {meta['shape']!r})"),
        ("transport", (meta["transport"] == "nccl") == (meta["device"] == "cuda"), f"{nccl} on {meta['device']!r}"),
        ("plan.nodes", "," not in nodes or options.get("ranks_per_node") == nodes,
         f"those of the option ranks_per_node, {options.get('ranks_per_node')!r}"),
        ("clock.hosts", clock["hosts"] <= meta["world_size"], f"at most world_size {meta['world_size']}"),
        ("clock.comparable", clock["comparable"] == (clock["hosts"] == 1),
         f"{clock['hosts'] == 1} with clock.hosts {clock['hosts']}: clocks of several hosts differ"),
        *((f"options.{name}", options.get(name, getattr(defaults, name)) == meta[name], f"{meta[name]!r}, the {name}")
          for name in ("dispatch_quant", "combine_dtype", "reduce_in_node")),
    ]  # fmt: skip
