"""Trace folders written by hand: complete and correct, until a test breaks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_course.backends.capabilities import SHAPES
from moe_course.expert_map import make_placement
from moe_course.trace.schema import COLUMNS, OUTPUTS, SCHEMA, SPANS, STAGES, dtype_of
from moe_course.trace.strict.places import places_of
from moe_course.trace.strict.rows import planned_rows


def texts_of(rows: list[list[int]]) -> dict:
    """Prompts and new tokens of a run whose rank r brings `rows[step][r]` rows to each step; never more than before."""
    ranks, found = len(rows[0]), {}
    for rank in range(ranks):
        several = max([1, *(step[rank] for step in rows[1:])])
        for place in range(several if rows[0][rank] else 0):
            tokens = rows[0][rank] - several + 1 if place == 0 else 1
            new = 1 + sum(step[rank] > place for step in rows[1:])
            found[place * ranks + rank] = (list(range(tokens)), list(range(70, 70 + new)))
    every = [found.get(index, ([], [])) for index in range(max(found) + 1)]
    return {"prompts": [{"prompt": "x", "tokens": tokens} for tokens, _ in every], "new_tokens": [n for _, n in every]}


def meta_of(ranks: int, experts: int, **fields: Any) -> dict:
    """Everything of `meta.json` but what is counted in the files. `fields` replace some; those of `plan` are added."""
    placement, shape = make_placement(ranks, experts), fields.get("shape", "all_to_all")
    plan = {
        "world_size": ranks, "ep_size": ranks, "placement": "linear", "nodes": [ranks],
        "experts_per_rank": [placement.num_local(rank) for rank in range(ranks)],
        "dispatch_group": "ep" if SHAPES[shape].over_ep else "dp", "reduce_group": None, "split_group": None,
        "dp": ranks, "pp": 1, "pcp": 1, "tp": 1,
    }  # fmt: skip
    meta = {
        "world_size": ranks, "model": "none", "plan": plan | fields.pop("plan", {}), **texts_of([[2] * ranks]),
        "token_text": {str(token): chr(token) for token in range(128)},
        "backend": "all_to_all", "shape": "all_to_all", "transport": "threads", "device": "cpu", "hidden_size": 16,
        "experts": experts, "top_k": experts, "rows_dtype": "float32",
        "sizes": {"dispatch": 64, "partial": 64, "contribution": 64}, "capacity": None, "prefill_passes": 1,
        "dispatch_quant": "none", "combine_dtype": "auto", "reduce_in_node": False, "exact": True, "threads": 1,
        "clock": {"source": "time.monotonic_ns", "hosts": 1, "comparable": True, "note": ""}, "options": {},
    } | fields  # fmt: skip
    if len(nodes := meta["plan"]["nodes"]) > 1:
        meta["options"] = meta["options"] | {"ranks_per_node": ",".join(map(str, nodes))}
    if SHAPES[shape].fixed:
        meta["options"] = meta["options"] | {"max_num_batched_tokens": meta["capacity"]}
    return meta


def write_meta(folder: Path, meta: dict, routes: list[int], values: bool = False) -> None:
    (folder / "meta.json").write_text(json.dumps({"schema": SCHEMA} | meta | {"values": values, "routes": routes}))


def files_of(meta: dict, parts: list[dict[str, torch.Tensor]], values: bool = False) -> list[dict[str, torch.Tensor]]:
    """The tensors of every rank's file. `parts` have step, layer, row, k and expert of each route; weights are 0.5.

    Prompts, tokens, owners and places follow from the plan. Values are random numbers.
    """
    placement = make_placement(len(parts), meta["experts"], ranks_per_node=tuple(meta["plan"]["nodes"]))
    passes, found = planned_rows(meta), []
    texts = [p["tokens"] + new for p, new in zip(meta["prompts"], meta["new_tokens"], strict=True)]
    for rank, part in enumerate(parts):
        told = {name: torch.full((len(part["row"]),), rank).to(dtype_of(name)) for name in COLUMNS} | part
        taken = zip(told["step"].tolist(), told["row"].tolist(), strict=True)
        where = torch.tensor([passes[rank][step][row] for step, row in taken]).long().view(-1, 2)
        told |= {"prompt": where[:, 0].clone(), "position": where[:, 1].clone()}
        told["token_id"] = torch.tensor([texts[prompt][position] for prompt, position in where.tolist()]).long()
        told["weight"] = torch.full((len(part["row"]),), 0.5)
        told["owner_rank"] = placement.owner[told["expert"]].long()
        told["local_expert"] = placement.local[told["expert"]].long()
        found.append(told)
    joined = {name: torch.cat([told[name] for told in found]) for name in COLUMNS}
    counts = torch.tensor([[len(rows) for rows in of_rank] for of_rank in passes])
    places = places_of(meta, placement, joined, counts)
    layers = joined["layer"].unique().tolist()
    for rank, told in enumerate(found):
        told |= {name: column[joined["source_rank"] == rank] for name, column in places.items()}
        told |= spans_of(len(passes[rank]), layers)
        if values:
            told |= outputs_of(passes[rank], layers, meta["hidden_size"])
            told["contribution"] = torch.rand(len(told["row"]), meta["hidden_size"])
    return found


def spans_of(passes: int, layers: list[int]) -> dict[str, torch.Tensor]:
    """Every stage of every layer in every pass, four nanoseconds each, from 1 on."""
    stages = range(len(STAGES) - 1)
    places = [(step, layer, stage) for step in range(passes) for layer in layers for stage in stages]
    table = [(*place, 4 * number + 1, 4 * number + 5) for number, place in enumerate(places)]
    return dict(zip(SPANS, torch.tensor(table).view(-1, 5).T.contiguous(), strict=True))


def outputs_of(rows: list[list], layers: list[int], hidden: int) -> dict[str, torch.Tensor]:
    places = [(step, layer, row) for step, found in enumerate(rows) for layer in layers for row in range(len(found))]
    table = torch.tensor(places).long().view(-1, 3).T.contiguous()
    return dict(zip(OUTPUTS, table, strict=True)) | {"output": torch.rand(len(places), hidden)}


def write_file(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / f"rank{rank:04d}.safetensors")


def put(name: str, at: Any, value: Any):
    """A change of a rank's tensors: entries of a column get a value."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][at] = value

    return change


