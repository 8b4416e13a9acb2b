"""Memory that peers write into: the one-sided way to send. Built in: notebook 09.

Every rank owns a window and sees those of its peers. A turn is: `open` (headers are compared), `put` as often as
needed, `flush`, `wait`. A window has two halves that take turns, so nobody has to say that it has finished reading:
a peer writes into a half again only after this rank has opened the turn after next.

Source: NVSHMEM's put and signal; PyTorch symmetric memory; FlashInfer's one-sided all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Window:
    """One rank's view of a window.

    Attributes:
        memories: for every rank of the group `[2, *shape]`, the memory itself and not a copy.
        like: `[0, *shape[1:]]`, dtype and width for headers.
        turn: turns opened so far.
        matrix: `[R, R]` int64, rows announced for this turn.
    """

    memories: list[torch.Tensor]
    like: torch.Tensor
    turn: int = 0
    matrix: torch.Tensor | None = None

    def of(self, rank: int) -> torch.Tensor:
        """The half of `rank`'s memory that this turn uses."""
        return self.memories[rank][self.turn % 2]
