"""Ranks of one host wait for each other: at most so long, not for one that is gone, and not for one that left.

Whatever ends an exchange early, a lost rank, a time-out, Ctrl-C, ends the group: its ranks are then no longer at the
same place. A rank that fails alone tells the others at once. Built in: notebook 06.
"""

from __future__ import annotations

from time import monotonic

from moe_course.comm import semaphores
from moe_course.comm.base import Comm
from moe_course.comm.mesh import Mesh
from moe_course.comm.named_errors import NamedErrors
from moe_course.comm.shared import Shared
from moe_course.comm.wire import LostPeer
from moe_course.errors import ExchangeTimeout, RankLost


class ShmWaiting(Comm):
    """A group of ranks on one host, as far as it waits. See `ShmComm` for the arguments."""

    _wait_for: list[list[int]]  # addresses of semaphores, [purpose][peer]

    def __init__(self, mesh: Mesh, members: list[int], shared: Shared, timeout: float, spin_s: float):
        super().__init__(members.index(mesh.rank), members, shared)
        self._mesh, self._timeout, self._spin_s = mesh, timeout, spin_s
        self._began, self._what, self._over = 0.0, "", ""

    def _enter(self, what: str | None = None) -> None:
        self._began, self._what = monotonic(), what or self._what
        if self._over or not self._mesh.files:
            raise RankLost(f"{self._what}: this group has ended: {self._over or 'it belongs to another process'}")

    def _wait(self, purpose: int, peer: int) -> None:
        address = self._wait_for[purpose][peer]
        if semaphores.try_wait(address):
            return
        rank = self.members[peer]
        if self.shared.waiting is not None:
            self.shared.waiting.waiting_for = {rank}
        deadline = self._began + self._timeout  # one limit for all peers together
        try:
            semaphores.wait(address, rank, deadline, self._spin_s, lambda: self._mesh.gone(rank))
        except LostPeer as lost:
            me, dog = self.world_rank, self.shared.watchdog
            with NamedErrors(self._what, rank, self.members, me, self._timeout, dog):
                raise lost

    def _leave(self, error: BaseException) -> None:
        """This rank does not finish the exchange it is in: the others wait for something that never comes."""
        self._over = f"rank {self.world_rank} left {self._what}: {type(error).__name__}"
        if not isinstance(error, ExchangeTimeout | RankLost):  # the others find those by themselves
            self._mesh.leave(f"it left {self._what}: {type(error).__name__}: {error}".rstrip(": "))
