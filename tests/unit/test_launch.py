"""The launcher's judgement: which exit code and which line a set of symptoms deserves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_course.launch import EVENT_MARK, EVENTS_ENV, _killed_rank, _verdict, launch

REPORT = """
Failures:
  [1]:
  rank      : 1 (local_rank: 1)
  exitcode  : 5 (pid: 11)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 2 (local_rank: 2)
  exitcode  : {code} (pid: 12)
  traceback : Signal 9 (SIGKILL) received by PID 12
"""


def error(rank, kind="ExchangeMismatch", code=4):
    return {"event": "error", "rank": rank, "kind": kind, "message": f"about {rank}", "exit_code": code}


def test_a_killed_rank_is_the_cause_whatever_the_others_say():
    lost = [error(0, "RankLost", 5), error(1, "RankLost", 5)]
    assert _killed_rank(REPORT.format(code=-9)) == (2, "SIGKILL")
    assert _verdict(1, False, 9, lost, [REPORT.format(code=-9)]) == (5, "error: rank 2: killed by SIGKILL")


def test_an_error_of_a_ranks_own_comes_before_those_who_lost_it():
    events = [error(0, "RankLost", 5), error(2, "CheckpointError", 2)]
    assert _killed_rank(REPORT.format(code=2)) is None
    assert _verdict(1, False, 9, events, [REPORT.format(code=2)]) == (2, "error: rank 2: about 2")


@pytest.mark.parametrize(("late", "code", "expected"), [(True, 1, 5), (False, 0, 0), (False, 7, 7)])
def test_time_limit_success_and_unknown_failures(late, code, expected):
    returncode, line = _verdict(code, late, 9, [], ["last words\n"])
    assert returncode == expected and (line is None) == (expected == 0)
    if expected == 7:
        assert "last words" in line


def test_events_are_single_lines_only_under_a_launcher():
    code = "from moe_course.launch import emit; emit('hello', text='a\\nb')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={EVENTS_ENV: "1"})
    assert shown.stdout.startswith(EVENT_MARK) and shown.stdout.count("\n") == 1
    assert not subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={}).stdout


def test_an_interrupt_in_a_callback_ends_the_ranks(tmp_path):
    """What a notebook's stop button does: the exception passes through, the processes do not stay."""
    program = tmp_path / "sleeper.py"
    program.write_text(
        "import os, time\nfrom moe_course.launch import emit\nemit('start', pid=os.getpid())\ntime.sleep(60)\n"
    )
    pids = []

    def on_event(event):
        pids.append(event["pid"])
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch([], 2, on_event, timeout=60, module="sleeper", env={"PYTHONPATH": f"{tmp_path}:{sys.path[0]}"})
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            import os

            os.kill(pid, 0)
