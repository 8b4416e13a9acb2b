"""What a cell hands to a picture, checked before anything is drawn. Built in: notebook 02."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_course.errors import ConfigError
from moe_course.whole import as_whole

if TYPE_CHECKING:
    import torch

    from moe_course.trace import Trace


def a_trace(value: Any) -> Trace:
    """A trace, or the one in a folder. Raises ConfigError for anything else, TraceError for a folder that is none."""
    if isinstance(value, str | Path):
        from moe_course.trace import Trace

        return Trace.load(value)
    if not all(hasattr(value, name) for name in ("meta", "spans")):
        raise ConfigError(f"trace is {_shown(value)}, needs to be a recorded run: Trace.load(folder), or its folder")
    return value


def whole(name: str, value: Any, example: str) -> int:
    """A whole number, also one of torch or numpy. Raises ConfigError for text, fractions and flags."""
    number = as_whole(value)
    if number is None:
        raise ConfigError(f"{name} is {_shown(value)}, needs to be a whole number: {name}={example}")
    return number


def several(name: str, values: Any) -> list[int] | None:
    """Whole numbers in order, or None for all. Raises ConfigError for a single one, and for what is no number."""
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} is {_shown(values)}, needs to be several numbers: {name}=[0] or {name}=range(3)")
    try:
        return sorted({whole(name, value, "[0]") for value in values})
    except (TypeError, ConfigError):  # a tensor without dimensions is iterable until one tries
        raise ConfigError(f"{name} is {_shown(values)}, needs to hold whole numbers: {name}=[0, 1]") from None


def finite(name: str, value: Any) -> float:
    """A number. Raises ConfigError for text, flags, inf and nan."""
    number = None
    if not isinstance(value, bool | str):
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = None
    if number is None or not math.isfinite(number):
        raise ConfigError(f"{name} is {_shown(value)}, needs to be a finite number: {name}=1.0")
    return number


def flag(name: str, value: Any) -> bool:
    """True or False. Raises ConfigError for anything else."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {_shown(value)}, needs to be True or False")
    return value


def floats(name: str, value: Any, shape: str) -> torch.Tensor:
    """A tensor of a float dtype. Raises ConfigError for lists and whole numbers."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{name} is {_shown(value)}, needs to be a tensor {shape}: torch.tensor(...)")
    if not value.is_floating_point():
        raise ConfigError(f"{name} has dtype {value.dtype}, needs to be one of floats: {name}.float()")
    return value


def _shown(value: Any) -> str:
    """A value on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}… ({type(value).__name__})"
