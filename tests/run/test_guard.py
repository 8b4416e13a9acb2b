"""The guard on real runs: whoever differs, is late, stops, dies or leaves is named, and nothing stays behind."""

from __future__ import annotations

import time

import pytest

TWO = ["--world-size", "2", "--prompt", "def add(", "--max-new-tokens", "3"]
FOUR = ["--tensor-parallel-size", "2", "--data-parallel-size", "2", "--enable-expert-parallel"]
TIMEOUT = 4.0


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
        ("1:dtype=bfloat16", ["dtype differs", '"bfloat16"', '"auto"']),
        ("1:expert_map_digest=abc", ["expert_map_digest differs", '"abc"']),
        ("1:checkpoint_digest=abc", ["checkpoint_digest differs", '"abc"']),
        ("1:plan.moe_tp_size=2", ["plan.moe_tp_size differs", "rank 1 has 2", "rank 0 has 1"]),
    ],
)
def test_one_rank_with_another_value_ends_the_job(course, override, says):
    """Every field is tried in tests/unit/test_handshake.py; here that ranks really end, and soon."""
    began = time.monotonic()
    ended = course.run(*TWO, "--override", override)
    assert_named(course, ended, 4, "handshake", "rank 1", *says)
    assert time.monotonic() - began < 20  # from nothing; all ranks start within this time too
    assert "transformers" not in ended.stderr and ended.result["verdict"] == "failed"


def test_ranks_may_live_elsewhere_and_lose_patience_at_different_times(course):
    ended = course.run(*TWO, *(f"--override=1:{field}=9" for field in ("timeout", "warn_after", "pid")))
    assert ended.returncode == 0, ended.stderr
    ended = course.run(*TWO, "--override", "1:no_such_field=9")
    assert_named(course, ended, 2, "no_such_field", "fields: ")


def fault(kind, **place):
    return ["--fault", f"{kind}@" + ",".join(f"{name}={value}" for name, value in place.items())]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([*TWO, *fault("skip", rank=1, layer=2)], 4, ["rank 0 has", "rank 1 has", "layer"]),
        ([*TWO, *fault("raise", rank=1, layer=2, stage="experts")], 1, ["rank 1: InjectedError", "layer 2"]),
        ([*TWO, *fault("kill", rank=1, layer=2, stage="combine")], 5, ["rank 1: killed by SIGKILL"]),
        ([*TWO, *fault("stop", rank=1, layer=2)], 5, ["rank 1 is stopped (SIGSTOP)", "all_gather_rows", "layer 2"]),
        ([*TWO, *fault("sleep", rank=1, layer=2, step=1)], 5, ["rank 1 is still computing", "step 1", "faults.py"]),
        ([*TWO, *fault("return", rank=1, layer=3, step=1)], 5, ["rank 1 has returned early at layer 3, step 1"]),
        ([*FOUR, *TWO[2:], *fault("stop", rank=3, layer=2)], 5, ["rank 3 is stopped"]),
    ],
    ids=["skip", "raise", "kill", "stop", "sleep", "return", "stop-in-tp2-dp2"],
)  # fmt: skip
def test_a_rank_that_does_not_keep_up_is_named(course, args, code, says):
    """Within the time-out and two seconds of the moment the others are all waiting for it."""
    ended = course.run(*args, "--timeout", str(TIMEOUT), "--warn-after", "1")
    assert_named(course, ended, code, *says)
    if "stop" in str(args) or "sleep" in str(args):
        assert any(line.startswith("  rank 0 waits in") for line in ended.stderr.splitlines())
        assert "slow  rank 0 waits in" in ended.stdout.replace("\n", " ")
        seconds = ended.result.get("seconds") if ended.result else None
        assert seconds is None or seconds > 0


def test_the_canary_and_the_audit_run_before_the_first_token(course):
    ep = ["--tensor-parallel-size", "2", "--enable-expert-parallel", "--prompt", "x", "--max-new-tokens", "2"]
    ended = course.run(*ep, *fault("reduce-never", rank=0), *fault("reduce-never", rank=1))
    assert_named(course, ended, 3, "canary", "never")
    ended = course.run(*TWO, "--expert-placement-strategy", "round_robin", *fault("misplace", rank=1))
    assert_named(course, ended, 2, "rank 1", "expert 128")
    ended = course.run(*ep, *fault("reduce-twice", rank=0))
    assert ended.returncode == 2 or "differ" in ended.error_lines[0]  # one rank alone: another call than the others


def test_timings_show_what_the_guard_costs(course):
    ended = course.run(*TWO, "--timings")
    assert ended.returncode == 0, ended.stderr
    assert all(ended.result["guard"][name] > 0 for name in ("handshake_s", "audit_s", "canary_s"))
    assert all(name in ended.stdout for name in ("handshake", "audit", "canary", "exchanges"))
