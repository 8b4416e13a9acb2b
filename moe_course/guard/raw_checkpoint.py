"""Tensors of a checkpoint straight from the bytes of its files: a second way, which shares no code with the loader.

A safetensors file is 8 bytes of length, a JSON header with dtype, shape and offsets of each tensor, and their bytes.
The files are mapped into memory, so only what is looked at is read. Built in: notebook 05.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from moe_course.errors import CheckpointError

#: Name in the header -> how numpy reads it, what torch makes of it. numpy knows no bfloat16.
DTYPES = {
    "F64": (np.float64, torch.float64),
    "F32": (np.float32, torch.float32),
    "F16": (np.float16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
}
ALL = slice(None)


class RawCheckpoint:
    """One file or all shards of a folder. Raises CheckpointError for what is missing or has another dtype.

    `tensors` and `bytes` count what was read.
    """

    def __init__(self, model_dir: str | Path):
        self.tensors = self.bytes = 0
        folder = Path(model_dir)
        index = folder / "model.safetensors.index.json"
        try:
            names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
            self._tensors = {}
            for file in sorted(names or {"model.safetensors"}):
                data = np.memmap(folder / file, dtype=np.uint8, mode="r")
                start = 8 + int(data[:8].view("<u8")[0])
                header = json.loads(bytes(data[8:start]))
                for name, entry in header.items():
                    if name != "__metadata__":
                        begin, end = entry["data_offsets"]
                        self._tensors[name] = (data[start + begin : start + end], entry["dtype"], entry["shape"])
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(f"{folder}: cannot read the weights again: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """A copy of a tensor in the file's dtype, or of these rows and columns of a matrix."""
        if name not in self._tensors:
            raise CheckpointError(f"{name} is not in the checkpoint")
        data, dtype, shape = self._tensors[name]
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} is stored as {dtype}, known are {', '.join(DTYPES)}")
        as_numpy, as_torch = DTYPES[dtype]
        array = data.view(as_numpy).reshape(shape)
        array = array[rows, columns] if columns != ALL else array[rows] if rows != ALL else array
        self.tensors += 1
        self.bytes += array.nbytes
        return torch.from_numpy(np.array(array)).view(as_torch)
