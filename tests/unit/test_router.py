"""The router against vectors computed by hand, against Hugging Face, and against its own invariants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import make_config, make_weights

from moe_course.errors import ConfigError
from moe_course.router import best_first, grouped_topk, route
from moe_course.rows import row_multiple

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "router.json").read_text())


def check_vector(topk, vector) -> None:
    """Raise AssertionError unless `topk` gives the ids of the vector, in order, and its weights."""
    bias = None if vector["bias"] is None else torch.tensor(vector["bias"], dtype=torch.float32)
    logits = torch.tensor(vector["logits"], dtype=torch.float32)
    weights, ids = topk(logits, e_score_correction_bias=bias, **vector["arguments"])
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert ids.tolist() == vector["ids"]
    assert torch.isfinite(weights).all()
    torch.testing.assert_close(weights, torch.tensor(vector["weights"], dtype=torch.float32), rtol=0, atol=2e-6)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_golden_vectors(vector):
    check_vector(grouped_topk, vector)


# -- known-wrong variants: each must fail one of the vectors -----------------------------------------------------------


def make_wrong(fault: str):
    """The same algorithm with one fault, in the words of a public bug report."""

    def topk(
        logits,
        top_k,
        *,
        n_group=1,
        topk_group=1,
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        e_score_correction_bias=None,
    ):
        scores = logits.sigmoid() if scoring_func == "sigmoid" else logits.softmax(-1)
        with_bias = e_score_correction_bias is not None
        choice = scores + e_score_correction_bias if with_bias else scores
        if n_group > 1:
            grouped = choice.view(len(choice), n_group, -1)
            best_two = grouped.topk(2, dim=-1).values.sum(-1)
            group_scores = best_two if with_bias else grouped.amax(-1)
            if fault == "groups by their maximum":
                group_scores = grouped.amax(-1)
            if fault == "groups by their two best without a bias too":
                group_scores = best_two
            kept = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False).unsqueeze(-1)
            fill = 0.0 if fault == "dropped groups filled with 0" else float("-inf")
            choice = grouped.masked_fill(dropped, fill).view_as(choice)
        if fault == "ties to the highest index":
            ids = choice.shape[1] - 1 - choice.flip(1).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        else:
            ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        if fault == "ascending order":
            ids = ids.flip(1)
        if fault == "bias not used for the choice":
            ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = (choice if fault == "weights from the biased scores" else scores).gather(1, ids)
        if fault == "scale before the renormalisation":
            weights = weights * routed_scaling_factor
        if norm_topk_prob and fault != "no renormalisation":
            weights = weights / (weights.sum(-1, keepdim=True) + (0.0 if fault == "no epsilon" else 1e-20))
        if fault not in ("no scale", "scale before the renormalisation"):
            weights = weights * routed_scaling_factor
        return weights, ids.to(torch.int32)

    return topk


def caught_by(topk) -> list[str]:
    """Names of the vectors that a function fails."""
    found = []
    for vector in VECTORS:
        try:
            check_vector(topk, vector)
        except AssertionError:
            found.append(vector["name"])
    return found


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ("dropped groups filled with 0", "R3"),
        ("weights from the biased scores", "R1"),
        ("no renormalisation", "R7: renormalised"),
        ("no epsilon", "R5"),
        ("groups by their maximum", "with a bias a group"),
        ("groups by their two best without a bias too", "without a bias a group"),
        ("ties to the highest index", "row B"),
        ("ascending order", "row A, one group"),
        ("bias not used for the choice", "R1"),
        ("no scale", "row A, one group"),
        ("scale before the renormalisation", "row A, one group"),
    ],
)
def test_known_faults_are_caught(fault, caught):
    """By the vector that was made for them, and by others."""
    assert any(name.startswith(caught) for name in caught_by(make_wrong(fault)))


def test_the_wrong_variants_differ_by_their_fault_only():
    assert caught_by(make_wrong("none")) == []


# -- an independent implementation -------------------------------------------------------------------------------------


def hugging_face_router(experts, top_k, n_group, topk_group, norm_topk_prob, weight, bias, scale=2.5):
    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

    config = GlmMoeDsaConfig(
        hidden_size=weight.shape[1],
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=scale,
        num_hidden_layers=1,
    )
    router = GlmMoeDsaTopkRouter(config)
    with torch.no_grad():
        router.weight.copy_(weight)
        router.e_score_correction_bias.copy_(bias)
    return router


def sorted_by_id(weights, ids):
    ids, order = ids.long().sort(dim=1)
    return weights.gather(1, order), ids


@pytest.mark.parametrize("norm_topk_prob", [True, False], ids=["renormalised", "raw"])
@pytest.mark.parametrize(
    ("experts", "top_k", "n_group", "topk_group"),
    [(16, 4, 1, 1), (10, 4, 1, 1), (16, 4, 4, 2), (256, 8, 8, 4), (256, 8, 1, 1), (8, 8, 2, 2), (8, 1, 4, 1)],
)
@torch.no_grad()
def test_equals_hugging_face(experts, top_k, n_group, topk_group, norm_topk_prob):
    """Random logits and a bias of both signs; an identity gate hands the logits over unchanged."""
    generator = torch.Generator().manual_seed(experts + top_k + n_group)
    logits = torch.randn(200, experts, generator=generator) * 2
    bias = torch.randn(experts, generator=generator) * 0.5 - 0.3
    router = hugging_face_router(experts, top_k, n_group, topk_group, norm_topk_prob, torch.eye(experts), bias)
    _, their_weights, their_ids = router(logits)
    weights, ids = grouped_topk(
        logits,
        top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
        e_score_correction_bias=bias,
    )
    (weights, ids), (their_weights, their_ids) = sorted_by_id(weights, ids), sorted_by_id(their_weights, their_ids)
    assert torch.equal(ids, their_ids)
    torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@torch.no_grad()
def test_route_equals_hugging_face_through_the_gate(dtype):
    """Rows and gate weights of the model's dtype are widened to fp32 before the product."""
    config = make_config(16, 4, 64, 32, n_group=4, topk_group=2)
    weights = make_weights(config, dtype)
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    router = hugging_face_router(16, 4, 4, 2, True, weights.gate.float(), weights.bias)
    _, their_weights, their_ids = router(rows)
    ours, theirs = (
        sorted_by_id(*route(rows, weights.gate, weights.bias, config)),
        sorted_by_id(their_weights, their_ids),
    )
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-6)


