"""POSIX semaphores in shared memory: how one process tells another that its bytes are there.

A post makes everything written before it visible to whoever waits successfully after it, on ARM as on x86; a plain
flag would promise that on x86 only. A waiter sleeps in the kernel, so more ranks than cores is no problem.

Source: POSIX `sem_init` with pshared = 1, `sem_clockwait` of glibc 2.30. Built in: notebook 06.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable

from moe_course.comm.wire import LostPeer

STRIDE = 64  # bytes from one semaphore to the next: a cache line each; sem_t has at most 32
SLICE_S = 0.1  # between two looks at the peer
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_address = ctypes.c_void_p
_keeps_gil = ctypes.PyDLL(None)  # these two never sleep, and giving the GIL away costs as much as they do
_libc = ctypes.CDLL(None, use_errno=True)

_try_wait, _post = _keeps_gil.sem_trywait, _keeps_gil.sem_post
_try_wait.argtypes = _post.argtypes = [_address]
_libc.sem_init.argtypes = [_address, ctypes.c_int, ctypes.c_uint]
if hasattr(_libc, "sem_timedwait"):  # macOS has none, and no shared-memory transport
    _libc.sem_timedwait.argtypes = [_address, ctypes.POINTER(_Timespec)]
if hasattr(_libc, "sem_clockwait"):
    _libc.sem_clockwait.argtypes = [_address, ctypes.c_int, ctypes.POINTER(_Timespec)]


def init(address: int) -> None:
    """Make a semaphore of value 0 at this address of shared memory. Raises OSError."""
    if _libc.sem_init(address, 1, 0):
        raise OSError(ctypes.get_errno(), "sem_init")


def post(address: int) -> None:
    """Add one. What this process wrote before, the one who takes it will see. Raises OSError."""
    if _post(address):
        raise OSError(errno.EOVERFLOW, "sem_post")


def try_wait(address: int) -> bool:
    """Take one, if there is one."""
    return not _try_wait(address)


def wait(address: int, peer: int, deadline: float, spin_s: float, gone: Callable[[], str | None]) -> None:
    """Take one, however long that lasts.

    Args:
        peer: who posts; for the error.
        deadline: `time.monotonic()` at which to give up.
        spin_s: how long to look again and again before going to sleep. A sleeper takes some 50 us to wake up.
        gone: what became of the peer, None while it is alive; asked every `SLICE_S`.

    Raises LostPeer: the peer has gone, or is late.
    """
    until = time.monotonic() + spin_s
    while time.monotonic() < until:
        if not _try_wait(address):
            return
        os.sched_yield()
    while not _sleep(address, min(SLICE_S, max(0.001, deadline - time.monotonic()))):
        lost = gone()
        if lost is None and time.monotonic() < deadline:
            continue
        if not _try_wait(address):  # it posted, and left afterwards
            return
        if lost is not None:
            raise LostPeer(peer, False, lost)
        raise LostPeer(peer, True, "it did not come")


def _sleep(address: int, seconds: float) -> bool:
    """Wait in the kernel; False after `seconds`, or a signal."""
    if hasattr(_libc, "sem_clockwait"):  # not moved by somebody who sets the clock
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)
        failed = _libc.sem_clockwait(address, _CLOCK_MONOTONIC, _Timespec(*divmod(until, 10**9)))
    else:
        until = time.time_ns() + int(seconds * 1e9)
        failed = _libc.sem_timedwait(address, _Timespec(*divmod(until, 10**9)))
    if failed and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), "sem_timedwait")
    return not failed