def both(*changes):
    """These changes, one after the other."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for one in changes:
            one(tensors)

    return change


def change_folder(folder: Path, change=lambda tensors: None, meta=lambda meta: None, **options: Any) -> Path:
    """A folder of two ranks whose rank 1 and `meta.json` are changed; returns it. `options` are those of `meta_of`.

    Each rank has a prompt of two tokens with two new ones: two passes of one layer, three rows, six routes. Routes 0 to
    3 belong to rows 0 and 1 of step 0. `values` of False leaves values out; `every` changes rank 0's tensors too.
    """
    values, every = options.pop("values", True), options.pop("every", False)
    told = meta_of(2, 6, **{"top_k": 2, **texts_of([[2, 2], [1, 1]])} | options)
    columns = {"step": [0, 0, 0, 0, 1, 1], "row": [0, 0, 1, 1, 0, 0], "k": [0, 1] * 3, "layer": [1] * 6}
    parts = [{name: torch.tensor(column) for name, column in columns.items()} for _ in range(2)]
    for rank, part in enumerate(parts):
        part["expert"] = torch.tensor([rank, 5, 3, 2, 4, 1 - rank])
    for rank, tensors in enumerate(files_of(told, parts, values)):
        if rank == 1 or every:
            change(tensors)
        write_file(folder, rank, tensors)
    routes = [len(part["row"]) for part in parts]
    content = json.loads(json.dumps({"schema": SCHEMA} | told | {"values": values, "routes": routes}))
    meta(content)
    (folder / "meta.json").write_text(json.dumps(content))
    return folder
