"""The oracle: a sparse MoE layer in three loops, slow and obvious. It imports torch and nothing else.

One process holds all rows and all experts. It follows the reduction recipe for any number of ranks and any
placement: contributions of one owner rank in k order, partial sums in rank order, one rounding, shared + routed.
Every row is computed alone, in a block of `BLOCK` rows of which the others are zero; the package computes it in
a batch, padded to 4, 8, 16 or 32 rows, and gets the same bits. Built in: notebook 03.
"""

import torch
import torch.nn.functional as F

BLOCK = 32  # a multiple of every padding that the package may choose


def linear(row, weight):
    """`[in]` times `[out, in]` -> `[out]`, computed as the first row of a block."""
    block = torch.zeros(BLOCK, row.shape[0], dtype=row.dtype)
    block[0] = row
    return F.linear(block, weight)[0]


def swiglu(row, w13, w2):
    """`w2(silu(gate) * up)`; the first half of `w13`'s rows is the gate."""
    gate, up = linear(row, w13).chunk(2)
    return linear(F.silu(gate) * up, w2)


def moe_layer(hidden_states_per_rank, topk_weights, topk_ids, w13, w2, placement, shared=None):
    """Output `[T_r, H]` of every rank's rows.

    Args:
        hidden_states_per_rank: list over ranks of `[T_r, H]`.
        topk_weights, topk_ids: lists over ranks of `[T_r, K]`; ids are global, -1 is no route.
        w13, w2: all experts, `[E, 2I, H]` and `[E, H, I]`, indexed by global id.
        placement: anything with `owner [E]` and `ep_size`.
        shared: `(w13 [2I_s, H], w2 [H, I_s])` of the shared expert, or None.
    """
    outputs = []
    for hidden_states, weights, ids in zip(hidden_states_per_rank, topk_weights, topk_ids, strict=True):
        acc = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        output = torch.empty_like(hidden_states)
        for t, row in enumerate(hidden_states):
            partial = torch.zeros(placement.ep_size, row.shape[0], dtype=acc)  # one per owner rank
            for k, expert in enumerate(ids[t].tolist()):
                if expert >= 0:
                    contribution = swiglu(row, w13[expert], w2[expert]).to(acc) * weights[t, k].to(acc)
                    partial[int(placement.owner[expert])] += contribution
            routed = torch.zeros(row.shape[0], dtype=acc)
            for rank in range(placement.ep_size):
                routed += partial[rank]
            output[t] = routed.to(row.dtype)
            if shared is not None:
                output[t] = swiglu(row, *shared) + output[t]
        outputs.append(output)
    return outputs