# -- invariants --------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Logits and bias on a coarse grid, so that ties are common, and groups that fit."""
    n_group = draw(st.sampled_from([1, 1, 2, 4]))
    per_group = draw(st.integers(2, 5))
    topk_group = draw(st.integers(1, n_group))
    top_k = draw(st.integers(1, per_group * topk_group))
    experts, rows = n_group * per_group, draw(st.integers(0, 4))
    grid = st.integers(-16, 16)
    logits = draw(st.lists(st.lists(grid, min_size=experts, max_size=experts), min_size=rows, max_size=rows))
    bias = draw(st.none() | st.lists(grid, min_size=experts, max_size=experts))
    return {
        "logits": torch.tensor(logits, dtype=torch.float32).view(rows, experts) / 4,
        "bias": None if bias is None else torch.tensor(bias, dtype=torch.float32) / 16,
        "arguments": {"top_k": top_k, "n_group": n_group, "topk_group": topk_group},
        "scale": draw(st.sampled_from([1.0, 2.5, 0.37])),
    }


def solve(problem, **changes):
    arguments = problem["arguments"] | {"routed_scaling_factor": problem["scale"]} | changes
    logits = arguments.pop("logits", problem["logits"])
    bias = arguments.pop("bias", problem["bias"])
    return grouped_topk(logits, arguments.pop("top_k"), e_score_correction_bias=bias, **arguments)


