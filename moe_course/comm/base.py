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
from dataclasses import dataclass, field
from typing import Protocol

import torch

from moe_course.comm.ledger import Entry, Ledger
from moe_course.errors import ConfigError, ExchangeMismatch

__all__ = ["Comm", "Entry", "Ledger", "Rows"]

OPS = ("all_gather_rows", "reduce_scatter_rows", "all_to_all_rows", "all_reduce", "barrier", "split")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
#: Fields every rank must agree on, in the order in which they are compared.
FIELDS = ("op number", "op", "layer", "step", "dtype", "width", "metadata bytes", "metadata dtypes")
UNKNOWN = -1  # "no rows expected" in a message
_COUNTED = ("reduce_scatter_rows", "all_to_all_rows")  # their counts must add up to the rows
_FEW = 16  # ranks


@dataclass(frozen=True)
class Rows:
    """What an exchange delivered: rows of all sources in rank order, what travelled along, rows per source."""

    rows: torch.Tensor  # [sum(counts), W]
    metadata: tuple[torch.Tensor, ...]  # each [sum(counts), …]
    counts: list[int]  # [R]


@dataclass
class Waiting:
    """The exchange a rank is in: what a watchdog shows when it lasts too long. Ranks are those of the whole world."""

    op: str
    number: int
    layer: int
    step: int
    members: list[int]
    waiting_for: set[int]
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.op} #{self.number} (layer {self.layer}, step {self.step})"


class Watcher(Protocol):
    """Whoever knows what other ranks do (`guard.watchdog.Watchdog`)."""

    def explain(self) -> tuple[str, list[str]]:
        """The culprit in a sentence, and one line about each rank."""

    def gone(self, rank: int | None) -> str:
        """What became of a rank that is lost; None: of any."""


@dataclass
class Shared:
    """What a group and all its sub-groups have in common on one rank."""

    ledger: Ledger
    layer: int = -1
    step: int = 0
    compare: bool = True  # False: believe every header, as a program without a guard does
    waiting: Waiting | None = None
    waited_s: float = 0.0  # spent in exchanges so far
    watchdog: Watcher | None = None


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
        send = _pack(rows, metadata, self.world_rank)
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
        send = _pack(rows, metadata, self.world_rank)
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
        send = _pack(mine, (), self.world_rank)
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
        packed = self._all_to_all(_pack(rows, (), self.world_rank), counts, [mine] * self.world_size)
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
            self._dtype_code(rows),
            rows.shape[1:].numel(),
            sum(_row_bytes(tensor) for tensor in metadata),
            sum((self._dtype_code(tensor) + 1) << (4 * place) for place, tensor in enumerate(metadata)),
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
            self._compare(messages, op, same_counts)
        if self.shared.waiting is not None:  # headers are here, rows are next
            self.shared.waiting.waiting_for = others
        return messages[:, len(header) + 1 : len(header) + 1 + size]

    def _dtype_code(self, tensor: torch.Tensor) -> int:
        if tensor.dtype not in DTYPES:
            known = ", ".join(_name(dtype) for dtype in DTYPES)
            raise ConfigError(f"rank {self.world_rank}: {_name(tensor.dtype)} rows cannot travel, these can: {known}")
        return DTYPES.index(tensor.dtype)

    def _compare(self, messages: torch.Tensor, op: str, same_counts: bool) -> None:
        """Raise the same ExchangeMismatch on all ranks if any two messages disagree."""
        size, fields, names = self.world_size, len(FIELDS), self.members
        if size <= _FEW and _all_fine(messages.tolist(), op, same_counts):
            return
        seen = messages.numpy()  # a dozen small comparisons: numpy's cost a tenth of torch's
        header, rows = seen[:, :fields], seen[:, fields]
        counts, wanted = seen[:, fields + 1 : fields + 1 + size], seen[:, fields + 1 + size :]
        if (header != header[0]).any():
            column = int((header != header[0]).any(axis=0).argmax())
            peer, field = int((header[:, column] != header[0, column]).argmax()), FIELDS[column]
            values = [_readable(field, int(header[rank, column])) for rank in (0, peer)]
            detail = f"rank {names[0]} has {values[0]}, rank {names[peer]} has {values[1]}"
            self._mismatch(header[0], field, detail)
        if op in _COUNTED and (counts.sum(axis=1) != rows).any():
            rank = int((counts.sum(axis=1) != rows).argmax())
            announced = counts[rank].tolist()
            said = f"announces {sum(announced)} in its counts {announced}"
            detail = f"rank {names[rank]} has {int(rows[rank])} rows and {said}"
            self._mismatch(header[0], "rows", detail)
        if same_counts and (counts != counts[0]).any():
            rank = int((counts != counts[0]).any(axis=1).argmax())
            what = "group numbers" if op == "split" else "counts"
            ours, theirs = counts[0].tolist(), counts[rank].tolist()
            detail = f"rank {names[0]} has {what} {ours}, rank {names[rank]} has {what} {theirs}"
            self._mismatch(header[0], "groups" if op == "split" else "rows", detail)
        wrong = (wanted != UNKNOWN) & (wanted != counts.T)
        if wrong.any():
            rank, source = (int(index) for index in divmod(int(wrong.argmax()), size))
            sent, expected = int(counts[source, rank]), int(wanted[rank, source])
            detail = f"rank {names[source]} sends {sent} rows to rank {names[rank]}, which expects {expected}"
            self._mismatch(header[0], "rows", detail)

    def _mismatch(self, header, field: str, detail: str) -> None:
        number, op, layer, step = header[:4].tolist()
        raise ExchangeMismatch(
            f"{OPS[op]} #{number} (layer {layer}, step {step}): {field} differ: {detail}; "
            "every rank must make the same calls in the same order with the same shapes"
        )

    def _done(self) -> None:
        if self.shared.waiting is not None:
            self.shared.waited_s += time.monotonic() - self.shared.waiting.since
            self.shared.waiting = None

    def _received(
        self, packed: torch.Tensor, rows: torch.Tensor, metadata: Sequence[torch.Tensor], counts: list[int]
    ) -> Rows:
        self.ledger.rows_received += len(packed) - counts[self.rank]
        self._done()
        return _unpack(packed, rows, metadata, counts)

    def _record(
        self, op: str, rows: torch.Tensor, metadata: Sequence[torch.Tensor], send_counts: Sequence[int]
    ) -> None:
        per_row, extra = _row_bytes(rows), sum(_row_bytes(tensor) for tensor in metadata)
        for peer, n in enumerate(send_counts):
            if peer != self.rank and n:
                entry = Entry(payload=n * per_row, metadata=n * extra, rows=n, messages=1)
                self.ledger.add(op, self.layer, self.world_rank, self.members[peer], entry)


