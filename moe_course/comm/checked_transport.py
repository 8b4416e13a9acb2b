"""What every exchange has around it: headers that all ranks compare, who is waited for, and a ledger of every byte.

Before rows move, every rank shows every other rank one fixed-size int64 message: which operation, of which layer and
step, of what dtype and width, and how many rows for whom. All ranks compare all messages, so a disagreement is the
same `ExchangeMismatch` everywhere, instead of a hang, an abort, or silently wrong rows. The message also is the count
exchange that ragged rows need. Built in: notebooks 06 and 07.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from moe_course.comm.header import OPS, UNKNOWN, compare, dtype_code
from moe_course.comm.ledger import Entry, Ledger
from moe_course.comm.packing import Rows, from_bytes, row_bytes
from moe_course.comm.shared import Shared, Waiting
from moe_course.comm.transport import Transport
from moe_course.errors import ConfigError


class CheckedTransport(Transport):
    """A transport in a group of ranks, that knows its place there and in the model, and keeps the books.

    See `Comm`, which builds its operations on this.
    """

    def __init__(self, rank: int, members: Sequence[int], shared: Shared | None = None):
        self.rank, self.world_size, self.members = rank, len(members), list(members)
        self.shared = shared or Shared(Ledger())
        self.buffers: dict = {}  # windows that a backend keeps from call to call
        self._op_number = self._windows = 0

    @property
    def world_rank(self) -> int:
        """This rank's number in the whole world."""
        return self.members[self.rank]

    @property
    def ledger(self) -> Ledger:
        return self.shared.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self.shared.ledger = ledger

    @property
    def layer(self) -> int:
        return self.shared.layer

    @layer.setter
    def layer(self, layer: int) -> None:
        self.shared.layer = layer

    @property
    def step(self) -> int:
        return self.shared.step

    @step.setter
    def step(self, step: int) -> None:
        self.shared.step = step

    def _agree(
        self,
        op: str,
        rows: torch.Tensor,
        metadata: Sequence[torch.Tensor],
        send_counts: Sequence[int],
        receive_counts: Sequence[int] | None = None,
        same_counts: bool = False,
        n: int | None = None,
        window: int = 0,
    ) -> torch.Tensor:
        """Exchange headers and compare them; returns rows per (source, destination) `[R, R]`."""
        size = self.world_size
        if len(send_counts) != size or len(receive_counts or send_counts) != size:
            raise ConfigError(f"rank {self.world_rank}: {op} needs one count for each of the {size} ranks")
        header = [
            self._op_number + 1,
            OPS.index(op),
            self.layer,
            self.step,
            dtype_code(rows, self.world_rank),
            rows.shape[1:].numel(),
            sum(row_bytes(tensor) for tensor in metadata),
            sum((dtype_code(tensor, self.world_rank) + 1) << (4 * place) for place, tensor in enumerate(metadata)),
            window,
        ]
        expected = list(receive_counts) if receive_counts is not None else [UNKNOWN] * size
        message = torch.tensor([*header, len(rows) if n is None else n, *send_counts, *expected], dtype=torch.int64)
        peers = [peer for peer in range(size) if peer != self.rank]
        others = self._now_in(op)
        messages = self._exchange(message, str(self.shared.waiting))  # [R, 10 + 2R]
        for peer in peers:
            entry = Entry(metadata=message.numel() * message.element_size(), messages=1)
            self.ledger.add(op, self.layer, self.world_rank, self.members[peer], entry)
        if self.shared.compare:
            compare(messages, self.members, op, same_counts)
        if self.shared.waiting is not None:  # headers are here, rows are next
            self.shared.waiting.waiting_for = others
        self._rows_held = messages[:, len(header)]
        return messages[:, len(header) + 1 : len(header) + 1 + size]

    def _now_in(self, op: str) -> set[int]:
        """This rank enters its next exchange; returns the others, in world ranks."""
        self._op_number += 1
        others = set(self.members) - {self.world_rank}
        self.shared.waiting = Waiting(op, self._op_number, self.layer, self.step, self.members, others)
        return others

    def _done(self) -> None:
        if self.shared.waiting is not None:
            self.shared.waited_s += time.monotonic() - self.shared.waiting.since
            self.shared.waiting = None

    def _received(self, parts: list[torch.Tensor], like: Sequence[torch.Tensor], matrix: torch.Tensor) -> Rows:
        counts = matrix[:, self.rank].tolist()
        self.ledger.receive(self.layer, len(parts[0]) - counts[self.rank])
        self._done()
        rows, *metadata = (from_bytes(part, tensor) for part, tensor in zip(parts, like, strict=True))
        return Rows(rows, tuple(metadata), counts, matrix)

    def _record(
        self, op: str, rows: torch.Tensor, metadata: Sequence[torch.Tensor], send_counts: Sequence[int]
    ) -> None:
        per_row, extra = row_bytes(rows), sum(row_bytes(tensor) for tensor in metadata)
        for peer, n in enumerate(send_counts):
            if peer != self.rank and n:
                entry = Entry(payload=n * per_row, metadata=n * extra, rows=n, messages=1)
                self.ledger.add(op, self.layer, self.world_rank, self.members[peer], entry)
