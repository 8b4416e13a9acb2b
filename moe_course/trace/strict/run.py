"""Check what only all ranks' files together can say: no route is missing, none is there twice, places fit each other.

Built in: notebook 13.
"""

from __future__ import annotations

from pathlib import Path

import torch

from moe_course.errors import TraceError
from moe_course.expert_map import Placement
from moe_course.trace.schema import COLUMNS, LONGEST, LOOSE, STAGES
from moe_course.trace.spans import OUTSIDE
from moe_course.trace.strict.passes import first_true
from moe_course.trace.strict.places import places_of
from moe_course.trace.strict.rank_file import file_of
from moe_course.trace.strict.rows import Passes, check_outputs, check_rows, planned_rows, prefill_passes, sharers


def check_run(folder: Path, meta: dict, placement: Placement, parts: list[dict[str, torch.Tensor]]) -> None:
    """Raises TraceError naming file, column, entry and what is expected there.

    Routes may be missing, and a row may have an expert twice, where the options say that stages were somebody's own
    or that something was broken on purpose.
    """
    layers = sorted({layer for part in parts[:1] for layer in part["span_layer"].tolist() if layer != OUTSIDE})
    if not layers and not any(len(part["step"]) for part in parts):
        return  # a model without sparse layers
    passes = planned_rows(meta)
    if meta["prefill_passes"] != (n := prefill_passes(meta)):
        raise TraceError(
            f"{folder}/meta.json: field prefill_passes is {meta['prefill_passes']}, expected {n}: the prompts go in so "
            f"many parts with capacity {meta['capacity']}"
        )
    for rank, part in enumerate(parts):
        path = folder / file_of(rank)
        if "faults" not in meta["options"]:
            _check_stages(path, part, layers, len(passes[rank]))
        check_rows(path, rank, part, passes[rank])
        if meta["values"]:
            check_outputs(path, part, passes[rank], layers)
    _check_time(folder, meta, parts)
    for members in sharers(meta, meta["plan"]["reduce_group"]):
        _check_routes(folder, meta, members, parts, passes, layers)
    check_owners(folder, meta, parts)
    _check_places(folder, meta, placement, parts, passes)


def _check_stages(path: Path, part: dict[str, torch.Tensor], layers: list[int], passes: int) -> None:
    """In every pass a rank goes through every stage of every sparse layer, also with no row."""
    names = ("span_step", "span_layer", "span_stage")
    inside = (part["span_layer"] != OUTSIDE).nonzero().flatten()
    told = torch.stack([part[name][inside] for name in names], dim=1)  # [n, 3]
    should = torch.tensor(
        [(step, layer, stage) for step in range(passes) for layer in layers for stage in range(len(STAGES) - 1)]
    ).view(-1, 3)
    shorter = min(len(told), len(should))
    every = f"each of {passes} passes has {', '.join(STAGES[:-1])} of layers {layers}, in this order"
    for at in first_true((told[:shorter] != should[:shorter]).any(dim=1)):
        raise TraceError(
            f"{path}: columns {', '.join(names)}, entry {int(inside[at])}, are {tuple(told[at].tolist())}, expected "
            f"{tuple(should[at].tolist())}: {every}"
        )
    if len(told) != len(should):
        raise TraceError(f"{path}: column span_step has {len(told)} entries in layers, expected {len(should)}: {every}")


def _check_time(folder: Path, meta: dict, parts: list[dict[str, torch.Tensor]]) -> None:
    """A run that lasts for months is a damaged stamp; between hosts nobody can say."""
    ends = [(int(part["span_begin_ns"][0]), int(part["span_end_ns"][-1])) for part in parts if len(part["span_step"])]
    if meta["clock"]["comparable"] and ends:
        ends = [(min(begin for begin, _ in ends), max(end for _, end in ends))]
    for begin, end in ends:
        if end - begin >= LONGEST:
            raise TraceError(
                f"{folder}: spans from {begin} to {end} ns are {(end - begin) / 8.64e13:.0f} days, expected less than "
                f"{LONGEST / 8.64e13:.0f}: a time stamp is damaged, or clocks do not compare"
            )


