"""The contract of a group of ranks, with a header before every exchange and a ledger of every byte.

Ragged counts and zero rows are the normal case. How headers are compared and the ledger is kept stands in
`checked_transport.py`.

Built in: notebooks 06 and 07. Source: `torch.distributed` semantics; vLLM `all_gatherv` / `reduce_scatterv`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_course.comm import window as one_sided
from moe_course.comm.checked_transport import CheckedTransport
from moe_course.comm.header import UNKNOWN
from moe_course.comm.ledger import Entry, Ledger
from moe_course.comm.packing import Rows, from_bytes, to_bytes
from moe_course.comm.padded import Padded, exchange_padded
from moe_course.comm.window import Window
from moe_course.errors import ConfigError

__all__ = ["Comm", "Entry", "Ledger", "Padded", "Rows", "Window"]


class Comm(CheckedTransport):
    """A group of `world_size` ranks, seen from `rank`. Every rank must call every operation, in one order.

    `layer` and `step` are written into the headers and the ledger; the layer and the generator set them. A group
    shares both, and the ledger, with the sub-groups split off it. `members` are the group's ranks in the numbers of
    the whole world; messages and ledger use those.

    `borrow=True` allows an operation to return views of the transport's own memory instead of copies. They hold
    until this rank's next exchange but one, and may be read, not changed: an all-gather's are one memory for all.

    Operations raise ExchangeMismatch (ranks disagree), ExchangeTimeout (a peer does not come) or RankLost (a
    peer is gone), each on all ranks that are still there. A tensor whose gradient would be lost on the way is a
    ConfigError.
    """

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
        came = sum(len(part) for source, (part,) in enumerate(received) if source != self.rank)
        self.ledger.receive(self.layer, came)
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

        Raises CapacityExceeded on all ranks when one has too many rows, or too many for one section, and
        ExchangeMismatch as usual.
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
