"""The guard on real runs: whoever differs, is late, stops, dies or leaves is named, and nothing stays behind."""

from __future__ import annotations

import time

import pytest

from moe_course.launch import GRACE_S, launch

TWO = ["--world-size", "2", "--prompt", "def add(", "--max-new-tokens", "3"]
FOUR = ["--tensor-parallel-size", "2", "--data-parallel-size", "2", "--enable-expert-parallel"]
TIMEOUT = 3.0


def assert_named(course, ended, code, *says):
    assert ended.returncode == code, ended.stderr
    assert len(ended.error_lines) == 1 and "Traceback" not in ended.stderr, ended.stderr
    for part in says:
        assert part in ended.error_lines[0], (part, ended.error_lines[0])
    assert not course.wait_until_gone()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("1:all2all_backend=naive", ["all2all_backend differs", '"naive"', '"allgather_reducescatter"']),
        ("1:tensor_parallel_size=2", ["tensor_parallel_size differs", "rank 1 has 2"]),
        ("1:checkpoint_digest=abc", ["checkpoint_digest differs", '"abc"']),
    ],
)
def test_one_rank_with_another_value_ends_the_job(course, override, says, request):
    """Every field is tried in tests/unit/test_handshake.py; here that ranks really end, and soon."""
    if "digest" not in override:  # that one starts from nothing, as a user's run does
        request.getfixturevalue("warm")
    began = time.monotonic()
    ended = course.run(*TWO, "--override", override)
    assert_named(course, ended, 4, "handshake", "rank 1", *says)
    assert time.monotonic() - began < 20  # all ranks start within this time too
    assert "transformers" not in ended.stderr and ended.result["verdict"] == "failed"


def test_ranks_may_live_elsewhere_and_lose_patience_at_different_times(warm):
    """And what the guard costs is shown."""
    fields = ("timeout", "warn_after", "pid")
    ended = warm.run(*TWO, "--timings", *(f"--override=1:{field}=9" for field in fields))
    assert ended.returncode == 0, ended.stderr
    assert all(ended.result["guard"][name] > 0 for name in ("handshake_s", "audit_s", "canary_s", "tensors"))
    assert all(name in ended.stdout for name in ("handshake", "audit", "canary", "exchanges"))
    ended = warm.run(*TWO, "--override", "1:no_such_field=9")
    assert_named(warm, ended, 2, "no_such_field", "fields: ")


def fault(kind, **place):
    return ["--fault", f"{kind}@" + ",".join(f"{name}={value}" for name, value in place.items())]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([*TWO, *fault("skip", rank=1, layer=2)], 4, ["layer differ", "rank 0 has 2", "rank 1 has"]),
        ([*TWO, *fault("raise", rank=1, layer=2, stage="experts")], 1, ["rank 1: InjectedError", "layer 2"]),
        ([*TWO, *fault("kill", rank=1, layer=2, stage="combine")], 5, ["rank 1: killed by SIGKILL"]),
        ([*TWO, *fault("sleep", rank=1, layer=2, step=1)], 5, ["rank 1 is still computing", "step 1", "faults.py"]),
        ([*TWO, *fault("return", rank=1, layer=2, step=1)], 5, ["rank 1 has returned early at layer 2, step 1"]),
        ([*FOUR, *TWO[2:], *fault("stop", rank=3, layer=2)], 5, ["rank 3 is stopped (SIGSTOP)", "layer 2"]),
    ],
    ids=["skip", "raise", "kill", "sleep", "return", "stop-in-tp2-dp2"],
)
def test_a_rank_that_does_not_keep_up_is_named(warm, args, code, says):
    """Within the time-out and two seconds of the fault."""
    ranks = 4 if "--data-parallel-size" in args else 2
    argv = [*args, "--timeout", str(TIMEOUT), "--warn-after", "1"]
    began = time.time()
    ended = launch(argv, ranks, timeout=100, env={warm.mark_name: warm.mark})
    assert ended.returncode == code, ended.error
    for part in says:
        assert part in ended.error, (part, ended.error)
    struck = [event["at"] for event in ended.events if event["event"] == "fault"]
    if struck:  # a rank that skips a layer does not report it
        assert began + ended.wall_s - struck[0] < TIMEOUT + 2 + GRACE_S
        named = [event["at"] for event in ended.events if event["event"] == "error"]
        assert min(named, default=struck[0]) - struck[0] < TIMEOUT + 2
    if "still" in ended.error or "stopped" in ended.error:
        assert len(ended.graph) == ranks and any(line.startswith("rank 0 waits in") for line in ended.graph)
        assert any(event["event"] == "warn" and "waits in" in event["text"] for event in ended.events)
    assert not warm.wait_until_gone()


def test_the_command_line_shows_one_error_line_and_the_waits_below_it(warm):
    ended = warm.run(*TWO, *fault("stop", rank=1, layer=2), "--timeout", "3", "--warn-after", "1")
    assert_named(warm, ended, 5, "rank 1 is stopped (SIGSTOP)", "all_gather_rows", "layer 2")
    assert any(line.startswith("  rank 0 waits in") for line in ended.stderr.splitlines())
    assert "slow  rank 0 waits in" in ended.stdout.replace("\n", " ")
    assert ended.result["verdict"] == "failed"
