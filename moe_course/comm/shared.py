"""What a group and its sub-groups share on one rank: ledger, place in the model, and the exchange it is in.

Built in: notebook 06.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from moe_course.comm.ledger import Ledger


@dataclass
class Waiting:
    """The exchange a rank is in: what a watchdog shows when it lasts too long. Ranks are those of the whole world."""

    op: str
    number: int
    layer: int
    step: int
    members: list[int]
    waiting_for: set[int]
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        where = f"layer {self.layer}, step {self.step}" if self.layer >= 0 else "outside the layers"
        return f"{self.op} #{self.number} ({where})"


class Watcher(Protocol):
    """Whoever knows what other ranks do (`guard.watchdog.Watchdog`)."""

    def explain(self) -> tuple[str, list[str]]:
        """The culprit in a sentence, and one line about each rank."""

    def gone(self, rank: int | None) -> str:
        """What became of a rank that is lost; None: of any."""


@dataclass
class Shared:
    """What a group and all its sub-groups have in common on one rank."""

    ledger: Ledger
    layer: int = -1
    step: int = 0
    compare: bool = True  # False: believe every header, as a program without a guard does
    waiting: Waiting | None = None
    waited_s: float = 0.0  # spent in exchanges so far
    watchdog: Watcher | None = None
