"""Read from a safetensors checkpoint only what this rank owns, and account for every tensor.

The headers of the files name every tensor with shape and place, so a rank checks the whole checkpoint and reads
its share. A missing, surplus, duplicated, damaged or wrongly shaped tensor is an error that lists names; vLLM
stays silent about a missing expert and computes with uninitialised memory. Built in: notebook 05.

Source: vLLM `DeepseekV2Model.load_weights`, `ep_weight_filter.py`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from moe_course.config import MoEConfig
from moe_course.errors import CheckpointError

PROJECTIONS = ("gate", "up", "down")
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, as its file's header describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass
class LoadReport:
    """What one rank read and what it left in the files. Bytes are those in the files."""

    tensors_read: int = 0
    bytes_read: int = 0
    tensors_skipped: int = 0
    bytes_skipped: int = 0
    expert_bytes_read: int = 0
    ignored: list[str] = field(default_factory=list)  # tensors of layers the model does not build (MTP)


def expert_name(layer: int, expert: int, projection: str) -> str:
    """Checkpoint name of one projection ("gate", "up" or "down") of a routed expert, by global id."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"


def expert_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every routed-expert tensor a checkpoint of this model must hold."""
    inter, hidden = config.moe_intermediate_size, config.hidden_size
    shape = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    return {
        expert_name(layer, expert, projection): shape[projection]
        for layer in config.sparse_layers
        for expert in range(config.n_routed_experts)
        for projection in PROJECTIONS
    }


def read_index(model_dir: str | Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint folder, one file or sharded, from the headers alone.

    Raises CheckpointError: no weights, a damaged or truncated file, a name that occurs twice, a shard list that
    disagrees with the shards.
    """
    folder = Path(model_dir)
    index_file = folder / "model.safetensors.index.json"
    if index_file.exists():
        try:
            weight_map = json.loads(index_file.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index_file} is not a safetensors index: {error}") from None
        files = sorted({folder / name for name in weight_map.values()})
    else:
        weight_map, files = None, [folder / "model.safetensors"]
    index: dict[str, TensorInfo] = {}
    for file in files:
        for info in _read_header(file):
            if info.name in index:
                raise CheckpointError(f"{info.name} occurs twice: in {index[info.name].file.name} and in {file.name}")
            index[info.name] = info
    if weight_map is not None:
        wrong = [name for name, file in weight_map.items() if name not in index or index[name].file.name != file]
        if wrong:
            raise CheckpointError(f"{index_file.name} names shards that do not hold {_names(wrong)}")
    return index


def check_index(
    index: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], num_hidden_layers: int
) -> list[str]:
    """Compare a checkpoint with what the model needs; returns names of layers the model does not build.

    Raises CheckpointError that lists names: missing, wrongly shaped, or unknown tensors.
    """
    missing = [name for name in expected if name not in index]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_names(missing)}")
    wrong = [
        f"{name} has shape {list(index[name].shape)}, config.json needs {list(shape)}"
        for name, shape in expected.items()
        if index[name].shape != tuple(shape)
    ]
    if wrong:
        raise CheckpointError(f"wrong shapes: {_names(wrong)}")
    surplus = [name for name in index if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    ignored = [name for name in surplus if (m := _LAYER.match(name)) and int(m[1]) >= num_hidden_layers]
    unknown = sorted(set(surplus) - set(ignored))
    if unknown:
        raise CheckpointError(f"the model has no place for {_names(unknown)}")
    return ignored


class Reader:
    """Reads tensors of one checkpoint by name and counts tensors and bytes."""

    def __init__(self, index: Mapping[str, TensorInfo]):
        self.index, self.report = index, LoadReport()
        self._files: dict[Path, object] = {}
        self._read: dict[str, int] = {}  # name -> bytes

    def read(self, name: str, part: tuple[int, slice] | None = None) -> torch.Tensor:
        """A tensor, or of it only `part = (dimension, slice)`."""
        info = self.index[name]
        try:
            if info.file not in self._files:
                self._files[info.file] = safe_open(info.file, framework="pt")
            if part is None:
                tensor = self._files[info.file].get_tensor(name)
            else:
                whole = self._files[info.file].get_slice(name)
                tensor = whole[part[1]] if part[0] == 0 else whole[:, part[1]]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file.name}: cannot read {name}: {error}") from None
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            raise CheckpointError(f"{name} {list(info.shape)}: the part {part} of it is empty")
        self._read[name] = nbytes
        self.report.tensors_read += 1
        self.report.bytes_read += nbytes
        if EXPERT.match(name):
            self.report.expert_bytes_read += nbytes
        return tensor

    def read_experts(
        self,
        config: MoEConfig,
        layer: int,
        experts: Iterable[int],
        dtype: torch.dtype,
        shard: tuple[int, int] = (0, 1),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stacked weights of the given global experts, in that order: `w13 [n, 2I, H]` (gate first), `w2 [n, H, I]`.

        Args:
            shard: `(part, parts)` cuts every expert into slices of I: the same rows of gate and up, and those columns
                of down. Then I in the shapes above is I / parts.
        """
        experts = list(experts)
        part, parts = shard
        inter, hidden = config.moe_intermediate_size // parts, config.hidden_size
        mine = slice(part * inter, (part + 1) * inter)
        rows, columns = ((0, mine), (1, mine)) if parts > 1 else (None, None)
        w13 = torch.empty(len(experts), 2 * inter, hidden, dtype=dtype)
        w2 = torch.empty(len(experts), hidden, inter, dtype=dtype)
        for row, expert in enumerate(experts):
            places = {"gate": w13[row, :inter], "up": w13[row, inter:], "down": w2[row]}
            for projection, place in places.items():
                name = expert_name(layer, expert, projection)
                if name in self.index:  # check_index has seen to it, unless a drill asked it not to
                    place.copy_(self.read(name, columns if projection == "down" else rows))
        return w13, w2

    def finish(self, ignored: list[str]) -> LoadReport:
        """Count what was left in the files."""
        self.report.tensors_skipped = sum(name not in self._read for name in self.index)
        self.report.bytes_skipped = sum(info.nbytes - self._read.get(name, 0) for name, info in self.index.items())
        self.report.ignored = ignored
        self._files.clear()
        return self.report


def _read_header(file: Path) -> list[TensorInfo]:
    """Parse a safetensors header: 8 bytes of length, then JSON. A name that occurs twice is an error here."""

    def no_twins(pairs: list[tuple[str, object]]) -> dict:
        names = [name for name, _ in pairs]
        twins = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twins:
            raise CheckpointError(f"{file.name}: {_names(twins)} occurs twice")
        return dict(pairs)

    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length), object_pairs_hook=no_twins)
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; the folder needs safetensors weights") from None
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{file.name} has no readable safetensors header: {error}") from None
    header.pop("__metadata__", None)
    try:
        infos = [
            TensorInfo(
                name, file, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0]
            )
            for name, entry in header.items()
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file.name} has a damaged safetensors header: {error}") from None
    needed, size = 8 + length + sum(info.nbytes for info in infos), file.stat().st_size
    if size != needed:
        kind = "truncated" if size < needed else "longer than its tensors"
        raise CheckpointError(f"{file.name} is {kind}: {size} bytes, its header needs {needed}")
    return infos


def _names(names: list[str], most: int = 4) -> str:
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
