"""Break a run on purpose: `--fault KIND@rank=R,layer=L,stage=dispatch|experts|combine[,step=S]`.

A fault strikes right before its stage. It sits outside the layer, as a receiver of its events or in the place of one
of its parts, so that what is broken is the real thing. For drills and tests. Built in: notebook 12.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_course.errors import ConfigError
from moe_course.expert_map import make_placement
from moe_course.glm.model import load
from moe_course.guard.faultspec import BEFORE, FaultSpec
from moe_course.launch import emit
from moe_course.stages import Stages


class ReturnEarly(Exception):
    """Ends the rank program as if it had nothing left to do."""


class InjectedError(RuntimeError):
    """What the fault `raise` raises: an error the package knows nothing of."""


@dataclass
class Fault:
    """One fault on the rank it is meant for. Call `install` after loading; it is a receiver of layer events."""

    spec: FaultSpec

    def __call__(self, stage: str, layer, **tensors: Any) -> None:
        spec = self.spec
        here = spec.layer in (None, layer.layer) and spec.step == layer.comm.step
        if here and BEFORE.get(spec.stage) == stage and spec.kind in _STRIKES:
            emit("fault", kind=spec.kind)
            _STRIKES[spec.kind](spec)

    def install(self, blocks: list) -> None:
        """Put the fault where it belongs. Raises ConfigError when this run has no such place."""
        spec = self.spec
        layers = [block.layer for block in blocks if spec.layer in (None, block.layer.layer)]
        if not layers:
            known = [block.layer.layer for block in blocks]
            raise ConfigError(f"fault {spec.kind}: layer {spec.layer} is not sparse; sparse layers: {known}")
        for layer in layers:
            if spec.kind == "skip":
                layer.forward = _skipping(layer, spec)
            elif spec.kind in ("reduce-twice", "reduce-never"):
                _break_reduction(layer, spec.kind)
            elif spec.kind == "corrupt":
                layer.stages = replace(layer.stages, experts=_corrupting(layer, spec))


class Faults:
    """All faults of a run, on one rank."""

    def __init__(self, specs: list[FaultSpec], rank: int):
        self._skewed = [spec for spec in specs if spec.kind == "skew"]  # the router is broken on every rank
        self._mine = [Fault(spec) for spec in specs if spec.rank == rank and spec.kind != "skew"]

    def load(self, job, comm, recorder: Callable, checked: bool, stages: Stages):
        """Load the model of a job with these faults in it; without any, just load it."""
        plan, held = job.plan, None
        for spec in self._skewed:
            stages = skewed_route(stages, plan.placement, spec.rank)
        if any(fault.spec.kind == "misplace" for fault in self._mine):
            asked = plan.parallel.expert_placement_strategy
            held = make_placement(plan.moe.ep_size, plan.config.n_routed_experts, asked)
        model = load(
            job.options.model,
            comm,
            plan,
            dtype=job.dtype,
            device=job.device,
            stages=stages,
            on_event=chain(recorder, *self._mine),
            backend=job.backend,
            held=held,
            check=checked,
        )
        for fault in self._mine:
            fault.install(model.blocks)
        return model


def chain(*receivers: Callable | None) -> Callable | None:
    """One receiver of layer events that hands them to several, in order."""
    wanted = [receiver for receiver in receivers if receiver is not None]

    def send(stage: str, layer, **tensors: Any) -> None:
        for receiver in wanted:
            receiver(stage, layer, **tensors)

    return send if wanted else None


def skewed_route(stages: Stages, placement, target: int) -> Stages:
    """Stages whose router sends every row to experts of one EP rank, with the weights it would have given."""
    mine = torch.tensor(placement.experts_of(target), dtype=torch.int32)

    def route(hidden_states, gate_weight, bias, config):
        weights, ids = stages.route(hidden_states, gate_weight, bias, config)
        rows, k = ids.shape
        place = (torch.arange(rows).unsqueeze(1) + torch.arange(k)) % len(mine)  # [T, K], distinct while K fits
        return weights, mine[place].to(ids.device)

    return replace(stages, route=route)


def _sleep(spec: FaultSpec) -> None:
    time.sleep(spec.seconds)


def _raise(spec: FaultSpec) -> None:
    raise InjectedError(f"injected at layer {spec.layer}, step {spec.step}, before {spec.stage}")


def _return(spec: FaultSpec) -> None:
    raise ReturnEarly(f"at layer {spec.layer}, step {spec.step}")


def _signal(number: int) -> Callable[[FaultSpec], None]:
    def strike(spec: FaultSpec) -> None:
        sys.stdout.flush()
        os.kill(os.getpid(), number)

    return strike


_STRIKES: dict[str, Callable[[FaultSpec], None]] = {
    "sleep": _sleep,
    "raise": _raise,
    "return": _return,
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
}


def _skipping(layer, spec: FaultSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    forward = layer.forward

    def skip(hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states) if layer.comm.step == spec.step else forward(hidden_states)

    return skip


def _corrupting(layer, spec: FaultSpec) -> Callable:
    experts = layer.stages.experts

    def compute(*args: Any) -> torch.Tensor:
        return experts(*args) * (2.0 if layer.comm.step == spec.step else 1.0)

    return compute


def _break_reduction(layer, kind: str) -> None:
    if layer.mode.reduce is None:
        raise ConfigError(f"fault {kind}: nothing is reduced over TP ranks here; use --tensor-parallel-size 2 or more")
    if kind == "reduce-never":
        layer.mode = replace(layer.mode, reduce=None)
        return
    layer.mode = replace(layer.mode, reduce=_Twice(layer.mode.reduce))


class _Twice:
    """A group whose sums are added up a second time, as when kernel and model both believe it is their job."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._comm.all_reduce(self._comm.all_reduce(tensor, dtype), dtype)
