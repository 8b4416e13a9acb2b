"""The JSON of `moe-course plan` (`moe_course.plan/1`): the plan, its groups, and what each rank holds.

Built in: notebook 04.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from moe_course.cost.memory import model_bytes, rank_memory

if TYPE_CHECKING:
    from moe_course.parallel import Plan

SCHEMA = "moe_course.plan/1"


def plan_json(
    plan: Plan,
    *,
    model: str = "",
    dtype: str = "bfloat16",
    max_num_batched_tokens: int = 256,
    ranks: Iterable[int] | None = None,
) -> dict[str, Any]:
    """Everything `moe-course plan` knows, ready for `json.dumps`.

    Args:
        model: name or path, as it was given.
        dtype, max_num_batched_tokens: for `memory`, see `cost.memory.rank_memory`.
        ranks: world ranks to list; None lists all.
    """
    from moe_course.planner.explain import explain  # imports torch, which the JSON of an error does not need

    return {
        "schema": SCHEMA,
        "model": {
            "name": model,
            "layers": plan.config.num_hidden_layers,
            "sparse_layers": list(plan.config.sparse_layers),
            "hidden_size": plan.config.hidden_size,
            "moe_intermediate_size": plan.config.moe_intermediate_size,
            "n_routed_experts": plan.config.n_routed_experts,
            "n_shared_experts": plan.config.n_shared_experts,
            "num_experts_per_tok": plan.config.num_experts_per_tok,
            "bytes": model_bytes(plan.config, dtype),
        },
        "dtype": dtype,
        "max_num_batched_tokens": max_num_batched_tokens,
        **plan.as_dict(),
        "decision": decision(plan),
        "groups": plan.groups,
        "ranks": [
            _rank(plan, rank, dtype, max_num_batched_tokens)
            for rank in (range(plan.world_size) if ranks is None else ranks)
        ],
        "explain": [str(step) for step in explain(plan)],
    }


def decision(plan: Plan) -> dict[str, Any]:
    """The row of vLLM's decision table for these sizes (`FusedMoEParallelConfig.make`)."""
    return {
        "tp": plan.parallel.tensor_parallel_size,
        "dp": plan.parallel.data_parallel_size,
        "pcp": plan.parallel.prefill_context_parallel_size,
        "enable_expert_parallel": plan.parallel.enable_expert_parallel,
        "sequence_parallel": plan.sequence_parallel,
        "moe_tp_size": plan.moe.tp_size,
        "ep_size": plan.moe.ep_size,
        "use_ep": plan.moe.use_ep,
        "use_all2all_kernels": plan.moe.use_all2all,
        "use_all2all_manager": plan.parallel.use_all2all,
    }


def dumps(value: dict[str, Any]) -> str:
    """One line per key, and per rank: large worlds stay readable and small, and a diff names the rank."""

    def line(item: Any) -> str:
        return json.dumps(item, ensure_ascii=False)

    def block(item: Any) -> str:
        if isinstance(item, list) and item and isinstance(item[0], dict | str):
            return "[\n" + ",\n".join(f"    {line(part)}" for part in item) + "\n  ]"
        return line(item)

    return "{\n" + ",\n".join(f"  {line(key)}: {block(item)}" for key, item in value.items()) + "\n}\n"


def _rank(plan: Plan, rank: int, dtype: str, max_num_batched_tokens: int) -> dict[str, Any]:
    mine = plan.rank(rank)
    return {
        "rank": rank,
        **mine.coordinates,
        "ep_rank": mine.ep_rank,
        "groups": mine.groups,
        "experts": mine.experts,
        "layers": mine.layers,
        "memory": rank_memory(plan, mine, dtype, max_num_batched_tokens).as_dict(),
    }
