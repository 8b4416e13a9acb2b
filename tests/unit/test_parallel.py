"""From flags to groups, to the decision table, to the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_course.config import GLM_5_1
from moe_course.errors import BackendUnavailable, ConfigError
from moe_course.parallel import MoEParallel, ParallelConfig, make_plan, moe_parallel, rank_groups

TABLES = json.loads((Path(__file__).parents[1] / "golden" / "parallel.json").read_text())


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


def split_whenever_tp(plan):
    return {"dispatch": plan.dispatch_group, "reduce": plan.reduce_group, "split": "tp"}


def dispatch_over_ep(plan):
    return row_groups(plan) | {"dispatch": plan.dispatch_group and "ep"}


def sum_whenever_tp(plan):
    return row_groups(plan) | {"reduce": "tp" if plan.parallel.tensor_parallel_size > 1 else None}


def row_groups(plan):
    return {"dispatch": plan.dispatch_group, "reduce": plan.reduce_group, "split": plan.split_group}


def check_row_groups(row, groups_of=row_groups) -> None:
    """Raise AssertionError unless rows are moved, added up and split over the groups of the table."""
    made = plan(
        tensor_parallel_size=row["tp"],
        data_parallel_size=row["dp"],
        prefill_context_parallel_size=row["pcp"],
        enable_expert_parallel=row["ep"],
        sequence_parallel_moe=row["sp"],
    )
    assert groups_of(made) == {role: row[role] for role in ("dispatch", "reduce", "split")}
    assert made.sequence_parallel == (row["split"] == "tp")
    assert made.as_dict()["dispatch_group"] == row["dispatch"]


@pytest.mark.parametrize("row", TABLES["groups_of_rows"], ids=str)
def test_groups_that_rows_meet_in(row):
    """vLLM's naive dispatch: over EP with sequence parallel, otherwise over DP, otherwise over PCP."""
    check_row_groups(row)


@pytest.mark.parametrize("wrong", [split_whenever_tp, dispatch_over_ep, sum_whenever_tp])
def test_wrong_groups_of_rows_are_caught(wrong):
    caught = 0
    for row in TABLES["groups_of_rows"]:
        try:
            check_row_groups(row, wrong)
        except AssertionError:
            caught += 1
    assert caught


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"data_parallel_size": 2}, "the sizes are 1 and 2"),
        ({"tensor_parallel_size": 2}, "the sizes are 2 and 1"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": False}, "parallelism is off"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "all2all_backend": "deepep_v2"}, "is deepep_v2"),
    ],
)  # fmt: skip
def test_sequence_parallel_cannot_be_forced(flags, says):
    with pytest.raises(ConfigError, match=says):
        plan(sequence_parallel_moe=True, **flags)


def test_ranks_of_a_pipeline_hold_the_sparse_layers_of_their_stage():
    """GLM-5.1: the first three of 78 layers are dense."""
    found = plan(data_parallel_size=2, pipeline_parallel_size=2)
    assert [found.rank(rank).layers for rank in range(4)] == [[*range(3, 39)], [*range(39, 78)]] * 2
    assert [found.rank(rank).ep_rank for rank in range(4)] == [0, 0, 1, 1]
    assert found.rank(1).experts == found.rank(0).experts == [*range(128)]


def test_external_copies_share_nothing():
    """Ranks of copy 1 are those of copy 0, moved on; no group holds ranks of both."""
    alone = plan(data_parallel_size=2, tensor_parallel_size=2)
    twice = plan(data_parallel_size=2, tensor_parallel_size=2, external_data_parallel_size=2)
    assert (alone.world_size, twice.world_size, twice.moe) == (4, 8, alone.moe)
    for rank in range(8):
        mine, first = twice.rank(rank), alone.rank(rank % 4)
        assert (mine.external_dp, mine.ep_rank, mine.experts) == (rank // 4, first.ep_rank, first.experts)
        for kind, members in first.groups.items():
            assert mine.groups[kind] == [member + 4 * (rank // 4) for member in members]


def test_rank_outside_the_world_is_refused():
    with pytest.raises(ConfigError, match="rank 4 is not in a world of 4"):
        plan(data_parallel_size=4).rank(4)


def test_groups_of_a_large_world_are_made_once(monkeypatch):
    """Otherwise a plan of 1,024 ranks makes them 1,024 times."""
    calls = []
    monkeypatch.setattr("moe_course.parallel.rank_groups", lambda *a, **k: calls.append(1) or rank_groups(*a, **k))
    made = plan(tensor_parallel_size=8, data_parallel_size=16, pipeline_parallel_size=8)
    assert [made.rank(rank).rank for rank in range(1024)] == list(range(1024))
    assert len(calls) == 1


def test_plans_that_are_refused_can_be_looked_at():
    flags = {"data_parallel_size": 2, "prefill_context_parallel_size": 3, "enable_expert_parallel": False}
    found = make_plan(ParallelConfig(all2all_backend="nixl_ep", **flags), GLM_5_1, strict=False, transport="vendor")
    assert [type(error) for error in found.refusals] == [ConfigError, ConfigError, BackendUnavailable]
    assert found.as_dict()["refused"] == [str(error) for error in found.refusals]
    with pytest.raises(ConfigError, match="data_parallel_size 2 with prefill_context_parallel_size 3"):
        make_plan(ParallelConfig(**flags), GLM_5_1)


@pytest.mark.parametrize("pp", [1, 2])
def test_note_on_expert_parallelism_that_changes_nothing(pp):
    found = plan(pipeline_parallel_size=pp)
    assert not found.moe.use_ep and len(found.notes) == 1
    assert "changes nothing: dp * pcp * tp = 1" in found.notes[0]
    assert plan(pipeline_parallel_size=pp, enable_expert_parallel=False).notes == ()


def test_note_on_stages_without_layers():
    found = plan(data_parallel_size=2, pipeline_parallel_size=80)
    assert found.notes == ("80 pipeline stages for 78 layers: 2 without any",)


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
