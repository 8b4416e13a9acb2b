"""Start ranks under torchrun from anywhere — a shell, a notebook cell, a test — and leave nothing behind.

`launch` starts `python -m torch.distributed.run … -m moe_course.run ARGS`, hands over every event the ranks
print, and ends all processes on Ctrl-C, on time-out and when a rank is lost. With several machines each launches
its own share, see nodes.py. This module does not import torch.

Built in: notebooks 00 and 13.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_course.exit_code import first_cause, judge
from moe_course.nodes import ONE_NODE, Nodes, gloo_environment, torchrun_command

EVENT_MARK = "@@"  # starts an event on stdout; what stands before it on its line was printed without an end of line
EVENTS_ENV, RESULT_ENV = "MOE_COURSE_EVENTS", "MOE_COURSE_RESULT"
PLAN_FILE = "plan.txt"  # beside the result: the plan as text, too long for an event
GRACE_S = 3.0  # between TERM and KILL
_HURRY_S = {"RankLost": 4.0}  # from a rank's error to the end of all others; torchrun would wait 30 s for a stopped one
_PR_SET_PDEATHSIG = 1


@dataclass(repr=False)
class RunResult:
    """How a launch ended.

    Attributes:
        returncode: 0, or the exit code of the command line (2 usage, 3 verification, 4 mismatch, 5 lost or late).
        error: one line that names the rank, or None.
        result: the run's JSON (`moe_course.run/1`), or None: it never got that far, or rank 0 is on another node.
        events: everything the ranks of this node reported, in order of arrival.
        output: other lines the processes wrote.
        wall_s: seconds from start to end.
        graph: after a time-out one line for each rank: what it was doing, and whom it waited for.
    """

    returncode: int
    error: str | None
    result: dict | None
    events: list[dict] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    graph: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        verdict = self.result["verdict"] if self.result else None
        return f"RunResult(returncode={self.returncode}, verdict={verdict!r}, error={self.error!r})"


def emit(event: str, **fields) -> None:
    """Report something to the launcher, if there is one. One line, written at once, so ranks do not mix lines."""
    if os.environ.get(EVENTS_ENV):
        common = {"event": event, "rank": int(os.environ.get("RANK", "0")), "at": time.time()}
        line = EVENT_MARK + json.dumps(common | fields) + "\n"
        sys.stdout.flush()
        os.write(1, line.encode())


def die_with_parent() -> None:
    """End this process when its parent ends, however that happens."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it went before the call
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def launch(
    argv: Sequence[str],
    world_size: int,
    on_event: Callable[[dict], None] | None = None,
    timeout: float = 600,
    *,
    module: str = "moe_course.run",
    env: dict[str, str] | None = None,
    nodes: Nodes | None = None,
) -> RunResult:
    """Run `module` with `argv` on `world_size` processes, under torchrun; with `nodes`, this node's share of them.

    Args:
        argv: arguments of the rank program, as on the command line of `moe-course run`.
        world_size: number of processes, on all nodes together.
        on_event: called with each event, in this thread.
        timeout: seconds until everything is ended.
        module: the rank program.
        env: extra environment variables.
        nodes: which of several machines this is; each of them calls `launch`. Default: all ranks are here.

    Interrupting the call (Ctrl-C, the kernel's stop button) ends all processes of this node and raises
    KeyboardInterrupt; ranks on other nodes lose their peers and end too. Raises ConfigError if the nodes cannot share
    the ranks equally, or if this one does not know the name of node 0.
    """
    began = time.monotonic()
    nodes = nodes or ONE_NODE
    with tempfile.TemporaryDirectory(prefix="moe-course-", ignore_cleanup_errors=True) as folder:
        result_file = Path(folder) / "result.json"
        process = _start(argv, world_size, nodes, module, result_file, env)
        output: list[str] = []
        events: list[dict] = []
        late, hurry = threading.Event(), None
        timer = threading.Timer(timeout, lambda: (late.set(), stop(process, _pids(events))))
        reader = threading.Thread(target=lambda: output.extend(process.stderr), daemon=True)
        for thread in (timer, reader):
            thread.daemon = True
            thread.start()
        try:
            for event in _events(process.stdout, output):
                events.append(event)
                if event["event"] == "plan" and (shown := result_file.with_name(PLAN_FILE)).exists():
                    event["text"] = shown.read_text()
                if event["event"] == "error" and hurry is None:
                    hurry = threading.Timer(_HURRY_S.get(event["kind"], 1.0), lambda: stop(process, _pids(events)))
                    hurry.daemon = True
                    hurry.start()
                if on_event is not None:
                    on_event(event)
            returncode = process.wait()
        finally:
            timer.cancel()
            if hurry is not None:
                hurry.cancel()
            if process.poll() != 0:  # interrupted, late or failed: ranks may still be there
                stop(process, _pids(events))
        reader.join(2)
        result = json.loads(result_file.read_text()) if result_file.exists() else None
    code, error = judge(returncode, late.is_set(), timeout, events, output, nodes)
    cause = first_cause(events)
    graph = cause.get("graph", []) if cause else []
    return RunResult(code, error, result, events, output, time.monotonic() - began, graph)


def stop(process: subprocess.Popen, pids: Sequence[int] = ()) -> None:
    """End a launch: the agent, its process group and the ranks it started (CONT, TERM, 3 s, KILL)."""
    # torchrun puts every rank into a session of its own; one that was stopped early has not told its number
    groups = list(dict.fromkeys([process.pid, *pids, *_children(process.pid)]))
    if process.poll() is None:
        for number in (signal.SIGCONT, signal.SIGTERM):
            for group in groups:
                _kill_group(group, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    for group in groups:
        _kill_group(group, signal.SIGKILL)
    process.wait()


def _start(argv, world_size: int, nodes: Nodes, module: str, result_file: Path, env) -> subprocess.Popen:
    nproc_per_node = nodes.processes_here(world_size)
    threads = max(1, (os.cpu_count() or 1) // nproc_per_node)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size().columns),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
        EVENTS_ENV: "1",
        RESULT_ENV: str(result_file),
        "TMPDIR": str(result_file.parent),  # torchrun and a rank that is killed leave folders behind: they go with ours
    }
    return subprocess.Popen(
        torchrun_command(argv, nproc_per_node, nodes, module),
        env=gloo_environment(nodes) | os.environ | environment | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,  # Ctrl-C reaches this process only, which then ends the group in order
        preexec_fn=_follow_parent if sys.platform == "linux" else None,
    )


def _follow_parent() -> None:
    # in the child, before exec: the agent gets TERM when this process ends, and takes its ranks along
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _events(stream, output: list[str]) -> Iterator[dict]:
    for line in stream:
        before, mark, event = line.partition(f'{EVENT_MARK}{{"event": ')
        if mark:
            with contextlib.suppress(json.JSONDecodeError):
                found = json.loads('{"event": ' + event)
                if before:
                    output.append(before + "\n")
                yield found
                continue
        output.append(line)


def _pids(events: list[dict]) -> list[int]:
    return [event["pid"] for event in events if event["event"] == "start"]


def _children(parent: int) -> list[int]:
    """Processes started by `parent` that are still there, where /proc tells."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.parent.name))
    return found


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
