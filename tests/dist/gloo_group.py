"""A group of worker processes that stays alive for many cases."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from gloo_wire import read_message, write_message

WORKER = Path(__file__).with_name("gloo_worker.py")
START_TIMEOUT = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Worker:
    """One process and the thread that collects its replies."""

    def __init__(self, env: dict[str, str]):
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors
        )
        self.replies: queue.Queue = queue.Queue()
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        try:
            while True:
                self.replies.put(read_message(self.process.stdout))
        except (EOFError, OSError, ValueError):
            self.replies.put(("gone", None))
        except BaseException:
            self.replies.put(("unreadable", traceback.format_exc()))

    def receive(self, timeout: float) -> tuple[str, Any]:
        """("done", value), ("failed", traceback), ("gone", what it said last) or ("silent", …)."""
        try:
            kind, value = self.replies.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return "silent", self.last_words()
        return (kind, self.last_words()) if kind == "gone" else (kind, value)

    def last_words(self) -> str:
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 4000))
        return self.errors.read().decode(errors="replace")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.errors.close()


class Group:
    """`size` gloo processes. Starts on the first `run`, and again after a case that broke it."""

    def __init__(self, size: int, timeout: float):
        self.size, self.timeout = size, timeout
        self.workers: list[Worker] = []

    def start(self) -> None:
        path = os.pathsep.join(sys.path)
        common = {"WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"GROUP_TIMEOUT": str(self.timeout), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        for rank in range(self.size):
            env = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.workers.append(Worker(env))
        self._collect(time.monotonic() + START_TIMEOUT, lost=())

    def run(self, case: str, *args: Any, timeout: float = 60, lost: tuple[int, ...] = ()) -> list[Any]:
        """Run `module:function` on every rank and return the values in rank order.

        `lost` ranks are not expected to answer; the group is closed afterwards.
        """
        if not self.workers:
            self.start()
        for worker in self.workers:
            write_message(worker.process.stdin, (case, args))
        try:
            return self._collect(time.monotonic() + timeout, lost)
        finally:
            if lost:
                self.close()

    def _collect(self, deadline: float, lost: tuple[int, ...]) -> list[Any]:
        values, trouble = [], []
        for rank, worker in enumerate(self.workers):
            kind, value = (None, None) if rank in lost else worker.receive(deadline - time.monotonic())
            values.append(value)
            if kind not in (None, "ready", "done"):
                trouble.append(f"worker {rank} {kind}: {value}")
        if trouble:
            self.close()
            raise AssertionError("\n".join(trouble))
        return values

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []
