"""How the parts of some rows lie one behind the other in a region of shared memory. Built in: notebook 06."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch

from moe_course.comm.shared_memory import aligned, move
from moe_course.errors import BackendUnavailable


def widths_of(parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Bytes per row. Raises BackendUnavailable for rows that are not in this host's memory."""
    for part in parts:
        if not part.is_cpu:
            raise BackendUnavailable(f"--transport shm does not carry {part.device.type} tensors; use nccl, or the CPU")
    return tuple(part.shape[1] for part in parts)


@lru_cache(maxsize=1024)  # the same few in every step
def places(rows: int, widths: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Where each part of `rows` rows begins, on a cache line, and the bytes of all together (at least 1)."""
    ends = list(accumulate((aligned(rows * width) for width in widths), initial=0))
    return tuple(ends[:-1]), max(1, ends[-1])


def put(memory: torch.Tensor, total: int, widths: tuple[int, ...], row: int, parts, start: int, n: int) -> None:
    """Write `n` rows of all parts, from their row `start` on, to row `row` of a region that holds `total` rows."""
    for part, width, place in zip(parts, widths, places(total, widths)[0], strict=True):
        move(memory, place + row * width, part, start * width, n * width)


def views(memory: torch.Tensor, total: int, widths: tuple[int, ...]) -> list[torch.Tensor]:
    """All parts of a region, uint8 `[total, width]`, in place."""
    at = places(total, widths)[0]
    return [memory[a : a + total * width].view(total, width) for a, width in zip(at, widths, strict=True)]


def copies(memory: torch.Tensor, total: int, widths: tuple[int, ...], gap: tuple[int, int], parts, start: int):
    """All parts of a region copied, but for rows `gap[0]` to `gap[1]`: those come from row `start` of `parts`."""
    first, last = gap
    copied = []
    for part, width, place in zip(parts, widths, places(total, widths)[0], strict=True):
        copy = torch.empty(total, width, dtype=torch.uint8)
        flat = copy.view(-1)
        move(flat, 0, memory, place, first * width)
        move(flat, first * width, part, start * width, (last - first) * width)
        move(flat, last * width, memory, place + last * width, (total - last) * width)
        copied.append(copy)
    return copied
