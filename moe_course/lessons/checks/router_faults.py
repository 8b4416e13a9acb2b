"""A router with one fault at a time: what a wrong answer looks like, so that a check can say which one it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

#: Larger epsilons that are common elsewhere.
EPSILONS = {"epsilon of 1e-6": 1e-6, "epsilon of 1e-8": 1e-8, "epsilon of 1e-9": 1e-9, "epsilon of 1e-12": 1e-12}
TIES = "ids: among equal scores the lowest id is chosen; torch.topk does not promise that, a stable sort does"
#: Fault -> what to say; the first word is the stage that goes wrong. Of two faults that leave the same, the first is
#: told: those of groups leave nothing where there is one group, and cases with one group come first.
FAULTS = {
    "filled with 0": "groups kept: a dropped group came back: 0, or another number, is not below every kept score; "
    "fill with -inf",
    "group by two best": "groups kept: without a bias a group counts by its best score alone",
    "group by its best": "groups kept: with a bias a group counts by the sum of its two best choice scores",
    "no groups": "groups kept: experts were chosen from all groups; first keep the best topk_group groups",
    "last of equal groups": "groups kept: among equal groups the one with the lowest index is kept",
    "ids within a group": "ids: these count from 0 in each group; ids are global",
    "other scoring": "scores: look at scoring_func; sigmoid scores each expert by itself, softmax all together",
    "softmax in groups": "scores: softmax runs over all E experts of a row; groups come later",
    "bias in bf16": "scores: the bias stays in fp32; bf16 cannot hold its last digits",
    "bias before scoring": "scores: the bias is added behind the scoring function, not to the logits",
    "bias taken away": "scores: the choice score is score + bias; here the bias was subtracted",
    "bias not used": "ids: the bias has no say; choose by score + bias",
    "last of equals": TIES,
    "worst first": "order: the best choice comes first",
    "in order of ids": "order: columns fall by the score that chose, they are not sorted by id",
    "in order of weights": "order: columns fall by score + bias, not by weight",
    "bias weighs": "weights: the bias weighs; it chooses, and the weights come from the scores alone",
    "bias taken off again": "weights: score + bias - bias has lost the digits of a small score; keep the scores aside",
    "of all experts": "sum: divide by the sum of the K chosen scores, not of all E",
    "no scale": "sum: routed_scaling_factor is missing, or stands before the division by the sum and cancels out",
    "norm turned": "sum: norm_topk_prob says whether to divide by the sum of the K weights",
    "no epsilon": "sum: 0 / 0 is NaN; divide by the sum + 1e-20",
} | dict.fromkeys(EPSILONS, "sum: the epsilon is 1e-20; a larger one counts when the scores themselves are tiny")


def solve(
    logits: torch.Tensor, bias: torch.Tensor | None, rules: Mapping[str, Any], fault: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk_weights`, `topk_ids` of logits `[T, E]` with one fault of `FAULTS`, or with none.

    Args:
        rules: top_k, n_group, topk_group, scoring_func, norm_topk_prob, routed_scaling_factor.
    """
    experts, top_k, groups = logits.shape[1], rules["top_k"], rules["n_group"]
    offset = torch.zeros(experts) if bias is None else bias
    sigmoid = (rules["scoring_func"] == "sigmoid") != (fault == "other scoring")
    before = logits + offset if fault == "bias before scoring" else logits
    if fault == "bias in bf16":
        offset = offset.bfloat16().float()
    scores = before.sigmoid() if sigmoid else before.softmax(dim=-1)
    if fault == "softmax in groups" and not sigmoid:
        scores = before.unflatten(-1, (groups, experts // groups)).softmax(dim=-1).flatten(1)
    weight_of = {"bias not used": 0, "bias before scoring": 0, "bias taken away": -1}.get(fault, 1)
    choice = scores + weight_of * offset
    if groups > 1 and fault != "no groups":
        choice = _masked(choice, groups, rules["topk_group"], bias is not None, fault)
    last = fault == "last of equals"
    ids = experts - 1 - _best(choice.flip(-1), top_k) if last else _best(choice, top_k)
    weights = (choice if fault == "bias weighs" else scores).gather(1, ids)
    if fault == "bias taken off again":
        weights = choice.gather(1, ids) - offset[ids]
    weights = _normalised(weights, scores, rules, fault)
    if fault == "ids within a group":
        ids = ids % (experts // groups)
    order = {
        "worst first": torch.arange(top_k).flip(0).expand_as(ids),
        "in order of ids": ids.argsort(dim=-1),
        "in order of weights": weights.argsort(dim=-1, descending=True, stable=True),
    }.get(fault)
    if order is not None:
        weights, ids = weights.gather(1, order), ids.gather(1, order)
    return weights, ids.to(torch.int32)


def _masked(choice: torch.Tensor, groups: int, kept: int, with_bias: bool, fault: str) -> torch.Tensor:
    grouped = choice.unflatten(-1, (groups, choice.shape[1] // groups))  # [T, G, E/G]
    by_two = {"group by two best": True, "group by its best": False}.get(fault, with_bias)
    best = grouped.sort(dim=-1, descending=True).values
    counts = best[..., :2].sum(dim=-1) if by_two else best[..., 0]  # [T, G]
    best_groups = groups - 1 - _best(counts.flip(-1), kept) if fault == "last of equal groups" else _best(counts, kept)
    dropped = torch.ones_like(counts, dtype=torch.bool).scatter_(1, best_groups, False)
    fill = 0.0 if fault == "filled with 0" else float("-inf")
    return grouped.masked_fill(dropped.unsqueeze(-1), fill).flatten(1)


def _normalised(weights: torch.Tensor, scores: torch.Tensor, rules: Mapping[str, Any], fault: str) -> torch.Tensor:
    if rules["norm_topk_prob"] != (fault == "norm turned"):
        total = (scores if fault == "of all experts" else weights).sum(dim=-1, keepdim=True)
        weights = weights / (total + ({"no epsilon": 0.0} | EPSILONS).get(fault, 1e-20))
    return weights if fault == "no scale" else weights * rules["routed_scaling_factor"]


def _best(scores: torch.Tensor, k: int) -> torch.Tensor:
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def likely(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    rules: Mapping[str, Any],
    look: Callable[[Any], torch.Tensor],
    expected: torch.Tensor,
    yours: torch.Tensor,
) -> str | None:
    """What to say about the first fault that leaves just what `yours` is; None when there is none."""
    for fault, words in FAULTS.items():
        value = look(solve(logits, bias, rules, fault))
        if _alike(value, yours) and not _alike(value, expected):
            return words
    return None


def is_a_tie(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    rules: Mapping[str, Any],
    expected: torch.Tensor,
    ids: torch.Tensor,
    in_order: bool,
) -> bool:
    """Are these other experts than expected, with just the same choice scores? Then they differ among equals only.

    Args:
        expected, ids: `[T, K]`, K different experts in a row.
        in_order: column by column; otherwise any order of the same scores will do.
    """
    if ids.shape != expected.shape or not ((ids >= 0) & (ids < logits.shape[1])).all():
        return False
    if (ids.sort(dim=-1).values.diff(dim=-1) == 0).any():
        return False
    scores = logits.sigmoid() if rules["scoring_func"] == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    mine, right = (choice.gather(1, which.long()) for which in (ids, expected))  # [T, K]
    if not in_order:
        mine, right = mine.sort(dim=-1).values, right.sort(dim=-1).values
    return torch.equal(mine, right) and not torch.equal(ids, expected)


def told_apart(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    rules: Mapping[str, Any],
    looks: Sequence[Callable[[Any], torch.Tensor]],
    faults: Sequence[str],
) -> bool:
    """Does each of these faults leave something, and no two the same, in the first look that shows them?"""
    right, seen = solve(logits, bias, rules), []
    for fault in faults:
        wrong = solve(logits, bias, rules, fault)
        shown = [(place, look(wrong)) for place, look in enumerate(looks) if not _alike(look(wrong), look(right))]
        if not shown or any(place == shown[0][0] and _alike(value, shown[0][1]) for place, value in seen):
            return False
        seen.append(shown[0])
    return True


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=0, atol=1e-5, equal_nan=True)
