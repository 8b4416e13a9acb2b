"""Write and read a trace folder: `meta.json`, one `rankNNNN.safetensors` per rank, `routes.jsonl` of all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moe_course.errors import TraceError
from moe_course.trace.record import COLUMNS, Recorder

SCHEMA = "moe_course.trace/1"


@dataclass(frozen=True)
class Trace:
    """All routes of a run. `columns[name]` is a 1-D tensor over routes, in rank order; `meta` is `meta.json`."""

    meta: dict
    columns: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.columns["row"])

    def routes(self) -> Iterator[dict]:
        """One dictionary per route."""
        lists = {name: self.columns[name].tolist() for name in COLUMNS}
        for values in zip(*lists.values(), strict=True):
            yield dict(zip(COLUMNS, values, strict=True))

    def where(self, **wanted: int) -> Iterator[dict]:
        """Routes with the given column values, e.g. `where(layer=1, step=0, source_rank=0, row=3)`."""
        keep = torch.ones(len(self), dtype=torch.bool)
        for name, value in wanted.items():
            keep &= self.columns[name] == value
        chosen = Trace(self.meta, {name: column[keep] for name, column in self.columns.items()})
        return chosen.routes()

    @classmethod
    def load(cls, directory: str | Path) -> Trace:
        """Read a folder written by `moe-course run --trace`. Raises TraceError when it does not add up."""
        folder = Path(directory)
        try:
            meta = json.loads((folder / "meta.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise TraceError(f"{folder}: no readable meta.json ({error})") from None
        if meta.get("schema") != SCHEMA:
            raise TraceError(f"{folder}: schema is {meta.get('schema')!r}, this version reads {SCHEMA!r}")
        parts = [_load_rank(folder, rank) for rank in range(meta["world_size"])]
        return cls(meta, {name: torch.cat([part[name] for part in parts]) for name in COLUMNS})


def write_rank(directory: str | Path, rank: int, recorder: Recorder, extra: dict[str, torch.Tensor]) -> None:
    """Write one rank's file; `extra` holds `contribution` and `output` when values were recorded."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(f"--trace {folder}: cannot make this folder: {error.strerror}; name another one") from None
    tensors = {name: column.contiguous() for name, column in (recorder.columns() | extra).items()}
    save_file(tensors, folder / f"rank{rank:04d}.safetensors")


def write_joined(directory: str | Path, meta: dict) -> None:
    """Write `meta.json` and, from the files of all ranks, `routes.jsonl`. Called once, after all ranks wrote."""
    folder = Path(directory)
    (folder / "meta.json").write_text(json.dumps({"schema": SCHEMA} | meta, indent=1) + "\n")
    with (folder / "routes.jsonl").open("w") as out:
        for route in Trace.load(folder).routes():
            out.write(json.dumps(route) + "\n")


def _load_rank(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    path = folder / f"rank{rank:04d}.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path.name} of rank {rank} cannot be read: {error}") from None
    missing = [name for name in COLUMNS if name not in tensors]
    if missing:
        raise TraceError(f"{path.name} of rank {rank} has no column {', '.join(missing)}")
    lengths = {name: len(tensors[name]) for name in COLUMNS}
    if len(set(lengths.values())) > 1:
        raise TraceError(f"{path.name} of rank {rank} has columns of different lengths: {lengths}")
    return tensors
