"""Machines that cannot share memory are refused on all ranks in one sentence, and what a group takes it gives back."""

from __future__ import annotations

import pytest

REFUSED = {
    "hosts": ["all ranks on one host", "rank 0 on node0 and rank 1 on node1", "use --transport gloo"],
    "hosts of one name": ["all ranks on one host", "rank 0 on node and rank 1 on node", "use --transport gloo"],
    "no memfd": ["rank 1: darwin has no memfd_create", "use --transport gloo"],
    "cuda": ["rank 1: rows on cuda cannot be shared"],
    "no room": ["rank 1: the system refuses shared memory", "use --transport gloo"],
    "out of reach": ["cannot reach rank", "on this host", "use --transport gloo"],
    "wrong bytes": ["rows arrive wrong in round", "of the self-test", "use --transport gloo"],
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_on_all_ranks_in_one_sentence(gloo, why):
    first, second = gloo(2).run("shm_start_cases:refused", why)
    assert first == second and first.startswith("BackendUnavailable: --transport shm")
    for words in REFUSED[why]:
        assert words in first
    assert gloo(2).run("exchange_cases:twice_the_same_group")  # gloo still works


def test_a_rank_that_does_not_begin_is_named(gloo):
    first, _ = gloo(2).run("shm_start_cases:late_to_begin")
    assert first.startswith("ExchangeTimeout: shared memory, host: after 0.5 s still waiting for rank 1")


def test_what_is_taken_is_given_back(gloo):
    """A descriptor for each rank and a connection to each peer; nothing more for sub-groups and windows."""
    for found in gloo(2).run("shm_start_cases:taken_and_given_back"):
        files, maps = found["before"]
        assert found["made"][0] == found["used"][0] == files + 2 + 1
        assert found["used"][1] > maps  # or this test sees nothing
        assert found["closed"] == (files, maps)


@pytest.mark.parametrize("size", [2, 4])
def test_borrowed_rows_are_in_place(gloo, size):
    for found in gloo(size).run("shm_start_cases:in_place"):
        assert found == dict.fromkeys(("borrowed", "copied", "kept", "grown", "copies stay"), True)
