"""Say who is waiting for whom, and who holds everybody up, before and when time runs out.

A thread on every rank looks at the exchange its rank is in. One that lasts longer than `warn_after` raises an alarm
in the store; every rank that is alive then publishes what it does: the exchange it waits in, or the line of code it
computes at. At the time-out a rank follows the waits from itself to the one that waits for nobody. Where nobody waits,
because all ranks compute for too long, rank 0 says so.

Source: torch's flight recorder and `monitored_barrier` name late ranks too; vLLM logs a warning when an engine
waits for long. Built in: notebook 12.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_course.comm.shared import Shared
from moe_course.guard.standstill import inside_yours, own_files
from moe_course.guard.wait_graph import Status, culprit

_ANSWER_S = 1.0  # how long ranks have to answer an alarm
_LOOK_EVERY_S = 0.25


class Watchdog(threading.Thread):
    """Watches one rank's exchanges.

    Args:
        store: a store of its own connection (`store.clone()`), seen by all ranks.
        shared: `comm.shared`; its `waiting` is the exchange the rank is in.
        places: host and pid of every rank, from the handshake.
        warn_after: seconds in one exchange before the alarm.
        on_warn: called with a sentence and this rank's status, once for each exchange that lasts too long.
        timeout: seconds after which `on_standstill` is called, when no rank waits for another and this one is in a
            stage of yours.
    """

    def __init__(
        self,
        store,
        rank: int,
        shared: Shared,
        places: list[dict],
        warn_after: float,
        on_warn: Callable[[str], None] = lambda text: None,
        timeout: float = math.inf,
        on_standstill: Callable[[str], None] = lambda text: None,
    ):
        super().__init__(daemon=True, name=f"watchdog-{rank}")
        self.store, self.rank, self.shared, self.places = store, rank, shared, places
        self.warn_after, self.on_warn = warn_after, on_warn
        self.timeout, self.on_standstill = timeout, on_standstill
        self._main = threading.main_thread().ident
        self._answered, self._warned = 0, None
        self._end = threading.Event()
        self._mutex = threading.Lock()  # one connection, two threads
        self._since = time.monotonic()  # of the last change of exchange, layer or step
        self._seen: tuple | None = None

    def run(self) -> None:
        pause = min(_LOOK_EVERY_S, self.warn_after / 4)
        while not self._end.wait(pause):
            try:
                self._look()
            except RuntimeError:  # the store went away with its host; nothing to tell anybody any more
                return

    def stop(self, how: str, detail: str = "") -> None:
        """The rank leaves: with "returned" or "failed" and a reason, for those who still wait for it."""
        self._end.set()
        if self.is_alive():
            self.join(_ANSWER_S)
        try:
            self._publish(Status(self.rank, how, detail))
        except RuntimeError:
            return

    def explain(self) -> tuple[str, list[str]]:
        """Who holds this rank up: one sentence on the culprit, and the wait-for graph, a line for each rank."""
        try:
            statuses = self._ask()
        except RuntimeError:
            return "", []
        return culprit(statuses, self.rank), [str(status) for status in statuses]

    def gone(self, rank: int | None) -> str:
        """What became of a rank whose connection broke; with None of any rank that is no longer there."""
        deadline = time.monotonic() + _ANSWER_S
        while True:
            try:
                found = [self._from_outside(peer) for peer in ([rank] if rank is not None else range(len(self.places)))]
            except RuntimeError:
                return ""
            found = [status for status in found if status.doing in ("dead", "returned", "failed")]
            if found or time.monotonic() > deadline:  # a process takes a moment to end, or to say goodbye
                return "; ".join(map(str, found))
            time.sleep(0.05)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises RuntimeError when the other thread does not come back from the store: its host may be cut off."""
        if not self._mutex.acquire(timeout=_ANSWER_S):
            raise RuntimeError("the store does not answer")
        try:
            yield
        finally:
            self._mutex.release()

    # -- inside --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        waiting, now = self.shared.waiting, time.monotonic()
        seen = (waiting is None, self.shared.waited_s, self.shared.layer, self.shared.step)  # any exchange adds a wait
        if seen != self._seen:
            self._seen, self._since = seen, now
        if waiting is not None and waiting is not self._warned and now - waiting.since > self.warn_after:
            self._warned = waiting
            with self._alone():
                self.store.add("alarm", 1)
            self.on_warn(str(self._status()))
        if self.rank == 0 and waiting is None and self.shared.layer >= 0 and now - self._since > self.warn_after:
            self._nobody_waits(now - self._since)
        with self._alone():
            alarm = self.store.add("alarm", 0)
        if alarm != self._answered:
            self._publish(self._status(), alarm)

    def _nobody_waits(self, seconds: float) -> None:
        """This rank computes for long. If others wait for it, theirs is the alarm; if not, it is raised here."""
        late = seconds > self.timeout and inside_yours(sys._current_frames().get(self._main))
        if self._warned == self._since and not late:
            return
        statuses = self._ask()
        first, self._warned = self._warned != self._since, self._since
        if any(status.doing == "waiting" for status in statuses):
            return
        if first:
            self.on_warn("; ".join(["no rank waits for another", *map(str, statuses)]))
        if late:
            self.on_standstill(f"has not come back for {seconds:.0f} s (--timeout), and no rank waits for another")

    def _status(self) -> Status:
        waiting = self.shared.waiting
        if waiting is not None:
            seconds = time.monotonic() - waiting.since
            return Status(self.rank, "waiting", str(waiting), sorted(waiting.waiting_for), seconds, self._stack())
        stack, seconds = self._stack(), time.monotonic() - self._since
        where = f"layer {self.shared.layer}, step {self.shared.step}, for {seconds:.1f} s, at {stack[-1]}"
        return Status(self.rank, "computing", where, [], seconds, stack)

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._main)
        frames = traceback.extract_stack(frame) if frame is not None else []
        own = own_files()
        found = [
            (f"{f.filename if f.filename in own else Path(f.filename).name}:{f.lineno} in {f.name}") for f in frames
        ]
        return found or ["an unknown place"]

    def _publish(self, status: Status, alarm: int | None = None) -> None:
        with self._alone():
            alarm = self.store.add("alarm", 0) if alarm is None else alarm
            self.store.set(f"status/{self.rank}", json.dumps(vars(status) | {"alarm": alarm}))
        self._answered = alarm

    def _ask(self) -> list[Status]:
        with self._alone():
            alarm = self.store.add("alarm", 1)
        self._publish(self._status(), alarm)
        deadline = time.monotonic() + _ANSWER_S
        while True:
            statuses = [self._read(rank, alarm) for rank in range(len(self.places))]
            if all(statuses) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return [status or self._from_outside(rank) for rank, status in enumerate(statuses)]

    def _read(self, rank: int, alarm: int) -> Status | None:
        """A rank's answer to this alarm; of one that has left, its last word."""
        with self._alone():
            if not self.store.check([f"status/{rank}"]):
                return None
            said = json.loads(self.store.get(f"status/{rank}"))
        final = said["doing"] in ("returned", "failed")
        return _status(said) if said["alarm"] >= alarm or final else None

    def _from_outside(self, rank: int) -> Status:
        said = self._read(rank, sys.maxsize)
        if said is not None:
            return said
        place = self.places[rank]
        where = f"{place['pid']} on {place['host']}"
        if place["machine"] != _machine():
            return Status(rank, "silent", where)
        state = _process_state(place["pid"])
        return Status(rank, {"T": "stopped", "t": "stopped", None: "dead", "Z": "dead"}.get(state, "silent"), where)


def place() -> dict:
    """Host and process of this rank, for the handshake. `machine` tells apart hosts of one name, and containers."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine()}


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _status(said: dict) -> Status:
    return Status(**{key: value for key, value in said.items() if key != "alarm"})


def _process_state(pid: int) -> str | None:
    """Letter of the process state (Linux: T is stopped, Z a zombie), None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return "?"
    return "?"
