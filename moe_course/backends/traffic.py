"""What a backend must move for one routing: rows from every rank to every rank, hop by hop.

Every backend module has `traffic(topk_ids_per_rank, placement, ...)`, worked out from the routing alone. A run's
ledger is compared with it (`cost/bounds.py`). Built in: notebook 11.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from moe_course.errors import ConfigError
from moe_course.expert_map import Placement
from moe_course.fits import check_ids


@dataclass(frozen=True)
class Traffic:
    """Rows by source and destination.

    Attributes:
        dispatch, combine: `[hops, R, R]` int64, rows from rank s to rank d. What is on the diagonal stays where it
            is: it counts as logical traffic, and never travels.
        returns: what a row is on the way home: "partials", one sum per owner (or node), in accumulator precision;
            "contributions", one expert's raw output, in the model's dtype.
    """

    dispatch: torch.Tensor
    combine: torch.Tensor
    returns: str = "partials"

    @property
    def dispatch_rows(self) -> int:
        """Rows that leave a rank on the way to the experts, all ranks and hops together."""
        return _leaving(self.dispatch)

    @property
    def combine_rows(self) -> int:
        """Rows that leave a rank on the way home."""
        return _leaving(self.combine)

    def payload(self, sizes: RowBytes) -> int:
        """Bytes of rows that leave a rank, both ways."""
        home = sizes.partial if self.returns == "partials" else sizes.contribution
        return self.dispatch_rows * sizes.dispatch + self.combine_rows * home


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a row on the way to the experts, of a partial sum, and of one expert's output on the way home."""

    dispatch: int
    partial: int
    contribution: int


def _leaving(rows: torch.Tensor) -> int:
    return int(rows.sum() - rows.diagonal(dim1=1, dim2=2).sum())


def check_ranks(topk_ids_per_rank: Iterable[torch.Tensor], placement: Placement) -> list[torch.Tensor]:
    """The ids of all ranks as a list. Raises ConfigError unless they are `[T, K]`, of every rank of the placement."""
    topk_ids_per_rank = list(topk_ids_per_rank)
    if len(topk_ids_per_rank) != placement.ep_size:
        raise ConfigError(
            f"topk_ids of {len(topk_ids_per_rank)} ranks for a placement over {placement.ep_size}; give one tensor for "
            "each rank, with T = 0 where it has no rows"
        )
    for rank, ids in enumerate(topk_ids_per_rank):
        check_ids(f"rank {rank}: topk_ids", ids)
    return topk_ids_per_rank


def destinations(topk_ids: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Which ranks a row's experts live on: `[T, R]` bool. Routes of -1, and experts without owner here, go nowhere."""
    owner = owners(topk_ids, placement)  # [T, K]
    ranks = torch.arange(placement.ep_size, device=topk_ids.device)
    return (owner.unsqueeze(2) == ranks).any(dim=1)


def owners(topk_ids: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Rank that owns each route's expert, in the group's numbers: `[T, K]` int64; -1 where there is none.

    Raises ConfigError for ids that belong to another numbering, and for those that are not `[T, K]` signed integers.
    """
    check_ids("topk_ids", topk_ids)
    ids, owner = topk_ids.contiguous().long(), placement.owner.to(topk_ids.device).long()
    if ids.numel() and (int(ids.max()) >= len(owner) or int(ids.min()) < -1):
        raise ConfigError(f"topk_ids reach from {int(ids.min())} to {int(ids.max())}, expected -1 … {len(owner) - 1}")
    return torch.where(ids >= 0, owner[ids.clamp(min=0)], -1)
