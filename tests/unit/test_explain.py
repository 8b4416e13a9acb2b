"""Every decision of a plan is said in words, and the words belong to that plan and to no other."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_course.config import GLM_5_1, MoEConfig
from moe_course.parallel import ParallelConfig, Plan, make_plan
from moe_course.planner.explain import explain

ALWAYS = ["layout", "EP group", "experts", "sequence parallel", "dispatch", "manager", "backend", "placement", "sum",
          "shared expert", "pipeline"]  # fmt: skip
SMALL = MoEConfig(16, 24, 20, 3, ("dense", "sparse", "sparse", "dense", "sparse"), n_shared_experts=1, n_group=4)


def plan(config: MoEConfig = GLM_5_1, **flags) -> Plan:
    return make_plan(ParallelConfig(**flags), config, strict=False)


def said(made: Plan) -> dict[str, str]:
    return {step.topic: step.text for step in explain(made)}


def check_explained(made: Plan, texts: dict[str, str]) -> None:
    """Raise AssertionError unless the texts say what the plan decided. Looks for words, not for sentences."""
    parallel, moe = made.parallel, made.moe
    assert ("slice of all" in texts["experts"]) == (moe.tp_size > 1), "cut or whole"
    assert (f"over {moe.ep_size} ranks" in texts["experts"]) == moe.use_ep, "EP size"
    assert texts["sequence parallel"].startswith("Yes") == made.sequence_parallel, "sequence parallel"
    assert texts["dispatch"].startswith("Yes") == moe.use_all2all, "all2all of the layers"
    assert ("here yes" in texts["manager"]) == parallel.use_all2all, "manager"
    assert ("although" in texts["manager"]) == (parallel.use_all2all != moe.use_all2all), "two predicates"
    assert ("group" in texts) == (made.dispatch_group is not None), "is there a group?"
    if made.dispatch_group:
        size = len(made.groups[made.dispatch_group][0])
        assert f"in {made.dispatch_group.upper()} groups of {size}," in texts["group"], "group of rows"
        assert f"reduce-scatter over {made.dispatch_group.upper()} " in texts["sum"], "way home"
    assert ("One all-reduce over TP" in texts["sum"]) == (made.reduce_group == "tp"), "who adds"
    assert ("PCP ranks then gather" in texts["sum"]) == (made.split_group == "pcp"), "who gathers"
    assert made.backend.reason in texts["backend"], "backend"
    assert (made.backend.warning or "") in texts["backend"], "old name"
    replaced = made.backend.name != parallel.all2all_backend
    assert ("was asked for" in texts["backend"]) == replaced, "another backend than asked for"
    assert parallel.all2all_backend in texts["backend"], "backend asked for"
    if moe.use_ep:
        assert texts["placement"].startswith(f"{made.placement.strategy}, {made.placement.reason}"), "placement"
    repeated = parallel.tensor_parallel_size > 1 and not made.sequence_parallel
    assert (f"The {parallel.tensor_parallel_size} TP ranks repeat" in texts["shared expert"]) == repeated, "shared"
    assert "once" in texts["shared expert"]
    stages = parallel.pipeline_parallel_size
    assert ("One stage" in texts["pipeline"]) == (stages == 1)
    assert stages == 1 or f"{made.config.num_hidden_layers} layers over {stages} stages" in texts["pipeline"]
    assert ("copies" in texts) == (parallel.external_data_parallel_size > 1)
    both = parallel.data_parallel_size > 1 and parallel.prefill_context_parallel_size > 1
    assert ("DP with PCP" in texts) == both
    assert f"{made.world_size} ranks" in texts["layout"] or made.world_size == 1


PLANS = [
    {},
    {"tensor_parallel_size": 4},
    {"tensor_parallel_size": 4, "enable_expert_parallel": False},
    {"data_parallel_size": 4},
    {"data_parallel_size": 4, "enable_expert_parallel": False},
    {"tensor_parallel_size": 2, "data_parallel_size": 4},
    {"tensor_parallel_size": 2, "data_parallel_size": 4, "sequence_parallel_moe": False},
    {"tensor_parallel_size": 2, "data_parallel_size": 4, "enable_expert_parallel": False},
    {"prefill_context_parallel_size": 4},
    {"tensor_parallel_size": 2, "prefill_context_parallel_size": 4},
    {"prefill_context_parallel_size": 4, "enable_expert_parallel": False},
    {"data_parallel_size": 2, "prefill_context_parallel_size": 2},
    {"data_parallel_size": 4, "pipeline_parallel_size": 2},
    {"data_parallel_size": 4, "external_data_parallel_size": 2},
    {"data_parallel_size": 4, "all2all_backend": "pplx"},
    {"data_parallel_size": 4, "all2all_backend": "deepep_v2"},
    {"data_parallel_size": 4, "expert_placement_strategy": "round_robin"},
]


@pytest.mark.parametrize("flags", PLANS, ids=str)
def test_every_decision_is_said(flags):
    made = plan(**flags)
    steps = explain(made)
    topics = [step.topic for step in steps]
    assert [topic for topic in topics if topic in ALWAYS] == ALWAYS and len(set(topics)) == len(topics)
    check_explained(made, said(made))
    for step in steps:
        assert re.search(r"\w+\.py : \w+", step.source), step.source
        assert step.text.endswith(".") and len(step.text) < 420 and "  " not in step.text, step.text
        assert str(step) == f"{step.topic}: {step.text} ({step.source})"


def test_words_of_another_plan_are_caught():
    """Each plan decides at least one thing differently, and the check sees it."""
    made = [plan(**flags) for flags in PLANS]
    for one, other in permutations(made, 2):
        with pytest.raises((AssertionError, KeyError)):
            check_explained(one, said(other))
            print(f"not told apart: {one.parallel} and {other.parallel}")  # shown when it fails


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        ParallelConfig,
        tensor_parallel_size=st.integers(1, 3),
        data_parallel_size=st.integers(1, 3),
        prefill_context_parallel_size=st.integers(1, 2),
        pipeline_parallel_size=st.integers(1, 6),
        external_data_parallel_size=st.integers(1, 2),
        enable_expert_parallel=st.booleans(),
        all2all_backend=st.sampled_from(["allgather_reducescatter", "naive", "deepep_v2", "nixl_ep"]),
        expert_placement_strategy=st.sampled_from(["linear", "round_robin"]),
        sequence_parallel_moe=st.sampled_from([None, False]),
    )
)
def test_every_plan_can_be_explained(parallel):
    made = make_plan(parallel, SMALL, strict=False)
    check_explained(made, said(made))


def test_the_number_of_a_rank_follows_from_its_place():
    """The formula is computed for every rank, with the rank's own coordinates."""
    made = plan(tensor_parallel_size=2, data_parallel_size=3, pipeline_parallel_size=2, external_data_parallel_size=2)
    formula = re.search(r"So rank = (.*?); rank 23 is (.*)\.$", said(made)["layout"])
    assert formula.group(2) == "external_dp 1, dp 2, pp 1, tp 1"
    for rank in range(made.world_size):
        assert eval(formula.group(1), {}, made.rank(rank).coordinates) == rank


