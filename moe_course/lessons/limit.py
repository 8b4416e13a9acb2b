"""A time limit that also ends what does not want to end: endless loops, in any thread. Built in: notebook 00."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_STEP_S, _PATIENCE_S = 0.02, 1.0


class Ended(BaseException):
    """Thrown into a thread that is over its time. Not an Exception: `except Exception` must not keep it alive."""


class TooSlow(Exception):
    """Time is up. `frames` are those that were running, innermost first."""

    def __init__(self, seconds: float, frames: list[FrameType]):
        super().__init__(f"still running after {seconds:g} s")
        self.frames = frames


def within(seconds: float, job: Callable[[Callable[[], None]], Any]) -> Any:
    """`job(join)` in a thread; returns or raises what it does. Threads that it starts call `join()` first.

    Whatever of them still runs when the job is over, or when time is, is ended.

    Raises:
        TooSlow: time is up.
    """
    threads: list[threading.Thread] = []
    outcome: list[Any] = [None, None]

    def join() -> None:
        threads.append(threading.current_thread())

    def run() -> None:
        try:
            outcome[0] = job(join)
        except BaseException as error:
            outcome[1] = error

    first = threading.Thread(target=run, daemon=True)
    first.start()
    try:
        first.join(seconds)
        if first.is_alive():
            alive = [thread for thread in (*threads, first) if thread.is_alive()]
            frames = sys._current_frames()
            raise TooSlow(seconds, [frames[thread.ident] for thread in alive if thread.ident in frames])
    finally:
        _end([*threads, first])
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _end(threads: list[threading.Thread]) -> None:
    """Throw `Ended` into each until it is gone; again and again, for a loop may catch everything."""
    deadline = time.monotonic() + _PATIENCE_S
    while (alive := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < deadline:
        for thread in alive:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Ended))
        alive[0].join(_STEP_S)
