"""One pass with a known answer, before the first token.

A twin of a real layer runs once: the same class, placement, groups, backend and stages, also your own, with small
weights whose result every rank knows to the bit (`guard/known_layer.py`). Only the router is replaced. What comes back
is compared, put into words (`guard/symptoms.py`), and all ranks agree on the verdict: nobody goes on alone.

Source: vLLM has no such pass; the faults that this one finds give fluent nonsense there. Built in: notebook 12.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from moe_course.backends.configure import Backend
from moe_course.comm.base import Ledger
from moe_course.errors import VerificationFailed
from moe_course.guard.known_layer import KnownLayer
from moe_course.guard.symptoms import Here, describe
from moe_course.layer import MoELayer
from moe_course.modes import Mode
from moe_course.parallel import Plan


def canary(layer: MoELayer, *, plan: Plan | None = None, step: int = -1, turn: int = 0) -> None:
    """Run the twin of `layer` once. Every rank of its groups must call it.

    The ledger, layer and step of the groups are afterwards as they were, and `on_event` is not called.

    Args:
        plan: says which ranks share rows. None: as the layer's mode says, so a mode that is wrong about just that,
            and is right in itself, goes unseen.
        step: the step that headers of these exchanges show.
        turn: which holders have no rows; two turns in a row leave nobody out.

    Raises:
        VerificationFailed: on all ranks alike, with what one of them saw.
        Whatever the stages raise, with a note.
    """
    mode, device, dtype = layer.mode, layer.w13.device, layer.w13.dtype
    holder, holders = _holder(mode) if plan is None else _holder_of(plan, mode.dispatch.world_rank)
    known = KnownLayer(layer.placement, mode.moe_tp_size, holders, layer.shared is not None)
    numbers = known.numbers(holder, 1 if mode.split is None else mode.split.world_size, turn)
    twin = _twin(layer, known)
    groups = {id(comm.shared): comm.shared for comm in mode.groups()}.values()
    before = [(shared, shared.ledger, shared.layer, shared.step) for shared in groups]
    for shared in groups:
        shared.ledger, shared.step = Ledger(), step
    try:
        with torch.no_grad():
            actual = twin.forward(known.inputs(numbers).to(device, dtype))
        wanted = (known.routed(numbers) + known.from_shared(numbers)).to(dtype)
        symptom = None
        if actual.dtype != dtype or not torch.equal(actual.cpu(), wanted):
            here = Here(
                rank=mode.dispatch.world_rank,
                layer=layer.layer,
                part=mode.moe_tp_rank if known.slices > 1 else mode.ep_rank,
                met=_met(layer),
                own=mode.own_rows(len(numbers)),
                reduced=None if mode.reduce is None else mode.reduce.members,
                scale=layer.config.routed_scaling_factor,
            )
            alike = actual.shape == wanted.shape and actual.dtype == dtype
            elsewhere = alike and torch.equal(actual[here.own].cpu(), wanted[here.own])
            symptom = elsewhere, describe(known, numbers, actual.cpu(), here)
        _agree(mode, symptom, device)
    except VerificationFailed:
        raise
    except Exception as error:
        error.add_note("raised in the known pass before generation (moe_course/guard/canary.py)")
        raise
    finally:
        for shared, ledger, number, step_before in before:
            shared.ledger, shared.layer, shared.step = ledger, number, step_before


def _twin(layer: MoELayer, known: KnownLayer) -> MoELayer:
    mode, device, dtype = layer.mode, layer.w13.device, layer.w13.dtype
    config = replace(
        layer.config,
        hidden_size=known.hidden,
        moe_intermediate_size=known.inter * known.slices,
        num_experts_per_tok=known.routes,
        n_group=1,
        topk_group=1,
    )

    def fixed(hidden_states, gate_weight, bias, config):
        weights, ids = known.routing(known.numbers_of(hidden_states))
        return weights.to(hidden_states.device), ids.to(hidden_states.device)

    mine = layer.placement.experts_of(mode.ep_rank)
    w13, w2 = (tensor.to(device, dtype) for tensor in known.expert_weights(mine, mode.moe_tp_rank))
    shared = tuple(tensor.to(device, dtype) for tensor in known.shared_weights()) if known.shared else None
    return type(layer)(
        config,
        layer.placement,
        mode.dispatch,
        layer.backend.exact(known.stride) if isinstance(layer.backend, Backend) else layer.backend,  # known to the bit
        gate_weight=torch.zeros(config.n_routed_experts, known.hidden, device=device),
        bias=None if layer.bias is None else torch.zeros_like(layer.bias),
        w13=w13,
        w2=w2,
        shared=shared,
        stages=replace(layer.stages, route=fixed),
        mode=mode,
        layer=layer.layer,
    )


def _holder(mode: Mode) -> tuple[int, int]:
    """`(which set of rows is here, how many there are)` by the groups: those of `reduce` and `split` share rows."""
    rank = first = mode.dispatch.world_rank
    sharing = 1
    for comm in (mode.reduce, mode.split):
        if comm is not None:
            first -= rank - comm.members[0]  # the groups are axes of one grid
            sharing *= comm.world_size
    return first // sharing, mode.dispatch.members[-1] // sharing + 1


def _holder_of(plan: Plan, rank: int) -> tuple[int, int]:
    """The same by the plan: TP and PCP ranks have the rows of their DP rank."""
    return plan.rank(rank).dp, plan.parallel.data_parallel_size


def _met(layer: MoELayer) -> list[int]:
    """The owners, or the slices, that rows reach before any sum over ranks that share them."""
    mode = layer.mode
    if mode.moe_tp_size == 1:
        return layer.placement.owner[mode.placement.owner >= 0].unique().tolist()
    others = [mode.moe_tp_rank + rank - mode.dispatch.world_rank for rank in mode.dispatch.members]
    return others if mode.travels else [mode.moe_tp_rank]


def _agree(mode: Mode, symptom: tuple[bool, str] | None, device: torch.device) -> None:
    """Raise on all ranks what any rank saw, best of all in rows it took through the layer itself.

    The groups are axes of one grid: one exchange in each of them reaches everybody.
    """
    seen = {} if symptom is None else {str(mode.dispatch.world_rank): symptom}
    for comm in mode.groups():
        text = json.dumps(seen).encode() if seen else b""
        rows = torch.tensor(list(text), dtype=torch.uint8, device=device).view(-1, 1)  # [bytes, 1], none if all is well
        gathered = comm.all_gather_rows(rows)
        for part in gathered.rows.cpu().split(gathered.counts):
            seen |= json.loads(bytes(part.flatten().tolist())) if len(part) else {}
    if seen:
        first, *others = sorted(seen, key=lambda rank: (seen[rank][0], int(rank)))
        also = f"; rank{'s' * (len(others) > 1)} {', '.join(sorted(others, key=int))} saw errors, too" if others else ""
        raise VerificationFailed(f"canary: {seen[first][1]}{also}")