def _all_fine(messages: list[list[int]], op: str, same_counts: bool) -> bool:
    """For a few ranks: does nothing differ? Lists are quickest then; what differs, and how, is `_compare`'s affair."""
    fields, size = len(FIELDS), len(messages)
    header, first = messages[0][:fields], messages[0][fields + 1 : fields + 1 + size]
    for message in messages:
        counts = message[fields + 1 : fields + 1 + size]
        if message[:fields] != header or (same_counts and counts != first):
            return False
        if op in _COUNTED and sum(counts) != message[fields]:
            return False
        if any(wanted != UNKNOWN for wanted in message[fields + 1 + size :]):
            return False  # or perhaps: somebody knows what to expect, and it has to be compared
    return True


def _readable(field: str, value: int) -> str:
    if field == "op":
        return OPS[value] if 0 <= value < len(OPS) else str(value)
    if field == "dtype":
        return _name(DTYPES[value])
    if field == "metadata dtypes":  # one hexadecimal digit each, 0 for none
        return ", ".join(_name(DTYPES[int(digit, 16) - 1]) for digit in reversed(f"{value:x}")) if value else "none"
    return str(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _pack(rows: torch.Tensor, metadata: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """One uint8 row `[n, B]` per row: its payload, then its metadata. Any dtype travels this way, fp8 too."""
    for tensor in metadata:
        if len(tensor) != len(rows):
            raise ConfigError(f"rank {rank}: metadata has {len(tensor)} rows, the rows are {len(rows)}")
    parts = [_bytes(tensor) for tensor in (rows, *metadata)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # flat first: an empty tensor counts as contiguous whatever its strides are, and then cannot be seen as bytes
    return tensor.detach().contiguous().view(-1).view(torch.uint8).view(len(tensor), _row_bytes(tensor))


def _unpack(packed: torch.Tensor, rows: torch.Tensor, metadata: Sequence[torch.Tensor], counts: list[int]) -> Rows:
    """Cut packed rows back into tensors shaped and typed like `rows` and `metadata`."""
    tensors, start = [], 0
    for like in (rows, *metadata):
        end = start + _row_bytes(like)
        part = packed[:, start:end].contiguous().view(-1)
        if part.storage_offset():  # one row or none is contiguous as it is, but starts where its dtype may not
            part = part.clone()
        tensors.append(part.view(like.dtype).view(len(packed), *like.shape[1:]))
        start = end
    return Rows(tensors[0], tuple(tensors[1:]), counts)
