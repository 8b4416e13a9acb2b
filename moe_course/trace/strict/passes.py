"""Check that one rank's spans and routes tell of the same passes through the model. Built in: notebook 13."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_course.errors import TraceError
from moe_course.trace.schema import STAGES
from moe_course.trace.spans import OTHER, OUTSIDE


def check_passes(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raises TraceError naming file, column, entry and what is expected there."""
    _check_spans(path, tensors)
    _check_times(path, tensors)
    _check_routes_were_timed(path, tensors)


def first_true(bad: torch.Tensor) -> list[int]:
    """Place of the first True of `[n]`, in a list; no place, no entry."""
    return bad.nonzero()[:1].flatten().tolist()


def _check_spans(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Passes are counted from 0, one after the other; what is in no sparse layer is "other"."""
    step, layer, stage = (tensors[f"span_{name}"] for name in ("step", "layer", "stage"))
    for at in first_true((stage < 0) | (stage >= len(STAGES))):
        raise TraceError(f"{path}: column span_stage, entry {at}, is {int(stage[at])}, expected 0 to {len(STAGES) - 1}")
    for at in first_true((layer < OUTSIDE) | ((layer == OUTSIDE) != (stage == OTHER))):
        raise TraceError(
            f"{path}: column span_layer, entry {at}, is {int(layer[at])} in stage {STAGES[int(stage[at])]!r}, expected "
            f"{OUTSIDE} in stage {STAGES[OTHER]!r} and a layer in every other"
        )
    before = torch.cat([torch.full((min(1, len(step)),), -1), step[:-1]])  # the first pass is 0
    for at in first_true((step != before) & (step != before + 1)):
        raise TraceError(
            f"{path}: column span_step, entry {at}, is {int(step[at])}, expected "
            + (f"{int(before[at])} or {int(before[at]) + 1}: passes come one after the other" if at else "0")
        )


def _check_times(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    begin, end = tensors["span_begin_ns"], tensors["span_end_ns"]
    for at in first_true(begin < 0):
        raise TraceError(f"{path}: column span_begin_ns, entry {at}, is {int(begin[at])}, expected 0 or more")
    for at in first_true((begin > end) | (begin < torch.cat([begin[:1], end[:-1]]))):
        raise TraceError(
            f"{path}: column span_begin_ns, entry {at}, is {int(begin[at])}: before the span ahead of it ended, or "
            f"after its own end {int(end[at])}"
        )


def _check_routes_were_timed(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A rank stamps the end of each stage, so a route of a layer it never entered is made up."""
    inside = tensors["span_layer"] != OUTSIDE
    timed = set(zip(tensors["span_step"][inside].tolist(), tensors["span_layer"][inside].tolist(), strict=True))
    places = torch.stack([tensors["step"], tensors["layer"]], dim=1)
    for step, layer in places.unique(dim=0).tolist():
        if (step, layer) not in timed:
            [at] = first_true((places == torch.tensor([step, layer])).all(dim=1))
            layers = sorted({layer for _, layer in timed})
            raise TraceError(
                f"{path}: columns step and layer, entry {at}, are {step} and {layer}: the rank has no span there; it "
                f"went through layers {layers} in {len({step for step, _ in timed})} passes"
            )
