"""Stage 2: who owns expert e, and which local row is it there?

Source: vLLM `expert_map_manager.py : determine_expert_map` and its placement fallbacks. Built in: notebook 05.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from moe_course.errors import ConfigError

STRATEGIES = ("linear", "round_robin")
#: Backends whose routing tables can follow a round-robin placement (vLLM: low latency and NIXL).
ROUND_ROBIN_BACKENDS = ("deepep_low_latency", "nixl_ep")


@dataclass(frozen=True)
class Placement:
    """Where every expert lives. The catalogue all ranks share.

    Attributes:
        owner: `[E]` int32, EP rank that holds expert e.
        local: `[E]` int32, row of expert e in its owner's `w13` and `w2`.
        strategy: the effective strategy, "linear" or "round_robin".
        reason: why this strategy and not the requested one, in words.
        ep_size: number of EP ranks R.
        ranks_per_node: EP ranks that share a host; R when there is one host. A list counts every host's ranks.
    """

    owner: torch.Tensor
    local: torch.Tensor
    strategy: str
    reason: str
    ep_size: int
    ranks_per_node: int | tuple[int, ...] = field(default=0)

    @property
    def nodes(self) -> list[list[int]]:
        """EP ranks of each host, in rank order. The last host has the remainder."""
        if isinstance(self.ranks_per_node, tuple):
            ends = [sum(self.ranks_per_node[: n + 1]) for n in range(len(self.ranks_per_node))]
            return [list(range(end - n, end)) for n, end in zip(self.ranks_per_node, ends, strict=True)]
        size = self.ranks_per_node or self.ep_size
        return [list(range(first, min(first + size, self.ep_size))) for first in range(0, self.ep_size, size)]

    @property
    def num_experts(self) -> int:
        return len(self.owner)

    def experts_of(self, rank: int) -> list[int]:
        """Global ids owned by `rank`, in the order of its weight rows."""
        return (self.owner == rank).nonzero().flatten().tolist()

    def num_local(self, rank: int) -> int:
        return int((self.owner == rank).sum())

    def within(self, ep_ranks: Iterable[int]) -> Placement:
        """The catalogue as a smaller group sees it: owners by their place in `ep_ranks`, -1 for experts elsewhere.

        Args:
            ep_ranks: rising; those of one host still share it.

        Raises ConfigError for ranks in another order, or outside the group.
        """
        ep_ranks = list(ep_ranks)
        if ep_ranks != sorted(set(ep_ranks) & set(range(self.ep_size))):
            raise ConfigError(f"EP ranks {ep_ranks} need to rise, each once, from 0 to {self.ep_size - 1}")
        if ep_ranks == list(range(self.ep_size)):
            return self
        owner = torch.full_like(self.owner, -1)
        for place, ep_rank in enumerate(ep_ranks):
            owner[self.owner == ep_rank] = place
        shares = [sum(rank in node for rank in ep_ranks) for node in self.nodes]
        return replace(self, owner=owner, ep_size=len(ep_ranks), ranks_per_node=tuple(n for n in shares if n))

    def sliced(self, rank: int, ranks: int) -> Placement:
        """The catalogue of ranks that each hold a slice of every expert: all experts are here, on `rank`."""
        return replace(self, owner=torch.full_like(self.owner, rank), ep_size=ranks, ranks_per_node=ranks)


def determine_expert_map(
    ep_size: int, ep_rank: int, num_experts: int, strategy: str = "linear"
) -> tuple[int, torch.Tensor | None]:
    """Number of experts on `ep_rank` and its map from global id to local row.

    The remainder of E / R goes to the first ranks, one expert each. Linear placement is contiguous; round robin
    gives rank r the experts r, r + R, r + 2R, …

    Returns:
        `(num_local_experts, expert_map)`; the map is `[E]` int32 with -1 for experts elsewhere, and None when
        `ep_size` is 1 (as in vLLM: not the identity).

    Raises:
        ConfigError: unknown strategy, E < R, or a rank outside the group.
    """
    _check(ep_size, ep_rank, num_experts, strategy)
    if ep_size == 1:
        return num_experts, None
    base, remainder = divmod(num_experts, ep_size)
    count = base + (ep_rank < remainder)
    if strategy == "linear":
        start = ep_rank * base + min(ep_rank, remainder)
        mine = torch.arange(start, start + count)
    else:
        mine = torch.arange(ep_rank, num_experts, ep_size)
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
    expert_map[mine] = torch.arange(count, dtype=torch.int32)
    return count, expert_map


def make_placement(
    ep_size: int,
    num_experts: int,
    strategy: str = "linear",
    reason: str = "as asked",
    ranks_per_node: int | tuple[int, ...] = 0,
) -> Placement:
    """The catalogue built from the maps of all ranks, without any fallback.

    Raises ConfigError for an unknown strategy, or when a rank would get no expert.
    """
    _check(ep_size, 0, num_experts, strategy)
    owner = torch.zeros(num_experts, dtype=torch.int32)
    local = torch.arange(num_experts, dtype=torch.int32)
    for rank in range(ep_size):
        _, expert_map = determine_expert_map(ep_size, rank, num_experts, strategy)
        if expert_map is not None:
            here = expert_map >= 0
            owner[here] = rank
            local[here] = expert_map[here]
    check_nodes(ranks_per_node, ep_size)
    return Placement(owner, local, strategy, reason, ep_size, ranks_per_node or ep_size)


def check_nodes(ranks_per_node: int | tuple[int, ...], ep_size: int) -> None:
    """Raise ConfigError for hosts without ranks, or whose ranks do not add up to the EP group."""
    if isinstance(ranks_per_node, tuple):
        if min(ranks_per_node, default=0) < 1 or sum(ranks_per_node) != ep_size:
            raise ConfigError(
                f"ranks_per_node {','.join(map(str, ranks_per_node))} has {sum(ranks_per_node)} ranks, the EP group "
                f"{ep_size}; every host needs at least one, and together they must be {ep_size}"
            )
    elif ranks_per_node < 0:
        raise ConfigError(f"ranks_per_node is {ranks_per_node}, needs to be at least 1")


def resolve_placement(
    strategy: str,
    *,
    ep_size: int,
    num_experts: int,
    n_group: int = 1,
    use_all2all: bool = True,
    backend: str = "allgather_reducescatter",
    num_redundant_experts: int = 0,
    enable_eplb: bool = False,
    ranks_per_node: int | tuple[int, ...] = 0,
) -> Placement:
    """The placement vLLM would end up with: round robin where it is supported, otherwise linear and the reason.

    Raises ConfigError for an unknown strategy or E < R.
    """
    _check(ep_size, 0, num_experts, strategy)
    effective, reason = strategy, "as asked"
    if strategy == "round_robin":
        refusal = None
        if ep_size == 1:
            refusal = "there is one EP rank"
        elif n_group <= 1:
            refusal = f"the model has n_group {n_group}, round robin needs more than one expert group"
        elif num_redundant_experts or enable_eplb:
            refusal = "redundant experts and EPLB place experts themselves"
        elif use_all2all and backend not in ROUND_ROBIN_BACKENDS:
            refusal = f"backend {backend} has no routing tables, only {' and '.join(ROUND_ROBIN_BACKENDS)} have"
        if refusal:
            effective, reason = "linear", f"round_robin was asked for and linear is used: {refusal}"
    return make_placement(ep_size, num_experts, effective, reason, ranks_per_node)


def _check(ep_size: int, ep_rank: int, num_experts: int, strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise ConfigError(f"expert placement strategy is {strategy!r}, known values: {', '.join(STRATEGIES)}")
    if ep_size < 1 or not 0 <= ep_rank < ep_size:
        raise ConfigError(f"EP rank {ep_rank} is not in a group of {ep_size}")
    if num_experts < ep_size:
        raise ConfigError(
            f"{num_experts} experts cannot be spread over {ep_size} EP ranks; use at most {num_experts} ranks"
        )