def _check_routes(
    folder: Path, meta: dict, members: list[int], parts: list[dict], passes: list[Passes], layers: list[int]
) -> None:
    """Ranks that share rows have each choice of each row once, all of them together."""
    top_k, counts = meta["top_k"], torch.tensor([len(rows) for rows in passes[members[0]]])
    layer_at = torch.full((max(layers, default=0) + 1,), -1)
    layer_at[layers] = torch.arange(len(layers))
    joined = {name: torch.cat([parts[rank][name] for rank in members]) for name in COLUMNS}
    # number of the row in its layer, over all passes; then of the choice
    row = ((counts.cumsum(0) - counts)[joined["step"]] + joined["row"]) * len(layers) + layer_at[joined["layer"]]
    choice, times = (row * top_k + joined["k"]).unique(return_counts=True)

    def where(number: int) -> str:
        number, layer = divmod(number, len(layers))
        step = int((counts.cumsum(0) <= number).sum())
        return f"row {number - int(counts[:step].sum())} of step {step}, layer {layers[layer]}"

    names = " and ".join(str(folder / file_of(rank)) for rank in members)
    for at in first_true(times > 1):
        number, k = divmod(int(choice[at]), top_k)
        raise TraceError(f"{names}: column k has {int(times[at])} entries of {k} for {where(number)}, expected 1")
    if any(name in meta["options"] for name in LOOSE):
        return
    if len(choice) != (n := int(counts.sum()) * len(layers) * top_k):
        gap = first_true(choice != torch.arange(len(choice)))
        number, k = divmod(gap[0] if gap else len(choice), top_k)
        raise TraceError(
            f"{names}: no route of k = {k} for {where(number)}; {len(choice)} routes, expected {n}: top_k is {top_k}, "
            "and the package's router leaves none out"
        )
    pair, times = (row * meta["experts"] + joined["expert"]).unique(return_counts=True)
    for at in first_true(times > 1):
        number, expert = divmod(int(pair[at]), meta["experts"])
        raise TraceError(f"{names}: column expert has {int(times[at])} of {expert} for {where(number)}, expected 1")
    for at in first_true(joined["weight"] < 0):
        weight = float(joined["weight"][at])
        raise TraceError(f"{names}: column weight is {weight:g} for {where(int(row[at]))}, expected 0 or more")


def check_owners(folder: Path, meta: dict, parts: list[dict[str, torch.Tensor]]) -> None:
    """A rank takes rows to the ranks of its dispatch group, and without one to nobody else."""
    for members in sharers(meta, meta["plan"]["dispatch_group"]):
        for rank in members:
            owner = parts[rank]["owner_rank"]
            for at in first_true(~torch.isin(owner, torch.tensor(members))):
                raise TraceError(
                    f"{folder / file_of(rank)}: column owner_rank, entry {at}, is {int(owner[at])}, expected one of "
                    f"{members}: rank {rank} takes rows to no other"
                )


def _check_places(
    folder: Path, meta: dict, placement: Placement, parts: list[dict[str, torch.Tensor]], passes: list[Passes]
) -> None:
    """Places of the package's own dispatch; one of yours leaves them open, for all routes."""
    columns = {name: torch.cat([part[name] for part in parts]) for name in COLUMNS}
    counts = torch.tensor([[len(rows) for rows in of_rank] for of_rank in passes])
    names = ("send_row", "receive_row", "via_rank")
    if "stages" in meta["options"] and all((columns[name] < 0).all() for name in names):
        return
    for name, should in places_of(meta, placement, columns, counts).items():
        for at in first_true(columns[name] != should):
            rank = int(columns["source_rank"][at])
            entry = at - sum(meta["routes"][:rank])
            raise TraceError(
                f"{folder / file_of(rank)}: column {name}, entry {entry}, is {int(columns[name][at])}, expected "
                f"{int(should[at])}: where {meta['shape']} puts the route, by the routes of all ranks"
            )
