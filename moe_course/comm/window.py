"""Memory that peers write into: the one-sided way to send. Built in: notebook 09.

Every rank owns a window and sees those of its peers. A turn is: `open` (headers are compared), `put` as often as
needed, `flush`, `wait`. A window has two halves that take turns, so nobody has to say that it has finished reading:
a peer writes into a half again only after this rank has opened the turn after next.

Source: NVSHMEM's put and signal; PyTorch symmetric memory; FlashInfer's one-sided all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_course.comm.ledger import Entry
from moe_course.comm.packing import row_bytes
from moe_course.errors import CapacityExceeded

if TYPE_CHECKING:
    from moe_course.comm.base import Comm


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


def window(comm: Comm, shape: Sequence[int], dtype: torch.dtype) -> Window:
    """See `Comm.window`."""
    rows = torch.empty(0, *shape[1:], dtype=dtype)
    comm._agree("window", rows, (), [shape[0]] * comm.world_size, same_counts=True, n=shape[0])
    memories = comm._memory((2, *shape), dtype)
    comm._done()
    return Window(memories, rows)


def open(comm: Comm, window: Window, send_counts: Sequence[int], held: int, capacity: int | None) -> torch.Tensor:
    """See `Comm.open`."""
    window.matrix = comm._agree("put_rows", window.like, (), send_counts, n=held)
    for rank, rows in enumerate(comm._rows_held.tolist()):
        if capacity is not None and rows > capacity:
            comm._done()
            raise CapacityExceeded(
                f"rank {comm.members[rank]} has {rows} rows, T_max is {capacity} (layer {comm.layer}, step "
                f"{comm.step}): a window of fixed size cannot hold them; raise --max-num-batched-tokens on all ranks, "
                "or send fewer rows"
            )
    window.turn += 1
    return window.matrix


def put(comm: Comm, window: Window, peer: int, start: int, rows: torch.Tensor, metadata: int) -> None:
    """See `Comm.put`."""
    window.of(peer)[start : start + len(rows)] = rows
    if peer != comm.rank and len(rows):
        entry = Entry(len(rows) * (row_bytes(rows) - metadata), 0, len(rows) * metadata, len(rows), 1)
        comm.ledger.add("put_rows", comm.layer, comm.world_rank, comm.members[peer], entry)


def wait(comm: Comm, window: Window) -> torch.Tensor:
    """See `Comm.wait`."""
    comm._await()
    comm.ledger.rows_received += int(window.matrix[:, comm.rank].sum() - window.matrix[comm.rank, comm.rank])
    comm._done()
    return window.of(comm.rank)
