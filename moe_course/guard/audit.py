"""After loading: does every rank hold what the plan says, and is each number that of the file?

Every rank reads its tensors a second time, by a way that shares no code with the loader (`guard/raw_checkpoint.py`),
and finds out which experts its rows really are (`guard/held.py`). In one exchange all learn who holds what.

Source: vLLM prints its expert map and checks nothing. Built in: notebook 05.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import torch

from moe_course.comm.base import Comm, Ledger
from moe_course.errors import CheckpointError
from moe_course.glm.model import LoadedModel
from moe_course.guard.held import Held
from moe_course.guard.raw_checkpoint import RawCheckpoint
from moe_course.parallel import Plan

MOST = 4  # findings that are told; the others are counted


def audit(model: LoadedModel, model_dir: str | Path, plan: Plan, comm: Comm) -> dict[str, float]:
    """Compare what `glm.load` left on every rank with the plan and the files.

    Args:
        comm: all ranks of the plan; every one must call it.

    Returns:
        What was compared on this rank: `tensors` and `bytes` read from the files, `experts` (rows of `w13` over all
        layers), `buffers` computed again; and `seconds`.

    Raises:
        CheckpointError: the same on all ranks. An expert, or a slice of one, that is not held by exactly the ranks of
            the plan; a tensor that differs from the file, holds NaN or infinity, or has no values; a buffer with
            another value than it should have; anything that is in no file and cannot be computed.
    """
    began = time.perf_counter()
    held, problems, counts = None, [], {}
    try:
        file = RawCheckpoint(model_dir)
        here = Held(model, file, plan, comm.rank).look()
        held, problems = here.experts, here.problems
        experts = sum(map(len, held.values()))
        counts = {"tensors": file.tensors, "bytes": file.bytes, "experts": experts, "buffers": here.buffers}
    except CheckpointError as error:  # to be told to the others, who wait for this rank
        problems = [f"rank {comm.rank}: {error}"]
    text = torch.frombuffer(bytearray(json.dumps([held, problems]).encode()), dtype=torch.uint8)
    ledger, comm.ledger = comm.ledger, Ledger()  # what this costs is no part of a run
    gathered = comm.all_gather_rows(text.view(-1, 1).to(model.device))
    comm.ledger = ledger
    said = [json.loads(part.numpy().tobytes()) for part in gathered.rows.cpu().split(gathered.counts)]
    by_rank = [experts for experts, _ in said]
    found = [] if None in by_rank else _ownership(plan, by_rank)
    found += [problem for _, problems in said for problem in problems]
    if found:
        more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
        placed = f"; the placement in force is {plan.placement.strategy}: {plan.placement.reason}"
        raise CheckpointError("; ".join(found[:MOST]) + more + placed * ("held by" in found[0]))
    return counts | {"seconds": round(time.perf_counter() - began, 4)}


def _ownership(plan: Plan, by_rank: list[dict[str, list]]) -> list[str]:
    """Experts, or slices of experts, that are held by other ranks than those of the plan."""
    whole, owner = plan.moe.use_ep, plan.placement.owner.tolist()
    planned, actual = defaultdict(list), defaultdict(list)  # (layer, expert, slice) -> ranks
    for rank, layers in enumerate(by_rank):
        mine = plan.rank(rank)
        for layer in mine.layers:
            for expert, owned_by in enumerate(owner):
                if not whole or owned_by == mine.ep_rank:
                    planned[layer, expert, 0 if whole else mine.ep_rank].append(rank)
        for layer, pairs in layers.items():
            for expert, part in pairs:
                actual[int(layer), expert, part].append(rank)
    found = []
    for layer, expert, part in sorted(planned.keys() | actual.keys()):
        ranks, wanted = actual[layer, expert, part], planned[layer, expert, part]
        if ranks != wanted:
            what = f"expert {expert}" if whole else f"slice {part} of {plan.moe.tp_size} of expert {expert}"
            found.append(f"layer {layer}: {what} is held by {_ranks(ranks)}, should be held by {_ranks(wanted)}")
    return found


def _ranks(ranks: list[int]) -> str:
    times = [
        f"{rank} ({ranks.count(rank)} times)" if ranks.count(rank) > 1 else str(rank) for rank in sorted(set(ranks))
    ]
    return f"rank{'s' * (len(times) > 1)} {', '.join(times)}" if times else "no rank"
