"""Groups on shared memory that must not come to be, and what a group takes and gives back."""

from __future__ import annotations

import gc
import os
import resource
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from shm_cases import shared, window_turns

from moe_course.comm import mesh, shm, shm_start
from moe_course.comm.base import Comm
from moe_course.comm.control import DATA
from moe_course.comm.shm import ROWS, ShmComm
from moe_course.errors import MoECourseError


class DoesNotWait(ShmComm):
    """Known to be wrong: reads rows without asking whether they are there. One rank sends late."""

    def _all_to_all(self, parts, matrix, borrow):
        time.sleep(0.001 * self.rank)
        return super()._all_to_all(parts, matrix, borrow)

    def _wait(self, purpose: int, peer: int) -> None:
        if purpose != DATA:
            super()._wait(purpose, peer)


class Elsewhere(mesh.Mesh):
    """The last rank is not to be found where it says."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        if rank == 0:
            self.address = self.address.replace("moe-course", "nowhere")


@contextmanager
def small_files(on: bool):
    """As under `ulimit -f`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if on:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(world: Comm, why: str) -> str:
    """The error of `over` under a condition that does not hold on this machine."""
    rank = world.rank
    conditions = {
        "hosts": mock.patch.object(shm_start, "host", lambda: (f"node{rank}", f"boot{rank}")),
        "hosts of one name": mock.patch.object(shm_start, "host", lambda: ("node", f"boot{rank}")),
        "no memfd": mock.patch.object(shm_start.sys, "platform", "darwin" if rank else "linux"),
        "cuda": mock.patch.object(world, "_device", torch.device("cuda" if rank else "cpu")),
        "no room": small_files(rank == 1),
        "out of reach": mock.patch.object(shm_start, "Mesh", Elsewhere),
        "wrong bytes": mock.patch.object(shm, "ShmComm", DoesNotWait),
    }
    with conditions[why]:
        try:
            shm.over(world, 1.5)
        except MoECourseError as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"


def late_to_begin(world: Comm) -> str:
    """Rank 1 comes after the time-out of the others."""
    if world.rank == 1:
        time.sleep(1)
    try:
        shm.over(world, 0.5)
    except MoECourseError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def held() -> tuple[int, int]:
    """Open descriptors, and mappings of shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("/memfd:moe-course")
    return len(os.listdir("/proc/self/fd")), maps


def taken_and_given_back(world: Comm) -> dict[str, tuple[int, int]]:
    """What is held before a group, with it, with many sub-groups of it, and when it is closed; three times over."""
    found = {"before": held()}
    for _ in range(3):
        comm = shm.over(world, 10)
        found["made"] = held()
        window_turns(comm, 2)
        for number in range(5):
            comm.split([[0, 1]]).all_gather_rows(torch.zeros(100 << number, 64))
        found["used"] = held()
        comm.barrier()
        comm.close()
        del comm
        found["closed"] = held()
    return found


def in_place(world: Comm) -> dict[str, bool]:
    """Borrowed rows are the transport's memory, others are not; a growing message moves none of them."""
    comm = shared(world)
    size, rank = comm.world_size, comm.rank
    send = partial(torch.full, (size, 4))
    first = comm.all_to_all_rows(send(1.0), [1] * size, borrow=True).rows
    small = comm._region(rank, ROWS + comm._turns[ROWS], 1)
    copied = comm.all_to_all_rows(send(2.0), [1] * size).rows
    own_memory = small.data_ptr() == first.data_ptr()
    copied_from = comm._region(rank, ROWS + comm._turns[ROWS], 1)
    found = {"borrowed": own_memory, "copied": copied.data_ptr() != copied_from.data_ptr()}

    first = comm.all_to_all_rows(send(3.0), [1] * size, borrow=True).rows
    many = torch.full((size * 50_000, 4), 4.0)
    larger = comm.all_to_all_rows(many, [50_000] * size, borrow=True).rows
    found["kept"] = bool((first == 3).all()) and bool((larger == 4).all())
    again = comm.all_to_all_rows(many + 1, [50_000] * size, borrow=True).rows  # the half of `first`, mapped anew
    found["grown"] = bool((again == 5).all()) and bool((larger == 4).all()) and len(again) == size * 50_000
    found["copies stay"] = bool((copied == 2).all())
    return found
