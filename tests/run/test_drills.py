"""Every drill names its cause in the first line; without the guard the same fault hangs, aborts, or passes unseen."""

from __future__ import annotations

import pytest

from moe_course.drills.catalogue import DRILLS

NAMES = ["group-mismatch", "missing-weights", "placement", "dependency", "capacity", "reduction", "pipeline", "skew"]
#: What the note says about each of its eight failure modes, and what a bystander sees here when nobody guards.
RAW = {
    "reduction": ("silently wrong", 3),
    "capacity": ("error after", 1),
}


def drill(course, *args):
    return course.run(*args, module=("-m", "moe_course", "drill"))


def test_the_eight_drills_are_those_of_the_note():
    assert list(DRILLS) == NAMES
    assert all(one.title and one.upstream and one.fault and one.cure and one.says for one in DRILLS.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_first_line_names_the_cause(course, name, request):
    if name != NAMES[0]:  # one starts from nothing, as a user's does
        request.getfixturevalue("warm")
    ended = drill(course, name)
    assert ended.returncode == 0, ended.stderr
    first = ended.stderr.splitlines()[0]
    assert first.startswith("error: rank ")
    for part in DRILLS[name].says:
        assert part in first
    assert ended.result["schema"] == "moe_course.drill/1" and ended.result["as_expected"]
    assert first == f"error: {ended.result['diagnosis']}"
    assert not course.wait_until_gone()


@pytest.mark.parametrize("name", RAW)
def test_without_guard(warm, name):
    outcome, code = RAW[name]
    ended = drill(warm, name, "--raw", "--raw-limit", "120")  # neither of these hangs
    assert ended.returncode == 0, ended.stderr
    assert ended.result["outcome"].startswith(outcome) and ended.result["exit_code"] == code
    assert "handshake" not in ended.stderr and "canary" not in ended.stderr
    assert not warm.wait_until_gone()


def test_the_list_and_a_name_that_is_none(course):
    ended = drill(course, "--list")
    assert ended.returncode == 0 and all(name in ended.stdout for name in NAMES)
    ended = drill(course, "flood")
    assert ended.returncode == 2 and "flood" in ended.stderr and "skew" in ended.stderr
