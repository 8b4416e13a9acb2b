"""Who holds everybody up: from statuses to a sentence, and from real waits to statuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from moe_course.comm.ledger import Ledger
from moe_course.comm.shared import Shared, Waiting
from moe_course.guard.wait_graph import Status, culprit
from moe_course.guard.watchdog import Watchdog, place


def waiting(rank: int, what: str, *peers: int) -> Status:
    return Status(rank, "waiting", what, list(peers), 3.0)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([Status(1, "computing", "layer 3, step 0, for 4.0 s, at a.py:5 in f")], "rank 1 is still computing, layer 3"),
        ([Status(1, "returned", "at layer 2")], "rank 1 has returned early at layer 2"),
        ([Status(1, "failed", "KeyError: 3")], "rank 1 has failed: KeyError: 3"),
        ([Status(1, "dead", "77 on here")], "rank 1 is dead, its process 77 on here is gone"),
        ([Status(1, "stopped", "77 on here")], "rank 1 is stopped (SIGSTOP)"),
        ([Status(1, "silent", "77 on there")], "rank 1 does not answer"),
        ([waiting(1, "dispatch", 2), Status(2, "stopped", "9 on here")], "rank 2 is stopped"),
        ([waiting(1, "dispatch", 0, 2), Status(2, "dead", "9 on here")], "rank 2 is dead"),
        ([waiting(1, "barrier", 0)], "ranks wait for each other in different exchanges: rank 0 waits in dispatch"),
        ([waiting(1, "dispatch", 0)], "ranks wait for each other: "),
        ([waiting(1, "dispatch", 2), waiting(2, "barrier", 1)], "different exchanges: rank 1 waits in dispatch"),
    ],
)
def test_waits_are_followed_to_whoever_waits_for_nobody(others, says):
    assert says in culprit([waiting(0, "dispatch", 1), *others], 0)


def watch(rank, shared, store, places, **more) -> Watchdog:
    dog = Watchdog(store, rank, shared, places, more.pop("warn_after", 0.2), **more)
    dog.start()
    return dog


def test_a_long_wait_is_announced_once_and_everybody_answers():
    store, warnings = dist.HashStore(), []
    shares = [Shared(Ledger()) for _ in range(2)]
    dogs = [watch(r, shares[r], store, [place()] * 2, on_warn=warnings.append) for r in range(2)]
    shares[0].waiting = Waiting("barrier", 4, 3, 1, [0, 1], {1})
    time.sleep(1.0)
    assert len(warnings) == 1 and "rank 0 waits in barrier #4 (layer 3, step 1) for rank 1" in warnings[0]
    cause, graph = dogs[0].explain()
    assert cause.startswith("rank 1 is still computing, layer -1, step 0, for ")
    assert "watchdog.py" in cause  # one process, one main thread: it asks
    assert len(graph) == 2 and graph[0].startswith("rank 0 waits")
    dogs[1].stop("returned", "at layer 5")
    assert dogs[0].explain()[0] == "rank 1 has returned early at layer 5"
    assert dogs[0].gone(1) == dogs[0].gone(None) == "rank 1 has returned early at layer 5"
    dogs[0].stop("returned")


@pytest.mark.parametrize("waits", [False, True])
def test_ranks_that_all_compute_for_long_are_announced_once(waits):
    store, warnings, ended = dist.HashStore(), [], []
    shares = [Shared(Ledger(), layer=2) for _ in range(2)]
    if waits:
        shares[1].waiting = Waiting("barrier", 4, 2, 1, [0, 1], {0})
    more = {"on_warn": warnings.append, "timeout": 0.4, "on_standstill": ended.append}
    dogs = [watch(rank, shares[rank], store, [place()] * 2, **more) for rank in range(2)]
    time.sleep(1.5)
    [said] = warnings
    if waits:
        assert said.startswith("rank 1 waits in barrier #4 (layer 2, step 1) for rank 0")
    else:
        assert said.startswith("no rank waits for another; rank 0 is still computing, layer 2, step 0, for ")
        assert "; rank 1 is still computing, layer 2" in said
    assert not ended, "only a stage of yours is ended"
    shares[0].step = 1  # it went on, and is slow once more
    time.sleep(0.8)
    assert len(warnings) == (1 if waits else 2)
    for dog in dogs:
        dog.stop("returned")


def test_before_the_first_layer_nobody_is_hurried():
    """Reading a large checkpoint takes what it takes."""
    warnings = []
    dog = watch(0, Shared(Ledger()), dist.HashStore(), [place()], on_warn=warnings.append)
    time.sleep(0.6)
    dog.stop("returned")
    assert not warnings


@pytest.mark.parametrize(("number", "says"), [(signal.SIGSTOP, "is stopped (SIGSTOP)"), (signal.SIGKILL, "is dead")])
def test_a_rank_that_cannot_answer_is_seen_from_outside(number, says):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        store, shared = dist.HashStore(), Shared(Ledger())
        dog = watch(0, shared, store, [place(), place() | {"pid": child.pid}])
        shared.waiting = Waiting("barrier", 4, 3, 1, [0, 1], {1})
        os.kill(child.pid, number)
        cause, _ = dog.explain()
        assert f"rank 1 {says}" in cause and str(child.pid) in cause
        dog.stop("returned")
    finally:
        child.kill()
        child.wait()


def test_of_a_rank_on_another_host_only_its_silence_is_known():
    store, shared = dist.HashStore(), Shared(Ledger())
    dog = watch(0, shared, store, [place(), {"host": "another", "pid": 1, "machine": "other"}])
    shared.waiting = Waiting("barrier", 4, 3, 1, [0, 1], {1})
    assert "rank 1 does not answer, process 1 on another" in dog.explain()[0]
    dog.stop("returned")


class StuckStore:
    """A store whose host was cut off: the first call never returns."""

    def __init__(self):
        self.hold = threading.Event()

    def __getattr__(self, name):
        return lambda *args: self.hold.wait(20)


def test_a_store_that_does_not_answer_holds_nobody_up():
    store = StuckStore()
    dog = watch(0, Shared(Ledger()), store, [place(), place()])
    time.sleep(0.3)
    began = time.monotonic()
    assert dog.explain() == ("", []) and dog.gone(1) == ""
    dog.stop("failed", "cable cut")
    assert time.monotonic() - began < 6
    store.hold.set()
