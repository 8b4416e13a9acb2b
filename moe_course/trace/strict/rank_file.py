"""Read one rank's file, and check that it holds what the run's plan allows. Built in: notebook 13."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from moe_course.errors import MoECourseError, TraceError
from moe_course.expert_map import Placement, make_placement
from moe_course.trace.schema import COLUMNS, OUTPUTS, SPANS, VALUES, dtype_of
from moe_course.trace.strict.passes import check_passes


def file_of(rank: int) -> str:
    """Name of a rank's file in the folder."""
    return f"rank{rank:04d}.safetensors"


def check_files(folder: Path, ranks: int) -> None:
    """One file for each rank, no more and no less."""
    found, wanted = {path.name for path in folder.glob("*.safetensors")}, {file_of(rank) for rank in range(ranks)}
    for name in sorted(found ^ wanted):
        what = "is missing" if name in wanted else "belongs to no rank"
        raise TraceError(f"{folder}/{name} {what}: meta.json says world_size {ranks}, there are {len(found)} files")


def placement_of(meta: dict, folder: Path) -> Placement:
    """Which rank owns which expert, by the plan of the run."""
    plan = meta["plan"]
    try:
        counts = plan["experts_per_rank"]
        nodes = tuple(plan["nodes"])
        placement = make_placement(plan["ep_size"], meta["experts"], plan["placement"], "as traced", nodes)
    except (TypeError, MoECourseError) as error:
        raise TraceError(f"{folder}/meta.json: plan cannot be read: {error}") from None
    mine = [placement.num_local(rank) for rank in range(placement.ep_size)]
    if mine != counts:
        raise TraceError(
            f"{folder}/meta.json: plan.experts_per_rank is {counts}, {meta['experts']} experts placed "
            f"{plan['placement']} over {plan['ep_size']} ranks are {mine}"
        )
    return placement


def read_rank(folder: Path, rank: int, meta: dict, placement: Placement) -> dict[str, torch.Tensor]:
    """All tensors of one rank. Raises TraceError naming file, column and both values."""
    path = folder / file_of(rank)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no file"
        raise TraceError(f"{path} is {what}, expected the file that rank {rank} wrote")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dictionary
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path} of rank {rank} cannot be read: {error}") from None
    _check_shapes(path, tensors, meta)
    _check_ranges(path, rank, tensors, meta, placement)
    _check_tokens(path, tensors, meta)
    _check_places(path, tensors, meta)
    check_passes(path, tensors)
    return tensors


def _check_shapes(path: Path, tensors: dict[str, torch.Tensor], meta: dict) -> None:
    values = (*VALUES, *OUTPUTS) if meta["values"] else ()
    wanted = {*COLUMNS, *SPANS, *values}
    for name in sorted(wanted ^ set(tensors)):
        if name in wanted:
            raise TraceError(f"{path}: column {name} is missing; it has {', '.join(sorted(tensors))}")
        unasked = " (meta.json says values: false)" if name in (*VALUES, *OUTPUTS) else ""
        raise TraceError(f"{path}: column {name} is not known{unasked}; known: {', '.join(sorted(wanted))}")
    for name, tensor in tensors.items():
        if tensor.dtype != dtype_of(name):
            raise TraceError(f"{path}: column {name} is {tensor.dtype}, expected {dtype_of(name)}")
        width = [meta["hidden_size"]] if name in VALUES else []
        if list(tensor.shape[1:]) != width or tensor.ndim == 0:
            raise TraceError(f"{path}: column {name} has shape {list(tensor.shape)}, expected {['n', *width]}")
    routes = meta["routes"][int(path.stem.removeprefix("rank"))]
    outputs = len(tensors["output"]) if meta["values"] else 0
    for names, length in (((*COLUMNS, *VALUES[:1]), routes), (OUTPUTS, outputs), (SPANS, len(tensors["span_step"]))):
        for name in names:
            if name in tensors and len(tensors[name]) != length:
                raise TraceError(f"{path}: column {name} has {len(tensors[name])} entries, expected {length}")


