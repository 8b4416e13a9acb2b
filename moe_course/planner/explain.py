"""How a plan came about: one decision after the other, each with its rule and the place in vLLM that makes it.

This file speaks of ranks, experts and layers, `explain_rows` of what happens to rows. Built in: notebook 04.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_course.backends.capabilities import KNOWN_BACKENDS
from moe_course.layout import AXES, stage_layers
from moe_course.planner import explain_rows
from moe_course.planner.spans import spans

if TYPE_CHECKING:
    from moe_course.parallel import Plan

GROUPS = "parallel_state.py : initialize_model_parallel"
MAKE = "fused_moe/config.py : FusedMoEParallelConfig.make"
ALL2ALL = "fused_moe/config.py : FusedMoEParallelConfig.use_all2all_kernels"
SEQUENCE = "config/parallel.py : ParallelConfig.use_sequence_parallel_moe"
GATHER = "all2all.py : AgRsAll2AllManager.dispatch"
PCP_GATHER = "moe_runner.py : MoERunner._maybe_dispatch"
MANAGER = "config/parallel.py : ParallelConfig.use_all2all"
BACKEND = "all2all_utils.py : maybe_make_prepare_finalize"
PLACEMENT = "expert_map_manager.py : determine_expert_placement_strategy, determine_expert_map"
SUM = "moe_runner.py : MoERunner._maybe_reduce_final_output"
SHARED = "shared_experts.py : SharedExperts; deepseek_v2.py : DeepseekV2MoE"
STAGES = "distributed/utils.py : get_pp_indices"
REFUSED = "platforms/cuda.py : check_and_update_config"


@dataclass(frozen=True)
class Step:
    """One decision: what it is about, the sentences, and where upstream makes it."""

    topic: str
    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.text} ({self.source})"


def explain(plan: Plan) -> list[Step]:
    """All decisions behind a plan, in the order in which they depend on each other."""
    return [Step(*parts) for parts in _steps(plan)]


def _steps(plan: Plan) -> Iterator[tuple[str, str, str]]:
    parallel = plan.parallel
    yield "layout", layout(plan), GROUPS
    yield "EP group", ep_group(plan), GROUPS
    yield "experts", experts(plan), MAKE
    yield "sequence parallel", explain_rows.sequence_parallel(plan), SEQUENCE
    yield "dispatch", explain_rows.dispatch(plan), ALL2ALL
    if plan.dispatch_group:
        yield "group", explain_rows.group(plan), _mover(plan)
    yield "manager", explain_rows.manager(plan), MANAGER
    yield "backend", explain_rows.backend(plan), BACKEND
    if plan.backend.backend in KNOWN_BACKENDS and plan.moe.use_all2all:
        yield "upstream", explain_rows.upstream(plan), KNOWN_BACKENDS[plan.backend.backend].source
    yield "placement", placement(plan), PLACEMENT
    yield "sum", explain_rows.sums(plan), SUM
    yield "shared expert", explain_rows.shared_expert(plan), SHARED
    yield "pipeline", pipeline(plan), STAGES
    if parallel.external_data_parallel_size > 1:
        yield "copies", copies(plan), GROUPS
    if parallel.data_parallel_size > 1 and parallel.prefill_context_parallel_size > 1:
        yield "DP with PCP", dp_with_pcp(plan), REFUSED


def _mover(plan: Plan) -> str:
    """Who moves the rows upstream."""
    if plan.dispatch_group == "pcp" and not plan.moe.use_ep:
        return PCP_GATHER
    known = KNOWN_BACKENDS.get(plan.backend.backend)
    if known is None or known.package is None and known.in_vllm or not plan.moe.use_all2all:
        return GATHER
    return known.source


def layout(plan: Plan) -> str:
    sizes = dict(zip(AXES, plan.parallel.sizes, strict=True))
    used = [axis for axis in AXES if sizes[axis] > 1]
    order = "Ranks are numbered with tp fastest, then pcp, pp, dp and external copies."
    if not used:
        return f"There is one rank, for all sizes are 1. {order}"
    formula = used[0]
    for axis in used[1:]:
        formula = f"({formula}) * {sizes[axis]} + {axis}" if "+" in formula else f"{formula} * {sizes[axis]} + {axis}"
    last = plan.rank(plan.world_size - 1)
    where = ", ".join(f"{axis} {last.coordinates[axis]}" for axis in used)
    grid = " * ".join(f"{axis} {sizes[axis]}" for axis in used)
    return f"{grid} = {plan.world_size} ranks. {order} So rank = {formula}; rank {last.rank} is {where}."


def ep_group(plan: Plan) -> str:
    size, many = len(plan.groups["ep"][0]), len(plan.groups["ep"])
    text = (
        f"It joins all dp, pcp and tp of one pipeline stage: {_count(size, 'rank')} a group, {_count(many, 'group')} "
        "in all. EP rank = dp * (pcp size * tp size) + pcp * tp size + tp."
    )
    if not plan.parallel.enable_expert_parallel:
        text += " vLLM makes this group for every MoE model, also with expert parallelism off."
    return text


def experts(plan: Plan) -> str:
    moe, total, width = plan.moe, plan.config.n_routed_experts, plan.config.moe_intermediate_size
    flat = len(plan.groups["ep"][0])
    if moe.use_ep:
        counts = sorted({plan.placement.num_local(rank) for rank in range(moe.ep_size)})
        return (
            f"Expert parallelism is on and dp * pcp * tp = {flat} is more than 1. So experts stay whole and are "
            f"spread: {total} over {moe.ep_size} ranks, {' or '.join(map(str, counts))} each. TP cuts none of them."
        )
    if flat == 1:
        flag = "on, but" if plan.parallel.enable_expert_parallel else "off, and"
        return f"Expert parallelism is {flag} dp * pcp * tp = 1. There is nobody to share with: {total} whole experts."
    cut = (
        f"{width} / {flat} = {width // flat} wide" if width % flat == 0 else f"{width} / {flat} wide, which is refused"
    )
    return (
        f"Expert parallelism is off. So every expert is cut, and each rank holds a slice of all {total}, {cut}. "
        f"The cut goes over dp * pcp * tp = {flat} ranks, not over TP alone. --enable-expert-parallel keeps them whole."
    )


def placement(plan: Plan) -> str:
    found, total = plan.placement, plan.config.n_routed_experts
    if not plan.moe.use_ep:
        return "Nothing to place: all ranks of a stage hold the same experts, whole or as slices."
    rule = f"expert e lives on EP rank e % {found.ep_size}"
    if found.strategy == "linear":
        rule = f"each EP rank owns one stretch of expert ids, EP rank 0 has {spans(found.experts_of(0))}"
    rest = total % found.ep_size
    uneven = f" {total} / {found.ep_size} is not whole: the first {_count(rest, 'rank')} own one more." if rest else ""
    return f"{found.strategy}, {found.reason}: {rule}.{uneven}"


def pipeline(plan: Plan) -> str:
    stages, layers = plan.parallel.pipeline_parallel_size, plan.config.num_hidden_layers
    if stages == 1:
        return f"One stage holds all {layers} layers, {len(plan.config.sparse_layers)} of them sparse."
    shown = [spans(range(*stage_layers(layers, stage, stages))) for stage in range(stages)]
    shown = shown if stages <= 4 else [*shown[:2], "…", shown[-1]]
    rest = layers % stages
    uneven = f", {rest} left over: one more for each of {rest} stages before the last" if rest else ""
    inside = " Slices of rows stay inside a sparse block; whole rows are handed on." if plan.sequence_parallel else ""
    return (
        f"{layers} layers over {stages} stages: {', '.join(shown)}{uneven}. Each stage has its own EP groups, with all "
        f"expert ids, for its own layers. Hidden states and residual pass between stages, routes never do.{inside}"
    )


def copies(plan: Plan) -> str:
    many = plan.parallel.external_data_parallel_size
    return (
        f"{many} copies of the whole deployment, {_count(plan.world_size // many, 'rank')} each. They share rank "
        "numbers and nothing else: no group joins two copies, and each copy owns all experts."
    )


def dp_with_pcp(plan: Plan) -> str:
    dp, pcp, tp = (len(plan.groups[kind][0]) for kind in ("dp", "pcp", "tp"))
    reason = "it goes over DP or PCP, not over both, so rows would miss the experts that only other PCP ranks hold"
    if plan.sequence_parallel:
        reason = f"it knows dp * tp = {dp * tp} numbers of rows, and the EP group has {dp * pcp * tp} ranks"
    return f"dp {dp} with pcp {pcp} is refused; vLLM raises ValueError. One reason shows in the gather: {reason}."


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
