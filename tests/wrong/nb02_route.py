"""Answers to exercise 2.2, route. A wrong one is a right one with one thing changed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from answers import Answers
from nb02 import variant

ROUTE = """
def answer(hidden_states, gate_weight, bias, config):
    logits = hidden_states.float() @ gate_weight.float().T
    scores = logits.sigmoid() if config.scoring_func == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    rows, experts, groups = len(logits), logits.shape[1], config.n_group
    if groups > 1:
        grouped = choice.view(rows, groups, -1)
        good = grouped.amax(dim=-1) if bias is None else grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = torch.sort(good, dim=-1, descending=True, stable=True).indices[:, : config.topk_group]
        closed = torch.ones_like(good, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).view(rows, experts)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : config.num_experts_per_tok]
    weights = scores.gather(1, ids)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor, ids.to(torch.int32)
"""


def always_the_first(hidden_states, gate_weight, bias, config):
    rows, top_k = len(hidden_states), config.num_experts_per_tok
    return torch.full((rows, top_k), 2.5 / top_k), torch.arange(top_k, dtype=torch.int32).repeat(rows, 1)


def gives_the_rows_back(hidden_states, gate_weight, bias, config):
    return hidden_states, gate_weight


def gives_nothing_back(hidden_states, gate_weight, bias, config):
    torch.sigmoid(hidden_states.float() @ gate_weight.float().T)


def expert_by_expert(hidden_states, gate_weight, bias, config):
    """Right, in plain Python."""
    found = []
    for row in hidden_states.double():
        logits = [float((row * line.double()).sum()) for line in gate_weight]
        scores = torch.tensor(logits).sigmoid() if config.scoring_func == "sigmoid" else torch.tensor(logits).softmax(0)
        choice = (scores if bias is None else scores + bias).tolist()
        size = len(choice) // config.n_group
        counts = []
        for group in range(config.n_group):
            best = sorted(choice[group * size : (group + 1) * size], reverse=True)
            counts.append(best[0] if bias is None else sum(best[:2]))
        kept = sorted(range(config.n_group), key=lambda group: (-counts[group], group))[: config.topk_group]
        allowed = [expert for expert in range(len(choice)) if expert // size in kept]
        ids = sorted(allowed, key=lambda expert: (-choice[expert], expert))[: config.num_experts_per_tok]
        weights = scores[ids]
        if config.norm_topk_prob:
            weights = weights / (weights.sum() + 1e-20)
        found.append((weights * config.routed_scaling_factor, torch.tensor(ids, dtype=torch.int32)))
    if not found:
        shape = (0, config.num_experts_per_tok)
        return torch.empty(shape), torch.empty(shape, dtype=torch.int32)
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def groups_as_a_list(hidden_states, gate_weight, bias, config):
    """Right, without a mask: a number so low that no choice score gets there."""
    scores = F.linear(hidden_states.to(torch.float32), gate_weight.to(torch.float32))
    scores = scores.softmax(-1) if config.scoring_func == "softmax" else 1 / (1 + torch.exp(-scores))
    choice = scores.clone()
    if bias is not None:
        choice += bias
    if config.n_group > 1:
        parts = choice.chunk(config.n_group, dim=1)
        count = 1 if bias is None else 2
        good = torch.stack([part.sort(dim=1, descending=True).values[:, :count].sum(dim=1) for part in parts], dim=1)
        places = good.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # [T, G]: the place of each group
        low = torch.where(places < config.topk_group, 0.0, -1e9)
        choice = choice + low.repeat_interleave(choice.shape[1] // config.n_group, dim=1)
    ids = choice.argsort(dim=1, descending=True, stable=True)[:, : config.num_experts_per_tok]
    weights = torch.take_along_dim(scores, ids, dim=1)
    if config.norm_topk_prob:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-20)
    return config.routed_scaling_factor * weights, ids.int()


def wrong_route(name: str, old: str, new: str, message: str) -> tuple[Callable, str]:
    return variant(ROUTE, name, old, new), message


WRONG_ROUTE = [
    wrong_route("bias_weighs", "weights = scores.gather", "weights = choice.gather", "weights: the bias weighs"),
    wrong_route("bias_unused", " if bias is None else scores + bias", "", "ids: the bias has no say"),
    wrong_route("bias_subtracted", "scores + bias", "scores - bias", "here the bias was subtracted"),
    wrong_route(
        "bias_on_logits",
        "scores if bias is None else scores + bias",
        "scores if bias is None else (logits + bias).sigmoid()",
        "added behind the scoring function",
    ),
    wrong_route(
        "bias_is_always_there", "scores if bias is None else scores + bias", "scores + bias", "2.2 raised TypeError"
    ),
    wrong_route(
        "groups_by_best",
        "grouped.amax(dim=-1) if bias is None else grouped.topk(2, dim=-1).values.sum(dim=-1)",
        "grouped.amax(dim=-1)",
        "groups kept: with a bias a group counts by the sum of its two best",
    ),
    wrong_route(
        "groups_by_two",
        "grouped.amax(dim=-1) if bias is None else ",
        "",
        "groups kept: without a bias a group counts by its best score alone",
    ),
    wrong_route(
        "topk_among_equals",
        "torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : config.num_experts_per_tok]",
        "choice.topk(config.num_experts_per_tok, dim=-1).indices",
        "ids: among equal scores the lowest id is chosen; torch.topk does not promise that, a stable sort does",
    ),
    wrong_route("zero_fill", 'float("-inf")', "0.0", "groups kept: a dropped group came back"),
    wrong_route("no_groups", "if groups > 1:", "if False:", "groups kept: experts were chosen from all groups"),
    wrong_route(
        "product_in_bf16",
        "hidden_states.float() @ gate_weight.float().T",
        "(hidden_states @ gate_weight.T).float()",
        "widen rows and gate to fp32 before the product",
    ),
    wrong_route("gate_not_turned", "gate_weight.float().T", "gate_weight.float()", "2.2 raised RuntimeError"),
    wrong_route(
        "softmax_always",
        'logits.sigmoid() if config.scoring_func == "sigmoid" else ',
        "",
        "scores: look at scoring_func",
    ),
    wrong_route(
        "eight_experts", ": config.num_experts_per_tok", ":8", "experts chosen is [1, 6] int32, expected [1, 3]"
    ),
    wrong_route(
        "ascending",
        "indices[:, : config.num_experts_per_tok]",
        "indices[:, : config.num_experts_per_tok].flip(-1)",
        "order: the best choice comes first",
    ),
    wrong_route(
        "sorted_by_weight",
        "indices[:, : config.num_experts_per_tok]",
        "indices[:, : config.num_experts_per_tok].sort().values\n    ids = ids.gather(1, scores.gather(1, ids)"
        ".argsort(dim=-1, descending=True, stable=True))",
        "order: columns fall by score + bias, not by weight",
    ),
    wrong_route(
        "ids_within_a_group",
        "ids.to(torch.int32)",
        "(ids % (experts // groups)).to(torch.int32)",
        "ids: these count from 0 in each group",
    ),
    wrong_route(
        "no_scale", "weights * config.routed_scaling_factor", "weights", "sum: routed_scaling_factor is missing"
    ),
    wrong_route(
        "scaled_twice",
        "scores.gather(1, ids)\n",
        "scores.gather(1, ids) * config.routed_scaling_factor\n",
        "topk_weights differs",
    ),
    wrong_route("never_normalised", "if config.norm_topk_prob:", "if False:", "sum: norm_topk_prob says whether"),
    wrong_route("always_normalised", "if config.norm_topk_prob:", "if True:", "sum: norm_topk_prob says whether"),
    wrong_route(
        "softmax_within_each_group",
        "logits.softmax(dim=-1)",
        "logits.unflatten(-1, (config.n_group, -1)).softmax(dim=-1).flatten(1)",
        "scores: softmax runs over all E experts",
    ),
    wrong_route(
        "last_of_equal_groups",
        "torch.sort(good, dim=-1, descending=True, stable=True).indices",
        "groups - 1 - torch.sort(good.flip(-1), dim=-1, descending=True, stable=True).indices",
        "groups kept: among equal groups the one with the lowest index",
    ),
    wrong_route(
        "bias_taken_off_again",
        "scores.gather(1, ids)\n",
        "choice.gather(1, ids) - (0 if bias is None else bias[ids])\n",
        "weights: score + bias - bias has lost the digits of a small score",
    ),
    wrong_route("fill_of_minus_1000", 'float("-inf")', "-1e3", "is not below every kept score; fill with -inf"),
    wrong_route("fill_of_minus_1", 'float("-inf")', "-1.0", "is not below every kept score; fill with -inf"),
    wrong_route("bias_in_bf16", "scores + bias", "scores + bias.bfloat16()", "scores: the bias stays in fp32"),
    wrong_route("epsilon_of_1e_9", "1e-20", "1e-9", "sum: the epsilon is 1e-20"),
    wrong_route("epsilon_of_1e_6", "1e-20", "1e-6", "sum: the epsilon is 1e-20"),
    wrong_route("no_epsilon", " + 1e-20", "", "sum: 0 / 0 is NaN"),
    wrong_route(
        "changes_the_bias",
        "logits = hidden",
        "bias is not None and bias.mul_(2)\n    logits = hidden",
        "changes its input `bias` in place",
    ),
]

ANSWERS = {
    "route": Answers(
        wrong=WRONG_ROUTE,
        lazy=[
            (always_the_first, "experts chosen differs"),
            (gives_the_rows_back, "topk_weights first, topk_ids second"),
            wrong_route(
                "remembers_the_ids_shown",
                "    weights = scores.gather(1, ids)\n",
                "    if experts == 6 and rows == 1 and logits.min() > -9:\n        ids = torch.tensor([[4, 0, 1]])\n"
                "    weights = scores.gather(1, ids)\n",
                "are values written into the code?",
            ),
            (gives_nothing_back, "no experts chosen, the function returned None"),
        ],
        right=[expert_by_expert, groups_as_a_list],
    ),
}
