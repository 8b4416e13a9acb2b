"""What shared memory is made of, each alone: semaphores, memory without a name, connections that tell of a death."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("shared memory needs Linux", allow_module_level=True)

from moe_course.comm import parts, semaphores, shared_memory
from moe_course.comm.mesh import Mesh
from moe_course.comm.padded import _HEAD
from moe_course.comm.segments import Segments
from moe_course.comm.wire import LostPeer


@pytest.fixture
def semaphore():
    memory = ctypes.create_string_buffer(semaphores.STRIDE)
    address = ctypes.addressof(memory)
    semaphores.init(address)
    yield address
    del memory


@pytest.fixture
def file():
    file = shared_memory.create()
    yield file
    os.close(file)


# -- semaphores ------------------------------------------------------------------------------------------------------


def test_a_semaphore_counts(semaphore):
    """A fast sender may post twice before its receiver looks."""
    assert not semaphores.try_wait(semaphore)
    for _ in range(2):
        semaphores.post(semaphore)
    assert [semaphores.try_wait(semaphore) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("spin_s", [0.0, 0.5])
def test_a_waiter_wakes_up_at_the_post(semaphore, spin_s):
    threading.Timer(0.15, semaphores.post, [semaphore]).start()
    began = time.monotonic()
    semaphores.wait(semaphore, 1, began + 10, spin_s, lambda: None)
    assert 0.1 < time.monotonic() - began < 5


def test_a_waiter_gives_up_at_the_deadline(semaphore):
    began = time.monotonic()
    with pytest.raises(LostPeer) as lost:
        semaphores.wait(semaphore, 3, began + 0.25, 0.0, lambda: None)
    assert lost.value.late and lost.value.peer == 3 and 0.25 <= time.monotonic() - began < 5


def test_a_waiter_hears_that_its_peer_has_gone(semaphore):
    with pytest.raises(LostPeer, match="it has gone") as lost:
        semaphores.wait(semaphore, 3, time.monotonic() + 60, 0.0, lambda: "it has gone")
    assert not lost.value.late


def test_who_posts_and_leaves_is_not_lost(semaphore):
    """The post came after the last look at the semaphore and before the look at the peer."""

    def gone():
        semaphores.post(semaphore)
        return "it has gone"

    semaphores.wait(semaphore, 3, time.monotonic() + 60, 0.0, gone)


def test_a_signal_does_not_count_as_a_post(semaphore):
    """Nor does it end the waiting."""
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(True))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(LostPeer):
            semaphores.wait(semaphore, 3, time.monotonic() + 0.3, 0.0, lambda: None)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_the_same_through_every_mapping(file):
    """Longer ones too, while somebody still looks into the shorter: a region can grow at any time."""
    memory = shared_memory.Memory([file], 2)
    short = memory.region(0, 1, 100)
    short[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert memory.region(0, 1, 50) is short
    view, long = short[1:3], memory.region(0, 1, 10 * len(short))
    assert len(long) >= 10 * len(short) and long[:3].tolist() == [1, 2, 3] and not long[3:].any()
    long[1] = 7
    del short, memory
    gc.collect()
    assert view.tolist() == [7, 3]


def test_regions_groups_and_windows_do_not_overlap(file):
    groups = [shared_memory.Memory([file], number) for number in (0, 1, shared_memory.GROUPS - 1)]
    places = [memory.region(0, index, 1) for memory in groups for index in range(8)]
    places += [window for memory in groups for nbytes in (1, 0, 5000) for window in memory.window(nbytes) if nbytes]
    for number, place in enumerate(places):
        assert not place.any()
        place.fill_(number + 1)
    assert [int(place[-1]) for place in places] == list(range(1, len(places) + 1))


def test_a_mapping_ends_with_its_last_tensor(file):
    def mappings():
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:moe-course")

    before = mappings()
    view = shared_memory.map_at(file, 0, 1 << 20)[5:9]
    assert mappings() == before + 1
    del view
    assert mappings() == before


def test_memory_that_cannot_be_mapped(file):
    with pytest.raises(OSError, match="cannot map"):
        shared_memory.map_at(file, 1, 4096)  # not at the beginning of a page


@pytest.mark.parametrize("widths", [(4,), (3, 8, 1), (5, 0, 2)], ids=str)
@pytest.mark.parametrize("total", [0, 1, 7])
def test_parts_lie_on_cache_lines_and_apart(widths, total):
    memory = torch.full((4096,), 255, dtype=torch.uint8)
    sent = [torch.full((total + 2, width), number, dtype=torch.uint8) for number, width in enumerate(widths)]
    at, nbytes = parts.places(total, widths)
    assert all(place % 64 == 0 for place in at) and nbytes >= 1
    for row in range(total):
        parts.put(memory, total, widths, row, sent, row + 1, 1)
    for found, number, width in zip(parts.views(memory, total, widths), range(3), widths, strict=False):
        assert found.shape == (total, width) and (found == number).all()
    if total:
        own = [torch.full((9, width), 77, dtype=torch.uint8) for width in widths]
        copied = parts.copies(memory, total, widths, (total - 1, total), own, 3)
        assert all((copy[-1] == 77).all() and not (copy[:-1] == 77).any() for copy in copied)
    assert int((memory != 255).sum()) == total * sum(widths)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8, 12])
def test_only_rows_in_use_are_written(width):
    """The rest of a segment keeps what it holds; rows of every alignment go to their slots."""
    sections, counts = torch.tensor([[2, 1], [0, 3]]), torch.tensor([1, 3, 2])
    plan, block = Segments(sections, 4, width), torch.arange(_HEAD + 3)
    rows = torch.arange(6 * width + 1, dtype=torch.uint8)[1:].view(6, width)
    memory = torch.full((plan.nbytes(0),), 255, dtype=torch.uint8)
    assert plan.put(memory, 0, 0, block, rows, counts) == 4
    assert plan.take(memory, 0)[1] == []  # nothing of the other one is there, or it thinks of other sections
    assert plan.put(memory, 1, 0, block, rows[:0], torch.tensor([0, 0, 0])) == 0
    blocks, segments = plan.take(memory, 0)
    assert blocks[0].tolist() == block.tolist() and segments[1].shape == (0, 4, width)
    assert torch.equal(segments[0][0, 0], rows[0]) and torch.equal(segments[0][1, :3], rows[1:4])
    assert int((segments[0] != 255).sum()) == 4 * width


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.fixture
def meshes():
    """`meshes(size, before)`: that many, connected in threads; `before(meshes)` runs when the first one listens."""
    made: list[Mesh] = []

    def connect(size, before=lambda made: None):
        made.extend(Mesh(rank, size) for rank in range(size))
        addresses = [mesh.address for mesh in made]
        threads = [threading.Thread(target=mesh.connect, args=(addresses, 5)) for mesh in made]
        threads[0].start()
        before(made)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(10)
        return made

    yield connect
    for mesh in made:
        mesh.close()


def test_everybody_gets_everybodys_memory(meshes):
    made = meshes(3)
    for mesh in made:
        shared_memory.map_at(mesh.files[mesh.rank], 0, 4096)[0] = mesh.rank + 10
    for mesh in made:
        assert [int(shared_memory.map_at(mesh.files[rank], 0, 4096)[0]) for rank in range(3)] == [10, 11, 12]
        assert not any(os.get_inheritable(file) for file in mesh.files.values())


def test_a_silent_peer_is_there_until_it_has_left(meshes):
    first, second = meshes(2)
    began = time.monotonic()
    assert first.gone(1) is None and second.gone(0) is None
    assert time.monotonic() - began < 0.2
    second.close()
    assert "has ended" in first.gone(1)
    first.leave("as a test")  # nobody hears it, and nobody minds


def test_a_last_word_is_heard_again_and_again(meshes):
    first, second = meshes(2)
    first.leave("it left barrier #1: KeyboardInterrupt")
    assert [second.gone(0) for _ in range(2)] == ["it left barrier #1: KeyboardInterrupt"] * 2


def test_strangers_are_sent_away(meshes):
    """Somebody who finds the socket's name and does not know the token gets no memory."""

    def pester(made):
        name, token = made[0].address.split()
        hellos = [b"", b"x" * 16 + (1).to_bytes(4, "little"), bytes.fromhex(token) + (9).to_bytes(4, "little")]
        for hello in hellos:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(f"\0{name}")
                socket.send_fds(stranger, [hello or b"?"], [made[1].files[1]] if hello else [])
                assert stranger.recv(64) == b""

    first, second = meshes(2, pester)
    assert set(first.files) == set(second.files) == {0, 1}


def test_a_peer_that_never_connects_is_named():
    mesh = Mesh(0, 3)
    with pytest.raises(LostPeer) as lost:
        mesh.connect([mesh.address] * 3, 0.2)
    mesh.close()
    assert lost.value.peer == 1 and lost.value.late