@given(problems())
def test_weights_sum_to_the_scale(problem):
    """Whatever the bias: it chooses and never weighs."""
    weights, _ = solve(problem)
    total = torch.full((len(weights),), problem["scale"])
    torch.testing.assert_close(weights.sum(dim=1), total, rtol=1e-5, atol=0)


@given(problems())
def test_weights_are_the_unbiased_scores_of_the_ids(problem):
    weights, ids = solve(problem, norm_topk_prob=False)
    torch.testing.assert_close(weights, problem["logits"].sigmoid().gather(1, ids.long()) * problem["scale"])


@given(problems())
def test_equals_a_search_by_hand(problem):
    """Groups and experts by explicit sorting of (-score, index) pairs: ids, order and ties included."""
    bias, arguments = problem["bias"], problem["arguments"]
    choice = problem["logits"].sigmoid() + (0 if bias is None else bias)
    _, ids = solve(problem)
    per_group = choice.shape[1] // arguments["n_group"]
    for row, found in zip(choice, ids.tolist(), strict=True):
        groups = list(row.split(per_group))
        if bias is None:
            scores = [float(group.max()) for group in groups]
        else:
            scores = [float(group.sort(descending=True).values[:2].sum()) for group in groups]
        best = sorted(range(len(groups)), key=lambda group: (-scores[group], group))
        kept = best[: arguments["topk_group"]] if len(groups) > 1 else [0]
        allowed = [expert for expert in range(len(row)) if expert // per_group in kept]
        values = row.tolist()
        assert found == sorted(allowed, key=lambda expert: (-values[expert], expert))[: arguments["top_k"]]


@given(problems(), st.randoms(use_true_random=False))
def test_rows_are_independent(problem, random):
    """Permuting, repeating or leaving out rows does the same to the result, to the bit."""
    weights, ids = solve(problem)
    picks = [random.randrange(len(ids)) for _ in range(5)] if len(ids) else []
    picked_weights, picked_ids = solve(problem, logits=problem["logits"][picks])
    assert torch.equal(picked_ids, ids[picks])
    assert torch.equal(picked_weights, weights[picks])


@given(st.permutations(range(12)), st.permutations(range(12)), st.booleans())
def test_renaming_experts_renames_the_ids(order, ranks, with_bias):
    """One group, no ties: permuted logits and bias give the permuted ids and the same weights."""
    logits = torch.tensor([ranks, ranks[::-1]], dtype=torch.float32) / 3 - 2
    bias = torch.linspace(-0.3, 0.31, 12) if with_bias else None
    order = torch.tensor(order)
    weights, ids = grouped_topk(logits, 4, e_score_correction_bias=bias)
    other_weights, other_ids = grouped_topk(
        logits[:, order], 4, e_score_correction_bias=None if bias is None else bias[order]
    )
    (weights, ids), (other_weights, other_ids) = (
        sorted_by_id(weights, ids),
        sorted_by_id(other_weights, order[other_ids.long()]),
    )
    assert torch.equal(ids, other_ids)
    torch.testing.assert_close(weights, other_weights, rtol=0, atol=1e-6)


@given(problems())
def test_every_id_lies_in_a_kept_group(problem):
    """Also where all choice scores are negative."""
    bias = torch.full((problem["logits"].shape[1],), -2.0) + (0 if problem["bias"] is None else problem["bias"])
    _, ids = solve(problem, bias=bias)
    groups = problem["arguments"]["n_group"]
    per_group = problem["logits"].shape[1] // groups
    for row in ids.tolist():
        assert len({expert // per_group for expert in row}) <= problem["arguments"]["topk_group"]
        assert len(set(row)) == len(row)


def test_ties_go_to_the_lowest_index():
    weights, ids = grouped_topk(torch.zeros(3, 64), 8)
    assert ids.tolist() == [list(range(8))] * 3
    assert torch.equal(weights, torch.full((3, 8), 0.125))


def test_columns_stand_in_descending_choice_order_not_weight_order():
    bias = torch.tensor([0.0, 2.0, 0.0, 1.0])
    weights, ids = grouped_topk(torch.tensor([[3.0, -3.0, 2.0, 0.0]]), 3, e_score_correction_bias=bias)
    assert ids.tolist() == [[1, 3, 0]]
    assert weights[0].argsort().tolist() == [0, 1, 2]


@pytest.mark.parametrize("n_group", [1, 4])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_zero_rows(n_group, with_bias):
    bias = torch.zeros(16) if with_bias else None
    weights, ids = grouped_topk(torch.zeros(0, 16), 4, n_group=n_group, topk_group=1, e_score_correction_bias=bias)
    assert (weights.shape, weights.dtype) == ((0, 4), torch.float32)
    assert (ids.shape, ids.dtype) == ((0, 4), torch.int32)


def test_route_takes_zero_rows():
    config = make_config(10, 4, 64, 32)
    weights = make_weights(config, torch.bfloat16)
    topk_weights, topk_ids = route(torch.zeros(0, 64, dtype=torch.bfloat16), weights.gate, weights.bias, config)
    assert topk_weights.shape == topk_ids.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_scored_in_fp32(dtype):
    logits = torch.tensor([[1.0, 1.0078125, 3.0, -2.0]]).to(dtype)
    weights, ids = grouped_topk(logits, 3)
    wide_weights, wide_ids = grouped_topk(logits.float(), 3)
    assert torch.equal(weights, wide_weights) and torch.equal(ids, wide_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_routing_of_a_row_does_not_depend_on_its_batch(torch_threads, dtype):
    """Where the gate's products are row-invariant, a row alone gets the same ids and the same bits."""
    config = make_config(10, 4, 64, 32)
    weights = make_weights(config, dtype)
    rows = torch.randn(37, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = route(rows, weights.gate, weights.bias, config)
    alone = [
        torch.cat(parts)
        for parts in zip(*(route(row, weights.gate, weights.bias, config) for row in rows.split(1)), strict=True)
    ]
    assert torch.equal(together[1], alone[1])
    if row_multiple(64, 10, torch.float32):
        assert torch.equal(together[0], alone[0])
    else:
        torch.testing.assert_close(together[0], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"top_k": 2, "n_group": 3}, "n_group 3 does not divide the 8 experts"),
        ({"top_k": 2, "n_group": 0}, "n_group 0"),
        ({"top_k": 2, "n_group": 4, "topk_group": 5}, "topk_group 5 is not between 1 and n_group 4"),
        ({"top_k": 2, "n_group": 4, "topk_group": 0}, "topk_group 0"),
        ({"top_k": 5, "n_group": 4, "topk_group": 2}, "top_k 5 does not fit 2 groups of 2 experts"),
        ({"top_k": 9}, "top_k 9"),
        ({"top_k": 0}, "top_k 0"),
        ({"top_k": 2, "scoring_func": "relu"}, "scoring_func is 'relu'"),
        ({"top_k": 2, "e_score_correction_bias": torch.zeros(7)}, r"shape \(7,\), expected \(8,\)"),
        (
            {"top_k": 1, "n_group": 8, "topk_group": 1, "e_score_correction_bias": torch.zeros(8)},
            "with a bias a group needs two",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        grouped_topk(torch.zeros(1, 8), **arguments)


def test_the_best_of_any_number_of_lines():
    """One line, lines, lines of lines: along the last dimension, and ties to the lowest index."""
    scores = torch.randint(0, 6, (3, 4, 8), generator=torch.Generator().manual_seed(0)).float()
    found = best_first(scores, 3)
    assert found.shape == (3, 4, 3) and torch.equal(found, torch.stack([best_first(lines, 3) for lines in scores]))
    for line, best in zip(scores.flatten(0, 1), found.flatten(0, 1), strict=True):
        by_hand = sorted(range(8), key=lambda place: (-line[place], place))[:3]
        assert best.tolist() == best_first(line, 3).tolist() == by_hand
