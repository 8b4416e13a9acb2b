"""Memory that peers write into: the one-sided way to send. Built in: notebook 09.

Every rank owns a window and sees those of its peers. A turn is: `open` (headers are compared), `put` as often as
needed, `flush`, `wait`. A window has two halves that take turns, so nobody has to say that it has finished reading:
a peer writes into a half again only after this rank has opened the turn after next.

Source: NVSHMEM's put and signal; PyTorch symmetric memory; FlashInfer's one-sided all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from moe_course.comm.ledger import Entry
from moe_course.comm.packing import row_bytes
from moe_course.errors import CapacityExceeded, ConfigError
from moe_course.gradients import no_gradient

if TYPE_CHECKING:
    from moe_course.comm.base import Comm


@dataclass
class Window:
    """One rank's view of a window.

    Attributes:
        memories: for every rank of the group `[2, *shape]`, the memory itself and not a copy.
        number: of the window in its group, from 1; ranks that mean different ones find out.
        turn: turns opened so far.
        matrix: `[R, R]` int64, rows announced for this turn.
        put: rows this rank has put for each rank in this turn.
    """

    memories: list[torch.Tensor]
    number: int
    turn: int = 0
    matrix: torch.Tensor | None = None
    put: list[int] = field(default_factory=list)

    def of(self, rank: int) -> torch.Tensor:
        """The half of `rank`'s memory that this turn uses."""
        return self.memories[rank][self.turn % 2]


def window(comm: Comm, shape: Sequence[int], dtype: torch.dtype) -> Window:
    """See `Comm.window`."""
    comm._windows += 1
    rows = torch.empty(0, *shape[1:], dtype=dtype)
    comm._agree("window", rows, (), [shape[0]] * comm.world_size, same_counts=True, n=shape[0], window=comm._windows)
    memories = comm._memory((2, *shape), dtype)
    comm._done()
    return Window(memories, comm._windows)


def open(
    comm: Comm,
    window: Window,
    send_counts: Sequence[int],
    rows: torch.Tensor,
    metadata: Sequence[torch.Tensor],
    capacity: int | None,
) -> torch.Tensor:
    """See `Comm.open`."""
    window.matrix = comm._agree("put_rows", rows, metadata, send_counts, window=window.number)
    for rank, held in enumerate(comm._rows_held.tolist()):
        if capacity is not None and held > capacity:
            comm._done()
            raise CapacityExceeded(
                f"rank {comm.members[rank]} has {held} rows, T_max is {capacity} (layer {comm.layer}, step "
                f"{comm.step}): a window of fixed size cannot hold them; raise --max-num-batched-tokens on all ranks, "
                "or send fewer rows"
            )
    window.turn += 1
    window.put = [0] * comm.world_size
    return window.matrix


def put(comm: Comm, window: Window, peer: int, start: int, rows: torch.Tensor, metadata: int, padding: int) -> None:
    """See `Comm.put`."""
    no_gradient(f"rank {comm.world_rank}", rows=rows)
    window.of(peer)[start : start + len(rows)] = rows
    window.put[peer] += len(rows)
    if peer != comm.rank and len(rows):
        n, payload = len(rows), row_bytes(rows) - metadata - padding
        entry = Entry(n * payload, n * padding, n * metadata, n, 1)
        comm.ledger.add("put_rows", comm.layer, comm.world_rank, comm.members[peer], entry)


def flush(comm: Comm, window: Window) -> None:
    """See `Comm.flush`."""
    if window.put != window.matrix[comm.rank].tolist():
        raise ConfigError(
            f"rank {comm.world_rank}: {window.put} rows were put for the ranks, {window.matrix[comm.rank].tolist()} "
            "were announced; open the turn with what is put"
        )
    comm._signal()


def wait(comm: Comm, window: Window) -> torch.Tensor:
    """See `Comm.wait`."""
    comm._await()
    comm.ledger.receive(comm.layer, int(window.matrix[:, comm.rank].sum() - window.matrix[comm.rank, comm.rank]))
    comm._done()
    return window.of(comm.rank)