@pytest.mark.parametrize(
    ("flags", "conditions"),
    [
        ({}, ["tp is 1", "dp is 1"]),
        ({"data_parallel_size": 2}, ["tp is 1"]),
        ({"tensor_parallel_size": 2}, ["dp is 1"]),
        ({"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}, ["dp is 1"]),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": False},
         ["expert parallelism is off"]),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "all2all_backend": "deepep_v2"},
         ["deepep_v2 is not among its backends"]),
        ({"enable_expert_parallel": False, "all2all_backend": "flashinfer_nvlink_two_sided"},
         ["expert parallelism is off", "tp is 1", "dp is 1", "flashinfer_nvlink_two_sided is not among its backends"]),
    ],
)  # fmt: skip
def test_each_condition_that_keeps_sequence_parallel_off_is_named(flags, conditions):
    assert said(plan(**flags))["sequence parallel"].startswith(f"No: {', '.join(conditions)}. ")


def test_sequence_parallel_turned_off_by_flag():
    text = said(plan(tensor_parallel_size=2, data_parallel_size=2, sequence_parallel_moe=False))["sequence parallel"]
    assert text.startswith("No: ") and "--no-sequence-parallel-moe" in text
    old_name = plan(tensor_parallel_size=2, data_parallel_size=2, all2all_backend="pplx")
    assert said(old_name)["sequence parallel"].startswith("Yes")  # replaced before anything is derived


def test_tensor_parallel_alone_moves_nothing():
    texts = said(plan(tensor_parallel_size=8))
    assert "Nothing crosses the EP group" in texts["dispatch"]
    assert "One all-reduce over TP adds the 8 partial sums" in texts["sum"]
    assert "allgather_reducescatter is not used" in texts["backend"]


def test_why_a_gather_is_not_over_the_ep_group():
    texts = said(plan(tensor_parallel_size=2, data_parallel_size=4, sequence_parallel_moe=False))
    assert "in DP groups of 4, for example 0,2,4,6. Not in the EP group" in texts["group"]
    library = plan(tensor_parallel_size=2, data_parallel_size=4, all2all_backend="deepep_v2")
    assert "deepep_v2 would send over the EP group" in said(library)["group"]
    sliced = replace(library.parallel, enable_expert_parallel=False)
    assert "deepep_v2" not in said(make_plan(sliced, GLM_5_1, strict=False))["group"]


def test_why_a_placement_fell_back():
    text = said(plan(data_parallel_size=6, expert_placement_strategy="round_robin"))["placement"]
    assert "round_robin was asked for and linear is used: the model has n_group 1" in text
    assert "EP rank 0 has 0-42" in text and "the first 4 ranks own one more" in text
    kept = said(plan(SMALL, tensor_parallel_size=4, expert_placement_strategy="round_robin"))["placement"]
    assert kept == "round_robin, as asked: expert e lives on EP rank e % 4."


def test_where_layers_left_over_go():
    text = said(plan(data_parallel_size=2, pipeline_parallel_size=4))["pipeline"]
    assert "0-18, 19-38, 39-58, 59-77, 2 left over: one more for each of 2 stages before the last" in text
    assert "left over" not in said(plan(pipeline_parallel_size=2))["pipeline"]
    assert "routes never do" in text


@pytest.mark.parametrize(
    ("tp", "reason"),
    [(1, "over DP or PCP, not over both"), (2, "knows dp * tp = 4 numbers of rows, and the EP group has 8 ranks")],
)
def test_why_dp_with_pcp_is_refused(tp, reason):
    made = plan(tensor_parallel_size=tp, data_parallel_size=2, prefill_context_parallel_size=2)
    assert reason in said(made)["DP with PCP"] and "ValueError" in said(made)["DP with PCP"]


def test_the_shared_expert_here_and_upstream():
    texts = [said(plan(**flags))["shared expert"] for flags in PLANS]
    assert all("holds it whole" in text and "adds it once, at the end" in text for text in texts)
    assert "vLLM cuts it over TP instead" in texts[1] and "vLLM keeps it whole here, too" in texts[5]
    assert said(plan(replace(GLM_5_1, n_shared_experts=0)))["shared expert"] == "This model has none."
