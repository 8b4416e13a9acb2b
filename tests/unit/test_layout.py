"""Where ranks stand: the groups of a world, the layers of a stage, coordinates and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_course.config import GLM_5_1
from moe_course.errors import ConfigError
from moe_course.layout import rank_groups, stage_layers
from moe_course.parallel import ParallelConfig, make_plan

TABLES = json.loads((Path(__file__).parents[1] / "golden" / "parallel.json").read_text())
KINDS = ("tp", "pcp", "pp", "dp", "ep")


# -- groups ----------------------------------------------------------------------------------------------------------


def check_groups(make, table) -> None:
    """Raise AssertionError unless all groups have the members of the table. The order of groups has no meaning."""
    groups = make(table["world_size"], **table["sizes"])
    for kind in KINDS:
        assert sorted(groups[kind]) == sorted(table[kind]), kind


@pytest.mark.parametrize("table", TABLES["groups"], ids=lambda table: str(table["sizes"]))
def test_groups_equal_the_tables(table):
    check_groups(rank_groups, table)


def ep_over_pipeline_stages(world_size, **sizes):
    return rank_groups(world_size, **sizes) | {"ep": [list(range(world_size))]}


def ep_is_tp(world_size, **sizes):
    groups = rank_groups(world_size, **sizes)
    return groups | {"ep": groups["tp"]}


def dp_fastest(world_size, *, dp=1, pp=1, pcp=1, tp=1):
    groups = rank_groups(world_size, dp=tp, pp=pp, pcp=pcp, tp=dp)
    return groups | {"dp": groups["tp"], "tp": groups["dp"]}


@pytest.mark.parametrize("wrong", [ep_over_pipeline_stages, ep_is_tp, dp_fastest])
def test_known_faults_are_caught(wrong):
    with pytest.raises(AssertionError):
        check_groups(wrong, TABLES["groups"][0])


@given(*[st.integers(1, 3)] * 5)
def test_every_rank_is_in_one_group_of_each_kind(external, dp, pp, pcp, tp):
    """Groups of a kind partition the world; the EP group is the product of dp, pcp and tp, in flat order."""
    world = external * dp * pp * pcp * tp
    groups = rank_groups(world, dp=dp, pp=pp, pcp=pcp, tp=tp)
    sizes = {"dp": dp, "pp": pp, "pcp": pcp, "tp": tp, "ep": dp * pcp * tp}
    for kind in KINDS:
        assert sorted(rank for group in groups[kind] for rank in group) == list(range(world))
        assert {len(group) for group in groups[kind]} == {sizes[kind]}
    for group in groups["ep"]:
        assert group == sorted(group)  # dp slowest, tp fastest: the position in the group is the flat EP rank
        stages = {rank // (pcp * tp) % pp for rank in group}
        assert len(stages) == 1


def test_world_that_is_not_a_multiple_is_refused():
    with pytest.raises(ConfigError, match="world size 6 is not a multiple of dp \\* pp \\* pcp \\* tp = 4"):
        rank_groups(6, dp=2, tp=2)


# -- stages and coordinates -----------------------------------------------------------------------------------------


def remainder_to_the_first(layers: int, stage: int, stages: int) -> tuple[int, int]:
    base, rest = divmod(layers, stages)
    return stage * base + min(stage, rest), (stage + 1) * base + min(stage + 1, rest)


def check_stages(row, layers_of=stage_layers) -> None:
    """Raise AssertionError unless the stages have the layers of the table, one after the other."""
    stages, first = row["stages"], 0
    for stage, count in enumerate(stages):
        assert layers_of(row["layers"], stage, len(stages)) == (first, first + count)
        first += count
    assert first == row["layers"]


@pytest.mark.parametrize("row", TABLES["layers_per_stage"], ids=lambda row: str(row["stages"]))
def test_layers_of_pipeline_stages(row):
    check_stages(row)


def test_another_split_of_layers_is_caught():
    with pytest.raises(AssertionError):
        check_stages(TABLES["layers_per_stage"][2], remainder_to_the_first)
    with pytest.raises(AssertionError):
        check_stages(TABLES["layers_per_stage"][-1], remainder_to_the_first)


@given(*[st.integers(1, 3)] * 5)
def test_coordinates_give_the_rank_back(external, dp, pp, pcp, tp):
    made = make_plan(ParallelConfig(tp, dp, pcp, pp, external_data_parallel_size=external), GLM_5_1, strict=False)
    for rank in range(made.world_size):
        mine = made.rank(rank)
        assert (((mine.external_dp * dp + mine.dp) * pp + mine.pp) * pcp + mine.pcp) * tp + mine.tp == rank
        assert mine.ep_rank == (mine.dp * pcp + mine.pcp) * tp + mine.tp == mine.groups["ep"].index(rank)
        assert all(rank in members for members in mine.groups.values())
