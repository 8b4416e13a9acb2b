"""Before ranks share memory: are they on one host, do they find each other, and does every byte arrive?

Each question is answered by every rank in the store, and every rank reads all answers. So all go on, or all refuse
with the same sentence. Built in: notebook 06.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_course.comm.dist import DistComm
from moe_course.comm.mesh import Mesh
from moe_course.comm.named_errors import NamedErrors
from moe_course.comm.wire import LostPeer
from moe_course.errors import BackendUnavailable, MoECourseError

if TYPE_CHECKING:
    from moe_course.comm.shm import ShmComm

ROUNDS = 50  # of the self-test
_ROWS, _WIDTH = 8, 512  # bytes a row
_SPIN_S = 100e-6  # what waking up costs is worth waiting for; with `sched_yield`, also where ranks share a core
_INSTEAD = "use --transport gloo"


class Questions:
    """Asks all ranks of a world something through its store."""

    def __init__(self, world: DistComm, timeout: float):
        self.store, self.rank, self.size, self.timeout = world._world.store, world.rank, world.world_size, timeout
        self.world = world
        # how often this rank has begun: the same on all of them, so answers do not mix
        self.prefix = f"shm/{self.store.add(f'shm/begun/{self.rank}', 1)}"

    def ask(self, name: str, answer: Any) -> list[Any]:
        """Everybody's answers, in rank order. Raises ExchangeTimeout or RankLost."""
        what, answers = f"shared memory, {name}", []
        self.store.set(f"{self.prefix}/{name}/{self.rank}", json.dumps(answer))
        for peer in range(self.size):
            key = f"{self.prefix}/{name}/{peer}"
            dog = self.world.shared.watchdog
            with NamedErrors(what, peer, self.world.members, self.rank, self.timeout, dog):
                try:
                    self.store.wait([key], timedelta(seconds=self.timeout))
                except RuntimeError as error:
                    raise LostPeer(peer, "timeout" in str(error), str(error)) from None
                answers.append(json.loads(self.store.get(key)))
        return answers

    def agree(self, name: str, problem: str | None) -> None:
        """Raise BackendUnavailable on all ranks when one has a problem."""
        for rank, theirs in enumerate(self.ask(name, problem)):
            if theirs:
                raise BackendUnavailable(f"--transport shm, rank {rank}: {theirs}; {_INSTEAD}")


def host() -> tuple[str, str]:
    """Name of this host, and what tells it from others of that name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else ""


def start(kind: type[ShmComm], world: DistComm, timeout: float) -> ShmComm:
    """See `shm.over`; `kind` is the class of the group."""
    questions, rank, size = Questions(world, timeout), world.rank, world.world_size
    mesh, problem = None, unfit(world)
    if problem is None:
        try:
            mesh = Mesh(rank, size)
        except OSError as error:
            problem = f"the system refuses shared memory: {error}"
    try:
        places = questions.ask("host", [*host(), mesh.address if mesh else ""])
        same_host(places)
        questions.agree("memory", problem)
        try:
            mesh.connect([address for *_, address in places], timeout / 2)  # others still listen when it fails
        except LostPeer as lost:
            problem = f"cannot reach rank {lost.peer} on this host: {lost}"
        questions.agree("connections", problem)
        comm = kind(mesh, 0, world.members, world, timeout, _SPIN_S)
        mesh.groups = 1
        questions.agree("semaphores", None)  # nobody posts before all are there
        questions.agree("self-test", self_test(comm))
    except BaseException:
        if mesh is not None:
            mesh.close()
        raise
    return comm


def unfit(world: DistComm) -> str | None:
    """Why this rank cannot share memory at all."""
    if not hasattr(os, "memfd_create") or sys.platform != "linux":
        return f"{sys.platform} has no memfd_create"
    if world._device.type != "cpu":
        return f"rows on {world._device.type} cannot be shared, only those of a CPU"
    return None


def same_host(places: list[list[str]]) -> None:
    """Raises BackendUnavailable when the ranks' `(name, boot, …)` are not those of one host."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, (name, boot, *_) in enumerate(places):
        ranks.setdefault((name if not boot else "", boot), []).append(rank)
    if len(ranks) > 1:
        where = " and ".join(
            f"{'rank' if len(some) == 1 else 'ranks'} {', '.join(map(str, some))} on {places[some[0]][0]}"
            for some in ranks.values()
        )
        raise BackendUnavailable(f"--transport shm needs all ranks on one host, there are {where}; {_INSTEAD}")


def self_test(comm: ShmComm) -> str | None:
    """Send rows that differ in every round, source and destination, headers too; what was wrong, if anything.

    What a rank reads before its sender's writes are visible is an older round.
    """
    rank, size = comm.rank, comm.world_size
    base = torch.arange(_ROWS * _WIDTH // 8).view(_ROWS, -1)
    matrix = torch.full((size, size), _ROWS)

    def pattern(turn: int, source: int, destination: int) -> torch.Tensor:
        return base + (((turn * size + source) * size + destination) << 20)

    wrong = None
    for turn in range(ROUNDS):
        rows = torch.cat([pattern(turn, rank, peer) for peer in range(size)])
        try:
            headers = comm._exchange(torch.tensor([turn, rank]), f"self-test, round {turn}")
            (received,) = comm._all_to_all([rows.view(torch.uint8)], matrix, True)
        except MoECourseError as error:
            return wrong or str(error)
        expected = torch.cat([pattern(turn, source, rank) for source in range(size)])
        if headers.tolist() != [[turn, source] for source in range(size)]:
            wrong = wrong or f"headers arrive wrong in round {turn} of the self-test: {headers.tolist()}"
        if not torch.equal(received.view(torch.int64), expected):
            wrong = wrong or f"rows arrive wrong in round {turn} of the self-test"
    return wrong
