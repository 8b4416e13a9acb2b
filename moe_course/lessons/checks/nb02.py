"""Exercises of notebook 02: choose among groups of experts, and a bias that chooses and never weighs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from moe_course.config import MoEConfig
from moe_course.lessons.checks.router_faults import TIES, is_a_tie, likely, told_apart
from moe_course.lessons.exercise import Case, Exercise, Look
from moe_course.router import _mask_groups, best_first, grouped_topk, route

#: Neighbours in a ranking are at least so far apart, except where a case is about ties: all ways to add up agree then.
CLEAR = 1e-4
#: Two experts in each of four groups: the loudest expert is in the first group, the best pair in the second.
LOUD = torch.tensor([[3.0, -3.0], [1.0, 0.5], [-1.0, -2.0], [-0.5, -4.0]])
#: Softmax scores of four groups: those of all E keep the first two groups, those within each group the middle two.
NARROW = torch.tensor([[2.0, 1.5], [1.75, 0.25], [-1.0, 0.5], [0.75, -0.5]])
#: Sigmoid makes about 1e-8 of these.
TINY = torch.tensor([[-18.5, -18.0, -19.0, -18.25]])
LOOKS = (
    Look("experts chosen", lambda result: result[1].sort(dim=-1).values),
    Look("order of topk_ids", lambda result: result[1]),
    Look("topk_weights", lambda result: result[0], tolerance=1e-5),
)

ONE_GROUP = {"n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "norm_topk_prob": True}
#: Faults that the first case of both exercises tells apart, and those that a bias adds.
TOLD = ("other scoring", "worst first", "in order of ids", "of all experts", "no scale", "norm turned")
TOLD_WITH_BIAS = ("bias before scoring", "bias taken away", "bias not used", "in order of weights", "bias weighs")


def clear_rows(
    rows: int,
    experts: int,
    generator: torch.Generator,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    scoring_func: str = "sigmoid",
) -> torch.Tensor:
    """Logits `[rows, experts]` in quarters, without a close call among the best experts or among the groups."""
    found: list[torch.Tensor] = []
    while len(found) < rows:
        row = torch.randint(-20, 21, (experts,), generator=generator) / 4
        scores = row.sigmoid() if scoring_func == "sigmoid" else row.softmax(dim=-1)
        choice = scores if bias is None else scores + bias
        best = choice.view(groups, -1).sort(dim=-1, descending=True).values[:, :12]  # [G, up to 12]
        rankings = (best.flatten().sort().values, best[:, 0].sort().values, best[:, :2].sum(dim=-1).sort().values)
        if all((ranking.diff() > CLEAR).all() for ranking in rankings):
            found.append(row)
    return torch.stack(found)


def telling_row(
    experts: int, top_k: int, generator: torch.Generator, bias: torch.Tensor | None = None, faults: tuple[str, ...] = ()
) -> torch.Tensor:
    """`[1, experts]`: a clear row on which every fault leaves a trace of its own. One group, sigmoid, scale 2.5."""
    rules = ONE_GROUP | {"top_k": top_k, "routed_scaling_factor": 2.5}
    looks = [look.of for look in LOOKS]
    while not told_apart(row := clear_rows(1, experts, generator, bias), bias, rules, looks, faults + TOLD):
        pass
    return row


def mixed(groups: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Groups `[G, E/G]` in any order, as one row `[1, E]`."""
    return groups[torch.randperm(len(groups), generator=generator)].view(1, -1)


def number(least: int, most: int, generator: torch.Generator) -> int:
    return int(torch.randint(least, most + 1, (1,), generator=generator))


def why(
    logits: torch.Tensor, bias: torch.Tensor | None, rules: Mapping[str, Any], look: str, expected: Any, yours: Any
) -> str | None:
    """The fault that would give just this, in words."""
    if not isinstance(yours, torch.Tensor):
        return None
    if look != "topk_weights" and yours.is_floating_point():
        return "the function returns topk_weights first, topk_ids second"
    if yours.dtype != expected.dtype:
        return "ids are int32, as the stages behind expect them" if look != "topk_weights" else "weights are fp32"
    of = next(one.of for one in LOOKS if one.name == look)
    said = likely(logits.float(), bias, rules, of, expected, yours)
    if said is None and look != "topk_weights":
        in_order = look == "order of topk_ids"
        return TIES if is_a_tie(logits.float(), bias, rules, expected, yours, in_order) else None
    return said


# 2.1: groups, without a bias


def topk_case(title: str, logits: torch.Tensor, top_k: int, *groups: int, **rules: Any) -> Case:
    return Case(title, (logits, top_k), dict(zip(("n_group", "topk_group"), groups, strict=False)) | rules)


