"""Answers to the exercises of notebook 07. `ANSWERS` maps each exercise's name to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from answers import Answers

from moe_course.backends.traffic import owners
from moe_course.dispatch import Dispatched

# 7.1, wrong


def pads_with_zero_rows(hidden_states, topk_weights, topk_ids, *, comm, placement):
    counts = comm.all_gather_rows(hidden_states[:, :0]).counts
    fill = (0, 0, 0, max(counts) - len(hidden_states))
    gathered = comm.all_gather_rows(F.pad(hidden_states, fill), F.pad(topk_weights, fill), F.pad(topk_ids, fill))
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def takes_weights_for_ids(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    ids, weights = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def forgets_ids(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights)
    ids = torch.where(placement.owner[topk_ids.long()] == comm.rank, topk_ids, -1)
    return Dispatched(gathered.rows, None, ids, gathered.metadata[0], None, "rows", gathered.counts)


def forgets_weights(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_ids)
    ids = gathered.metadata[0]
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, topk_weights, None, "rows", gathered.counts)


def leaves_weights_to_others(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_ids)
    ids = gathered.metadata[0]
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, None, None, "rows", gathered.counts)


def sends_nothing(hidden_states, topk_weights, topk_ids, *, comm, placement):
    return Dispatched(hidden_states, None, topk_ids, topk_weights, None, "rows", [len(hidden_states)])


def puts_own_rows_first(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    parts = [torch.split(part, gathered.counts) for part in (gathered.rows, *gathered.metadata)]
    order = [comm.rank, *(rank for rank in range(comm.world_size) if rank != comm.rank)]
    rows, weights, ids = (torch.cat([part[rank] for rank in order]) for part in parts)
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(rows, None, ids, weights, None, "rows", gathered.counts)


def ids_of_own_rows_first(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights)
    ids = torch.cat([topk_ids, comm.all_gather_rows(topk_ids).rows[len(topk_ids) :]])
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, gathered.metadata[0], None, "rows", gathered.counts)


def drops_rows_without_routes(hidden_states, topk_weights, topk_ids, *, comm, placement):
    routed = (topk_ids >= 0).any(dim=1)
    gathered = comm.all_gather_rows(hidden_states[routed], topk_weights[routed], topk_ids[routed])
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def drops_rows_of_others(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    here = (placement.owner[ids.long()] == comm.rank) & (ids >= 0)
    keep = here.any(dim=1)
    ids = torch.where(here, ids, -1)
    return Dispatched(gathered.rows[keep], None, ids[keep], weights[keep], None, "rows", gathered.counts)


def assumes_equal_counts(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    counts = [len(hidden_states)] * comm.world_size
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", counts)


def counts_backwards(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts[::-1])


def forgets_the_handle(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", None)


def translates_to_local_ids(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    here = (placement.owner[ids.long()] == comm.rank) & (ids >= 0)
    ids = torch.where(here, placement.local[ids.long()], -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def keeps_foreign_ids(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def keeps_only_foreign_ids(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] != comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def swaps_ids_and_weights(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    ids, weights = gathered.metadata
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def weighs_before_sending(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states * topk_weights.sum(1, keepdim=True), topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def idle_rank_leaves(hidden_states, topk_weights, topk_ids, *, comm, placement):
    if len(hidden_states) == 0:
        return Dispatched(hidden_states, None, topk_ids, topk_weights, None, "rows", [0] * comm.world_size)
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def gathers_twice(hidden_states, topk_weights, topk_ids, *, comm, placement):
    counts = comm.all_gather_rows(hidden_states).counts
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", counts)


def sends_wide_ids(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids.long())
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids] == comm.rank, ids, -1).int()
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def returns_wide_ids(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids.long(), -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


def returns_wide_rows(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows.double(), None, ids, weights, None, "rows", gathered.counts)


def returns_wide_weights(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights.double(), None, "rows", gathered.counts)


def sends_wide_rows(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states.double(), topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows.to(hidden_states.dtype), None, ids, weights, None, "rows", gathered.counts)


def says_another_layout(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "routes", gathered.counts)


def counts_for_the_experts(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    counted = torch.zeros(placement.num_local(comm.rank), dtype=torch.int32)
    return Dispatched(gathered.rows, None, ids, weights, counted, "rows", gathered.counts)


def list_of_rows(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows.tolist(), None, ids, weights, None, "rows", gathered.counts)


def fields_in_another_order(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    return Dispatched(gathered.rows, None, gathered.counts, weights, None, "rows", ids)


def masks_in_place(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids[placement.owner[ids.long()] != comm.rank] = -1
    topk_ids[placement.owner[topk_ids.long()] != comm.rank] = -1
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)


# lazy


def returns_the_input(hidden_states, topk_weights, topk_ids, *, comm, placement):
    return hidden_states, topk_weights, topk_ids


def writes_the_first_case(hidden_states, topk_weights, topk_ids, *, comm, placement):
    return Dispatched(torch.tensor([[0.0], [1.0]]), None, topk_ids, topk_weights, None, "rows", [1, 1])


# right


def as_the_notebook_teaches(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    here = placement.owner[ids.long()] == comm.rank
    return Dispatched(gathered.rows, None, torch.where(here, ids, -1), weights, None, "rows", gathered.counts)


def with_owners(hidden_states, topk_weights, topk_ids, *, comm, placement):
    arrived = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    ids = arrived.metadata[1].masked_fill(owners(arrived.metadata[1], placement) != comm.rank, -1)
    return Dispatched(
        hidden_states=arrived.rows,
        scales=None,
        topk_ids=ids,
        topk_weights=arrived.metadata[0],
        expert_num_tokens=None,
        layout="rows",
        handle=tuple(arrived.counts),
    )


def one_after_the_other(hidden_states, topk_weights, topk_ids, *, comm, placement):
    """Three exchanges of one part each: as many bytes, three headers."""
    rows = comm.all_gather_rows(hidden_states)
    weights = comm.all_gather_rows(topk_weights).rows
    ids = comm.all_gather_rows(topk_ids).rows
    mine = torch.tensor(placement.experts_of(comm.rank), dtype=ids.dtype)
    return Dispatched(rows.rows, None, torch.where(torch.isin(ids, mine), ids, -1), weights, None, "rows", rows.counts)


def by_all_to_all(hidden_states, topk_weights, topk_ids, *, comm, placement):
    """A copy for every rank, row after row; the rank's own copy stays at home."""
    size = comm.world_size
    copies = [part.repeat(size, 1) for part in (hidden_states, topk_weights, topk_ids)]
    arrived = comm.all_to_all_rows(copies[0], [len(hidden_states)] * size, *copies[1:])
    weights, ids = arrived.metadata
    for expert in range(placement.num_experts):
        if placement.owner[expert] != comm.rank:
            ids = ids.masked_fill(ids == expert, -1)
    return Dispatched(arrived.rows, None, ids, weights, None, "rows", torch.tensor(arrived.counts))


