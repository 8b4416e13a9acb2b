"""How many bytes the sparse layers of one rank need: weights, and buffers of the all-gather backend.

Only the MoE part: no attention, embeddings, KV cache, activations between layers or copies a transport makes.

Source: shapes of vLLM `routed_experts.py : RoutedExperts` and `DeepseekV2MoE`. Built in: notebook 04.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from moe_course.config import MoEConfig

if TYPE_CHECKING:
    from moe_course.parallel import Plan, RankPlan

#: Bytes of one element.
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
FP32 = 4
#: Backends whose buffers are counted here.
COUNTED_BACKENDS = ("allgather_reducescatter", "no_dp_ep")


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. None stands for a number that does not exist: a cut that does not come out even,
    or buffers of a backend that is not counted here.

    Attributes:
        sparse_layers: sparse layers of this rank's pipeline stage; all weights below are sums over them.
        routed: its experts, or its slice of all experts.
        shared: the shared expert, whole, as this package holds it.
        shared_upstream: what vLLM would hold of it: 1 / tp, or all of it with sequence-parallel MoE.
        router: gate weight and correction bias, in float32 as here. vLLM keeps the gate in the model's dtype.
        weights: routed + shared + router.
        rows_gathered: rows on this rank after dispatch when every engine brings `max_num_batched_tokens`.
        gathered_rows: those rows, `[rows, H]` in the model's dtype; 0 when nothing travels.
        gathered_routes: their weights (float32) and ids (int32), `[rows, K]` each.
        partial_sums: `[rows, H]` in the accumulator's dtype. vLLM returns partial sums in the model's dtype.
        buffers: gathered_rows + gathered_routes + partial_sums. One layer at a time, so once per rank.
    """

    sparse_layers: int
    routed: int | None
    shared: int
    shared_upstream: int | None
    router: int
    weights: int | None
    rows_gathered: int
    gathered_rows: int | None
    gathered_routes: int | None
    partial_sums: int | None
    buffers: int | None

    def as_dict(self) -> dict[str, int | None]:
        return asdict(self)


def expert_bytes(config: MoEConfig, dtype: str = "bfloat16", parts: int = 1) -> int | None:
    """One routed expert's `w13 [2I, H]` and `w2 [H, I]`, or one of `parts` equal slices of it.

    None when the width I cannot be cut into so many equal parts.
    """
    if config.moe_intermediate_size % parts:
        return None
    return 3 * (config.moe_intermediate_size // parts) * config.hidden_size * ITEMSIZE[dtype]


def shared_bytes(config: MoEConfig, dtype: str = "bfloat16", parts: int = 1) -> int | None:
    """The shared expert of one layer: n_shared_experts of them as one, `n_shared_experts * I` wide."""
    width = config.n_shared_experts * config.moe_intermediate_size
    return None if width % parts else 3 * (width // parts) * config.hidden_size * ITEMSIZE[dtype]


def router_bytes(config: MoEConfig) -> int:
    """Gate `[E, H]` and, where the model has one, correction bias `[E]`, both float32."""
    return config.n_routed_experts * (config.hidden_size + config.has_correction_bias) * FP32


def rows_gathered(plan: Plan, max_num_batched_tokens: int) -> int:
    """Rows on a rank after dispatch. Without dispatch its own rows; all ranks that share rows hold the same ones.

    Rows split over TP (sequence parallel) or PCP ranks meet again in the gather, so a split does not add rows; vLLM
    pads every share to the same length, which may add tp - 1 rows.
    """
    if plan.dispatch_group is None:
        return max_num_batched_tokens
    ranks = len(plan.groups[plan.dispatch_group][0])
    if plan.split_group is None:
        return ranks * max_num_batched_tokens
    split = len(plan.groups[plan.split_group][0])
    if plan.dispatch_group in ("ep", plan.split_group):
        return ranks // split * max_num_batched_tokens
    return ranks * -(-max_num_batched_tokens // split)


def rank_memory(
    plan: Plan, rank: int | RankPlan, dtype: str = "bfloat16", max_num_batched_tokens: int = 256
) -> RankMemory:
    """The MoE part of one rank, in bytes.

    Args:
        rank: a world rank, or what `plan.rank` said about it.
        dtype: of experts, shared expert and rows: a key of `ITEMSIZE`.
        max_num_batched_tokens: rows that the ranks of one engine (one DP rank) take through a layer together.
    """
    mine = plan.rank(rank) if isinstance(rank, int) else rank
    config, layers = plan.config, len(mine.layers)
    one = expert_bytes(config, dtype, plan.moe.tp_size)
    tp = 1 if plan.sequence_parallel else plan.parallel.tensor_parallel_size
    upstream = shared_bytes(config, dtype, tp)
    routed = None if one is None else layers * len(mine.experts) * one
    shared, router = layers * shared_bytes(config, dtype), layers * router_bytes(config)

    rows = rows_gathered(plan, max_num_batched_tokens)
    accumulator = max(FP32, ITEMSIZE[dtype])
    gathered = routes = partial = 0
    if layers and plan.dispatch_group is not None:
        gathered = rows * config.hidden_size * ITEMSIZE[dtype]
        routes = rows * config.num_experts_per_tok * 2 * FP32  # a weight and an id
    if layers and (plan.dispatch_group is not None or plan.reduce_group is not None):
        partial = rows * config.hidden_size * accumulator
    counted = plan.backend.name in COUNTED_BACKENDS
    return RankMemory(
        sparse_layers=layers,
        routed=routed,
        shared=shared,
        shared_upstream=None if upstream is None else layers * upstream,
        router=router,
        weights=None if routed is None else routed + shared + router,
        rows_gathered=rows,
        gathered_rows=gathered if counted else None,
        gathered_routes=routes if counted else None,
        partial_sums=partial if counted else None,
        buffers=gathered + routes + partial if counted else None,
    )


def model_bytes(config: MoEConfig, dtype: str = "bfloat16") -> dict[str, int]:
    """The MoE part of one whole copy of the model: routed, shared and router, over all sparse layers."""
    layers = len(config.sparse_layers)
    return {
        "routed": layers * config.n_routed_experts * expert_bytes(config, dtype),
        "shared": layers * shared_bytes(config, dtype),
        "router": layers * router_bytes(config),
    }