@cache
def grouped_cases(seed: int) -> list[Case]:
    """One group first, then groups; no bias anywhere."""
    g = torch.Generator().manual_seed(seed)
    few, scaled = number(3, 5, g), {"routed_scaling_factor": 2.5}
    loud = mixed(LOUD, g)
    silent = torch.tensor([[0.5, 0.25, 2.0, -120.0]])  # the second group wins, and one of its scores is 0
    many = torch.stack([torch.randperm(256, generator=g) for _ in range(few)]) / 32 - 4  # no two alike in a row
    return [
        topk_case("1 row, 6 experts, K = 3, scale 2.5", telling_row(6, 3, g), 3, **scaled),
        topk_case(f"{few} rows, 8 experts", clear_rows(few, 8, g), 3),
        topk_case("norm_topk_prob is False", clear_rows(2, 8, g), 3, norm_topk_prob=False, **scaled),
        topk_case("softmax scores", clear_rows(2, 8, g, scoring_func="softmax"), 1, scoring_func="softmax",
                  norm_topk_prob=False),
        topk_case("equal logits", torch.zeros(2, 64), 3),
        topk_case("4 groups, 1 kept: one loud expert against two good ones", loud, 2, 4, 1),
        topk_case("2 groups, 1 kept, which holds a score of 0", silent, 2, 2, 1),
        topk_case(f"4 groups, 2 kept, {few} rows", clear_rows(few, 12, g, groups=4), 4, 4, 2, **scaled),
        topk_case("K is every expert of the kept groups", clear_rows(2, 8, g, groups=4), 4, 4, 2),
        topk_case("3 groups, all kept", clear_rows(2, 9, g, groups=3), 4, 3, 3),
        topk_case("bf16 logits", clear_rows(2, 8, g, groups=2).bfloat16(), 2, 2, 1),
        topk_case("softmax scores, 4 groups, 2 kept", mixed(NARROW, g), 3, 4, 2, scoring_func="softmax"),
        topk_case("equal logits, 4 groups, 2 kept", torch.zeros(2, 16), 3, 4, 2),
        topk_case("every score underflows to 0", torch.full((1, 4), -120.0), 2),
        topk_case("scores around 1e-8", TINY[:, torch.randperm(4, generator=g)], 2, **scaled),
        topk_case(f"{few} rows, 256 experts, 8 groups, 4 kept", many, 8, 8, 4, **scaled),
        topk_case("no rows", torch.zeros(0, 8), 2, 4, 2),
    ]  # fmt: skip


def why_grouped(case: Case, look: str, expected: Any, yours: Any) -> str | None:
    logits, top_k = case.args
    rules = ONE_GROUP | {"routed_scaling_factor": 1.0, "top_k": top_k} | case.keywords
    return why(logits, None, rules, look, expected, yours)


GROUPED_TOPK = Exercise(
    "2.1", "grouped_topk", grouped_topk, grouped_cases, LOOKS, why=why_grouped, also=(_mask_groups, best_first)
)


# 2.2: the stage, with a bias


def route_case(
    title: str,
    logits: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
    generator: torch.Generator,
    *groups: int,
    dtype: torch.dtype = torch.float32,
    **rules: Any,
) -> Case:
    """Rows and a gate whose product is exactly `logits`, however it is added up: each sum has one term that counts.

    A row has two numbers more than there are experts, which no expert looks at.
    """
    rows_count, experts = logits.shape
    place = torch.randperm(experts + 2, generator=generator)[:experts]
    sign = torch.randint(0, 2, (experts,), generator=generator) * 2.0 - 1
    gate = torch.zeros(experts, experts + 2)
    gate[torch.arange(experts), place] = 2 * sign
    rows = torch.ones(rows_count, experts + 2)
    rows[:, place] = logits * sign / 2
    return Case(title, (rows.to(dtype), gate.to(dtype), bias, config_of(experts, top_k, experts + 2, *groups, **rules)))


def config_of(experts: int, top_k: int, hidden: int, n_group: int = 1, topk_group: int = 1, **rules: Any) -> MoEConfig:
    sizes = {"hidden_size": hidden, "moe_intermediate_size": 8, "n_routed_experts": experts}
    groups = {"num_experts_per_tok": top_k, "n_group": n_group, "topk_group": topk_group}
    return MoEConfig(**sizes, **groups, mlp_layer_types=("sparse",), **({"routed_scaling_factor": 2.5} | rules))


def fine_case(generator: torch.Generator) -> Case:
    """bf16 rows whose product needs fp32: 1 and 1 + 1/512 are two logits, and one number in bf16."""
    gate = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    gate[number(2, 3, generator), 1] = 1.0
    rows = torch.tensor([[1.0, 1 / 512]])
    return Case("bf16 rows and gate, fp32 logits", (rows.bfloat16(), gate.bfloat16(), None, config_of(4, 1, 2)))


