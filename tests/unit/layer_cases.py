"""Random sparse layers, ragged batches that are hard on purpose, and the comparison with the oracle.

Used by the tests in threads and, in worker processes, by the tests on gloo.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.config import MoEConfig
from moe_course.expert_map import Placement
from moe_course.layer import MoELayer
from moe_course.lessons import reference
from moe_course.rows import RowInvariance
from moe_course.stages import Stages

#: Verdicts of the layers that were compared; the test summary says whether all of them promised equality.
VERDICTS: set[RowInvariance] = set()
#: Used instead of equality where the machine does not promise it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}


@dataclass(frozen=True)
class Weights:
    """All weights of one layer, experts by global id."""

    config: MoEConfig
    gate: torch.Tensor
    bias: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    shared: tuple[torch.Tensor, torch.Tensor]

    def of(self, placement: Placement, rank: int) -> dict[str, torch.Tensor]:
        """`w13` and `w2` of one rank, in the order of its local ids."""
        mine = placement.experts_of(rank)
        return {"w13": self.w13[mine], "w2": self.w2[mine]}


@dataclass(frozen=True)
class Batch:
    """Rows of all ranks with their routing; ids are global, -1 is no route."""

    hidden_states: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    topk_ids: list[torch.Tensor]


def make_config(experts: int, top_k: int, hidden: int, inter: int, **more) -> MoEConfig:
    return MoEConfig(
        hidden_size=hidden,
        moe_intermediate_size=inter,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        mlp_layer_types=("sparse",),
        n_shared_experts=1,
        routed_scaling_factor=more.pop("routed_scaling_factor", 2.5),
        **more,
    )


def make_weights(config: MoEConfig, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Weights that keep the size of the rows; gate and up differ, the bias is never zero."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inter, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5).to(dtype)

    return Weights(
        config,
        gate=normal(experts, hidden),
        bias=torch.rand(experts, generator=generator) * 0.4 - 0.2,
        w13=normal(experts, 2 * inter, hidden) * 2,
        w2=normal(experts, hidden, inter) * 2,
        shared=(normal(2 * inter, hidden) * 2, normal(hidden, inter) * 2),
    )


def make_layer(weights: Weights, placement: Placement, comm, backend, *, shared: bool = True, **more) -> MoELayer:
    mine = weights.of(placement, comm.rank) | {key: more.pop(key) for key in ("w13", "w2") if key in more}
    return MoELayer(
        weights.config,
        placement,
        comm,
        backend,
        gate_weight=more.pop("gate_weight", weights.gate),
        bias=weights.bias,
        shared=weights.shared if shared else None,
        **mine,
        **more,
    )


def fixed_route(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Stages:
    """Stages whose router answers with these ids, whatever it is asked."""
    return Stages(route=lambda hidden_states, gate_weight, bias, config: (topk_weights, topk_ids))


def make_batch(counts: list[int], config: MoEConfig, dtype: torch.dtype, seed: int) -> Batch:
    """`counts[r]` random rows for rank r, K distinct random experts each."""
    generator = torch.Generator().manual_seed(seed)
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    rows = [torch.randn(n, config.hidden_size, generator=generator).to(dtype) for n in counts]
    weights = [torch.rand(n, top_k, generator=generator) + 0.1 for n in counts]
    ids = [torch.rand(n, experts, generator=generator).argsort(dim=1)[:, :top_k].to(torch.int32) for n in counts]
    return Batch(rows, weights, ids)


def batches(ranks: int, placement: Placement, config: MoEConfig, dtype: torch.dtype) -> dict[str, Batch]:
    """The batches every comparison runs, by name."""
    counts = [(5 * rank + 3) % 7 for rank in range(ranks)]  # 3, 1, 6, 4, 2, 0, 5, …
    top_k, last = config.num_experts_per_tok, ranks - 1

    def batch(counts: list[int], seed: int) -> Batch:
        return make_batch(counts, config, dtype, seed)

    found = {
        "ragged": batch(counts, 1),
        "zero rows on every second rank": batch([0 if rank % 2 else 2 for rank in range(ranks)], 2),
        "zero rows everywhere": batch([0] * ranks, 3),
        "one row in total": batch([0] * last + [1], 4),
    }
    crowd = batch([3] * ranks, 5)
    for ids in crowd.topk_ids:
        ids[:, 1:] = -1
        ids[:, 0] = config.n_routed_experts - 1
    found["all rows to one expert"] = crowd

    gaps = batch([4] * ranks, 6)
    for rank, ids in enumerate(gaps.topk_ids):
        ids[0] = -1
        ids[1, rank % top_k] = -1
        ids[2, 0] = ids[2, -1] = -1
    found["routes and whole rows of -1"] = gaps

    narrow = batch([2] * ranks, 7)
    targets = placement.experts_of(last)
    for ids in narrow.topk_ids:
        for row in range(len(ids)):
            chosen = [targets[(row + k) % len(targets)] if k < len(targets) else -1 for k in range(top_k)]
            ids[row] = torch.tensor(chosen, dtype=torch.int32)
    found["all experts of a row on one rank"] = narrow

    whole = batch(counts, 8)
    strided = [torch.stack([rows, -rows], dim=2)[:, :, 0] for rows in whole.hidden_states]
    found["non-contiguous rows"] = Batch(strided, whole.topk_weights, whole.topk_ids)
    return found


def oracle(batch: Batch, weights: Weights, placement: Placement, *, shared: bool = True) -> list[torch.Tensor]:
    """What the slow reference makes of a batch."""
    return reference.moe_layer(
        batch.hidden_states,
        batch.topk_weights,
        batch.topk_ids,
        weights.w13,
        weights.w2,
        placement,
        weights.shared if shared else None,
    )


def differences(actual: list[torch.Tensor], expected: list[torch.Tensor], verdict: RowInvariance) -> list[str]:
    """Where two lists of rows differ, in words: to the bit where `verdict` promises it, else beyond the tolerance.

    float64 products add up in another order in every batch; they are compared to 1e-12.
    """
    if any(rows.dtype != torch.float64 for rows in actual):
        VERDICTS.add(verdict)
    found = []
    for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            found.append(
                f"rank {rank}: {tuple(ours.shape)} {ours.dtype}, expected {tuple(theirs.shape)} {theirs.dtype}"
            )
            continue
        exact = verdict.exact and ours.dtype != torch.float64
        limit = TOLERANCE[ours.dtype] * max(1.0, float(theirs.abs().max()) if theirs.numel() else 1.0)
        same = torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=0, atol=limit)
        if not same:
            largest = (ours.double() - theirs.double()).abs().max()
            found.append(f"rank {rank}: differs by up to {largest:.3g} ({'equality' if exact else limit} wanted)")
    return found
