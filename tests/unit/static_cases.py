"""Rows with garbage in every unused slot, the comparison with the slow reference, and experts that are wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from layer_cases import TOLERANCE

from moe_course.dispatch import Dispatched
from moe_course.lessons import reference
from moe_course.static_shapes import static_experts

H, I = 16, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
GARBAGE = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "huge": 3e38}
#: Slots C and the counts of the local experts.
CASES = {
    "no rows at all": (4, [0, 0, 0]),
    "full": (5, [5, 5, 5, 5]),
    "uneven, one empty": (7, [3, 0, 7, 1]),
    "all to the last": (6, [0, 0, 6]),
    "one expert": (8, [5]),
    "one slot": (1, [1, 0]),
    "one expert, one slot": (1, [1]),
}


def make(capacity: int, counts: list[int], dtype=torch.float32, garbage: float = float("nan")):
    """`(hidden_states, expert_num_tokens, w13, w2)` with garbage in every unused slot."""
    generator = torch.Generator().manual_seed(capacity + 10 * len(counts))
    rows = torch.randn(len(counts), capacity, H, generator=generator).to(dtype)
    for expert, count in enumerate(counts):
        rows[expert, count:] = garbage
    w13 = (torch.randn(len(counts), 2 * I, H, generator=generator) * 2 * H**-0.5).to(dtype)
    w2 = (torch.randn(len(counts), H, I, generator=generator) * 2 * I**-0.5).to(dtype)
    return rows, torch.tensor(counts, dtype=torch.int32), w13, w2


def padded(rows: torch.Tensor, counts: torch.Tensor) -> Dispatched:
    return Dispatched(rows, None, torch.empty(0, 2, dtype=torch.int32), None, counts, "padded", None)


def faults(experts, inputs) -> list[str]:
    """What is wrong with the outputs, in words; the slow reference computes each row alone."""
    rows, counts, w13, w2 = inputs
    outputs = experts(rows, counts, w13, w2)
    if outputs.shape != rows.shape or outputs.dtype != rows.dtype:
        return [f"{tuple(outputs.shape)} {outputs.dtype}"]
    found = []
    for expert, count in enumerate(counts.tolist()):
        if not (outputs[expert, count:] == 0).all():  # NaN is not 0
            found.append(f"expert {expert}: an unused slot is not zero")
        for slot in range(count):
            expected = reference.swiglu(rows[expert, slot], w13[expert], w2[expert])
            limit = TOLERANCE[rows.dtype] * max(1.0, float(expected.abs().max()))
            if not torch.allclose(outputs[expert, slot], expected, rtol=0, atol=limit):
                found.append(f"expert {expert}, slot {slot}: not what the reference computes")
    return found


def unloaded():
    """An expert without rows whose weights are not there yet."""
    inputs = make(7, [3, 0, 7, 1])
    inputs[2][1] = inputs[3][1] = float("nan")
    return inputs


def used(rows, counts):
    return (torch.arange(rows.shape[1], device=rows.device) < counts.unsqueeze(1)).unsqueeze(-1)


def plain(rows, counts, w13, w2):
    gate, up = torch.bmm(rows, w13.transpose(1, 2)).chunk(2, dim=-1)
    return torch.bmm(F.silu(gate) * up, w2.transpose(1, 2))


def times_mask_before(rows, counts, w13, w2):
    return plain(rows * used(rows, counts), counts, w13, w2)


def times_mask_after(rows, counts, w13, w2):
    return plain(rows, counts, w13, w2) * used(rows, counts)


def chosen_before_only(rows, counts, w13, w2):
    return plain(torch.where(used(rows, counts), rows, 0), counts, w13, w2)


def one_slot_too_many(rows, counts, w13, w2):
    return static_experts(rows, counts + 1, w13, w2)


def up_before_gate(rows, counts, w13, w2):
    return static_experts(rows, counts, w13.roll(I, dims=1), w2)


def boolean_indexing(rows, counts, w13, w2):
    mask = used(rows, counts).squeeze(-1)
    outputs = torch.zeros_like(rows)
    for expert in range(len(rows)):
        gate, up = F.linear(rows[expert][mask[expert]], w13[expert]).chunk(2, dim=-1)
        outputs[expert][mask[expert]] = F.linear(F.silu(gate) * up, w2[expert])
    return outputs


def largest_count_only(rows, counts, w13, w2):
    most = int(counts.max())
    outputs = static_experts(rows[:, :most], counts, w13, w2)
    return F.pad(outputs, (0, 0, 0, rows.shape[1] - most))


def branch_on_a_count(rows, counts, w13, w2):
    return static_experts(rows, counts, w13, w2) if counts.sum() > 0 else torch.zeros_like(rows)


WRONG_RESULT = (plain, times_mask_before, times_mask_after, chosen_before_only, one_slot_too_many, up_before_gate)
DATA_DEPENDENT = (boolean_indexing, largest_count_only, branch_on_a_count)