def _check_ranges(path: Path, rank: int, columns: dict[str, torch.Tensor], meta: dict, placement: Placement) -> None:
    for name in ("weight", *VALUES):
        odd = ~columns[name].isfinite() if name in columns else torch.empty(0)  # [n] or [n, H]; n may be 0
        bad = (odd if odd.ndim == 1 else odd.any(dim=1)).nonzero()
        if len(bad):
            at = int(bad[0])
            value = columns[name][at][odd[at]].flatten()[0].item()
            raise TraceError(f"{path}: column {name}, entry {at}, holds {value}, expected finite numbers")
    lengths = [len(p["tokens"]) + len(new) for p, new in zip(meta["prompts"], meta["new_tokens"], strict=True)]
    ranks = meta["world_size"]
    limits = {
        "step": (0, 2**31), "layer": (0, 2**31), "source_rank": (rank, rank + 1), "row": (0, 2**31),
        "token_id": (0, 2**31), "k": (0, meta["top_k"]), "expert": (0, meta["experts"]), "owner_rank": (0, ranks),
        "local_expert": (0, meta["experts"]), "send_row": (-1, 2**40), "receive_row": (-1, 2**40),
        "via_rank": (-1, ranks), "prompt": (0, len(lengths)), "position": (0, max(lengths, default=0)),
    }  # fmt: skip
    for name, (least, end) in limits.items():
        bad = ((columns[name] < least) | (columns[name] >= end)).nonzero()
        if len(bad):
            at = int(bad[0])
            raise TraceError(
                f"{path}: column {name}, entry {at}, is {int(columns[name][at])}, expected {least} to {end - 1}"
            )
    expected = {"owner_rank": placement.owner, "local_expert": placement.local}
    for name, by_expert in expected.items():
        should = by_expert[columns["expert"]].long()
        bad = (columns[name] != should).nonzero()
        if len(bad):
            at = int(bad[0])
            raise TraceError(
                f"{path}: column {name}, entry {at}, is {int(columns[name][at])} for expert "
                f"{int(columns['expert'][at])}; the plan ({placement.strategy}, {placement.ep_size} EP ranks) says "
                f"{int(should[at])}"
            )


def _check_tokens(path: Path, columns: dict[str, torch.Tensor], meta: dict) -> None:
    """A row is one token of its prompt's text."""
    texts = [p["tokens"] + new for p, new in zip(meta["prompts"], meta["new_tokens"], strict=True)]
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
    prompt, position, told = columns["prompt"], columns["position"], columns["token_id"]
    for at in (position >= lengths[prompt]).nonzero()[:1].flatten().tolist():
        raise TraceError(
            f"{path}: column position, entry {at}, is {int(position[at])}, prompt {int(prompt[at])} has "
            f"{int(lengths[prompt[at]])} tokens"
        )
    every = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
    should = every[(lengths.cumsum(0) - lengths)[prompt] + position] if len(prompt) else told
    for at in (told != should).nonzero()[:1].flatten().tolist():
        raise TraceError(
            f"{path}: column token_id, entry {at}, is {int(told[at])}; position {int(position[at])} of prompt "
            f"{int(prompt[at])} is token {int(should[at])}"
        )


def _check_places(path: Path, columns: dict[str, torch.Tensor], meta: dict) -> None:
    """The package's own dispatch says where each row lies; one of yours leaves it open, for all routes or for none."""
    places = torch.stack([columns["send_row"], columns["receive_row"]])  # [2, n]
    if not meta["values"] and (places < 0).all():
        return
    for name, column in zip(("send_row", "receive_row"), places, strict=True):
        for at in (column < 0).nonzero()[:1].flatten().tolist():
            known = "values are recorded" if meta["values"] else "places of other routes are known"
            raise TraceError(f"{path}: column {name}, entry {at}, is {int(column[at])}, expected 0 or more: {known}")
