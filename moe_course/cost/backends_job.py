"""The routing that `moe-course backends` sends: a recording, or a router with random weights. Built in: notebook 11."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_course.backends.support import check_support
from moe_course.cost.compare import Job
from moe_course.cost.replay import Shown, notes_on_nodes, shown
from moe_course.cost.routing import batches, number_of_experts, ranks_of_rows
from moe_course.cost.routing_file import read_routing
from moe_course.cost.sizes import row_sizes
from moe_course.errors import BackendUnavailable, ConfigError
from moe_course.expert_map import make_placement
from moe_course.router import grouped_topk


def make_job(file, rows_of, rows, experts, top_k, passes, transport, sizes) -> tuple[Job, dict[str, str], list[str]]:
    """The job, shapes that this transport cannot carry with the reason, and notes."""
    size, limit = sizes["world_size"], sizes["max_num_tokens"]
    if rows > limit:
        raise ConfigError(f"--rows is {rows}, --max-num-batched-tokens is {limit}; a pass takes at most as many")
    row_sizes(sizes["hidden_size"], sizes["dtype"], sizes["dispatch_quant"])  # names and sizes that do not fit
    if file is None:
        total = experts or 256
        tensors, notes = _seeded(total, top_k, rows, size, passes, sizes), ["routing: a router with random weights"]
    else:
        total, tensors, notes = _from_file(file, rows_of, experts, passes, size, rows)
    placement = make_placement(size, total, sizes["strategy"], ranks_per_node=sizes["ranks_per_node"])
    lines, refused = [], {}
    for line in [Shown("no_dp_ep", "no_dp_ep"), *shown(placement)]:
        try:
            check_support(line.shape, transport)
            lines.append([line.name, line.shape, line.reduce_in_node])
        except BackendUnavailable as error:
            refused[line.name] = str(error)
    return Job(*tensors, lines=lines, experts=total, **sizes), refused, [*notes, *notes_on_nodes(placement)]


def _seeded(experts: int, top_k: int, rows: int, size: int, passes: int, sizes: dict):
    """`(ids, rank, batch)` of a router with random weights; each pass is a layer with a router of its own."""
    if top_k > experts:
        raise ConfigError(f"--top-k is {top_k} of {experts} experts; a row chooses each one once at most")
    generator, ids = torch.Generator().manual_seed(sizes["seed"]), []
    for _ in range(passes):
        logits = torch.randn(size * rows, 32, generator=generator) @ torch.randn(32, experts, generator=generator)
        ids.append(grouped_topk(logits * 32**-0.5, top_k)[1])
    rank = torch.arange(size).repeat_interleave(rows).repeat(passes)
    return torch.cat(ids), rank, torch.arange(passes).repeat_interleave(size * rows)


def _from_file(file: Path, rows_of: str | None, experts: int | None, passes: int, size: int, limit: int):
    """E, `(ids, rank, batch)` and notes: passes spread over the batches and layers of a recording."""
    total, routing = number_of_experts(read_routing(file), experts, None)
    owner = ranks_of_rows(routing, size, rows_of)
    all_passes = [
        (layer, chunk) for chunk in batches(routing, owner, size, limit) for layer in range(len(routing.layers))
    ]
    chosen = [
        all_passes[i * len(all_passes) // min(passes, len(all_passes))] for i in range(min(passes, len(all_passes)))
    ]
    ids, rank, batch = [], [], []
    for number, (layer, chunk) in enumerate(chosen):
        for r, rows in enumerate(chunk):
            ids.append(routing.ids[rows, layer])
            rank.append(torch.full((len(rows),), r))
            batch.append(torch.full((len(rows),), number))
    notes = [f"routing: {file}, {len(chosen)} of {len(all_passes)} passes", *routing.notes]
    return total, (torch.cat(ids), torch.cat(rank), torch.cat(batch)), notes
