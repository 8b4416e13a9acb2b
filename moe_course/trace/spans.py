"""Where a rank's time goes: one span per stage, from real time stamps.

A stamp ends the span that the stamp before it began, so the spans of a pass leave no gap. Built in: notebook 13.
"""

from __future__ import annotations

import time

import torch

from moe_course.trace.schema import SPANS, STAGES

OTHER = STAGES.index("other")
OUTSIDE = -1  # layer of what lies between the sparse layers


class Clock:
    """Collects spans of one rank. It reads the host's clock: work that is queued on a GPU ends later."""

    def __init__(self):
        self._spans: list[tuple[int, int, int, int, int]] = []
        self._since = 0

    def begin(self) -> None:
        """The next span begins now."""
        self._since = time.monotonic_ns()

    def end(self, step: int, layer: int, stage: int) -> None:
        """A span ends now, and the next one begins."""
        now = time.monotonic_ns()
        self._spans.append((step, layer, stage, self._since, now))
        self._since = now

    def tensors(self) -> dict[str, torch.Tensor]:
        """One int64 tensor for each of `SPANS`."""
        table = torch.tensor(self._spans, dtype=torch.int64).view(-1, len(SPANS))
        return dict(zip(SPANS, (column.clone() for column in table.T), strict=True))
