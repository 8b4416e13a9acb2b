"""Segments of a fixed size, each with a block of its own in front: an exchange without headers and without counts.

What a low-latency backend does: every rank knows the size of every message beforehand, so nothing is asked first.
The price is padding. The block says what a header says, how many rows each section holds, and whether the sender had
too many. Built in: notebook 09. Source: DeepEP's low-latency kernels; vLLM `deepep_ll.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_course.comm.header import OPS, compare_fields, dtype_code
from moe_course.comm.ledger import Entry
from moe_course.comm.packing import from_bytes, row_bytes, to_bytes
from moe_course.errors import CapacityExceeded, ConfigError, ExchangeMismatch

if TYPE_CHECKING:
    from moe_course.comm.base import Comm

OP = "all_to_all_padded"
#: Fields of a block that all ranks must agree on, "sections" as one number for the placement of the experts; behind
#: them a mark: the sender's rows if it has too many, else those of its fullest section, below 0, if they are, else 0.
FIELDS = ("op number", "op", "layer", "step", "dtype", "width", "capacity", "sections")
_HEAD = len(FIELDS) + 1


@dataclass(frozen=True)
class Padded:
    """What came: `segments[s]` is `[sections[s, rank], capacity, W]` from rank s, whose first rows count.

    `counts[s]` is `[sections[s].sum()]` int64: rows in all sections of rank s, whomever they went to. Rows of a
    segment beyond its count hold anything. Segments may be views of the transport's memory: they hold until the next
    exchange but one.
    """

    segments: list[torch.Tensor]
    counts: list[torch.Tensor]


def exchange_padded(
    comm: Comm, rows: torch.Tensor, counts: torch.Tensor, sections: torch.Tensor, capacity: int, held: int
) -> Padded:
    """See `Comm.all_to_all_padded`."""
    rank, size = comm.rank, comm.world_size
    if len(counts) != int(sections[rank].sum()) or int(counts.sum()) != len(rows):
        raise ConfigError(
            f"rank {comm.world_rank}: {len(rows)} rows in {len(counts)} sections that hold {int(counts.sum())}, "
            f"expected {int(sections[rank].sum())} sections that hold all rows"
        )
    fullest = int(counts.max()) if len(counts) else 0
    too_many = held if held > capacity else -fullest if fullest > capacity else 0
    if too_many:  # an empty segment with a mark: nobody waits, everybody learns of it
        rows, counts = rows[:0], torch.zeros_like(counts)
    comm._now_in(OP)
    what = str(comm.shared.waiting)
    fields = [comm._op_number, OPS.index(OP), comm.layer, comm.step]
    fields += [dtype_code(rows, comm.world_rank), rows.shape[1:].numel(), capacity]
    fields += [hash(tuple(sections.flatten().tolist())), too_many]  # of numbers: the same in every process
    block = torch.cat([torch.tensor(fields), counts.to("cpu", torch.int64)])
    (packed,) = to_bytes(rows, (), comm.world_rank)
    blocks, segments = comm._padded(block, packed, counts.to("cpu", torch.int64), sections, capacity, what)
    _record(comm, block, rows, counts, sections, capacity)

    heads = torch.stack([theirs[:_HEAD] for theirs in blocks])
    if comm.shared.compare:
        compare_fields(heads[:, : len(FIELDS)].numpy(), comm.members, FIELDS)
    comm._done()
    if not segments:
        raise ExchangeMismatch(
            f"rank {comm.world_rank}: {what}: segments came that are not of the expected size, although width and "
            "capacity agree; every rank must use the same placement"
        )
    marks = heads[:, -1].tolist()
    if any(marks):
        full = marks.index(max(marks) or min(marks))  # rows before routes
        raise _exceeded(comm, comm.members[full], marks[full], capacity)
    theirs = [block[_HEAD:] for block in blocks]
    here = _for(theirs, sections, rank)
    comm.ledger.receive(comm.layer, sum(int(here[source].sum()) for source in range(size) if source != rank))
    tensors = [
        from_bytes(segment.reshape(-1, row_bytes(rows)), rows).view(-1, capacity, *rows.shape[1:])
        if segment.numel()
        else rows.new_empty(int(sections[source, rank]), capacity, *rows.shape[1:])
        for source, segment in enumerate(segments)
    ]
    return Padded(tensors, theirs)


def _exceeded(comm: Comm, rank: int, mark: int, capacity: int) -> CapacityExceeded:
    where = f"T_max is {capacity} (layer {comm.layer}, step {comm.step})"
    if mark > 0:
        return CapacityExceeded(
            f"rank {rank} has {mark} rows, {where}: a segment of fixed size cannot hold them; raise "
            "--max-num-batched-tokens on all ranks, or send fewer rows"
        )
    return CapacityExceeded(
        f"rank {rank} has {-mark} routes to one expert, {where}: it has no more rows than T_max, so a row names that "
        f"expert twice; give each row distinct experts, or raise --max-num-batched-tokens to {-mark} on all ranks"
    )


def pad(comm: Comm, block, rows, counts, sections, capacity: int, what: str):
    """Fill a segment for every rank, send them, and take theirs apart.

    Args:
        block: int64; rows: uint8 `[n, B]`, by section; counts: rows in each section.

    Returns:
        `(blocks, segments)`, lists over ranks: int64 `[…]` and uint8 `[sections[s, rank], capacity, B]`. No segments
        when one is of another size than expected: then the blocks disagree, which is for the caller to say.
    """
    rank, width = comm.rank, rows.shape[1]
    head = block.to(rows.device).view(torch.uint8)
    outgoing, done = [], 0
    for mine in counts.split(sections[rank].tolist()):
        n = int(mine.sum())
        segment = rows.new_empty(len(head) + len(mine) * capacity * width)
        segment[: len(head)] = head
        place = slots(mine, capacity).to(rows.device)
        segment[len(head) :].view(len(mine) * capacity, width)[place] = rows[done : done + n]
        outgoing.append(segment)
        done += n
    blocks_bytes = (8 * (_HEAD + sections.sum(1))).tolist()
    numbers = sections[:, rank].tolist()
    sizes = [block + n * capacity * width for block, n in zip(blocks_bytes, numbers, strict=True)]
    received = comm._segments(outgoing, sizes, what)
    if any(len(segment) != n for segment, n in zip(received, sizes, strict=True)):
        return [segment[: 8 * _HEAD].cpu().view(torch.int64) for segment in received], []
    blocks = [segment[:n].cpu().view(torch.int64) for segment, n in zip(received, blocks_bytes, strict=True)]
    segments = [
        segment[block:].view(n, capacity, width)
        for segment, block, n in zip(received, blocks_bytes, numbers, strict=True)
    ]
    return blocks, segments


def slots(counts: torch.Tensor, capacity: int) -> torch.Tensor:
    """Where the rows of each section lie in a segment: `[sum(counts)]`, section after section."""
    start = torch.arange(len(counts)) * capacity - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + start.repeat_interleave(counts)


def _part(counts: torch.Tensor, sections: torch.Tensor, source: int, peer: int) -> torch.Tensor:
    """Of a source's counts those of its sections for `peer`."""
    first = int(sections[source, :peer].sum())
    return counts[first : first + int(sections[source, peer])]


def _for(counts: list[torch.Tensor], sections: torch.Tensor, peer: int) -> list[torch.Tensor]:
    """Of every source's counts those of its sections for `peer`."""
    ends = sections[:, : peer + 1].sum(1).tolist()
    pairs = zip(counts, ends, sections[:, peer].tolist(), strict=True)
    return [theirs[end - n : end] for theirs, end, n in pairs]


def _record(comm: Comm, block, rows, counts, sections, capacity: int) -> None:
    width = row_bytes(rows)
    numbers = sections[comm.rank].tolist()
    for peer, mine in enumerate(counts.split(numbers)):
        if peer != comm.rank:
            n = int(mine.sum())
            room = numbers[peer] * capacity if comm.sends_padding else n
            entry = Entry(n * width, (room - n) * width, block.numel() * 8, n, 1)
            comm.ledger.add(OP, comm.layer, comm.world_rank, comm.members[peer], entry)
