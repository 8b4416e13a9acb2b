"""Read `--fault` and `--override`: what is to be broken, and where. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from moe_course.errors import ConfigError

#: kind -> what happens.
KINDS = {
    "sleep": "the rank stops for `seconds` (default 3600) before the stage",
    "raise": "the rank raises an error",
    "return": "the rank program ends as if it were done",
    "kill": "the rank is killed (SIGKILL)",
    "stop": "the rank is stopped (SIGSTOP)",
    "skip": "the rank leaves the layer out",
    "corrupt": "the experts of the rank return twice their output",
    "reduce-twice": "partial sums are added up twice",
    "reduce-never": "partial sums are not added up",
    "misplace": "experts are loaded by the placement that was asked for, not by the one in force",
    "skew": "the router of every rank sends all rows to experts of this rank",
}
#: stage -> event after which a fault strikes that is meant to come right before it.
BEFORE = {"dispatch": "route", "experts": "dispatch", "combine": "experts"}


@dataclass(frozen=True)
class FaultSpec:
    """One fault. `layer` of None means every sparse layer."""

    kind: str
    rank: int
    layer: int | None = None
    stage: str = "dispatch"
    step: int = 0
    seconds: float = 3600.0


def parse_fault(text: str) -> FaultSpec:
    """`KIND@rank=R[,layer=L][,stage=S][,step=N][,seconds=X]`. Raises ConfigError."""
    usage = f"--fault {text!r}: expected KIND@rank=R,layer=L,stage=dispatch|experts|combine[,step=S]"
    kind, at, places = text.partition("@")
    if kind not in KINDS:
        raise ConfigError(f"{usage}; kind {kind!r} is not one of {', '.join(KINDS)}")
    values: dict[str, Any] = {}
    for place in filter(None, places.split(",")):
        name, equals, value = place.partition("=")
        try:
            values[name] = {"rank": int, "layer": int, "step": int, "stage": str, "seconds": float}[name](value)
        except (KeyError, ValueError):
            raise ConfigError(f"{usage}; {place!r} is not understood") from None
    if "rank" not in values:
        raise ConfigError(f"{usage}; rank is missing")
    if values.get("stage", "dispatch") not in BEFORE:
        raise ConfigError(f"{usage}; stage {values['stage']!r} is not one of {', '.join(BEFORE)}")
    return FaultSpec(kind, **values)


def parse_override(text: str) -> tuple[int, str, Any]:
    """`RANK:FIELD=VALUE`: (rank, field, value), the value as JSON or else as text. Raises ConfigError."""
    rank, colon, rest = text.partition(":")
    name, equals, value = rest.partition("=")
    if not rank.isdecimal() or not colon or not equals or not name:
        raise ConfigError(f"--override {text!r}: expected RANK:FIELD=VALUE")
    try:
        return int(rank), name, json.loads(value)
    except json.JSONDecodeError:
        return int(rank), name, value
