"""The contract of a group of ranks, with a header before every exchange and a ledger of every byte.

Ragged counts and zero rows are the normal case. Before rows move, every rank shows every other rank one
fixed-size int64 message: which operation, of which layer and step, of what dtype and width, and how many rows
for whom. All ranks compare all messages, so a disagreement is the same `ExchangeMismatch` everywhere, instead
of a hang, an abort, or silently wrong rows. The message also is the count exchange that ragged rows need.

Built in: notebooks 06 and 07. Source: `torch.distributed` semantics; vLLM `all_gatherv` / `reduce_scatterv`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from moe_course.comm.header import OPS, UNKNOWN, compare, dtype_code
from moe_course.comm.ledger import Entry, Ledger
from moe_course.comm.packing import Rows, pack, row_bytes, unpack
from moe_course.comm.shared import Shared, Waiting
from moe_course.errors import ConfigError

__all__ = ["Comm", "Entry", "Ledger", "Rows"]


class Comm(ABC):
    """A group of `world_size` ranks, seen from `rank`. Every rank must call every operation, in one order.

    `layer` and `step` are written into the headers and the ledger; the layer and the generator set them. A group
    shares both, and the ledger, with the sub-groups split off it. `members` are the group's ranks in the numbers of
    the whole world; messages and ledger use those. A transport implements `_exchange`, `_all_to_all`,
    `_all_gather` and `_subgroup`.

    Operations raise ExchangeMismatch (ranks disagree), ExchangeTimeout (a peer does not come) or RankLost (a
    peer is gone), each on all ranks that are still there.
    """

    def __init__(self, rank: int, members: Sequence[int], shared: Shared | None = None):
        self.rank, self.world_size, self.members = rank, len(members), list(members)
        self.shared = shared or Shared(Ledger())
        self._op_number = 0

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

    # -- operations ---------------------------------------------------------------------------------------------

    def all_gather_rows(self, rows: torch.Tensor, *metadata: torch.Tensor) -> Rows:
        """Everybody's rows, in rank order.

        Args:
            rows: `[n, W]`; n may differ between ranks and may be 0.
            metadata: tensors `[n, …]` that travel with the rows; counted apart.
        """
        send = pack(rows, metadata, self.world_rank)
        counts = self._agree("all_gather_rows", rows, metadata, [len(rows)] * self.world_size)
        received = [int(counts[source, self.rank]) for source in range(self.world_size)]
        self._record("all_gather_rows", rows, metadata, [len(rows)] * self.world_size)
        packed = self._all_gather(send, [n * send.shape[1] for n in received])
        return self._received(packed, rows, metadata, received)

    def all_to_all_rows(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        *metadata: torch.Tensor,
        receive_counts: Sequence[int] | None = None,
    ) -> Rows:
        """Send the first `send_counts[0]` rows to rank 0, the next to rank 1, …; receive in rank order.

        Args:
            rows: `[sum(send_counts), W]`.
            receive_counts: rows expected from each rank, if known; compared with what they send.
        """
        send = pack(rows, metadata, self.world_rank)
        counts = self._agree("all_to_all_rows", rows, metadata, send_counts, receive_counts)
        received = [int(counts[source, self.rank]) for source in range(self.world_size)]
        self._record("all_to_all_rows", rows, metadata, send_counts)
        packed = self._all_to_all(send, list(send_counts), received)
        return self._received(packed, rows, metadata, received)

    def reduce_scatter_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Rank r gets the sum over all ranks of slice r, added in rank order: `[sum(counts), W]` -> `[counts[r], W]`.

        Args:
            counts: rows per rank, the same list on all ranks.
        """
        return self._reduce_scatter("reduce_scatter_rows", rows, counts)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks in rank order, the same bits everywhere: an ordered reduce-scatter, then all-gather.

        Args:
            tensor: `[n, W]`, one shape on all ranks.
        """
        base, rest = divmod(len(tensor), self.world_size)
        counts = [base + (rank < rest) for rank in range(self.world_size)]
        mine = self._reduce_scatter("all_reduce", tensor, counts)
        self._agree("all_reduce", mine, (), [len(mine)] * self.world_size)
        self._record("all_reduce", mine, (), [len(mine)] * self.world_size)
        send = pack(mine, (), self.world_rank)
        packed = self._all_gather(send, [n * send.shape[1] for n in counts])
        return self._received(packed, mine, (), counts).rows

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._agree("barrier", torch.empty(0, 0, dtype=torch.uint8), (), [0] * self.world_size)
        self._done()

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        """The sub-group that contains this rank. All ranks pass the same groups in the same order.

        Args:
            groups: lists of ranks, rising; every rank is in exactly one. Otherwise all ranks raise ConfigError.
        """
        groups = [list(group) for group in groups]
        partition = sorted(rank for group in groups for rank in group) == list(range(self.world_size))
        valid = partition and all(group == sorted(group) for group in groups)
        number = {rank: index for index, group in enumerate(groups) for rank in group}
        numbers = [number[rank] if valid else UNKNOWN for rank in range(self.world_size)]
        self._agree("split", torch.empty(0, 0, dtype=torch.uint8), (), numbers, same_counts=True)
        if not valid:  # on all ranks, as they have just agreed
            raise ConfigError(
                f"groups {groups}: every rank below {self.world_size} needs to be in one, in rising order"
            )
        group = self._subgroup(groups, groups[number[self.rank]])
        self._done()
        return group

    # -- what a transport implements ----------------------------------------------------------------------------

    @abstractmethod
    def _exchange(self, message: torch.Tensor, what: str) -> torch.Tensor:
        """Give every rank a `[n]` int64 message and return all of them as `[R, n]`."""

    @abstractmethod
    def _all_to_all(self, rows: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Move packed uint8 rows: slices of `[sum(send_counts), B]` out, `[sum(receive_counts), B]` in."""

    @abstractmethod
    def _all_gather(self, rows: torch.Tensor, receive_bytes: list[int]) -> torch.Tensor:
        """Give everybody the packed rows `[n, B]`; `receive_bytes[s]` come from rank s. Returns `[sum n, B]`."""

    @abstractmethod
    def _subgroup(self, groups: list[list[int]], mine: list[int]) -> Comm:
        """Create all groups and return the one that contains this rank."""

    # -- header and ledger --------------------------------------------------------------------------------------

    def _reduce_scatter(self, op: str, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        counts = list(counts)
        agreed = self._agree(op, rows, (), counts, same_counts=True)
        mine = int(agreed[self.rank, self.rank])
        self._record(op, rows, (), counts)
        packed = self._all_to_all(pack(rows, (), self.world_rank), counts, [mine] * self.world_size)
        received = self._received(packed, rows, (), [mine] * self.world_size)
        parts = received.rows.view(self.world_size, mine, *rows.shape[1:])
        total = parts[0].clone()
        for part in parts[1:]:  # rank order: the same bits on every run and every transport
            total += part
        return total

    def _agree(
        self,
        op: str,
        rows: torch.Tensor,
        metadata: Sequence[torch.Tensor],
        send_counts: Sequence[int],
        receive_counts: Sequence[int] | None = None,
        same_counts: bool = False,
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
        ]
        expected = list(receive_counts) if receive_counts is not None else [UNKNOWN] * size
        self._op_number += 1
        message = torch.tensor([*header, len(rows), *send_counts, *expected], dtype=torch.int64)
        peers = [peer for peer in range(size) if peer != self.rank]
        others = {self.members[peer] for peer in peers}
        self.shared.waiting = Waiting(op, self._op_number, self.layer, self.step, self.members, others)
        messages = self._exchange(message, str(self.shared.waiting))  # [R, 9 + 2R]
        for peer in peers:
            entry = Entry(metadata=message.numel() * message.element_size(), messages=1)
            self.ledger.add(op, self.layer, self.world_rank, self.members[peer], entry)
        if self.shared.compare:
            compare(messages, self.members, op, same_counts)
        if self.shared.waiting is not None:  # headers are here, rows are next
            self.shared.waiting.waiting_for = others
        return messages[:, len(header) + 1 : len(header) + 1 + size]

    def _done(self) -> None:
        if self.shared.waiting is not None:
            self.shared.waited_s += time.monotonic() - self.shared.waiting.since
            self.shared.waiting = None

    def _received(
        self, packed: torch.Tensor, rows: torch.Tensor, metadata: Sequence[torch.Tensor], counts: list[int]
    ) -> Rows:
        self.ledger.rows_received += len(packed) - counts[self.rank]
        self._done()
        return unpack(packed, rows, metadata, counts)

    def _record(
        self, op: str, rows: torch.Tensor, metadata: Sequence[torch.Tensor], send_counts: Sequence[int]
    ) -> None:
        per_row, extra = row_bytes(rows), sum(row_bytes(tensor) for tensor in metadata)
        for peer, n in enumerate(send_counts):
            if peer != self.rank and n:
                entry = Entry(payload=n * per_row, metadata=n * extra, rows=n, messages=1)
                self.ledger.add(op, self.layer, self.world_rank, self.members[peer], entry)