def some_bias(experts: int, generator: torch.Generator) -> torch.Tensor:
    """`[E]` between -0.75 and 0.75."""
    return torch.randint(-24, 25, (experts,), generator=generator) / 32


@cache
def route_cases(seed: int) -> list[Case]:
    """One group first, where the bias is the only news. Then groups, as in 2.1, with a bias."""
    g = torch.Generator().manual_seed(seed)
    few, loud = number(3, 5, g), mixed(LOUD, g)
    lift = torch.tensor([0.0, 0.75, -0.375, 0.25, 0.5, -0.5])[torch.randperm(6, generator=g)]
    first = telling_row(6, 3, g, lift, TOLD_WITH_BIAS)
    b4, b8, b12, big = some_bias(4, g), some_bias(8, g), some_bias(12, g), some_bias(256, g) / 4 + 1.5
    below, soft = torch.tensor([-0.6, -0.8, -1.0, -1.1]), clear_rows(2, 4, g, b4, scoring_func="softmax")
    spread = torch.tensor([0.25, -0.5, 0.5, -0.25])
    fine = torch.tensor([0.5, 0.5 + 1 / 1024, 0.25, 0.25 + 1 / 2048])  # the first two are one number in bf16
    return [
        route_case("1 row, 6 experts, K = 3, scale 2.5", first, 3, lift, g),
        route_case(f"{few} rows, 8 experts", clear_rows(few, 8, g, b8), 3, b8, g),
        route_case("no bias", clear_rows(2, 8, g), 3, None, g),
        route_case("norm_topk_prob is False", clear_rows(2, 8, g, b8), 3, b8, g, norm_topk_prob=False),
        route_case("softmax scores", soft, 2, b4, g, scoring_func="softmax"),
        route_case("every bias is negative", clear_rows(2, 8, g, b8 - 3), 3, b8 - 3, g),
        route_case("2 groups, 1 kept, every choice score negative", torch.zeros(1, 4), 2, below, g, 2, 1),
        route_case("4 groups, 1 kept: one loud expert against two good ones", loud, 2, torch.zeros(8), g, 4, 1),
        route_case(f"4 groups, 2 kept, {few} rows", clear_rows(few, 12, g, b12, 4), 4, b12, g, 4, 2),
        route_case("K is every expert of the kept groups", clear_rows(2, 8, g, b8, 4), 4, b8, g, 4, 2),
        route_case("4 groups, 1 kept, no bias", loud, 2, None, g, 4, 1),
        route_case("equal logits, equal bias", torch.zeros(2, 64), 3, torch.ones(64), g),
        route_case("bf16 rows", clear_rows(2, 8, g, b8), 3, b8, g, dtype=torch.bfloat16),
        fine_case(g),
        route_case("a bias finer than bf16", torch.zeros(1, 4), 1, fine, g),
        route_case("2 groups, 1 kept, every choice score below -4,000", torch.zeros(1, 4), 2, below - 4e3, g, 2, 1),
        route_case("softmax scores, 4 groups, 2 kept", mixed(NARROW, g), 3, None, g, 4, 2, scoring_func="softmax"),
        route_case("equal logits, equal bias, 4 groups, 2 kept", torch.zeros(2, 16), 3, torch.ones(16), g, 4, 2),
        route_case("every score underflows to 0", torch.full((1, 6), -120.0), 2, lift, g),
        route_case("scores around 1e-8", TINY[:, torch.randperm(4, generator=g)], 2, spread, g),
        route_case(f"{few} rows, 256 experts", clear_rows(few, 256, g, big), 8, big, g),
        route_case("no rows", torch.zeros(0, 8), 3, b8, g),
    ]  # fmt: skip


def why_route(case: Case, look: str, expected: Any, yours: Any) -> str | None:
    rows, gate, bias, config = case.args
    rules = {name: getattr(config, name) for name in ("n_group", "topk_group", "scoring_func", "norm_topk_prob")}
    rules |= {"top_k": config.num_experts_per_tok, "routed_scaling_factor": config.routed_scaling_factor}
    if (
        case.title.startswith("bf16 rows and gate")
        and isinstance(yours, torch.Tensor)
        and yours.dtype == expected.dtype
    ):
        return "scores: logits 1 and 1 + 1/512 fell together; widen rows and gate to fp32 before the product"
    return why(rows.float() @ gate.float().T, bias, rules, look, expected, yours)


ROUTE = Exercise(
    "2.2", "route", route, route_cases, LOOKS, stage="route", why=why_route, also=(grouped_topk, _mask_groups)
)

EXERCISES = (GROUPED_TOPK, ROUTE)
