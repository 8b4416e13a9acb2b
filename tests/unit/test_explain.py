"""Every decision of a plan is said in words, and the words belong to that plan and to no other."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_course.backends.capabilities import KNOWN_BACKENDS, SHAPES
from moe_course.backends.select import AVAILABLE
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
        home = "Over EP " if SHAPES[made.shape].over_ep else f"reduce-scatter over {made.dispatch_group.upper()} "
        assert home in texts["sum"], "way home"
        shape, even = SHAPES[made.shape], made.placement.num_experts % len(made.groups[made.dispatch_group][0]) == 0
        assert (shape.formula in texts["group"]) == even or not shape.over_ep, "rows a token"
    assert ("One all-reduce over TP" in texts["sum"]) == (made.reduce_group == "tp"), "who adds"
    assert ("PCP ranks then gather" in texts["sum"]) == (made.split_group == "pcp"), "who gathers"
    assert made.backend.reason in texts["backend"], "backend"
    assert (made.backend.warning or "") in texts["backend"], "old name"
    asked, runs = parallel.all2all_backend, made.backend.name
    stands = moe.use_all2all and made.backend.warning is None and runs != asked
    assert (f"{runs}, as asked" in texts["backend"]) == (runs == asked), "as asked"
    assert (f"{runs}, which stands for {asked}: " in texts["backend"]) == stands, "shape of a library"
    replaced = runs != asked and not stands
    assert (f"{runs}, where {asked} was asked for" in texts["backend"]) == replaced, "another backend than asked for"
    assert ("upstream" in texts) == moe.use_all2all, "what vLLM has"
    if moe.use_all2all:
        applies = {"experts": "Experts apply", "source": "The source applies", "combine": "Combine applies"}
        who = KNOWN_BACKENDS[made.backend.backend].weights_applied_by
        assert [text for key, text in applies.items() if text in texts["upstream"]] == [applies[who]], "weights"
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


DEFAULT = "allgather_reducescatter"
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
    *({"data_parallel_size": 4, "all2all_backend": name} for name in KNOWN_BACKENDS if name != DEFAULT),
    {"tensor_parallel_size": 2, "data_parallel_size": 4, "all2all_backend": "deepep_v2"},
    {"tensor_parallel_size": 2, "data_parallel_size": 4, "all2all_backend": "nixl_ep"},
    {"tensor_parallel_size": 2, "prefill_context_parallel_size": 4, "all2all_backend": "deepep_high_throughput"},
    {"data_parallel_size": 4, "all2all_backend": "nixl_ep", "enable_expert_parallel": False},
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
        all2all_backend=st.sampled_from(AVAILABLE),
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
    assert "in EP groups of 8" in said(library)["group"]
    assert "The 2 TP ranks hold the same rows, and each sends them" in said(library)["group"]
    sliced = make_plan(replace(library.parallel, enable_expert_parallel=False), GLM_5_1)
    assert "in DP groups of 4" in said(sliced)["group"] and "deepep_v2" not in said(sliced)["group"]
    assert "So vLLM makes the one of deepep_v2, and needs its library" in said(sliced)["manager"]


def test_a_library_that_was_asked_for_and_is_missing():
    """The plan says what is missing, and shows how the shape that stands for it moves the rows."""
    flags = ParallelConfig(data_parallel_size=4, all2all_backend="nixl_ep")
    texts = said(make_plan(flags, GLM_5_1, strict=False, transport="vendor"))
    assert "needs the package nixl_ep" in texts["backend"]
    assert texts["backend"].endswith("The other steps show how low_latency moves rows in its place.")
    assert "to a place kept for it" in texts["group"]


@pytest.mark.parametrize(
    ("backend", "ranks", "says"),
    [  # GLM-5.1, from a separate calculation; two hops with 8 ranks a node
        ("allgather_reducescatter", 8, "That is R - 1 = 7 rows a token."),
        ("all_to_all", 8, "K * (1 - 1/R): 7.00 rows a token on average."),
        ("nixl_ep", 16, "K * (1 - 1/R): 7.50 rows a token on average."),
        ("mori_low_latency", 8, "4.63 rows a token on average."),
        ("flashinfer_nvlink_one_sided", 64, "7.56 rows a token on average."),
        ("deepep_v2", 8, "With N = 1 nodes, E = 256, K = 8"),
        ("deepep_v2", 8, "0.00 rows a token on average, and 4.63 inside nodes."),
        ("deepep_v2", 16, "With N = 2 nodes, E = 256, K = 8"),
        ("two_hop", 32, "2.71 rows a token on average"),
    ],
)
def test_how_many_rows_a_token_sends(backend, ranks, says):
    made = plan(data_parallel_size=ranks, all2all_backend=backend)
    made = replace(made, placement=replace(made.placement, ranks_per_node=8))
    assert says in said(made)["group"]


@pytest.mark.parametrize(
    ("flags", "hidden", "says"),
    [
        ({"all2all_backend": "deepep_low_latency"}, 2880, "rows of H = 2880 are padded to 3072"),
        ({"all2all_backend": "deepep_low_latency"}, 8193, "hidden_size 8193 is too large for deepep_low_latency"),
        (
            {"all2all_backend": "deepep_high_throughput"},
            6144,
            "combine takes bfloat16 only; E % R = 0 is needed; no CUDA",
        ),
        (
            {"all2all_backend": "two_hop"},
            6144,
            "vLLM has no name for two_hop: with --reduce-in-node it is what deepep_high_throughput does across nodes.",
        ),
        (
            {"all2all_backend": "mori_low_latency"},
            6144,
            "Across nodes a row goes once to each other node (DeepEP takes 8 ranks for one), which hands it on, and "
            "one sum for each node comes home",
        ),
        ({"all2all_backend": "deepep_v2"}, 6144, "only with VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE=1"),
        ({"all2all_backend": "all_to_all"}, 6144, "it is what plain all-to-all code does. The source applies"),
    ],
    ids=str,
)
def test_what_upstream_does_differently(flags, hidden, says):
    assert says in said(plan(replace(GLM_5_1, hidden_size=hidden), data_parallel_size=4, **flags))["upstream"]


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
