"""Start the command line as a user would, in a process group of its own, and look for what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm import MARK, process_name, warm_starts


@dataclass
class Ended:
    returncode: int
    stdout: str
    stderr: str
    result: dict | None

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error:")]


class Course:
    """A command of this test; all its processes carry one mark in their environment."""

    mark_name = MARK

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.json = folder / "out.json"

    def start(self, *args: str, module: tuple[str, ...] = ("-m", "moe_course", "run"), **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *module, *args, "--json", str(self.json)],
            env=os.environ | {MARK: self.mark, "COLUMNS": "120"} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, timeout: float = 150, **options) -> Ended:
        process = self.start(*args, **options)
        stdout, stderr = process.communicate(timeout=timeout)
        return self.ended(process.returncode, stdout, stderr)

    def ended(self, returncode: int, stdout: str, stderr: str) -> Ended:
        result = json.loads(self.json.read_text()) if self.json.exists() else None
        return Ended(returncode, stdout, stderr, result)

    def processes(self) -> dict[int, str]:
        """Living processes of this command: pid -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0") or (
                    self.forked(entry) is not None
                ):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found

    def ranks(self) -> dict[int, int]:
        """Living rank processes: rank -> pid."""
        found = {}
        for pid, command in self.processes().items():
            rank = self.forked(Path(f"/proc/{pid}"))
            if rank:
                found[int(rank)] = pid
            elif rank is None and "moe_course.run" in command and "torch.distributed.run" not in command:
                environ = dict(
                    part.split("=", 1) for part in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in part
                )
                if "RANK" in environ:
                    found[int(environ["RANK"])] = pid
        return found

    def forked(self, entry: Path) -> str | None:
        """Of a process that started warm the rank, "" if it is none; None for all others."""
        name = (entry / "comm").read_text().strip()
        mine = process_name({MARK: self.mark})
        return name.removeprefix(mine) if name.startswith(mine) else None

    def wait_until_gone(self, seconds: float = 5) -> dict[int, str]:
        """Processes still there after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.processes()


@pytest.fixture
def course(tmp_path):
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc to look for left-over processes")
    course = Course(tmp_path)
    yield course
    for pid in course.processes():
        os.kill(pid, 9)


@pytest.fixture
def warm(course):
    """`course`, whose processes start warm: for tests of what runs do, not of how Python starts."""
    with warm_starts():
        yield course


@pytest.fixture(scope="session")
def told(tmp_path_factory):
    """Folder of a run with `trace/` and its page `run.html`, and the run's figures. Nobody changes them."""
    folder = tmp_path_factory.mktemp("report")
    prompts = ("def add(a, b):", "</script><img src=x onerror=alert(1)>", "größe")
    asked = ("--device=cpu", "--world-size=4", "--max-new-tokens=3", *(f"--prompt={text}" for text in prompts))
    with warm_starts():
        ended = Course(folder).run(*asked, "--trace", str(folder / "trace"), "--report", str(folder / "run.html"))
    assert ended.returncode == 0, ended.stderr
    assert re.sub(r"\s", "", f"{folder}/run.html: open it in a browser") in re.sub(r"\s", "", ended.stdout)
    return folder, ended.result
