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
    """Time is up."""

    def __init__(self, seconds: float):
        super().__init__(f"still running after {seconds:g} s")
        self.seconds = seconds


def within(seconds: float, job: Callable[[Callable[[], None]], Any]) -> Any:
    """`job(join)` in a thread; returns or raises what it does. Threads that it starts call `join()` first.

    Whatever of them still runs when the job is over, or when time is, is ended.

    Raises:
        TooSlow: time is up.

    An error has `still_running`: the frames that threads which had not ended were in.
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
        error = TooSlow(seconds) if first.is_alive() else outcome[1]
        if error is not None:
            error.still_running = _frames([*threads, first])
            raise error
    finally:
        _end([*threads, first])
    return outcome[0]


def _frames(threads: list[threading.Thread]) -> list[FrameType]:
    frames = sys._current_frames()
    return [frames[thread.ident] for thread in threads if thread.is_alive() and thread.ident in frames]


def _end(threads: list[threading.Thread]) -> None:
    """Throw `Ended` into each until it is gone; again and again, for a loop may catch everything."""
    deadline = time.monotonic() + _PATIENCE_S
    while (alive := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < deadline:
        for thread in alive:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Ended))
        alive[0].join(_STEP_S)
