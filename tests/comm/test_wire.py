"""The wire for headers: real sockets between threads. Everybody's message arrives, and who is missing is known."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch.distributed as dist

from moe_course.comm.wire import LostPeer, Wire, own_address

SIZES = [1, 2, 3, 8]


@pytest.fixture(autouse=True)
def this_host(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def meet(size, fn, store=None, timeout=5.0, name="group"):
    """`fn(wire)` on every rank in a thread of its own; what it returned or raised."""
    store, results = store or dist.HashStore(), [None] * size

    def run(rank):
        try:
            results[rank] = fn(Wire(store, name, rank, size, timeout))
        except LostPeer as lost:
            results[rank] = lost

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def exchange(wire, length=64, rounds=1):
    """All messages of the last round, as bytes."""
    for number in range(rounds):
        places = [bytearray(length) for _ in range(wire.size)]
        places[wire.rank][:] = bytes([wire.rank + 10 * number]) * length
        views = [memoryview(place) for place in places]
        wire.exchange(views[wire.rank], views)
    return [bytes(place) for place in places]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [1, 4200])
def test_every_rank_gets_every_message_in_order(size, length):
    expected = [bytes([rank + 40]) * length for rank in range(size)]
    assert meet(size, lambda wire: exchange(wire, length, rounds=5)) == [expected] * size


def test_two_groups_over_one_store_do_not_mix():
    store = dist.HashStore()
    first = meet(2, exchange, store, name="a")
    assert meet(2, exchange, store, name="b") == first


def test_a_peer_that_has_gone_is_known_at_once():
    def leave_or_wait(wire):
        if wire.rank == 1:
            wire.close()
            return None
        time.sleep(0.2)
        return exchange(wire)

    began = time.monotonic()
    results = meet(3, leave_or_wait, timeout=20)
    assert all(isinstance(results[rank], LostPeer) and results[rank].peer == 1 for rank in (0, 2))
    assert not results[0].late and time.monotonic() - began < 5


def test_a_late_peer_is_late_and_not_lost():
    def late(wire):
        if wire.rank == 1:
            time.sleep(2)
            return None
        return exchange(wire)

    results = meet(2, late, timeout=0.5)
    assert isinstance(results[0], LostPeer) and results[0].late and results[0].peer == 1


def test_a_peer_that_never_connects_is_named():
    store = dist.HashStore()
    with pytest.raises(LostPeer) as lost:
        Wire(store, "alone", 0, 3, 0.4)
    assert lost.value.peer == 1 and lost.value.late


def test_strangers_are_sent_away():
    """Somebody who finds the port and does not know the token, or says nothing, is not taken for a rank."""
    store, done, silent = dist.HashStore(), [], []

    def pester():
        host, port = store.get("wire/group/0").decode().split()
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 20):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(words)
        silent.append(socket.create_connection((host, int(port))))
        done.append(True)

    def run(rank):
        results[rank] = exchange(Wire(store, "group", rank, 2, 5.0))

    results = [None, None]
    first = threading.Thread(target=run, args=(0,), daemon=True)
    first.start()
    pester()
    second = threading.Thread(target=run, args=(1,), daemon=True)
    second.start()
    for thread in (first, second):
        thread.join(20)
    assert done and results[0] == results[1] == [bytes([0]) * 64, bytes([1]) * 64]


def test_the_own_address_is_the_one_on_the_way_to_the_meeting_place():
    assert own_address() == "127.0.0.1"
