"""Answers to exercise 2.1, grouped_topk. A wrong one is a right one with one thing changed."""

from __future__ import annotations

import linecache
from collections.abc import Callable

import torch
import torch.nn.functional as F
from answers import Answers


def variant(of: str, name: str, old: str, new: str) -> Callable:
    """The function of the text `of`, called `name`, with `old` replaced."""
    assert of.count(old) == 1, f"{name}: {old!r} is {of.count(old)} times in the text"
    source = of.replace(old, new).replace("def answer(", f"def {name}(")
    filename = f"<wrong: {name}, {len(of)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {"__name__": __name__, "torch": torch, "F": F}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


GROUPED = """
def answer(router_logits, top_k, *, n_group=1, topk_group=1, scoring_func="sigmoid", norm_topk_prob=True,
           routed_scaling_factor=1.0):
    rows, experts = router_logits.shape
    logits = router_logits.float()
    scores = logits.sigmoid() if scoring_func == "sigmoid" else logits.softmax(dim=-1)
    grouped = scores.view(rows, n_group, experts // n_group)
    good = grouped.amax(dim=-1)
    kept = torch.sort(good, dim=-1, descending=True, stable=True).indices[:, :topk_group]
    closed = torch.ones_like(good, dtype=torch.bool).scatter_(1, kept, False)
    choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).view(rows, experts)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, ids.to(torch.int32)
"""


def hard_coded_ids(router_logits, top_k, **rules):
    rows = len(router_logits)
    return torch.full((rows, top_k), 1 / top_k), torch.arange(top_k, dtype=torch.int32).repeat(rows, 1)


def gives_the_logits_back(router_logits, top_k, **rules):
    return router_logits


def gives_only_ids(router_logits, top_k, **rules):
    return router_logits.topk(top_k).indices


