"""Ranks as processes of one host that write into each other's memory: no copy through the kernel, none in between.

A sender knows from the headers where its rows belong in the receiver's memory, puts them there, and posts a
semaphore. So rows lie in rank order where they arrive, and `borrow=True` returns them without a copy. An all-gather
is put once, into one memory that all ranks look at: borrowed rows of it may be read, not changed.

Nobody says that it has finished reading. Memory is written again only when its reader must be done:

* Headers and rows have two halves that take turns. Whoever writes header n+2 has everybody's header n+1, so all have
  read header n. Whoever writes rows of its all-to-all (all-gather) n+2 has everybody's header of it, so all have
  entered it, and what they borrowed from n was theirs until then.
* Padded segments have no header before them, so there is nothing that says who has entered. Whoever writes segments
  n+3 has everybody's segments n+2, so all have entered n+2, and what they borrowed from n was theirs until then. That
  takes three parts. With two a fast rank would write n+2 while a slow one still reads n, between n+1 and n+2.

Source: NVSHMEM's put and signal; PyTorch symmetric memory; FlashInfer's one-sided all-to-all. Built in: notebook 06.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch

from moe_course.comm import semaphores
from moe_course.comm.control import CONTROL, DATA, HEADER, WINDOW, control_blocks
from moe_course.comm.dist import DistComm
from moe_course.comm.mesh import Mesh
from moe_course.comm.parts import copies, places, put, views, widths_of
from moe_course.comm.segments import Segments
from moe_course.comm.shared_memory import GROUPS, Memory
from moe_course.comm.shm_start import start
from moe_course.comm.shm_waiting import ShmWaiting
from moe_course.errors import ConfigError

ROWS, GATHER, PADDED = CONTROL + 1, CONTROL + 3, CONTROL + 5  # regions of a group: two, two and three


class ShmComm(ShmWaiting):
    """One rank of a group of processes on one host; `shm.over` makes that of all ranks.

    Args:
        mesh: everybody's memory and connections.
        number: of the group, the same on its members and in use for no other group of any of them.
        members: world ranks, in group order.
        world: the group of torch.distributed, for objects.
        timeout: seconds to wait for the others in one exchange.
        spin_s: see `semaphores.wait`.

    A rank that leaves an exchange early ends the group, see `shm_waiting.py`.
    """

    transport = "shm"
    sends_padding = False
    halves, thirds = 2, 3  # see above; the tests show what happens with fewer

    def __init__(self, mesh: Mesh, number: int, members: list[int], world: DistComm, timeout: float, spin_s: float):
        super().__init__(mesh, members, world.shared, timeout, spin_s)
        self._world = world
        memory = Memory([mesh.files[rank] for rank in members], number)
        self._region, self._window = memory.region, memory.window
        size, rank = self.world_size, self.rank
        self._peers = [(rank + step) % size for step in range(1, size)]  # everybody begins with another one
        self._post_to, self._wait_for, self._headers = control_blocks(memory, size, rank)
        self._turns = dict.fromkeys((HEADER, ROWS, GATHER, PADDED), 0)

    def _turn(self, kind: int, of: int) -> int:
        self._turns[kind] = (self._turns[kind] + 1) % of
        return self._turns[kind]

    # -- what the contract asks for --------------------------------------------------------------------------------

    def _exchange(self, message: torch.Tensor, what: str) -> torch.Tensor:
        self._enter(what)
        try:
            half, fields = self._turn(HEADER, self.halves), message.numel()
            self._headers[self.rank][half, :fields] = message.numpy()
            for peer in self._peers:
                semaphores.post(self._post_to[HEADER][peer])
            messages = np.empty((self.world_size, fields), np.int64)
            messages[self.rank] = message.numpy()
            for peer in self._peers:
                self._wait(HEADER, peer)
                messages[peer] = self._headers[peer][half, :fields]
        except BaseException as error:
            self._leave(error)
            raise
        return torch.from_numpy(messages)

    def _all_to_all(self, parts: list[torch.Tensor], matrix: torch.Tensor, borrow: bool) -> list[torch.Tensor]:
        counts = matrix.tolist()
        column, widths = [row[self.rank] for row in counts], widths_of(parts)
        memory = self._put_rows(parts, counts, widths, [*self._peers, *([self.rank] if borrow else [])])
        if borrow:
            return views(memory, sum(column), widths)
        before = sum(column[: self.rank])
        gap = before, before + column[self.rank]
        return copies(memory, sum(column), widths, gap, parts, sum(counts[self.rank][: self.rank]))

    def _all_to_all_views(self, parts: list[torch.Tensor], matrix: torch.Tensor) -> list[list[torch.Tensor]]:
        """Own rows are not copied at all: half of everything with two ranks."""
        counts = matrix.tolist()
        column, widths = [row[self.rank] for row in counts], widths_of(parts)
        memory = self._put_rows(parts, counts, widths, self._peers)
        split = [part.split(column) for part in views(memory, sum(column), widths)]
        found = [list(each) for each in zip(*split, strict=True)]
        start, n = sum(counts[self.rank][: self.rank]), column[self.rank]
        found[self.rank] = [part[start : start + n] for part in parts]
        return found

    def _put_rows(self, parts, counts: list[list[int]], widths: tuple[int, ...], peers: list[int]) -> torch.Tensor:
        """Put rows where they belong in the memories of these ranks; this rank's memory, once its own are there."""
        self._enter()
        try:
            index, rank = ROWS + self._turn(ROWS, self.halves), self.rank
            starts = [0, *accumulate(counts[rank])]
            for peer in peers:
                n = counts[rank][peer]
                if n:  # otherwise nothing is put and nothing posted: both sides know
                    column = [row[peer] for row in counts]
                    total, before = sum(column), sum(column[:rank])
                    memory = self._region(peer, index, places(total, widths)[1])
                    put(memory, total, widths, before, parts, starts[peer], n)
                    if peer != rank:
                        semaphores.post(self._post_to[DATA][peer])
            column = [row[rank] for row in counts]
            for peer in self._peers:
                if column[peer]:
                    self._wait(DATA, peer)
            return self._region(rank, index, places(sum(column), widths)[1])
        except BaseException as error:
            self._leave(error)
            raise

    def _all_gather(self, parts: list[torch.Tensor], counts: list[int], borrow: bool) -> list[torch.Tensor]:
        self._enter()
        try:
            widths, total, mine = widths_of(parts), sum(counts), counts[self.rank]
            memory = self._region(0, GATHER + self._turn(GATHER, self.halves), places(total, widths)[1])
            if mine:
                put(memory, total, widths, sum(counts[: self.rank]), parts, 0, mine)
                for peer in self._peers:
                    semaphores.post(self._post_to[DATA][peer])
            for peer in self._peers:
                if counts[peer]:
                    self._wait(DATA, peer)
            if borrow:
                return views(memory, total, widths)
            return copies(memory, total, widths, (total, total), parts, mine)
        except BaseException as error:
            self._leave(error)
            raise

    def _segments(self, send: list[torch.Tensor], receive_bytes: list[int], what: str) -> list[torch.Tensor]:
        # sizes first: a sender has to know what the others put in front of its own
        matrix = self._exchange(torch.tensor([segment.numel() for segment in send]), what)
        (received,) = self._all_to_all([torch.cat(send).view(-1, 1)], matrix, False)
        return list(received.view(-1).split(receive_bytes))

    def _padded(self, block, rows, counts, sections, capacity, what):
        """Put the block and the rows in use into everybody's memory: nothing else of a segment is written."""
        self._enter(what)
        try:
            index = PADDED + self._turn(PADDED, self.thirds)
            plan = Segments(sections, capacity, widths_of([rows])[0])
            started = 0
            for peer in range(self.world_size):  # rows are sorted by rank
                memory = self._region(peer, index, plan.nbytes(peer))
                started += plan.put(memory, self.rank, peer, block, rows[started:], counts)
                if peer != self.rank:
                    semaphores.post(self._post_to[DATA][peer])
            for peer in self._peers:
                self._wait(DATA, peer)
            return plan.take(self._region(self.rank, index, plan.nbytes(self.rank)), self.rank)
        except BaseException as error:
            self._leave(error)
            raise

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return [memory.view(dtype).view(shape) for memory in self._window(nbytes)]

    def _signal(self) -> None:
        self._enter()
        for peer in self._peers:
            semaphores.post(self._post_to[WINDOW][peer])

    def _await(self) -> None:
        self._enter()
        try:
            for peer in self._peers:
                self._wait(WINDOW, peer)
        except BaseException as error:
            self._leave(error)
            raise

    def _subgroup(self, groups: list[list[int]], mine: list[int]) -> ShmComm:
        """No new memory and no new connections: a range of the same files. Groups of groups are fine."""
        what = self._what
        highest = int(self._exchange(torch.tensor([self._mesh.groups]), what).max())
        if highest == GROUPS:  # on all ranks
            raise ConfigError(f"{what}: {GROUPS} groups have been made, shared memory has room for no more; keep them")
        self._mesh.groups = highest + 1
        members = [self.members[rank] for rank in mine]
        group = type(self)(self._mesh, highest, members, self._world, self._timeout, self._spin_s)
        self._exchange(torch.tensor([highest]), what)  # nobody posts before its semaphore is there
        return group

    def gather_objects(self, item: Any) -> list[Any] | None:
        """Everybody's picklable object on rank 0 of all ranks, None elsewhere. They travel over gloo."""
        if self.world_size < self._world.world_size:
            raise ConfigError(f"rank {self.world_rank}: gather objects in the group of all ranks, not in a sub-group")
        return self._world.gather_objects(item)

    def close(self) -> None:
        """Leave the others. Memory that is still looked into stays."""
        self._over = "it was closed here"
        self._mesh.close()


def over(world: DistComm, timeout: float | None = None) -> ShmComm:
    """The group of all ranks on shared memory, over a joined world of torch.distributed. All ranks call it.

    Args:
        world: what `dist.init` returned; it stays in use for objects.
        timeout: seconds to wait for a peer in one exchange; default: the world's.

    Raises:
        BackendUnavailable: ranks on several hosts, no such memory here, rows on a GPU, or bytes that arrived wrong in
            a test of the machine. On all ranks, with the same sentence.
        ExchangeTimeout, RankLost: a rank that does not come.
    """
    return start(ShmComm, world, world._timeout if timeout is None else timeout)
