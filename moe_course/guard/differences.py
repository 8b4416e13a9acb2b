"""In what an own stage differs from the package's, in words; None where it does not. Built in: notebook 13."""

from __future__ import annotations

from typing import Any

import torch

from moe_course.dispatch import Dispatched
from moe_course.errors import ConfigError
from moe_course.fits import check_routing
from moe_course.rows import TOLERANCE


def of_tensors(name: str, wanted: Any, found: Any, tolerance: float = 0.0) -> str | None:
    """The first difference between two tensors, numbers, None, or tuples and lists of those; NaN equals NaN."""
    if isinstance(wanted, tuple | list) and isinstance(found, tuple | list):
        if len(wanted) != len(found):
            return f"{name} has {len(found)} parts, expected {len(wanted)}"
        parts = (
            of_tensors(f"{name}[{i}]", a, b, tolerance) for i, (a, b) in enumerate(zip(wanted, found, strict=True))
        )
        return next((part for part in parts if part), None)
    if not (isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor)):
        return (
            None
            if type(wanted) is type(found) and wanted == found
            else f"{name} is {_shown(found)}, expected {_shown(wanted)}"
        )
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return f"{name} is {_shown(found)}, expected {_shown(wanted)}"
    wrong = ~torch.isclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    values = f"{name}{list(at)} is {found[at].item():.6g}, expected {wanted[at].item():.6g}"
    return f"{values} ({int(wrong.sum())} of {wrong.numel()} differ)"


def of_routing(wanted: tuple, found: Any) -> str | None:
    """Of `(topk_weights, topk_ids)`; the order of a row's choices is free."""
    if not _two_tensors(found):
        return f"it returned {_shown(found)}, expected topk_weights and topk_ids"
    for name, a, b in zip(("topk_weights", "topk_ids"), wanted, found, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return of_tensors(name, a, b)
    ids = [ids.sort(dim=1) for _, ids in (wanted, found)]
    weights = [weights.gather(1, order.indices) for (weights, _), order in zip((wanted, found), ids, strict=True)]
    return of_tensors("topk_ids (each row sorted)", ids[0].values, ids[1].values) or of_tensors(
        "topk_weights (in the order of their ids)", *weights, tolerance=TOLERANCE[torch.float32]
    )


def of_routing_form(rows: torch.Tensor, found: Any) -> str | None:
    """What no dispatch could take, whatever the package's router says; for passes in which nothing is compared."""
    if not _two_tensors(found):
        return f"it returned {_shown(found)}, expected topk_weights and topk_ids"
    try:
        check_routing(rows, *found, rank=0)
    except ConfigError as error:
        return str(error).removeprefix("rank 0: ")
    return None


def _two_tensors(found: Any) -> bool:
    return isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(t, torch.Tensor) for t in found)


def of_dispatched(wanted: Dispatched, found: Any, handle: bool) -> str | None:
    """Of what reaches the experts; places that nobody reads may hold anything.

    Args:
        handle: also of the handle; not where an own combine reads it.
    """
    if not isinstance(found, Dispatched):
        return f"it returned {_shown(found)}, expected a Dispatched"
    if found.layout != wanted.layout:
        return f"layout is {found.layout!r}, expected {wanted.layout!r}"
    for name in ("expert_num_tokens", "topk_ids", "topk_weights", "scales", "hidden_states"):
        a, b = getattr(wanted, name), getattr(found, name)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
            used = _used(name, wanted, a)
            a, b = torch.where(used, a, torch.zeros_like(a)), torch.where(used, b, torch.zeros_like(b))
        if difference := of_tensors(name, a, b):
            return difference
    return _of_handle(wanted.handle, found.handle) if handle else None


def of_outputs(
    wanted: torch.Tensor, found: Any, dtype: torch.dtype, dispatched: Dispatched | None = None
) -> str | None:
    """Of expert outputs, or of sums that came home; another order of adding up is allowed."""
    if (
        dispatched is not None
        and dispatched.layout == "padded"
        and isinstance(found, torch.Tensor)
        and found.shape == wanted.shape
    ):
        used = _used("hidden_states", dispatched, wanted)
        wanted, found = (
            torch.where(used, wanted, torch.zeros_like(wanted)),
            torch.where(used, found, torch.zeros_like(found)),
        )
    return of_tensors("its result", wanted, found, TOLERANCE[dtype])


def _used(name: str, dispatched: Dispatched, like: torch.Tensor) -> torch.Tensor:
    """Which numbers of a field count: slots up to an expert's count, weights of routes that are computed here."""
    if dispatched.layout == "padded" and name in ("hidden_states", "scales"):
        slots = torch.arange(like.shape[1], device=like.device)
        return (slots < dispatched.expert_num_tokens.unsqueeze(1)).unsqueeze(-1).expand_as(like)
    if name == "topk_weights":
        return dispatched.topk_ids >= 0
    return torch.ones_like(like, dtype=torch.bool)


def _of_handle(wanted: Any, found: Any) -> str | None:
    """The package's combine reads it: counts as any list of whole numbers, everything else as that type."""
    if isinstance(wanted, list):
        numbers = (
            found.tolist() if isinstance(found, torch.Tensor) else list(found) if isinstance(found, tuple) else found
        )
        return of_tensors("handle", wanted, numbers)
    if type(found) is not type(wanted):
        kind = f"{type(wanted).__module__}.{type(wanted).__qualname__}" if wanted is not None else "None"
        return f"handle is {_shown(found)}, expected {kind}, which the package's combine reads"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
