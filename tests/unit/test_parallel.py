"""From flags to groups, to the decision table, to the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_course.config import GLM_5_1
from moe_course.errors import BackendUnavailable, ConfigError
from moe_course.parallel import MoEParallel, ParallelConfig, make_plan, moe_parallel, rank_groups

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


# -- decision table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLES["moe_parallel"], ids=lambda row: f"tp{row['tp']}-dp{row['dp']}-pcp{row['pcp']}")
@pytest.mark.parametrize("flag", ["off", "on"])
def test_decision_table(row, flag):
    """Which matrices are cut, which experts are spread, and whether rows travel."""
    tp_size, ep_size, use_ep = row[flag]
    found = moe_parallel(row["tp"], row["dp"], row["pcp"], enable_expert_parallel=flag == "on")
    assert found == MoEParallel(tp_size, ep_size, use_ep, flag == "on" and row["all2all"])


@pytest.mark.parametrize(
    "row",
    [row for row in TABLES["moe_parallel"] if row["all2all_sp"] is not None],
    ids=lambda row: f"tp{row['tp']}-dp{row['dp']}-pcp{row['pcp']}",
)
@pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])
def test_decision_table_with_sequence_parallel(row, flag):
    """Sequence parallelism needs tp > 1 and dp > 1; then rows travel, unless EP is off."""
    found = moe_parallel(row["tp"], row["dp"], row["pcp"], enable_expert_parallel=flag, sequence_parallel=True)
    assert found.use_all2all == (flag and row["all2all_sp"])


# -- plan ------------------------------------------------------------------------------------------------------------


def plan(experts: int = 256, n_group: int = 1, **flags):
    from dataclasses import replace

    return make_plan(ParallelConfig(**flags), replace(GLM_5_1, n_routed_experts=experts, n_group=n_group))


def test_data_parallel_plan():
    found = plan(data_parallel_size=4)
    assert found.world_size == 4
    assert found.moe == MoEParallel(1, 4, True, True)
    assert found.backend.name == "allgather_reducescatter"
    assert [found.placement.num_local(rank) for rank in range(4)] == [64] * 4
    assert found.notes == ()


def test_tensor_parallel_plan_moves_no_rows():
    found = plan(tensor_parallel_size=4)
    assert found.moe == MoEParallel(1, 4, True, False)
    assert found.backend.name == "no_dp_ep"
    assert "dp = pcp = 1" in found.backend.reason and "allgather_reducescatter is not used" in found.backend.reason


def test_plan_without_expert_parallel():
    found = plan(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=False)
    assert found.moe == MoEParallel(4, 1, False, False)
    assert found.placement.ep_size == 1
    assert found.backend.name == "allgather_reducescatter" and "slice of each expert" in found.backend.reason
    assert (found.dispatch_group, found.reduce_group, found.split_group) == ("dp", "tp", None)


def test_one_process_plan():
    found = plan()
    assert found.world_size == 1
    assert found.moe == MoEParallel(1, 1, False, False)
    assert found.placement.experts_of(0) == list(range(256))


def test_world_size_is_the_product():
    parallel = ParallelConfig(2, 3, 5, 7)
    assert parallel.world_size == 2 * 3 * 5 * 7


def test_pipeline_stages_do_not_share_experts():
    """The EP group lives inside one pipeline stage."""
    found = plan(data_parallel_size=2, pipeline_parallel_size=2)
    assert (found.world_size, found.moe.ep_size) == (4, 2)


def test_note_on_an_uneven_number_of_experts():
    found = plan(experts=10, data_parallel_size=4)
    assert len(found.notes) == 1
    assert "10 experts on 4 ranks" in found.notes[0] and "E % R = 0" in found.notes[0]
    assert found.as_dict()["experts_per_rank"] == [3, 3, 2, 2]


def test_note_on_the_placement():
    """GLM-5.1 has one expert group: round robin is never used."""
    found = plan(data_parallel_size=4, expert_placement_strategy="round_robin")
    assert found.placement.strategy == "linear"
    assert found.notes == (found.placement.reason,)
    assert "n_group 1" in found.notes[0]


@pytest.mark.parametrize("old", ["naive", "pplx"])
def test_note_on_old_backend_names(old):
    found = plan(data_parallel_size=2, all2all_backend=old)
    assert found.backend.name == "allgather_reducescatter"
    assert found.notes == (f"{old} is an old name, allgather_reducescatter runs instead",)


def test_round_robin_without_dispatch_gets_no_note():
    found = plan(n_group=8, tensor_parallel_size=4, expert_placement_strategy="round_robin")
    assert found.placement.strategy == "round_robin"
    assert found.notes == ()


@pytest.mark.parametrize("name", ["tensor", "data", "prefill_context", "pipeline"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}_parallel_size is 0"):
        ParallelConfig(**{f"{name}_parallel_size": 0})


def test_plans_that_cannot_be_made_are_refused():
    with pytest.raises(ConfigError, match="8 experts cannot be spread over 9 EP ranks"):
        plan(experts=8, data_parallel_size=9)
    with pytest.raises(ConfigError, match="zigzag"):
        plan(data_parallel_size=2, expert_placement_strategy="zigzag")
    with pytest.raises(BackendUnavailable, match="teleport.*choose from: allgather_reducescatter"):
        plan(data_parallel_size=2, all2all_backend="teleport")


def test_plan_as_dict_is_json():
    found = plan(experts=10, data_parallel_size=2, tensor_parallel_size=2, all2all_backend="naive").as_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["world_size"], found["dp"], found["tp"], found["pcp"], found["pp"]) == (4, 2, 2, 1, 1)
    assert (found["ep_size"], found["moe_tp_size"], found["use_all2all"]) == (4, 1, True)
    assert len(found["notes"]) == 2
