"""Write and read a trace folder: `meta.json`, one `rankNNNN.safetensors` per rank, `routes.jsonl` of all ranks.

Built in: notebook 13.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_course.errors import TraceError
from moe_course.result import RESULT_FILE
from moe_course.trace.record import Recorder
from moe_course.trace.schema import COLUMNS, OUTPUTS, SCHEMA, SPANS, VALUES
from moe_course.trace.strict.meta import check_meta
from moe_course.trace.strict.rank_file import check_files, file_of, placement_of, read_rank
from moe_course.trace.strict.run import check_run
from moe_course.whole import as_whole

if TYPE_CHECKING:
    from moe_course.trace.join import Explanation


@dataclass(frozen=True)
class Trace:
    """All routes of a run.

    Attributes:
        meta: `meta.json`, see `trace.schema.META`.
        columns: one 1-D tensor over routes for each of `trace.schema.COLUMNS`, in rank order.
        ranks: for every rank, its spans and, where values were recorded, its contributions and outputs.
    """

    meta: dict
    columns: dict[str, torch.Tensor]
    ranks: tuple[dict[str, torch.Tensor], ...] = ()

    def __len__(self) -> int:
        return len(self.columns["row"])

    def routes(self) -> Iterator[dict]:
        """One dictionary per route."""
        lists = {name: self.columns[name].tolist() for name in COLUMNS}
        for values in zip(*lists.values(), strict=True):
            yield dict(zip(COLUMNS, values, strict=True))

    def where(self, **wanted: int) -> Iterator[dict]:
        """Routes with the given column values, e.g. `where(layer=1, step=0, source_rank=0, row=3)`.

        Raises TraceError for a name that is no column, and for a value that is no number.
        """
        keep = torch.ones(len(self), dtype=torch.bool)
        for name, value in wanted.items():
            if name not in self.columns:
                raise TraceError(f"a trace has no column {name!r}; it has {', '.join(COLUMNS)}")
            value = value if name == "weight" else whole(name, value)
            keep &= self.columns[name] == value
        return Trace(self.meta, {name: column[keep] for name, column in self.columns.items()}).routes()

    def spans(self, rank: int) -> dict[str, torch.Tensor]:
        """`span_step`, `span_layer`, `span_stage`, `span_begin_ns`, `span_end_ns` of one rank, int64, in order.

        `span_stage` is an index of `trace.schema.STAGES`. Times of ranks on several hosts do not compare, see
        `meta["clock"]`. Raises TraceError for a rank that is not in the trace.
        """
        return {name: self._rank(rank)[name] for name in SPANS}

    def values(self, rank: int) -> dict[str, torch.Tensor]:
        """`contribution [n, H]` fp32 in the order of the rank's routes, `output [rows, H]` fp32 and its places.

        Raises TraceError when the run had no `--trace-values`.
        """
        found = self._rank(rank)
        if not self.meta["values"]:
            raise TraceError(
                f"rank {rank}: contributions and outputs were not recorded; record the run with --trace-values and "
                "the package's own dispatch: another one does not say where it puts rows"
            )
        return {name: found[name] for name in (*VALUES, *OUTPUTS)}

    def explain(self, rank: int, row: int, layer: int, step: int) -> Explanation:
        """Where a row's output comes from: routes, owners, places, contributions, and their sum, added once more.

        Args:
            rank, row: row `row` of those that `rank` took through the layer in this pass.
            layer, step: a sparse layer of the model, and the number of the pass.

        Raises TraceError for a row that was not recorded, and for a run without `--trace-values`.
        """
        from moe_course.trace.join import explain

        told = {"rank": rank, "row": row, "layer": layer, "step": step}
        return explain(self, **{name: whole(name, value) for name, value in told.items()})

    def to_perfetto(self, path: str | Path) -> Path:
        """Write spans and routes as a trace for ui.perfetto.dev or chrome://tracing; returns the path of the file.

        Raises TraceError when the file cannot be written.
        """
        from moe_course.trace.perfetto import write_perfetto

        return write_perfetto(self, path)

    def _rank(self, rank: int) -> dict[str, torch.Tensor]:
        rank = whole("rank", rank)
        if rank not in range(len(self.ranks)):
            raise TraceError(f"rank {rank} is not in this trace; it has ranks 0 to {len(self.ranks) - 1}")
        return self.ranks[rank]

    @classmethod
    def load(cls, directory: str | Path) -> Trace:
        """Read a folder written by `moe-course run --trace`. Raises TraceError when it does not add up."""
        folder = Path(directory)
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(
                f"{folder}: no readable meta.json ({error}); `moe-course run --trace FOLDER` writes a folder with one"
            ) from None
        meta = check_meta(meta, folder)
        check_files(folder, meta["world_size"])
        placement = placement_of(meta, folder)
        parts = [read_rank(folder, rank, meta, placement) for rank in range(meta["world_size"])]
        check_run(folder, meta, placement, parts)
        columns = {name: torch.cat([part.pop(name) for part in parts]) for name in COLUMNS}
        return cls(meta, columns, tuple(parts))


def whole(name: str, value: object) -> int:
    """A number as an int, also one of torch or numpy. Raises TraceError for text, fractions, flags and None."""
    number = as_whole(value)
    if number is None:
        hint = f"; write {name}={value.strip()}" if isinstance(value, str) and value.strip().isdecimal() else ""
        raise TraceError(f"{name} is {value!r}, needs to be a whole number{hint}")
    return number


def write_rank(directory: str | Path, rank: int, recorder: Recorder, extra: dict[str, torch.Tensor]) -> None:
    """Write one rank's file; `extra` is what `collect_values` found, if values were recorded.

    Every rank must call it: where a row lies at its owner may be an exchange.
    """
    folder, columns = Path(directory), recorder.columns()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:  # of an earlier run; a folder without it is not taken for a trace
            for name in ("meta.json", RESULT_FILE):
                (folder / name).unlink(missing_ok=True)
        tensors = {name: column.contiguous() for name, column in (columns | recorder.clock.tensors() | extra).items()}
        save_file(tensors, folder / file_of(rank))
    except OSError as error:
        raise TraceError(f"--trace {folder}: cannot write there: {error.strerror}; name another folder") from None


def write_joined(directory: str | Path, meta: dict) -> None:
    """Write `meta.json` and, from the files of all ranks, `routes.jsonl`. Called once, after all ranks wrote.

    Files of ranks that an earlier, larger run left in the folder are removed: they are no part of this trace.
    """
    folder, ranks = Path(directory), meta["world_size"]
    for path in folder.glob("rank*.safetensors"):
        if path.name not in {file_of(rank) for rank in range(ranks)}:
            path.unlink()
    routes, values = [], []
    for rank in range(ranks):
        with safe_open(folder / file_of(rank), framework="pt") as file:
            routes.append(file.get_slice("row").get_shape()[0])
            values.append("contribution" in file.keys())  # noqa: SIM118, not a dictionary
    found = {"schema": SCHEMA} | meta | {"values": all(values), "routes": routes}
    (folder / "meta.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    with (folder / "routes.jsonl").open("w") as out:
        for route in Trace.load(folder).routes():
            out.write(json.dumps(route) + "\n")
