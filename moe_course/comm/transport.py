"""What a transport implements: messages, rows in parts, segments, and where it has it, memory to share.

`comm/base.py` builds all operations from these few. `sim.py`, `dist.py` and `shm.py` implement them. Rows are uint8
here: any dtype travels as bytes. Built in: notebook 06.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from moe_course.comm.padded import pad
from moe_course.errors import BackendUnavailable

if TYPE_CHECKING:
    from moe_course.comm.base import Comm


class Transport(ABC):
    """Moves bytes between the ranks of a group. Sizes are known to both sides when it is called."""

    transport = "none"  # name for messages and tables
    sends_padding = True  # does `_padded` give unused rows to the transport?
    rank: int
    world_rank: int

    @abstractmethod
    def _exchange(self, message: torch.Tensor, what: str) -> torch.Tensor:
        """Give every rank a `[n]` int64 message and return all of them as `[R, n]`."""

    @abstractmethod
    def _all_to_all(self, parts: list[torch.Tensor], matrix: torch.Tensor, borrow: bool) -> list[torch.Tensor]:
        """Move rows in parts, each uint8 `[sum of row `rank` of the matrix, bytes]`; return the same parts received.

        `matrix[s, d]` rows go from rank s to rank d.
        """

    def _all_to_all_views(self, parts: list[torch.Tensor], matrix: torch.Tensor) -> list[list[torch.Tensor]]:
        """The same, source by source, in place where that can be; this rank's own rows are those it was given."""
        counts = matrix[:, self.rank].tolist()
        received = [part.split(counts) for part in self._all_to_all(parts, matrix, True)]
        return [[part[source] for part in received] for source in range(len(counts))]

    @abstractmethod
    def _all_gather(self, parts: list[torch.Tensor], counts: list[int], borrow: bool) -> list[torch.Tensor]:
        """Give everybody these parts of rows, uint8 `[n, bytes]`; `counts[s]` rows come from rank s."""

    @abstractmethod
    def _segments(self, send: list[torch.Tensor], receive_bytes: list[int], what: str) -> list[torch.Tensor]:
        """Give rank d the uint8 tensor `send[d]`, and return one of `receive_bytes[s]` bytes from each rank s."""

    @abstractmethod
    def _subgroup(self, groups: list[list[int]], mine: list[int]) -> Comm:
        """Create all groups and return the one that contains this rank."""

    def _padded(self, block, rows, counts, sections, capacity, what):
        """Send a block and padded sections to every rank, see `padded.pad`; return theirs. All of it travels."""
        return pad(self, block, rows, counts, sections, capacity, what)

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """A tensor on every rank, seen by all of them: the list is in rank order."""
        raise self._no_memory()

    def _signal(self) -> None:
        """Tell all peers that this rank's writes are done."""
        raise self._no_memory()

    def _await(self) -> None:
        """Wait until all peers have signalled once more."""
        raise self._no_memory()

    def _no_memory(self) -> BackendUnavailable:
        return BackendUnavailable(
            f"rank {self.world_rank}: {self.transport} has no memory that ranks share; use --transport shm, or threads"
        )
