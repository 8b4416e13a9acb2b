"""The contract of a group of ranks, with a header before every exchange and a ledger of every byte.

Ragged counts and zero rows are the normal case. Before rows move, every rank shows every other rank one
fixed-size int64 message: which operation, of which layer and step, of what dtype and width, and how many rows
for whom. All ranks compare all messages, so a disagreement is the same `ExchangeMismatch` everywhere, instead
of a hang, an abort, or silently wrong rows. The message also is the count exchange that ragged rows need.

Built in: notebooks 06 and 07. Source: `torch.distributed` semantics; vLLM `all_gatherv` / `reduce_scatterv`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from moe_course.comm import window as one_sided
from moe_course.comm.header import OPS, UNKNOWN, compare, dtype_code
from moe_course.comm.ledger import Entry, Ledger
from moe_course.comm.packing import Rows, from_bytes, row_bytes, to_bytes
from moe_course.comm.padded import Padded, exchange_padded
from moe_course.comm.shared import Shared, Waiting
from moe_course.comm.transport import Transport
from moe_course.comm.window import Window
from moe_course.errors import ConfigError

__all__ = ["Comm", "Entry", "Ledger", "Padded", "Rows", "Window"]


class Comm(Transport):
    """A group of `world_size` ranks, seen from `rank`. Every rank must call every operation, in one order.

    `layer` and `step` are written into the headers and the ledger; the layer and the generator set them. A group
    shares both, and the ledger, with the sub-groups split off it. `members` are the group's ranks in the numbers of
    the whole world; messages and ledger use those.

    `borrow=True` allows an operation to return views of the transport's own memory instead of copies. They hold
    until this rank's next exchange but one, and may be read, not changed: an all-gather's are one memory for all.

    Operations raise ExchangeMismatch (ranks disagree), ExchangeTimeout (a peer does not come) or RankLost (a
    peer is gone), each on all ranks that are still there.
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

    # -- operations ---------------------------------------------------------------------------------------------

    def all_gather_rows(self, rows: torch.Tensor, *metadata: torch.Tensor, borrow: bool = False) -> Rows:
        """Everybody's rows, in rank order.

        Args:
            rows: `[n, W]`; n may differ between ranks and may be 0.
            metadata: tensors `[n, …]` that travel with the rows; counted apart.
        """
        parts = to_bytes(rows, metadata, self.world_rank)
        matrix = self._agree("all_gather_rows", rows, metadata, [len(rows)] * self.world_size)
        self._record("all_gather_rows", rows, metadata, [len(rows)] * self.world_size)
        received = self._all_gather(parts, matrix[:, self.rank].tolist(), borrow)
        return self._received(received, (rows, *metadata), matrix)

    def all_to_all_rows(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        *metadata: torch.Tensor,
        receive_counts: Sequence[int] | None = None,
        borrow: bool = False,
    ) -> Rows:
        """Send the first `send_counts[0]` rows to rank 0, the next to rank 1, …; receive in rank order.

        Args:
            rows: `[sum(send_counts), W]`.
            receive_counts: rows expected from each rank, if known; compared with what they send.
        """
        parts = to_bytes(rows, metadata, self.world_rank)
        matrix = self._agree("all_to_all_rows", rows, metadata, send_counts, receive_counts)
        self._record("all_to_all_rows", rows, metadata, send_counts)
        received = self._all_to_all(parts, matrix, borrow)
        return self._received(received, (rows, *metadata), matrix)

    def all_to_all_views(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """As `all_to_all_rows`, but the rows of each source by themselves, in place where the transport can.

        This rank's own rows are the caller's, the others hold until its next exchange but one. They may be read, not
        changed.
        """
        parts = to_bytes(rows, (), self.world_rank)
        matrix = self._agree("all_to_all_rows", rows, (), send_counts, receive_counts)
        self._record("all_to_all_rows", rows, (), send_counts)
        received = self._all_to_all_views(parts, matrix)
        self.ledger.rows_received += sum(len(part) for source, (part,) in enumerate(received) if source != self.rank)
        self._done()
        return [from_bytes(part, rows) for (part,) in received]

    def all_to_all_padded(
        self, rows: torch.Tensor, counts: torch.Tensor, sections: torch.Tensor, capacity: int, held: int
    ) -> Padded:
        """Exchange segments of a size all ranks know beforehand: no header, no count exchange, one message a peer.

        Args:
            rows: `[sum(counts), W]`, sorted by destination and section.
            counts: `[sections[rank].sum()]` int64, rows in each of this rank's sections.
            sections: `[R, R]` int64, the same on all ranks: `sections[s, d]` sections go from rank s to rank d.
            capacity: rows that fit into a section.
            held: rows this rank brings; more than `capacity` are refused.

        Raises CapacityExceeded on all ranks when one has too many rows, and ExchangeMismatch as usual.
        """
        return exchange_padded(self, rows, counts, sections, capacity, held)

    def reduce_scatter_rows(
        self, rows: torch.Tensor, counts: Sequence[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Rank r gets the sum over all ranks of slice r, added in rank order: `[sum(counts), W]` -> `[counts[r], W]`.

        Args:
            counts: rows per rank, the same list on all ranks.
            dtype: sums are kept and returned in it; None: in that of the rows.
        """
        return self._reduce_scatter("reduce_scatter_rows", rows, counts, dtype)

    def all_reduce(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Sum over all ranks in rank order, the same bits everywhere: an ordered reduce-scatter, then all-gather.

        Args:
            tensor: `[n, W]`, one shape on all ranks.
            dtype: sums are kept in it, and rounded once to the tensor's; None: in the tensor's own.
        """
        base, rest = divmod(len(tensor), self.world_size)
        counts = [base + (rank < rest) for rank in range(self.world_size)]
        mine = self._reduce_scatter("all_reduce", tensor, counts, dtype).to(tensor.dtype)
        matrix = self._agree("all_reduce", mine, (), [len(mine)] * self.world_size)
        self._record("all_reduce", mine, (), [len(mine)] * self.world_size)
        received = self._all_gather(to_bytes(mine, (), self.world_rank), counts, False)
        return self._received(received, (mine,), matrix).rows

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

    # -- memory that peers write into ---------------------------------------------------------------------------

    def window(self, shape: Sequence[int], dtype: torch.dtype) -> Window:
        """Memory `[*shape]` on every rank of the group that all its ranks may put rows into. All must call it.

        Raises BackendUnavailable on a transport without memory to share.
        """
        return one_sided.window(self, shape, dtype)

    def open(
        self,
        window: Window,
        send_counts: Sequence[int],
        rows: torch.Tensor,
        *metadata: torch.Tensor,
        capacity: int | None = None,
    ) -> torch.Tensor:
        """Begin a turn: show everybody the header, and how many rows go where. Returns that as `[R, R]`.

        Args:
            rows, metadata: what is going to be put, for the header; a window may hold both in one byte row.
            capacity: the most rows a rank may bring. Raises CapacityExceeded on all ranks when one has more.
        """
        return one_sided.open(self, window, send_counts, rows, metadata, capacity)

    def put(
        self, window: Window, peer: int, start: int, rows: torch.Tensor, metadata: int = 0, padding: int = 0
    ) -> None:
        """Write rows `[n, …]` into `peer`'s memory of this turn, from its row `start` on.

        Args:
            metadata, padding: how many bytes of each row are metadata, or carry nothing, for the ledger.
        """
        one_sided.put(self, window, peer, start, rows, metadata, padding)

    def flush(self, window: Window) -> None:
        """This rank has put all it has for this turn: tell its peers. ConfigError where it announced other rows."""
        one_sided.flush(self, window)

    def wait(self, window: Window) -> torch.Tensor:
        """This rank's memory `[*shape]`, once all peers have flushed. In place; it holds until the turn after next."""
        return one_sided.wait(self, window)

    # -- header and ledger --------------------------------------------------------------------------------------

    def _reduce_scatter(self, op: str, rows: torch.Tensor, counts: Sequence[int], dtype=None) -> torch.Tensor:
        counts = list(counts)
        agreed = self._agree(op, rows, (), counts, same_counts=True)
        mine = int(agreed[self.rank, self.rank])
        self._record(op, rows, (), counts)
        packed = self._all_to_all(to_bytes(rows, (), self.world_rank), agreed, True)
        received = self._received(packed, (rows,), agreed)
        parts = received.rows.view(self.world_size, mine, *rows.shape[1:])
        total = parts[0].to(dtype or rows.dtype, copy=True)
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
        self.ledger.rows_received += len(parts[0]) - counts[self.rank]
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
