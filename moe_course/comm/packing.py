"""Rows and what travels along, as bytes, and back: any dtype travels this way, fp8 too. Built in: notebook 06."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_course.errors import ConfigError


@dataclass(frozen=True)
class Rows:
    """What an exchange delivered: rows of all sources in rank order, what travelled along, rows per source."""

    rows: torch.Tensor  # [sum(counts), W]
    metadata: tuple[torch.Tensor, ...]  # each [sum(counts), …]
    counts: list[int]  # [R]


def row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def pack(rows: torch.Tensor, metadata: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """One uint8 row `[n, B]` per row: its payload, then its metadata. Any dtype travels this way, fp8 too."""
    for tensor in metadata:
        if len(tensor) != len(rows):
            raise ConfigError(f"rank {rank}: metadata has {len(tensor)} rows, the rows are {len(rows)}")
    parts = [_bytes(tensor) for tensor in (rows, *metadata)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # flat first: an empty tensor counts as contiguous whatever its strides are, and then cannot be seen as bytes
    return tensor.detach().contiguous().view(-1).view(torch.uint8).view(len(tensor), row_bytes(tensor))


def unpack(packed: torch.Tensor, rows: torch.Tensor, metadata: Sequence[torch.Tensor], counts: list[int]) -> Rows:
    """Cut packed rows back into tensors shaped and typed like `rows` and `metadata`."""
    tensors, start = [], 0
    for like in (rows, *metadata):
        end = start + row_bytes(like)
        part = packed[:, start:end].contiguous().view(-1)
        if part.storage_offset():  # one row or none is contiguous as it is, but starts where its dtype may not
            part = part.clone()
        tensors.append(part.view(like.dtype).view(len(packed), *like.shape[1:]))
        start = end
    return Rows(tensors[0], tuple(tensors[1:]), counts)
