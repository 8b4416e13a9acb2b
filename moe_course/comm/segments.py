"""Where padded segments lie in the memory of the rank that gets them. Built in: notebook 09.

First comes a note from every source: what its block begins with, and a number for the sections it has in mind. Where
the notes lie depends on nothing that ranks could disagree about, so a rank reads what the others have said even if
they think of other sections, capacities or widths. Behind the notes lie the blocks, and then the segments.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch

from moe_course.comm.padded import _HEAD, _part, slots
from moe_course.comm.shared_memory import aligned, move

_NOTE = aligned(8 * (1 + _HEAD))
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class Segments:
    """The segments of one exchange.

    Args:
        sections: `[R, R]` int64; capacity: rows a section holds; width: bytes of a row.
    """

    def __init__(self, sections: torch.Tensor, capacity: int, width: int):
        self.sections, self.capacity, self.width = sections, capacity, width
        self._number = sections.tolist()
        self._block_bytes = [8 * (_HEAD + sum(row)) for row in self._number]
        # numbers, not strings: their hash is the same in every process
        self._plan = hash((capacity, width, *(n for row in self._number for n in row)))

    @cached_property
    def _blocks(self) -> list[int]:
        """Where the block of each source begins; behind them begins the first segment."""
        return list(accumulate(map(aligned, self._block_bytes), initial=_NOTE * len(self._number)))

    def _segments(self, peer: int) -> list[int]:
        """Where the segment of each source begins at `peer`, and the end of the last."""
        lengths = (aligned(row[peer] * self.capacity * self.width) for row in self._number)
        return list(accumulate(lengths, initial=self._blocks[-1]))

    def nbytes(self, peer: int) -> int:
        """Memory that `peer` needs."""
        return self._segments(peer)[-1]

    def put(self, memory: torch.Tensor, source: int, peer: int, block, rows, counts: torch.Tensor) -> int:
        """Write a source's note, block and rows for `peer` into the memory of `peer`; returns how many rows.

        Args:
            block: int64; rows: uint8 `[n or more, width]`, by section; counts: rows in each section of the source.
        """
        note = torch.cat([torch.tensor([self._plan]), block[:_HEAD]]).view(torch.uint8)
        move(memory, _NOTE * source, note, 0, note.numel())
        move(memory, self._blocks[source], block.view(torch.uint8), 0, self._block_bytes[source])
        here = _part(counts, self.sections, source, peer)
        n = int(here.sum())
        if n and self.width:
            _into(self._segment(memory, source, peer), slots(here, self.capacity), rows[:n])
        return n

    def take(self, memory: torch.Tensor, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`(blocks, segments)` as `padded.pad` returns them; blocks are copies, segments views.

        No segments, and only the beginnings of blocks, when ranks think of other sections: all of them see that.
        """
        notes = memory[: _NOTE * len(self._number)].view(torch.int64).view(-1, _NOTE // 8)[:, : 1 + _HEAD].clone()
        if (notes[:, 0] != self._plan).any():
            return list(notes[:, 1:]), []
        blocks = [memory[at : at + n] for at, n in zip(self._blocks[:-1], self._block_bytes, strict=True)]
        segments = [
            self._segment(memory, source, rank).view(row[rank], self.capacity, self.width)
            for source, row in enumerate(self._number)
        ]
        return [block.clone().view(torch.int64) for block in blocks], segments

    def _segment(self, memory: torch.Tensor, source: int, peer: int) -> torch.Tensor:
        """`[sections * capacity, width]`, a view."""
        start, rows = self._segments(peer)[source], self._number[source][peer] * self.capacity
        return memory[start : start + rows * self.width].view(rows, self.width)


def _into(segment: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows to their places, in the longest words that their width allows: bytes one by one would be slow."""
    size, dtype = next((size, dtype) for size, dtype in _WORDS if rows.shape[1] % size == 0)
    if rows.storage_offset() % size:
        rows = rows.clone()
    segment.view(dtype).index_copy_(0, places, rows.view(dtype))