def speaker_after_speaker(hidden_states, topk_weights, topk_ids, *, comm, placement):
    """One exchange for each rank that speaks, as vLLM does for ragged sizes."""
    heard = []
    for speaker in range(comm.world_size):
        n = len(hidden_states) if comm.rank == speaker else 0
        heard.append(comm.all_gather_rows(hidden_states[:n], topk_weights[:n], topk_ids[:n]))
    weights, ids = (torch.cat([said.metadata[place] for said in heard]) for place in (0, 1))
    ids = torch.where(placement.owner[ids.long()] == comm.rank, ids, -1)
    counts = [sum(said.counts) for said in heard]
    return Dispatched(torch.cat([said.rows for said in heard]), None, ids, weights, None, "rows", counts)


# 7.2, wrong


def one_scale_for_all_rows(rows, group_size=128):
    scale = rows.float().abs().max().clamp(min=1e-10) / 448 if rows.numel() else torch.tensor(1.0)
    codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale.expand(len(rows), rows.shape[1] // group_size).contiguous()


def one_scale_for_the_whole_row(rows, group_size=128):
    scale = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
    codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale


def repeats_the_row_scale(rows, group_size=128):
    scale = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
    codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale.expand(-1, rows.shape[1] // group_size).contiguous()


def scale_upside_down(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = 448 / groups.abs().amax(2).clamp(min=1e-10)
    codes = (groups * scale.unsqueeze(2)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def forgets_negative_numbers(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.amax(2).clamp(min=1e-10) / 448
    codes = (groups / scale.unsqueeze(2)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def only_casts(rows, group_size=128):
    scale = torch.ones(len(rows), rows.shape[1] // group_size)
    return rows.to(torch.float8_e4m3fn), scale


def divides_by_zero(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.abs().amax(2) / 448
    codes = (groups / scale.unsqueeze(2)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def brings_the_rows_back(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.abs().amax(2).clamp(min=1e-10) / 448
    codes = (groups / scale.unsqueeze(2)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale.unsqueeze(2)).flatten(1), scale


def narrow_scales(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = (groups.abs().amax(2).clamp(min=1e-10) / 448).bfloat16()
    codes = (groups / scale.float().unsqueeze(2)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def computes_in_the_dtype_of_the_rows(rows, group_size=128):
    groups = rows.unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.abs().amax(2).clamp(min=1e-10) / 448
    codes = (groups / scale.unsqueeze(2)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale.float()


def floor_of_1e_4(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.abs().amax(2).clamp(min=1e-4) / 448
    codes = (groups / scale.unsqueeze(2)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def floor_of_1e_6(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.abs().amax(2).clamp(min=1e-6) / 448
    codes = (groups / scale.unsqueeze(2)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def int8_codes(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.abs().amax(2).clamp(min=1e-10) / 127
    return (groups / scale.unsqueeze(2)).round().flatten(1).to(torch.int8), scale


def limit_of_another_fp8(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.abs().amax(2).clamp(min=1e-10) / 240
    codes = (groups / scale.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def groups_the_wrong_way(rows, group_size=128):
    groups = rows.float().unflatten(1, (group_size, rows.shape[1] // group_size))
    scale = groups.abs().amax(1).clamp(min=1e-10) / 448
    codes = (groups / scale.unsqueeze(1)).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def cuts_to_whole_numbers(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.abs().amax(2).clamp(min=1e-10) / 448
    codes = (groups / scale.unsqueeze(2)).round().flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def gives_one_tensor(rows, group_size=128):
    return rows


def writes_the_first_row(rows, group_size=128):
    scales = torch.full((len(rows), rows.shape[1] // group_size), 0.015625)
    return (rows.float() / 0.015625).to(torch.float8_e4m3fn), scales


# 7.2, right


def with_unflatten(rows, group_size=128):
    groups = rows.float().unflatten(1, (rows.shape[1] // group_size, group_size))
    scale = groups.abs().amax(2).clamp(min=1e-10) / 448
    codes = (groups / scale.unsqueeze(2)).clamp(-448, 448).flatten(1)
    return codes.to(torch.float8_e4m3fn), scale


def as_vllm_multiplies(rows, group_size=128):
    tokens, hidden = rows.shape
    x = rows.float().reshape(tokens, hidden // group_size, group_size)
    scale = x.abs().max(dim=-1).values.clamp_min(1e-10) * (1 / 448) if tokens else x.sum(-1)
    q = torch.clamp(x / scale[..., None], -448.0, 448.0).to(torch.float8_e4m3fn)
    return q.reshape(tokens, hidden), scale


def group_by_group(rows, group_size=128):
    """One scale of 1 for zeros; a loop instead of a view."""
    codes = torch.zeros(rows.shape).to(torch.float8_e4m3fn)
    scales = torch.ones(len(rows), rows.shape[1] // group_size)
    for row in range(len(rows)):
        for group in range(scales.shape[1]):
            part = rows[row, group * group_size : (group + 1) * group_size].double()
            largest = float(part.abs().max())
            if largest > 0:
                scales[row, group] = largest / 448
                coded = (part / (largest / 448)).float().clamp(-448, 448).to(torch.float8_e4m3fn)
                codes[row, group * group_size : (group + 1) * group_size] = coded
    return codes, scales


_CAST = "these values are right, their dtype is not: .to"
ANSWERS = {
    "dispatch": Answers(
        wrong=[
            (pads_with_zero_rows, "short ranks were padded: nobody sent these rows"),
            (takes_weights_for_ids, "metadata arrives in the order you sent it in"),
            (forgets_ids, "ids of all rows are needed"),
            (ids_of_own_rows_first, "the ids belong to other rows"),
            (forgets_weights, "each row needs its own weights"),
            (leaves_weights_to_others, "the experts apply the weights here"),
            (puts_own_rows_first, "rows lie in rank order"),
            (drops_rows_without_routes, "every row keeps its place on every rank"),
            (drops_rows_of_others, "every row keeps its place on every rank"),
            (assumes_equal_counts, "handle on rank 0 is [2, 2], expected [2, 4]"),
            (counts_backwards, "the handle is what combine cuts by"),
            (forgets_the_handle, "handle on rank 0 is None"),
            (translates_to_local_ids, "these are local numbers"),
            (keeps_foreign_ids, "ids of experts that live on other ranks become -1"),
            (keeps_only_foreign_ids, "the other way round"),
            (swaps_ids_and_weights, "topk_ids on rank 0 is [6, 2] float32, expected [6, 2] int32"),
            (weighs_before_sending, "rows travel as they are"),
            (idle_rank_leaves, "rank 1 has returned, and the others are waiting for it"),
            (gathers_twice, "12 rows sent, budget 6"),
            (returns_wide_ids, f"{_CAST}(torch.int32)"),
            (returns_wide_rows, f"{_CAST}(torch.float32)"),
            (returns_wide_weights, f"{_CAST}(torch.float32)"),
            (sends_wide_ids, "168 bytes sent, budget 120"),
            (sends_wide_rows, "144 bytes sent, budget 120"),
            (says_another_layout, "layout on rank 0 is 'routes', expected 'rows'"),
            (counts_for_the_experts, "nobody has counted the rows of each expert here"),
            (list_of_rows, "types of the fields on rank 0 is 'hidden_states: list'"),
            (fields_in_another_order, "'topk_ids: list'"),
            (masks_in_place, "changes its input `topk_ids` in place"),
        ],
        lazy=[
            (sends_nothing, "these are one rank's own rows"),
            (returns_the_input, "the function returned a tuple of 3"),
            (writes_the_first_case, "number of rows on rank 0 is 2, expected 6"),
        ],
        right=[as_the_notebook_teaches, with_owners, one_after_the_other, by_all_to_all, speaker_after_speaker],
    ),
    "quantize_rows": Answers(
        wrong=[
            (one_scale_for_all_rows, "one scale for all rows"),
            (repeats_the_row_scale, "one scale for the whole row"),
            (one_scale_for_the_whole_row, "each row has a scale of its own for every 4 numbers"),
            (scale_upside_down, "upside down"),
            (forgets_negative_numbers, "negative numbers count, too"),
            (divides_by_zero, "a code is NaN: 0 / 0 for a group of zeros"),
            (brings_the_rows_back, "torch.float32 numbers would travel"),
            (floor_of_1e_4, "clamp(min=1e-10)"),
            (floor_of_1e_6, "clamp(min=1e-10)"),
            (int8_codes, "torch.int8 numbers would travel"),
            (narrow_scales, "scales stay fp32"),
            (computes_in_the_dtype_of_the_rows, "compute in fp32, also for rows in bf16"),
            (limit_of_another_fp8, "divided by 448, the largest code of e4m3"),
            (groups_the_wrong_way, "a scale is the largest absolute value of its group"),
            (cuts_to_whole_numbers, "a code is the number divided by its group's scale"),
        ],
        lazy=[
            (only_casts, "scales differs"),
            (gives_one_tensor, "what comes back is 'a Tensor'"),
            (writes_the_first_row, "scales differs in 1 of 2 numbers"),
        ],
        right=[with_unflatten, as_vllm_multiplies, group_by_group],
    ),
}
