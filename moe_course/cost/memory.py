"""How many bytes the sparse layers of one rank need: weights, and buffers of the backend that moves its rows.

Only the MoE part: no attention, embeddings, KV cache, activations between layers or copies a transport makes.

Buffers are what dispatch hands to the experts and what they hand to combine. With R ranks in the group, T rows on each,
row = H * bytes of the model's dtype, acc = H * bytes of the accumulator's, K routes a token:

| shape | rows here | rows | routes | results |
|---|---|---|---|---|
| allgather_reducescatter | always R * T | R * T * row | R * T * K * 8 | R * T * acc |
| high_throughput | at most R * T | R * T * row | R * T * K * 8 | R * T * acc |
| two_hop | at most R * T, and N * T to forward | (R * T + N * T) * row | (R * T + N * T) * K * 8 | R * T * acc |
| all_to_all | at most R * T * min(K, E_local) | that * row | that * 4 | that * row |
| low_latency | always E_local * R * T_max | that * row | E_local * 4 | that * row |
| one_sided | always R * T_max | R * T_max * row | R * T_max * K * 8 | R * T_max * acc |

"At most" is a router that sends everything to one rank. 8 bytes are a float32 weight and an int32 id, 4 an id or a
count. E_local * R is E, so low latency needs E * T_max rows whatever R is. T_max is `max_num_batched_tokens`, also
where ranks bring slices: the size is fixed before anybody knows. N is the number of nodes: a rank forwards its own rows
and those of its partner on each other node, of more partners where nodes are not equal. Memory that peers write into
has two halves, which a transport of that kind holds twice.

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


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. None stands for a number that does not exist: a cut that does not come out even,
    or buffers of a backend that nobody knows.

    Attributes:
        sparse_layers: sparse layers of this rank's pipeline stage; all weights below are sums over them.
        routed: its experts, or its slice of all experts.
        shared: the shared expert, whole, as this package holds it.
        shared_upstream: what vLLM would hold of it: 1 / tp, or all of it with sequence-parallel MoE.
        router: gate weight and correction bias, in float32 as here. vLLM keeps the gate in the model's dtype.
        weights: routed + shared + router.
        rows_gathered: rows of the experts' input, when every engine brings `max_num_batched_tokens`: the most there
            can be, or the number of slots where that is fixed.
        gathered_rows: those rows, `[rows, H]` in the model's dtype; 0 when nothing travels. With two hops also the
            rows that this rank forwards.
        gathered_routes: their weights (float32) and ids (int32), `[rows, K]` each; an id per row, or a count per
            expert, where no weight travels.
        partial_sums: what goes home, `[rows, H]`: partial sums in the accumulator's dtype (vLLM returns them in the
            model's), or raw outputs in the model's, where source or combine weights them.
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
    """Rows that meet on a rank if each of its group sends all it has. Without dispatch its own rows.

    Rows split over TP (sequence parallel) or PCP ranks meet again in the group, so a split does not add rows; vLLM
    pads every share to the same length, which may add tp - 1 rows. Where TP ranks bring the same rows to the EP group,
    each of them counts.
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


def _buffers(plan: Plan, mine: RankPlan, tokens: int, itemsize: int) -> tuple[int, int, int, int] | None:
    """Rows on a rank, and bytes of rows, routes and results. See the table above."""
    from moe_course.backends.capabilities import SHAPES  # its package imports torch

    shape, config = plan.shape, plan.config
    if shape not in SHAPES:
        return None
    hidden, top_k, num_local = config.hidden_size, config.num_experts_per_tok, len(mine.experts)
    rows = rows_gathered(plan, tokens)
    row, acc, routes = hidden * itemsize, hidden * max(FP32, itemsize), top_k * 2 * FP32
    if plan.dispatch_group is None:
        return rows, 0, 0, rows * acc if plan.reduce_group else 0
    ranks = len(plan.groups[plan.dispatch_group][0])
    if SHAPES[shape].fixed:
        rows = ranks * tokens
    if shape == "all_to_all":
        rows *= min(top_k, num_local)
        return rows, rows * row, rows * FP32, rows * row
    if shape == "low_latency":
        rows *= num_local
        return rows, rows * row, num_local * FP32, rows * row
    forwarded = 0
    if shape == "two_hop":
        share = tokens if plan.split_group is None else -(-tokens // len(plan.groups[plan.split_group][0]))
        forwarded = _forwards_for(plan, mine.ep_rank) * share
    return rows, (rows + forwarded) * row, (rows + forwarded) * routes, rows * acc


def _forwards_for(plan: Plan, ep_rank: int) -> int:
    """How many ranks send their rows for this rank's node to this rank: itself, and its partners on other nodes."""
    nodes = plan.placement.nodes
    mine = next(node for node in nodes if ep_rank in node)
    place = mine.index(ep_rank)
    return 1 + sum(len(range(place, len(node), len(mine))) for node in nodes if node != mine)


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

    found = _buffers(plan, mine, max_num_batched_tokens, ITEMSIZE[dtype])
    rows, *parts = found or (rows_gathered(plan, max_num_batched_tokens), None, None, None)
    if found and not layers:
        parts = [0, 0, 0]
    return RankMemory(
        sparse_layers=layers,
        routed=routed,
        shared=shared,
        shared_upstream=None if upstream is None else layers * upstream,
        router=router,
        weights=None if routed is None else routed + shared + router,
        rows_gathered=rows,
        gathered_rows=parts[0],
        gathered_routes=parts[1],
        partial_sums=parts[2],
        buffers=sum(parts) if found else None,
    )


def model_bytes(config: MoEConfig, dtype: str = "bfloat16") -> dict[str, int]:
    """The MoE part of one whole copy of the model: routed, shared and router, over all sparse layers."""
    layers = len(config.sparse_layers)
    return {
        "routed": layers * config.n_routed_experts * expert_bytes(config, dtype),
        "shared": layers * shared_bytes(config, dtype),
        "router": layers * router_bytes(config),
    }
