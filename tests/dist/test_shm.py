"""Shared memory: the same bits, bytes and errors as threads, in the processes that also run on gloo."""

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
from shm_cases import PADDED, nested_groups, padded_many, padded_problem, sections_of, window_turns

from moe_course.comm.sim import run_threads

SIZES = [2, 4]  # four ranks are more than many a machine has cores


@pytest.fixture
def on_shm(gloo):
    """`on_shm(size, case, *args)` runs a case on shared memory between the processes of `gloo(size)`."""
    return lambda size, case, *args: gloo(size).run("shm_cases:on_shm", case, *args)


@pytest.mark.parametrize("size", SIZES)
def test_operations_and_ledger_equal_those_of_threads(gloo, size):
    """All operations on ragged rows of every dtype, fp8 and bool included: results to the bit, bytes to the byte."""
    found = gloo(size).run("shm_cases:many", "exchange_cases:every_operation", list(MOVED))
    for place, dtype_name in enumerate(MOVED):
        mine = [results[place] for results in found]
        assert bits(mine) == bits(run_threads(size, every_operation, dtype_name)), dtype_name


@pytest.mark.parametrize("size", SIZES)
def test_disagreement_is_the_same_error_on_all_ranks(gloo, size):
    """And the group goes on afterwards, through all kinds of it."""
    found = gloo(size).run("shm_cases:many", "exchange_cases:mismatch", list(MISMATCHES))
    after = torch.cat([torch.full((rank, 2), float(rank)) for rank in range(size)])
    for place, kind in enumerate(MISMATCHES):
        results = [one[place] for one in found]
        (message,) = {result["message"] for result in results}
        assert message is not None, f"nobody noticed: {kind}"
        for words in expected_in_message(kind, size, results[0]["number"]):
            assert words in message
        assert all(torch.equal(result["after"], after) for result in results)


def test_disagreement_in_a_group_names_ranks_of_the_world(gloo):
    found = gloo(4).run("shm_cases:many", "exchange_cases:mismatch_in_a_pair", list(MISMATCHES))
    for place, kind in enumerate(MISMATCHES):
        results = [one[place] for one in found]
        assert [result["message"] for result in results[:2]] == [None, None]
        message = results[2]["message"]
        assert message is not None and message == results[3]["message"]
        for words in expected_in_message_of_a_pair(kind, results[2]["number"]):
            assert words in message


@pytest.mark.parametrize("case", [pairs, crossed, descending, labels_in_a_pair], ids=lambda case: case.__name__)
def test_groups_equal_those_of_threads(on_shm, case):
    assert bits(on_shm(4, f"exchange_cases:{case.__name__}")) == bits(run_threads(4, case))


def test_groups_of_groups(on_shm):
    """Halves that have made different numbers of groups still make one together."""
    found = on_shm(4, "shm_cases:nested_groups")
    assert found == run_threads(4, nested_groups)
    assert found[2] == [100.0, 1100.0, 1111.0, 100.0]


def test_two_groups_of_the_same_ranks_do_not_mix(on_shm):
    assert on_shm(2, "exchange_cases:twice_the_same_group") == run_threads(2, twice_the_same_group)
    assert on_shm(4, "gloo_cases:many_pairs", 10) == [[3.0] * 10] * 2 + [[7.0] * 10] * 2


def test_objects_are_gathered_on_rank_0(on_shm):
    assert on_shm(2, "gloo_cases:objects") == [[{"rank": 0, "rows": []}, {"rank": 1, "rows": [0]}], None]
    assert on_shm(4, "shm_cases:objects_in_a_pair") == ["rank 0", "rank 1", "rank 2", "rank 3"]


# -- padded segments and windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_padded_segments(on_shm, size):
    """Every section holds its rows, as cut out by hand; payload and blocks as in threads, and no padding travels."""
    found, threads = on_shm(size, "shm_cases:padded_many"), run_threads(size, padded_many)
    for place, (dtype_name, width) in enumerate(PADDED):
        problems = [padded_problem(size, source, getattr(torch, dtype_name), width) for source in range(size)]
        for rank in range(size):
            mine = found[rank][place]
            assert bits(mine["used"]) == bits(cut_by_hand(size, rank, problems))
            assert mine["padding"] == 0 and (width == 0 or threads[rank][place]["padding"] > 0)
            for name in ("used", "counts", "shapes", "ledger"):
                assert bits(mine[name]) == bits(threads[rank][place][name]), name


def cut_by_hand(size, rank, problems):
    """Source -> section for `rank` -> its rows."""
    cut = []
    for source, (counts, rows) in enumerate(problems):
        first = int(sections_of(size)[source, :rank].sum())
        here = range(first, first + int(sections_of(size)[source, rank]))
        ends = counts.cumsum(0).tolist()
        cut.append([rows[ends[section] - int(counts[section]) : ends[section]] for section in here])
    return cut


@pytest.mark.parametrize("size", SIZES)
def test_disagreement_about_segments(on_shm, size):
    """The same for everybody, whatever lies in another place because of it; and afterwards all is well."""
    expected = {
        "rows": (f"CapacityExceeded: rank {size - 1} has 3 rows", "T_max"),
        **{field: ("ExchangeMismatch: ", f"{field} differ") for field in ("capacity", "width", "dtype", "layer")},
        "sections": ("ExchangeMismatch: ", "sections differ"),
        "nothing": ("", ""),
    }
    for said in on_shm(size, "shm_cases:padded_disagreement"):
        for kind, message, (start, words) in zip(expected, said, expected.values(), strict=True):
            assert message.startswith(start) and words in message, kind
            assert bool(message) == (kind != "nothing")


@pytest.mark.parametrize("size", SIZES)
def test_the_ordinary_way_to_send_segments(on_shm, size):
    """`_segments` itself, which `_padded` does without: sizes that only the sender knows, empty ones among them."""
    for rank, received in enumerate(on_shm(size, "shm_cases:plain_segments")):
        assert received == [[source * 16 + rank] * (source + 2 * rank) for source in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_windows_equal_those_of_threads(on_shm, size):
    assert on_shm(size, "shm_cases:window_turns") == run_threads(size, window_turns)
