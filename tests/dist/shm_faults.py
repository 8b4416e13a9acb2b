"""Processes that lose a rank on shared memory. Run as a program: it forks the ranks of each scenario and reports.

    python shm_faults.py killed_before late …      one line of JSON for each

torch is imported once, so a scenario takes a fraction of a second.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from moe_course.comm import semaphores, shm
from moe_course.comm.dist import init
from moe_course.config import MoEConfig
from moe_course.errors import MoECourseError
from moe_course.parallel import ParallelConfig, make_plan

RANKS, CULPRIT = 3, 1
TIMEOUT = 20.0
SHORT = 0.6  # where a rank is only late


def barrier_until_lost(comm, what=None) -> dict:
    """Exchange until it fails; how, and after how many seconds."""
    began = time.monotonic()
    try:
        while time.monotonic() < began + 30:
            began = time.monotonic()
            (what or comm.barrier)()
    except MoECourseError as error:
        seconds = time.monotonic() - began
        again = ""
        try:
            comm.barrier()
        except MoECourseError as second:
            again = f"{type(second).__name__}: {second}"
        return {"kind": type(error).__name__, "message": str(error), "seconds": seconds, "again": again}
    return {"kind": "none"}


def rows(comm) -> None:
    comm.all_to_all_rows(torch.ones(3 * comm.world_size, 100), [3] * comm.world_size, borrow=True)


def after_the_put(fault) -> None:
    """Have the culprit fail when it has put its rows and posts the first time, not before its fifth exchange."""
    real, seen = semaphores.post, []

    def post(address: int) -> None:
        seen.append(address)
        if len(seen) > 5 * 2 * (RANKS - 1) and len(seen) % (2 * (RANKS - 1)) == RANKS:
            fault()
        real(address)

    semaphores.post = post


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def broken() -> None:
    raise MemoryError("made up")


def success(comm) -> dict:
    for _ in range(5):
        rows(comm)
    before = mapped()
    comm.barrier()
    comm.close()
    return {"kind": "none", "mapped": before}


def killed_before(comm) -> dict:
    if comm.rank == CULPRIT:
        killed()
    time.sleep(0.3)
    return barrier_until_lost(comm)


def killed_while_others_wait(comm) -> dict:
    if comm.rank == CULPRIT:
        time.sleep(0.3)
        killed()
    return barrier_until_lost(comm)


def killed_between_put_and_post(comm) -> dict:
    if comm.rank == CULPRIT:
        after_the_put(killed)
    return barrier_until_lost(comm, lambda: rows(comm))


def exception_between_put_and_post(comm) -> dict:
    """The culprit lives on, and the others know at once."""
    if comm.rank != CULPRIT:
        return barrier_until_lost(comm, lambda: rows(comm))
    after_the_put(broken)
    try:
        while True:
            rows(comm)
    except MemoryError:
        time.sleep(0.5)
    return barrier_until_lost(comm)


def interrupted(comm) -> dict:
    """Ctrl-C on the culprit, which waits for rank 0 to come."""
    if comm.rank == CULPRIT:
        Path(os.environ["WAITING"]).touch()
        try:
            comm.barrier()
        except KeyboardInterrupt:
            return {"kind": "KeyboardInterrupt"}
    time.sleep(0.8 if comm.rank == 0 else 0)
    return barrier_until_lost(comm)


def slow(comm) -> dict:
    """In time, but long after everybody has looked whether it still lives."""
    for _ in range(2):
        if comm.rank == CULPRIT:
            time.sleep(0.5)
        comm.barrier()
    return {"kind": "none"}


def late(comm) -> dict:
    if comm.rank == CULPRIT:
        time.sleep(SHORT + 1)
    return barrier_until_lost(comm)


def stopped(comm) -> dict:
    if comm.rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGSTOP)
    return barrier_until_lost(comm)


def returned_early(comm) -> dict:
    return {"kind": "none"} if comm.rank == CULPRIT else barrier_until_lost(comm)


def with_a_child(comm) -> dict:
    """The culprit forks a child that lives on after it, and cannot use the group."""
    if comm.rank == CULPRIT:
        child = os.fork()
        if child == 0:
            try:
                comm.barrier()
            except MoECourseError as error:
                Path(os.environ["CHILD"]).write_text(str(error))
            time.sleep(2)
            os._exit(0)
        while not os.path.exists(os.environ["CHILD"]):
            time.sleep(0.01)
        killed()
    return barrier_until_lost(comm)


def mapped() -> list[str]:
    """Files that this process shares with others, as the kernel names them, and names in /dev/shm."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    shared = {parts[5] for parts in lines if parts[1][3] == "s" and len(parts) == 6}
    return sorted(shared)


def rank_process(scenario: str, rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"CHILD": str(folder / "child"), "WAITING": str(folder / "waiting")}
    timeout = SHORT if scenario in ("late", "stopped") else TIMEOUT
    config = MoEConfig(
        hidden_size=8,
        moe_intermediate_size=8,
        n_routed_experts=2 * RANKS,
        num_experts_per_tok=2,
        mlp_layer_types=("sparse",),
    )
    world = init(make_plan(ParallelConfig(data_parallel_size=RANKS), config), "cpu", TIMEOUT)
    comm = shm.over(world, timeout)
    (folder / f"{rank}.socket").write_text(comm._mesh.address.split()[0])
    found = globals()[scenario](comm)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if found["kind"] == "none":
        dist.destroy_process_group()


def run(scenario: str, folder: Path) -> dict:
    """How every rank ended, what it found, and what is still there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_process(scenario, rank, port, folder)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    ends: list[str | None] = [None] * RANKS
    deadline = time.monotonic() + 40
    while None in ends and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if ends[rank] is None and os.waitpid(pid, os.WNOHANG)[0]:
                ends[rank] = "ended"
        if (folder / "waiting").exists():
            (folder / "waiting").unlink()
            time.sleep(0.3)
            os.kill(pids[CULPRIT], signal.SIGINT)
        if scenario == "stopped" and [rank for rank, end in enumerate(ends) if not end] == [CULPRIT]:
            os.kill(pids[CULPRIT], signal.SIGCONT)
            os.kill(pids[CULPRIT], signal.SIGKILL)
        time.sleep(0.01)
    for rank, pid in enumerate(pids):
        if ends[rank] is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return {"ends": ends, **left_in(folder)}


def left_in(folder: Path) -> dict:
    """What the ranks wrote down, and which of their sockets are still there."""
    found = [folder / f"{rank}.json" for rank in range(RANKS)]
    names = [(folder / f"{rank}.socket").read_text() for rank in range(RANKS)]
    child = folder / "child"
    return {
        "found": [json.loads(file.read_text()) if file.exists() else None for file in found],
        "sockets": [name for name in names if name in Path("/proc/net/unix").read_text()],
        "child": child.read_text() if child.exists() else "",
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in whatever a shell starts in the background
    for name in sys.argv[2:]:
        print(json.dumps({"scenario": name, **run(name, Path(sys.argv[1]) / name)}), flush=True)
