"""The tiny model before its training, wired so that training is fast on a CPU and gives Hugging Face's numbers.

The sparse-attention indexer is never trained: up to `index_topk` = 512 positions it selects everything, and the
model never sees more. Training therefore skips it. Built in: notebook 13.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

CONTEXT = 512
CONFIG = dict(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.5,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,  # = nope + rope, as in GLM-5.1 (192 + 64 = 256)
    index_topk=CONTEXT,
    index_n_heads=2,
    index_head_dim=32,
    max_position_embeddings=CONTEXT,
    initializer_range=0.05,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


class _SortRows(torch.autograd.Function):
    """`rows[order // k]`: one copy of a row per route, sorted by expert.

    Autograd's own backward adds the copies up with `index_put`, one at a time on a CPU. Each row has exactly k
    copies, so un-sorting and summing over k gives the same sum several times faster.
    """

    @staticmethod
    def forward(ctx, rows, order, k):
        ctx.save_for_backward(order)
        ctx.k = k
        return rows[order // k]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad[order.argsort()].view(-1, ctx.k, grad.shape[-1]).sum(1), None, None


class _UnsortRows(torch.autograd.Function):
    """`rows[order.argsort()]`, with the gather it deserves as its backward."""

    @staticmethod
    def forward(ctx, rows, order):
        ctx.save_for_backward(order)
        return rows[order.argsort()]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0]], None


def grouped_mm_training(experts, hidden_states, top_k_index, top_k_weights):
    """Hugging Face's `grouped_mm` experts, with a backward that is fast on CPU. Shapes as theirs."""
    k = top_k_index.shape[1]
    ids, order = top_k_index.reshape(-1).sort()
    offsets = torch.bincount(ids, minlength=experts.num_experts).cumsum(0, dtype=torch.int32)
    rows = _SortRows.apply(hidden_states, order, k)  # [T*K, H]
    gate, up = F.grouped_mm(rows, experts.gate_up_proj.transpose(-2, -1), offs=offsets).chunk(2, dim=-1)
    out = F.grouped_mm(F.silu(gate) * up, experts.down_proj.transpose(-2, -1), offs=offsets)
    out = _UnsortRows.apply(out, order).view(-1, k, hidden_states.shape[-1])  # [T, K, H]
    return torch.bmm(top_k_weights.unsqueeze(1), out).squeeze(1)


def _causal_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling).transpose(1, 2), None


def build_model(seed: int) -> GlmMoeDsaForCausalLM:
    """The untrained model, wired for fast training: plain causal attention, indexer asleep."""
    AttentionInterface.register("causal_training", _causal_attention)
    AttentionMaskInterface.register("causal_training", lambda *args, **kwargs: torch.zeros(1, 1, 1, 1))
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm_training", grouped_mm_training)
    torch.manual_seed(seed)
    config = GlmMoeDsaConfig(**CONFIG)
    config._attn_implementation = "causal_training"
    config._experts_implementation = "grouped_mm_training"
    model = GlmMoeDsaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.indexer.forward = lambda *args, **kwargs: None
    return model