def one_row_after_the_other(router_logits, top_k, n_group=1, topk_group=1, scoring_func="sigmoid",
                            norm_topk_prob=True, routed_scaling_factor=1.0):  # fmt: skip
    """Right, in plain Python."""
    all_weights, all_ids = [], []
    size = router_logits.shape[1] // n_group
    for logits in router_logits.float():
        scores = (torch.sigmoid(logits) if scoring_func == "sigmoid" else torch.softmax(logits, 0)).tolist()
        groups = sorted(range(n_group), key=lambda g: (-max(scores[g * size : (g + 1) * size]), g))[:topk_group]
        allowed = [expert for expert in range(len(scores)) if expert // size in groups]
        ids = sorted(allowed, key=lambda expert: (-scores[expert], expert))[:top_k]
        total = sum(scores[expert] for expert in ids) + 1e-20 if norm_topk_prob else 1.0
        all_ids.append(ids)
        all_weights.append([scores[expert] / total * routed_scaling_factor for expert in ids])
    weights = torch.tensor(all_weights, dtype=torch.float32).reshape(-1, top_k)
    return weights, torch.tensor(all_ids, dtype=torch.int32).reshape(-1, top_k)


def ranks_groups_by_comparing(router_logits, top_k, *, n_group=1, topk_group=1, scoring_func="sigmoid",
                              norm_topk_prob=True, routed_scaling_factor=1.0):  # fmt: skip
    """Right, without sorting: the best of what is left, K times."""
    scores = {"sigmoid": torch.sigmoid, "softmax": lambda x: F.softmax(x, dim=1)}[scoring_func](router_logits.float())
    best = torch.stack([part.max(dim=1).values for part in scores.chunk(n_group, dim=1)], dim=1)  # [T, G]
    earlier = torch.arange(n_group)[:, None] < torch.arange(n_group)  # [G, G]: is the first the lower id?
    beaten = (best[:, :, None] > best[:, None, :]) | ((best[:, :, None] == best[:, None, :]) & earlier)
    open_group = beaten.sum(dim=1) < topk_group  # [T, G]: beaten by fewer than are kept
    left = torch.where(open_group.repeat_interleave(scores.shape[1] // n_group, dim=1), scores, -1.0)
    ids = []
    for _ in range(top_k):
        first = (left == left.amax(dim=1, keepdim=True)).float().argmax(dim=1, keepdim=True)
        ids.append(first)
        left = left.scatter(1, first, -2.0)
    ids = torch.cat(ids, dim=1)
    weights = torch.take_along_dim(scores, ids, dim=1)
    if norm_topk_prob:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, ids.int()


def wrong_grouped(name: str, old: str, new: str, message: str) -> tuple[Callable, str]:
    return variant(GROUPED, name, old, new), message


WRONG_GROUPED = [
    wrong_grouped(
        "softmax_always", 'logits.sigmoid() if scoring_func == "sigmoid" else ', "", "scores: look at scoring_func"
    ),
    wrong_grouped(
        "sigmoid_always",
        ' if scoring_func == "sigmoid" else logits.softmax(dim=-1)',
        "",
        "scores: look at scoring_func",
    ),
    wrong_grouped(
        "scores_in_bf16",
        "router_logits.float()",
        "router_logits",
        "topk_weights is [2, 2] bfloat16, expected [2, 2] float32",
    ),
    wrong_grouped(
        "no_groups",
        "closed.unsqueeze(-1)",
        "torch.zeros_like(grouped, dtype=torch.bool)",
        "groups kept: experts were chosen from all groups",
    ),
    wrong_grouped(
        "groups_by_two",
        "grouped.amax(dim=-1)",
        "grouped.sort(dim=-1).values[..., -2:].sum(dim=-1)",
        "groups kept: without a bias a group counts by its best score alone",
    ),
    wrong_grouped(
        "groups_by_sum",
        "grouped.amax(dim=-1)",
        "grouped.sum(dim=-1)",
        "groups kept: without a bias a group counts by its best score alone",
    ),
    wrong_grouped("zero_fill", 'float("-inf")', "0.0", "groups kept: a dropped group came back"),
    wrong_grouped(
        "multiplies_the_mask",
        'grouped.masked_fill(closed.unsqueeze(-1), float("-inf"))',
        "(grouped * (~closed).unsqueeze(-1))",
        "groups kept: a dropped group came back",
    ),
    wrong_grouped(
        "ids_within_a_group",
        "ids.to(torch.int32)",
        "(ids % (experts // n_group)).to(torch.int32)",
        "ids: these count from 0 in each group; ids are global",
    ),
    wrong_grouped(
        "last_of_equals",
        "torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]",
        "experts - 1 - choice.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]",
        "ids: among equal scores the lowest id is chosen",
    ),
    wrong_grouped(
        "topk_among_equals",
        "torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]",
        "choice.topk(top_k, dim=-1).indices",
        "ids: among equal scores the lowest id is chosen; torch.topk does not promise that, a stable sort does",
    ),
    wrong_grouped(
        "ascending", "indices[:, :top_k]", "indices[:, :top_k].flip(-1)", "order: the best choice comes first"
    ),
    wrong_grouped(
        "sorted_by_id",
        "indices[:, :top_k]",
        "indices[:, :top_k].sort(dim=-1).values",
        "order: columns fall by the score that chose",
    ),
    wrong_grouped("over_all_experts", "(weights.sum(", "(scores.sum(", "sum: divide by the sum of the K chosen scores"),
    wrong_grouped("no_scale", "weights * routed_scaling_factor", "weights", "sum: routed_scaling_factor is missing"),
    wrong_grouped(
        "scale_cancels",
        "if norm_topk_prob:",
        "weights = weights * routed_scaling_factor\n    routed_scaling_factor = 1.0\n    if norm_topk_prob:",
        "stands before the division by the sum",
    ),
    wrong_grouped("always_normalised", "if norm_topk_prob:", "if True:", "sum: norm_topk_prob says whether"),
    wrong_grouped("never_normalised", "if norm_topk_prob:", "if False:", "sum: norm_topk_prob says whether"),
    wrong_grouped("no_epsilon", " + 1e-20", "", "sum: 0 / 0 is NaN"),
    wrong_grouped(
        "softmax_within_each_group",
        "logits.softmax(dim=-1)",
        "logits.unflatten(-1, (n_group, -1)).softmax(dim=-1).flatten(1)",
        "scores: softmax runs over all E experts",
    ),
    wrong_grouped(
        "last_of_equal_groups",
        "torch.sort(good, dim=-1, descending=True, stable=True).indices",
        "n_group - 1 - torch.sort(good.flip(-1), dim=-1, descending=True, stable=True).indices",
        "groups kept: among equal groups the one with the lowest index",
    ),
    wrong_grouped("epsilon_of_1e_9", "1e-20", "1e-9", "sum: the epsilon is 1e-20"),
    wrong_grouped("epsilon_of_1e_6", "1e-20", "1e-6", "sum: the epsilon is 1e-20"),
    wrong_grouped("ids_int64", "ids.to(torch.int32)", "ids", "experts chosen is [1, 3] int64, expected [1, 3] int32"),
    wrong_grouped(
        "ids_first",
        "return weights * routed_scaling_factor, ids.to(torch.int32)",
        "return ids.to(torch.int32), weights * routed_scaling_factor",
        "topk_weights first, topk_ids second",
    ),
    wrong_grouped(
        "in_place",
        "router_logits.float()",
        "router_logits.neg_().neg().float()",
        "changes its input `router_logits` in place",
    ),
]


ANSWERS = {
    "grouped_topk": Answers(
        wrong=WRONG_GROUPED,
        lazy=[
            (hard_coded_ids, "experts chosen differs"),
            (gives_the_logits_back, "no experts chosen, the function returned a Tensor"),
            (gives_only_ids, "no experts chosen, the function returned a Tensor"),
            wrong_grouped(
                "remembers_the_ids_shown",
                "    weights = scores.gather(1, ids)\n",
                "    if experts == 6:\n        ids = torch.tensor([[1, 3, 2]])\n    weights = scores.gather(1, ids)\n",
                "are values written into the code?",
            ),
        ],
        right=[one_row_after_the_other, ranks_groups_by_comparing],
    ),
}
