"""How rows travel in a run: the backend with its options, and who carries them, with the reason.

Worked out before anything starts, by the launcher and again by every rank. Built in: notebook 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course import quant
from moe_course.backends.capabilities import current_name, shape_of
from moe_course.backends.configure import Backend, configure
from moe_course.backends.support import pick_transport
from moe_course.backends.traffic import RowBytes
from moe_course.combine import accumulator
from moe_course.errors import BackendUnavailable, ConfigError
from moe_course.options import RunOptions
from moe_course.parallel import Plan


@dataclass(frozen=True)
class Travel:
    """What `travel` decided.

    Attributes:
        backend: how rows travel.
        transport: who carries them; reason: why that one.
        sizes: bytes of a row on its way.
        same_text: is the text promised to be that of one process, and logits within `verify.LOGIT_TOLERANCE`? Not with
            quantised rows or narrower sums. Sums in another order keep this, though not every bit: `--reduce-in-node`,
            `--static-shapes`.
    """

    backend: Backend
    transport: str
    reason: str
    sizes: RowBytes
    same_text: bool


def travel(options: RunOptions, plan: Plan, device_type: str, dtype: torch.dtype, one_host: bool) -> Travel:
    """Decide it.

    Raises:
        BackendUnavailable: a transport that does not carry these rows, a backend that does not take a format, or more
            prompts on a rank than its fixed places hold.
        ConfigError: options of another backend, or a hidden size that a format does not divide.
    """
    transport, reason = pick_transport(options.transport, plan.backend.name, device_type, one_host)
    fmt = None if options.dispatch_quant == "none" else options.dispatch_quant
    name = plan.backend.name if plan.backend.name == "no_dp_ep" else current_name(plan.parallel.all2all_backend)
    if not plan.moe.use_all2all and plan.dispatch_group is not None:
        name = "allgather_reducescatter"  # expert parallelism is off
    before = fmt is None or quant.when(name, fmt) == "before"
    hidden = plan.config.hidden_size
    if fmt is not None:
        quant.scales_per_row(fmt, hidden)  # refuses a width that does not fit
    if options.reduce_in_node and plan.backend.name != "two_hop":
        raise ConfigError(
            f"--reduce-in-node belongs to two_hop (or deepep_v2), the backend is {plan.backend.name}; "
            + _instead(plan, "two_hop", "two_hop")
        )
    if options.static_shapes and plan.shape != "low_latency":
        raise ConfigError(
            f"--static-shapes needs rows in fixed places, and {plan.backend.name} has none; "
            + _instead(plan, "low_latency", "deepep_low_latency")
        )
    narrow = None if options.combine_dtype == "auto" else getattr(torch, options.combine_dtype)
    backend = configure(
        plan.backend.name,
        max_num_tokens=options.max_num_batched_tokens,
        reduce_in_node=options.reduce_in_node,
        format=fmt,
        before=before,
        combine_dtype=narrow,
    )
    _check_decode(options, plan, backend)
    sizes = RowBytes(
        dispatch=quant.row_bytes(fmt, hidden) if fmt and before else hidden * dtype.itemsize,
        partial=hidden * (narrow or accumulator(dtype)).itemsize,
        contribution=hidden * (narrow or dtype).itemsize,
    )
    same_text = fmt is None and narrow in (None, accumulator(dtype))
    return Travel(backend, transport, reason, sizes, same_text)


def _instead(plan: Plan, shape: str, name: str) -> str:
    """How to get a backend of this shape; one that was asked for may not be in use here."""
    asked = current_name(plan.parallel.all2all_backend)
    if shape_of(asked) != shape:
        return f"use --all2all-backend {name}, or leave the option out"
    return f"{asked} was asked for, but {plan.backend.reason}; use several data-parallel ranks with expert parallelism"


def _check_decode(options: RunOptions, plan: Plan, backend: Backend) -> None:
    """Each prompt brings a row to every step, and those of a rank come together."""
    dp = plan.parallel.data_parallel_size
    most = -(-len(options.prompts) // dp)
    if backend.capacity is not None and most > backend.capacity:
        raise BackendUnavailable(
            f"{most} prompts on one data-parallel rank bring {most} rows to a step, and T_max of {plan.backend.name} "
            f"is {backend.capacity}; raise --max-num-batched-tokens to {most}, or use more data-parallel ranks"
        )
