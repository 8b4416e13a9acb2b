"""Rows and what travels along, as bytes, and back: any dtype travels this way, fp8 too. Built in: notebook 06."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_course.errors import ConfigError
from moe_course.gradients import no_gradient


@dataclass(frozen=True)
class Rows:
    """What an exchange delivered: rows of all sources in rank order, what travelled along, rows per source.

    `matrix[s, d]`, int64, says how many rows rank s sent to rank d: every rank has seen every header.
    """

    rows: torch.Tensor  # [sum(counts), W]
    metadata: tuple[torch.Tensor, ...]  # each [sum(counts), …]
    counts: list[int]  # [R]
    matrix: torch.Tensor  # [R, R]


def row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def to_bytes(rows: torch.Tensor, metadata: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """The rows and each of their metadata as uint8 `[n, bytes per row]`: what every exchange begins with.

    Raises ConfigError for metadata of other row counts, and where a gradient would be lost.
    """
    no_gradient(f"rank {rank}", rows=rows)
    for tensor in metadata:
        no_gradient(f"rank {rank}", metadata=tensor)
        if len(tensor) != len(rows):
            raise ConfigError(f"rank {rank}: metadata has {len(tensor)} rows, the rows are {len(rows)}")
    return [_bytes(tensor) for tensor in (rows, *metadata)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # flat first: an empty tensor counts as contiguous whatever its strides are, and then cannot be seen as bytes
    return tensor.detach().contiguous().view(-1).view(torch.uint8).view(len(tensor), row_bytes(tensor))


def from_bytes(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes `[n, bytes per row]` as rows shaped and typed like `like`."""
    flat = part.contiguous().view(-1)
    if flat.storage_offset() % like.element_size():  # contiguous as it is, but it starts where its dtype may not
        flat = flat.clone()
    return flat.view(like.dtype).view(len(part), *like.shape[1:])


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One uint8 row per row, for transports that send one message: `[n, sum of widths]`."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def cut(packed: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Joined rows apart again, as wide as `parts` are."""
    return list(packed.split([part.shape[1] for part in parts], dim=1))
