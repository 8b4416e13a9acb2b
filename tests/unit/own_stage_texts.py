"""Five stages as a learner might write them, each the text of a file; none calls the package's."""

GATHERED = """\
import torch
from moe_course.dispatch import Dispatched


def dispatch(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    here = placement.owner[ids.clamp(min=0).long()] == comm.rank
    ids = torch.where(here & (ids >= 0), ids, -1)
    rows, counts = gathered.rows, tuple(gathered.counts)
    return Dispatched(rows, None, ids, weights, None, "rows", counts)
"""
COMBINED = """\
def combine(expert_output, dispatched, *, comm):
    counts = list(dispatched.handle)
    home = comm.all_to_all_rows(expert_output, counts).rows
    parts = home.split(counts[comm.rank]) if counts[comm.rank] else [home]
    return sum(parts[1:], parts[0].clone())
"""
ROUTED = """\
def route(hidden_states, gate_weight, bias, config):
    scores = (hidden_states.float() @ gate_weight.float().T).sigmoid()
    ids = (scores + bias).topk(config.num_experts_per_tok, sorted=False).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(1, keepdim=True) * config.routed_scaling_factor, ids.int()
"""
COMPUTED = """\
import torch.nn.functional as F


def experts(dispatched, w13, w2, expert_map):
    output = dispatched.hidden_states.new_zeros(len(dispatched.hidden_states), w2.shape[1])
    for row, k in (dispatched.topk_ids >= 0).nonzero().tolist():
        expert = expert_map[int(dispatched.topk_ids[row, k])]
        gate, up = (w13[expert] @ dispatched.hidden_states[row]).chunk(2)
        output[row] += dispatched.topk_weights[row, k] * (w2[expert] @ (F.silu(gate) * up))
    return output
"""
MAPPED = """\
import torch


def expert_map(ep_size, ep_rank, num_experts, strategy):
    local = torch.full((num_experts,), -1, dtype=torch.int32)
    share = -(-num_experts // ep_size)
    mine = range(num_experts)[ep_rank * share : (ep_rank + 1) * share]
    local[list(mine)] = torch.arange(len(mine), dtype=torch.int32)
    return len(mine), local
"""

#: Stage -> text of its file.
ALL = {"route": ROUTED, "expert_map": MAPPED, "dispatch": GATHERED, "experts": COMPUTED, "combine": COMBINED}
