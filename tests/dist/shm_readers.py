"""Slow readers and fast writers on shared memory, and transports that keep too little for them."""

from __future__ import annotations

import time
from functools import partial

import torch

from moe_course.comm import shm_start
from moe_course.comm.base import Comm
from moe_course.comm.control import HEADER
from moe_course.comm.shm import GATHER, PADDED, ROWS, ShmComm

SLOW = 1  # the rank that takes its time
PAUSE_S = 0.001


class SlowToRead(ShmComm):
    """One rank looks at headers a while after they have come."""

    def _wait(self, purpose: int, peer: int) -> None:
        super()._wait(purpose, peer)
        if purpose == HEADER and self.rank == SLOW and self.world_size > 1:
            time.sleep(PAUSE_S)


class Fewer(SlowToRead):
    """Known to be wrong: memory is written again too early."""

    fewer: dict[int, int] = {}

    def _turn(self, kind: int, of: int) -> int:
        return super()._turn(kind, self.fewer.get(kind, of))


class OneHeader(Fewer):
    fewer = {HEADER: 1}


class OneRows(Fewer):
    fewer = {ROWS: 1}


class OneGather(Fewer):
    fewer = {GATHER: 1}


class TwoSegments(Fewer):
    fewer = {PADDED: 2}


KINDS = {kind.__name__: kind for kind in (ShmComm, SlowToRead, OneHeader, OneRows, OneGather, TwoSegments)}


def wrong_turns(world: Comm, kind: str, operation: str, turns: int) -> int:
    """Turns after which this rank finds other bytes than were sent, in a group of this kind."""
    comm = shm_start.start(KINDS[kind], world, 20)
    wrong = OPERATIONS[operation](comm, turns)
    world.barrier()
    comm.close()
    return wrong


def headers(comm: Comm, turns: int) -> int:
    found = [comm._exchange(torch.tensor([turn, comm.rank]), "headers").tolist() for turn in range(turns)]
    return sum(one != [[turn, rank] for rank in range(comm.world_size)] for turn, one in enumerate(found))


def borrowed(comm: Comm, turns: int, operation: str) -> int:
    """Rows are looked at twice: when they come, and just before the next exchange but one."""
    wrong, before, size = 0, None, comm.world_size
    for turn in range(turns):
        now = (exchange(comm, operation, turn), turn)
        if comm.rank == SLOW:
            time.sleep(PAUSE_S)
        for views, sent in filter(None, (before, now)):
            expected = [[value(source, comm.rank, sent, operation)] * 3 for source in range(size)]
            wrong += torch.cat(list(views)).view(size, -1, 3)[:, 0].tolist() != expected
        before = now
    comm.barrier()
    return wrong


def value(source: int, destination: int, turn: int, operation: str) -> float:
    return 1000.0 * turn + 10 * source + (destination if operation != "all_gather" else 0)


def exchange(comm: Comm, operation: str, turn: int) -> list[torch.Tensor]:
    """Two equal rows for everybody, borrowed."""
    size, ones = comm.world_size, torch.ones(comm.world_size, comm.world_size, dtype=torch.int64)
    rows = torch.tensor([value(comm.rank, peer, turn, operation) for peer in range(size)]).repeat_interleave(2)
    rows = rows.view(-1, 1).repeat(1, 3)
    if operation == "all_to_all":
        return [comm.all_to_all_rows(rows, [2] * size, borrow=True).rows]
    if operation == "all_gather":
        return [comm.all_gather_rows(rows[:2], borrow=True).rows]
    return comm.all_to_all_padded(rows, 2 * ones[0], ones, 2, 2).segments


def windows(comm: Comm, turns: int, one_half: bool = False) -> int:
    """What a rank reads in its window, and again just before it opens the turn after next."""
    wrong, before = 0, None
    window = comm.window((2 * comm.world_size, 3), torch.float32)
    if one_half:  # known to be wrong
        window.of = lambda rank: window.memories[rank][0]
    for turn in range(turns):
        comm.open(window, [2] * comm.world_size, window.of(0)[:0])
        for peer in range(comm.world_size):
            rows = torch.full((2, 3), value(comm.rank, peer, turn, "window"))
            comm.put(window, peer, 2 * comm.rank, rows)
        comm.flush(window)
        now = (comm.wait(window), turn)
        if comm.rank == SLOW:
            time.sleep(PAUSE_S)
        for memory, sent in filter(None, (before, now)):
            expected = [value(source, comm.rank, sent, "window") for source in range(comm.world_size)]
            wrong += memory[::2, 0].tolist() != expected
        before = now
    comm.barrier()
    return wrong


OPERATIONS = {
    "headers": headers,
    "windows": windows,
    "one window": partial(windows, one_half=True),
    **{operation: partial(borrowed, operation=operation) for operation in ("all_to_all", "all_gather", "padded")},
}
