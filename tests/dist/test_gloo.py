"""Ranks as processes: the same bits and the same bytes as threads, and every fault named instead of a hang."""

from __future__ import annotations

import pytest
import torch
from exchange_cases import (
    MISMATCHES,
    MOVED,
    bits,
    crossed,
    descending,
    every_operation,
    expected_in_message,
    expected_in_message_of_a_pair,
    labels_in_a_pair,
    pairs,
    twice_the_same_group,
)

from moe_course.comm import dist
from moe_course.comm.sim import run_threads
from moe_course.config import GLM_5_1
from moe_course.errors import BackendUnavailable, PlanMismatch
from moe_course.parallel import ParallelConfig, make_plan

SIZES = [2, 4]


@pytest.mark.parametrize("dtype_name", MOVED)
@pytest.mark.parametrize("size", SIZES)
def test_operations_and_ledger_equal_those_of_threads(gloo, size, dtype_name):
    """All operations on ragged rows, fp8 and bool included: results to the bit, counted bytes to the byte."""
    found = gloo(size).run("exchange_cases:every_operation", dtype_name)
    assert bits(found) == bits(run_threads(size, every_operation, dtype_name))


@pytest.mark.parametrize("kind", MISMATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_disagreement_is_the_same_error_on_all_ranks(gloo, size, kind):
    """Where plain gloo hangs, aborts or delivers wrong rows. The group can go on afterwards."""
    results = gloo(size).run("exchange_cases:mismatch", kind)
    messages = {result["message"] for result in results}
    assert len(messages) == 1
    message = messages.pop()
    assert message is not None, "nobody noticed"
    for words in expected_in_message(kind, size, results[0]["number"]):
        assert words in message
    after = torch.cat([torch.full((rank, 2), float(rank)) for rank in range(size)])
    assert all(torch.equal(result["after"], after) for result in results)


# -- groups ----------------------------------------------------------------------------------------------------------


def test_groups_are_separate(gloo):
    """All ranks create all groups in one order, ten times: always 3, 3, 7, 7."""
    assert bits(gloo(4).run("exchange_cases:pairs")) == bits(run_threads(4, pairs))
    assert gloo(4).run("gloo_cases:many_pairs", 10) == [[3.0] * 10] * 2 + [[7.0] * 10] * 2


def test_groups_that_cross(gloo):
    assert gloo(4).run("exchange_cases:crossed") == run_threads(4, crossed)


def test_members_in_an_order_of_their_own(gloo):
    """Kept, or refused on all ranks; never mixed up. The same as in threads."""
    assert gloo(4).run("exchange_cases:descending") == run_threads(4, descending)


@pytest.mark.parametrize("kind", MISMATCHES)
def test_disagreement_in_a_group_names_ranks_of_the_world(gloo, kind):
    results = gloo(4).run("exchange_cases:mismatch_in_a_pair", kind)
    assert [result["message"] for result in results[:2]] == [None, None]
    message = results[2]["message"]
    assert message is not None and message == results[3]["message"]
    for words in expected_in_message_of_a_pair(kind, results[2]["number"]):
        assert words in message


def test_ledger_and_labels_are_shared_with_groups(gloo):
    assert gloo(4).run("exchange_cases:labels_in_a_pair") == run_threads(4, labels_in_a_pair)


def test_two_groups_of_the_same_ranks_do_not_mix(gloo):
    assert gloo(2).run("exchange_cases:twice_the_same_group") == run_threads(2, twice_the_same_group)


def test_objects_are_gathered_on_rank_0(gloo):
    assert gloo(2).run("gloo_cases:objects") == [[{"rank": 0, "rows": []}, {"rank": 1, "rows": [0]}], None]


# -- ranks that are missing ------------------------------------------------------------------------------------------


def test_a_late_rank_is_named_after_the_time_out(brittle_group):
    result, _ = brittle_group(2, timeout=3).run("gloo_cases:late", 1, lost=(1,))
    assert result["kind"] == "ExchangeTimeout"
    assert "barrier #1 (layer 3, step 0): after 3 s still waiting for rank 1" in result["message"]
    assert 2 < result["seconds"] < 30


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_killed_rank_is_named_at_once(brittle_group, moment):
    """By both survivors, long before the time-out, whether it died before the exchange or while they wait for it."""
    first, _, third = brittle_group(3, timeout=20).run("gloo_cases:killed", 1, moment, lost=(1,))
    for result in (first, third):
        assert result["kind"] == "RankLost", result["message"]
        assert "barrier #1 (layer 3, step 0): lost rank 1" in result["message"]
        assert result["seconds"] < 15


# -- joining the group -----------------------------------------------------------------------------------------------


@pytest.fixture
def plan():
    return make_plan(ParallelConfig(data_parallel_size=2), GLM_5_1)


def test_without_torchrun_there_is_no_group(plan, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BackendUnavailable, match="RANK is not set; start this with torchrun"):
        dist.init(plan)


def test_torchrun_and_plan_must_agree(plan, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(PlanMismatch, match="torchrun started 3 ranks, the plan has 2"):
        dist.init(plan, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(BackendUnavailable, match="use --device cpu"):
        dist.pick_device("cuda")
    assert dist.pick_device("auto") == dist.pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("size", SIZES)
def test_disagreement_about_segments(gloo, size):
    """gloo itself would end a process, or take a shorter message for a whole one."""
    words = {"rows": "T_max", **{f: f"{f} differ" for f in ("capacity", "width", "dtype", "layer", "sections")}}
    for said in gloo(size).run("shm_cases:padded_disagreement"):
        for kind, message in zip((*words, "nothing"), said, strict=True):
            assert words.get(kind, "") in message and bool(message) == (kind != "nothing"), (kind, message)
