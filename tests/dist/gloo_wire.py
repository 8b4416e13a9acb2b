"""Messages between the tests and their worker processes: pickles behind an 8-byte length."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, BinaryIO

import torch


class _Pickler(pickle.Pickler):
    """Tensors as plain bytes: fp8 is no problem, and no memory is shared between processes."""

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return NotImplemented
        data = item.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _rebuild, (data, item.dtype, tuple(item.shape))


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def write_message(stream: BinaryIO, message: Any) -> None:
    file = io.BytesIO()
    _Pickler(file).dump(message)
    stream.write(struct.pack("<q", file.tell()) + file.getvalue())
    stream.flush()


def read_message(stream: BinaryIO) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    (length,) = struct.unpack("<q", _read(stream, 8))
    return pickle.loads(_read(stream, length))


def _read(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data
