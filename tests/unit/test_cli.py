"""The command line as a whole: its list of commands, its version, and a reader who leaves early."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

from moe_course.cli import main

COMMANDS = ("run", "drill", "plan", "replay", "backends", "report", "doctor", "bench")


def test_each_command_says_in_a_line_what_it_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.split("Commands:")[1].strip().splitlines()]
    assert [name for name, _ in lines] == list(COMMANDS)
    assert all(says.strip().endswith(".") and not says.endswith("...") for _, says in lines), lines


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moe-course {metadata.version('moe-course')}\n"


@pytest.mark.parametrize("asked", [(), ("--version",), ("plan", "--world-size", "64", "--model", "glm-5.1")])
def test_a_reader_who_has_left_sees_no_traceback(asked):
    """`moe-course plan | head`, when head is quicker."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        command = [sys.executable, "-m", "moe_course.cli", *asked]
        ended = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.stderr == "" and ended.returncode != 0
