"""Ranks that die, stop, come late or fail on shared memory: named by the others, and nothing is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("shm_faults.py")
LOST = {  # scenario -> what the two others say of rank 1, and within how many seconds
    "killed_before": ("barrier #1 (outside the layers): lost rank 1", 5),
    "killed_while_others_wait": ("barrier #1 (outside the layers): lost rank 1", 5),
    "killed_between_put_and_post": ("all_to_all_rows #6 (outside the layers): lost rank 1", 5),
    "exception_between_put_and_post": (
        "all_to_all_rows #6 (outside the layers): lost rank 1: it left all_to_all_rows #6 (outside the layers): "
        "MemoryError: made up",
        5,
    ),
    "interrupted": ("lost rank 1: it left barrier #1 (outside the layers): KeyboardInterrupt", 5),
    "returned_early": ("barrier #1 (outside the layers): lost rank 1", 5),
    "with_a_child": ("barrier #1 (outside the layers): lost rank 1", 1.9),  # the child holds on for 2 s
}
LATE = ("late", "stopped")
SCENARIOS = ("success", "slow", *LOST, *LATE)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Scenario -> what became of its ranks. One process runs them all; its temporary folder is an empty one."""
    folder, temporary = tmp_path_factory.mktemp("scenarios"), tmp_path_factory.mktemp("temporary")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(folder), *SCENARIOS]
    program = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert program.returncode == 0, program.stderr
    found = {one["scenario"]: one for one in map(json.loads, program.stdout.splitlines())}
    assert list(found) == list(SCENARIOS)
    assert not list(temporary.iterdir())
    return found


@pytest.mark.parametrize("scenario", LOST)
def test_a_rank_that_is_lost_is_named(ended, scenario):
    """By both others and at once: no time-out of 20 s. They cannot go on without it, and say that too."""
    said, seconds = LOST[scenario]
    for rank in (0, 2):
        found = ended[scenario]["found"][rank]
        assert found["kind"] == "RankLost" and said in found["message"], found
        assert found["seconds"] < seconds
        assert found["again"].startswith("RankLost") and "this group has ended" in found["again"]


@pytest.mark.parametrize("scenario", LATE)
def test_a_late_rank_is_named_after_the_time_out(ended, scenario):
    """Not before it: a rank that has stopped is still there."""
    for rank in (0, 2):
        found = ended[scenario]["found"][rank]
        assert found["kind"] == "ExchangeTimeout"
        assert "barrier #1 (outside the layers): after 0.6 s still waiting for rank 1; every rank" in found["message"]
        assert 0.6 <= found["seconds"] < 3


def test_a_slow_rank_is_waited_for(ended):
    assert ended["slow"]["found"] == [{"kind": "none"}] * 3


def test_who_fails_alone_cannot_go_on(ended):
    found = ended["exception_between_put_and_post"]["found"][1]
    assert found["kind"] == "RankLost"
    assert "this group has ended: rank 1 left all_to_all_rows #6 (outside the layers): MemoryError" in found["message"]


def test_a_forked_child_is_no_rank(ended):
    assert ended["with_a_child"]["child"].endswith("this group has ended: it belongs to another process")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_left(ended, scenario):
    """All ranks ended by themselves, or by what the scenario did to them, and their sockets with them."""
    assert ended[scenario]["ends"] == ["ended"] * 3
    assert not ended[scenario]["sockets"]


def test_there_never_was_a_file(ended):
    """What ranks share has no name in any folder, so nothing can stay there, however they end."""
    for found in ended["success"]["found"]:
        assert "/memfd:moe-course (deleted)" in found["mapped"]
        assert not [name for name in found["mapped"] if name.startswith(("/dev/shm", "/tmp", "/var/tmp"))]
