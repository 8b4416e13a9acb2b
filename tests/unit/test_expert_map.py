"""Who owns which expert: tables by hand, the partition, the fallbacks in words, and topology outside state_dict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import make_config, make_layer, make_weights

from moe_course.backends import allgather_reducescatter
from moe_course.comm.sim import run_threads
from moe_course.errors import ConfigError
from moe_course.expert_map import STRATEGIES, determine_expert_map, make_placement, resolve_placement

TABLES = json.loads((Path(__file__).parents[1] / "golden" / "expert_maps.json").read_text())


def check_owned(determine, table) -> None:
    """Raise AssertionError unless every rank owns the experts of the table, in that order of local ids."""
    owned = table["experts"]
    for rank, mine in enumerate(owned):
        count, expert_map = determine(len(owned), rank, table["num_experts"], table["strategy"])
        assert count == len(mine)
        assert expert_map.dtype == torch.int32
        expected = [mine.index(expert) if expert in mine else -1 for expert in range(table["num_experts"])]
        assert expert_map.tolist() == expected


@pytest.mark.parametrize("table", TABLES["owned"], ids=lambda table: f"{table['num_experts']}-{table['strategy']}")
def test_maps_equal_the_tables(table):
    check_owned(determine_expert_map, table)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("table", TABLES["counts"], ids=lambda table: f"{table['num_experts']}-{table['ep_size']}")
def test_the_remainder_goes_to_the_first_ranks(table, strategy):
    counts = [
        determine_expert_map(table["ep_size"], rank, table["num_experts"], strategy)[0]
        for rank in range(table["ep_size"])
    ]
    assert counts == table["counts"]


def remainder_on_the_last_rank(ep_size, ep_rank, num_experts, strategy="linear"):
    base = num_experts // ep_size
    start, end = ep_rank * base, num_experts if ep_rank == ep_size - 1 else (ep_rank + 1) * base
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
    expert_map[start:end] = torch.arange(end - start, dtype=torch.int32)
    return end - start, expert_map


def local_ids_from_one(ep_size, ep_rank, num_experts, strategy="linear"):
    count, expert_map = determine_expert_map(ep_size, ep_rank, num_experts, strategy)
    return count, torch.where(expert_map >= 0, expert_map + 1, expert_map)


def strategies_swapped(ep_size, ep_rank, num_experts, strategy="linear"):
    return determine_expert_map(ep_size, ep_rank, num_experts, STRATEGIES[strategy == "linear"])


@pytest.mark.parametrize("wrong", [remainder_on_the_last_rank, local_ids_from_one, strategies_swapped])
def test_known_faults_are_caught(wrong):
    """By the table of 10 experts on 4 ranks. The first fault is invisible where E % R = 0."""
    with pytest.raises(AssertionError):
        check_owned(wrong, TABLES["owned"][0])
    if wrong is remainder_on_the_last_rank:
        check_owned(wrong, TABLES["owned"][2])


def test_worked_example():
    """256 experts on 4 ranks: expert 12 is row 12 of rank 0, expert 139 is row 11 of rank 2."""
    placement = make_placement(4, 256)
    assert (int(placement.owner[12]), int(placement.local[12])) == (0, 12)
    assert (int(placement.owner[139]), int(placement.local[139])) == (2, 11)
    assert determine_expert_map(4, 2, 256)[1][139] == 11


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_has_no_map(strategy):
    """None, not the identity."""
    assert determine_expert_map(1, 0, 10, strategy) == (10, None)
    placement = make_placement(1, 10, strategy)
    assert placement.owner.tolist() == [0] * 10
    assert placement.local.tolist() == list(range(10))


sizes = st.integers(1, 12).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(ranks, 60)))


@given(sizes, st.sampled_from(STRATEGIES))
def test_maps_of_all_ranks_partition_the_experts(size, strategy):
    """Every expert has one owner, local ids count from 0, loads differ by one at most, and the catalogue agrees."""
    ranks, experts = size
    placement = make_placement(ranks, experts, strategy)
    owners = [0] * experts
    for rank in range(ranks):
        count, expert_map = determine_expert_map(ranks, rank, experts, strategy)
        mine = list(range(experts)) if expert_map is None else (expert_map >= 0).nonzero().flatten().tolist()
        for expert in mine:
            owners[expert] += 1
        local = mine if expert_map is None else expert_map[mine].tolist()
        assert local == list(range(count))
        assert placement.experts_of(rank) == mine
        assert placement.num_local(rank) == count
        assert placement.local[mine].tolist() == local
        assert count in (experts // ranks, experts // ranks + 1)
    assert owners == [1] * experts
    assert placement.num_experts == experts


@given(sizes)
def test_linear_is_contiguous_and_round_robin_is_a_modulus(size):
    ranks, experts = size
    assert make_placement(ranks, experts, "linear").owner.diff().ge(0).all()
    assert make_placement(ranks, experts, "round_robin").owner.tolist() == [e % ranks for e in range(experts)]


def _map(ep_size, num_experts, strategy):
    determine_expert_map(ep_size, 0, num_experts, strategy)


def _resolved(ep_size, num_experts, strategy):
    resolve_placement(strategy, ep_size=ep_size, num_experts=num_experts)


@pytest.mark.parametrize("make", [_map, make_placement, _resolved])
@pytest.mark.parametrize(
    ("ep_size", "num_experts", "strategy", "words"),
    [
        (4, 3, "linear", "3 experts cannot be spread over 4 EP ranks"),
        (2, 1, "round_robin", "1 experts cannot be spread over 2"),
        (2, 8, "zigzag", "'zigzag', known values: linear, round_robin"),
        (0, 8, "linear", "not in a group of 0"),
    ],
)
def test_impossible_maps_are_refused(make, ep_size, num_experts, strategy, words):
    with pytest.raises(ConfigError, match=words):
        make(ep_size, num_experts, strategy)


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_group_are_refused(rank):
    with pytest.raises(ConfigError, match=f"EP rank {rank} is not in a group of 4"):
        determine_expert_map(4, rank, 8)


# -- which strategy runs ---------------------------------------------------------------------------------------------

GROUPED = {"ep_size": 4, "num_experts": 16, "n_group": 8, "use_all2all": False}


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nixl_ep"])
def test_round_robin_with_routing_tables_is_kept(backend):
    placement = resolve_placement("round_robin", **GROUPED | {"use_all2all": True, "backend": backend})
    assert (placement.strategy, placement.reason) == ("round_robin", "as asked")


def test_round_robin_without_dispatch_is_kept():
    """TP + EP, more than one expert group: no tables are needed."""
    placement = resolve_placement("round_robin", **GROUPED)
    assert placement.strategy == "round_robin"
    assert placement.owner.tolist() == [0, 1, 2, 3] * 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n_group": 1}, "n_group 1, round robin needs more than one expert group"),
        ({"num_redundant_experts": 2}, "redundant experts and EPLB"),
        ({"enable_eplb": True}, "redundant experts and EPLB"),
        ({"use_all2all": True, "backend": "allgather_reducescatter"}, "allgather_reducescatter has no routing tables"),
        ({"use_all2all": True, "backend": "deepep_high_throughput"}, "deepep_high_throughput has no routing tables"),
        ({"ep_size": 1}, "one EP rank"),
    ],
    ids=str,
)
def test_round_robin_falls_back_and_says_why(changes, why):
    placement = resolve_placement("round_robin", **GROUPED | changes)
    assert placement.strategy == "linear"
    assert "round_robin was asked for and linear is used" in placement.reason
    assert why in placement.reason
    assert torch.equal(placement.owner, make_placement(placement.ep_size, 16).owner)


@pytest.mark.parametrize("changes", [{}, {"n_group": 1}, {"enable_eplb": True}, {"use_all2all": True}], ids=str)
def test_linear_is_always_as_asked(changes):
    placement = resolve_placement("linear", **GROUPED | changes)
    assert (placement.strategy, placement.reason) == ("linear", "as asked")


def test_ranks_per_node_defaults_to_one_host():
    assert resolve_placement("linear", ep_size=4, num_experts=8).ranks_per_node == 4
    assert resolve_placement("linear", ep_size=4, num_experts=8, ranks_per_node=2).ranks_per_node == 2


# -- topology is not a weight ----------------------------------------------------------------------------------------


def test_the_map_is_not_part_of_state_dict():
    """Zeroing and loading all of `state_dict` leaves map and placement of a rank as they were."""
    weights = make_weights(make_config(10, 4, 64, 32), torch.float32)
    layers = run_threads(2, lambda comm: make_layer(weights, make_placement(2, 10), comm, allgather_reducescatter))
    before = layers[1].expert_map.clone()
    names = layers[1].state_dict()
    assert not [name for name in names if "map" in name or "placement" in name or "owner" in name]
    for tensor in names.values():
        assert tensor.data_ptr() != layers[1].expert_map.data_ptr()
        tensor.zero_()
    layers[1].load_state_dict(layers[0].state_dict())
    assert torch.equal(layers[1].expert_map, before)
    assert layers[1].placement.owner.tolist() == [0] * 5 + [1] * 5
