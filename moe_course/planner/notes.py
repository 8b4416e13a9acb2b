"""What a plan should say out loud: why it cannot run, and what its reader would not guess. Built in: notebook 04."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_course.config import MoEConfig
from moe_course.errors import ConfigError, MoECourseError

if TYPE_CHECKING:
    from moe_course.parallel import MoEParallel, ParallelConfig, Plan


def find_refusals(parallel: ParallelConfig, config: MoEConfig, moe: MoEParallel) -> list[MoECourseError]:
    """Why these flags can be planned and not run."""
    found: list[MoECourseError] = []
    dp, pcp = parallel.data_parallel_size, parallel.prefill_context_parallel_size
    if dp > 1 and pcp > 1:
        found.append(
            ConfigError(
                f"data_parallel_size {dp} with prefill_context_parallel_size {pcp}: use one of them, "
                "as in vLLM (platforms/cuda.py)"
            )
        )
    if config.moe_intermediate_size % moe.tp_size:
        found.append(
            ConfigError(
                f"moe_intermediate_size {config.moe_intermediate_size} cannot be cut into {moe.tp_size} equal parts; "
                "add --enable-expert-parallel, or use a number of ranks that divides it"
            )
        )
    return found


def find_notes(plan: Plan) -> list[str]:
    """What a reader of the plan should know and would not guess."""
    from moe_course.backends.capabilities import KNOWN_BACKENDS, across_nodes, upstream_hidden_size

    parallel, moe, experts = plan.parallel, plan.moe, plan.config.n_routed_experts
    tp, notes = parallel.tensor_parallel_size, []
    if parallel.enable_expert_parallel and not moe.use_ep:
        notes.append(
            "expert parallelism is on and changes nothing: dp * pcp * tp = 1, so there is nobody to share with"
        )
    if parallel.pipeline_parallel_size > plan.config.num_hidden_layers:
        notes.append(
            f"{parallel.pipeline_parallel_size} pipeline stages for {plan.config.num_hidden_layers} layers: "
            f"{parallel.pipeline_parallel_size - plan.config.num_hidden_layers} without any"
        )
    known = KNOWN_BACKENDS.get(plan.backend.backend)
    if experts % moe.ep_size:
        uneven = known.uneven_experts if known is not None and moe.use_all2all else True
        upstream = {
            False: f"; upstream needs E % R = 0 here, as {plan.backend.backend} finds an expert's rank by division",
            True: " and on vLLM's all-gather path; upstream's other backends and EPLB need E % R = 0",
            None: f"; whether {plan.backend.backend} takes that upstream is not known",
        }[uneven]
        notes.append(f"{experts} experts on {moe.ep_size} ranks: fine here{upstream}")
    if plan.placement.strategy != parallel.expert_placement_strategy:
        notes.append(plan.placement.reason)
    if plan.backend.warning:
        notes.append(plan.backend.warning)
    if known is not None and not known.in_vllm:
        notes.append(f"{plan.backend.backend} is a name of this package, not in vLLM: {known.instead}")
    if known is not None and moe.use_all2all:
        if len(plan.placement.nodes) > 1:
            notes += across_nodes([plan.backend.backend])
        try:
            upstream_hidden_size(plan.backend.backend, plan.config.hidden_size)
        except ConfigError as error:
            notes.append(f"fine here; {error}")
    if moe.use_all2all and plan.dispatch_group == "ep" and tp > 1 and not plan.sequence_parallel:
        why = (
            ""
            if known is None or known.sequence_parallel
            else f" (vLLM does not slice rows for {plan.backend.backend})"
        )
        notes.append(
            f"every row is held by {tp} TP ranks, and each sends it over the EP group{why}: the result is right, and "
            f"every route is computed {tp} times"
        )
    if moe.use_ep and plan.dispatch_group in ("dp", "pcp") and plan.reduce_group:
        notes.append(
            f"every row is held by {tp} TP ranks: rows are gathered in each {plan.dispatch_group.upper()} group, so no "
            f"route is computed twice; a backend that dispatches over the EP group would send each of them {tp} times"
        )
    if parallel.pipeline_parallel_size > 1 and plan.sequence_parallel:
        notes.append(
            "pipeline stages hand on whole rows: slices of rows stay inside the sparse block, they do not cross "
            "from layer to layer"
        )
    return notes
