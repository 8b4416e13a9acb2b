"""The fewest rows and bytes that a shape must move: for a routing that was seen, and for one that nobody knows yet.

Both are a `Traffic`, rows from every rank to every rank, and are measured by the same functions. For a routing that
was seen it is counted by the backend itself (`traffic`). For a router that picks K of E experts at random, each as
likely, none twice, it is an expectation, so its numbers are floats. A rank d that holds e_d experts gets a row of a
token with probability 1 - C(E - e_d, K) / C(E, K); a node likewise, with the experts of all its ranks.

Two conventions stand side by side, because published figures use both: rows on the wire leave their rank; logical
rows are all rows, also those whose expert is at home.

Source: DeepEP V2 chooses its SM count by the same expected number of distinct ranks. Built in: notebook 11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import comb

import torch

from moe_course.backends.traffic import RowBytes, Traffic
from moe_course.backends.two_hop import forwarders
from moe_course.errors import ConfigError
from moe_course.expert_map import Placement

CHUNK_ROWS = 8192  # rows of one rank that are counted at once: `[T, K, R]` has to fit into memory


@dataclass(frozen=True)
class Rows:
    """Rows of one direction, all ranks and hops together; int for a routing that was seen, float for an expectation.

    wire: they leave their rank; logical: those, and those that stay; across: they leave their node.
    """

    wire: float
    logical: float
    across: float


@dataclass(frozen=True)
class Bound:
    """What must move, both ways. Bytes are those of rows: no ids, no headers, no padding."""

    dispatch: Rows
    combine: Rows
    wire_bytes: float
    logical_bytes: float
    across_bytes: float


def hit(here: int, total: int, top_k: int) -> float:
    """Probability that at least one of K experts, drawn from `total` without replacement, is one of `here`."""
    every = comb(total, top_k)
    return (every - comb(total - here, top_k)) / every  # whole numbers up to here: nothing is lost


def expected_traffic(
    shape: str, placement: Placement, tokens: Sequence[float], top_k: int, *, reduce_in_node: bool = False
) -> Traffic:
    """What moves on average, if the router picks K experts at random. Numbers of experts may differ between ranks.

    Args:
        shape: a key of `backends.BACKENDS`.
        tokens: rows of each rank, `[R]`.
        top_k: K, different experts for a row.
        reduce_in_node: of `two_hop`.

    Returns:
        `Traffic` with float64 rows, with the diagonal.

    Raises:
        ConfigError: an unknown shape, other than R numbers of rows, or K > E.
    """
    size, experts = placement.ep_size, placement.num_experts
    if len(tokens) != size or top_k > experts:
        raise ConfigError(f"{len(tokens)} numbers of rows for {size} ranks, K = {top_k} of {experts} experts")
    sources = torch.tensor(tokens, dtype=torch.float64).unsqueeze(1)  # [R, 1]
    held = torch.tensor([placement.num_local(rank) for rank in range(size)])
    chance = torch.tensor([hit(int(n), experts, top_k) for n in held], dtype=torch.float64)
    if shape == "no_dp_ep":
        return _both_ways(sources.new_zeros(size, size))
    if shape == "allgather_reducescatter":
        return _both_ways(sources.expand(size, size).clone())
    if shape in ("all_to_all", "low_latency"):
        return _both_ways(sources * (top_k * held.double() / experts), "contributions")
    if shape in ("high_throughput", "one_sided"):
        return _both_ways(sources * chance)
    if shape == "two_hop":
        of_node = [hit(int(held[node].sum()), experts, top_k) for node in placement.nodes]
        return _two_hops(placement, sources, chance, of_node, reduce_in_node)
    raise ConfigError(f"no bound is known for the shape {shape!r}")


def observed_traffic(
    count: Callable[..., Traffic],
    ids_per_rank: Sequence[torch.Tensor],
    placement: Placement,
    chunk: int = CHUNK_ROWS,
    **options,
) -> Traffic:
    """What a routing moves, counted by a backend's `traffic`, some rows at a time.

    Args:
        count: `traffic` of a module of `moe_course.backends`, or of a configured `Backend`.
        ids_per_rank: `topk_ids` `[T_r, K]` of each rank; -1 is no route.
    """
    return add([count(part, placement, **options) for part in _chunks(ids_per_rank, chunk)])


def add(parts: Sequence[Traffic]) -> Traffic:
    """The traffic of several layers or batches together; at least one, all of one shape."""
    dispatch = torch.stack([part.dispatch for part in parts]).sum(0)
    return Traffic(dispatch, torch.stack([part.combine for part in parts]).sum(0), parts[0].returns)


def bound(traffic: Traffic, sizes: RowBytes, placement: Placement) -> Bound:
    """Rows and bytes of a traffic, both ways, by both conventions."""
    there, home = rows(traffic.dispatch, placement), rows(traffic.combine, placement)
    back = sizes.partial if traffic.returns == "partials" else sizes.contribution
    return Bound(
        there,
        home,
        there.wire * sizes.dispatch + home.wire * back,
        there.logical * sizes.dispatch + home.logical * back,
        there.across * sizes.dispatch + home.across * back,
    )


def rows(matrices: torch.Tensor, placement: Placement) -> Rows:
    """Rows of one direction: `[hops, R, R]` from rank to rank."""
    node = torch.empty(placement.ep_size, dtype=torch.int64)
    for number, ranks in enumerate(placement.nodes):
        node[ranks] = number
    total = matrices.sum(0)  # [R, R]
    elsewhere = node.unsqueeze(1) != node
    logical, stays = total.sum().item(), total.diagonal().sum().item()
    return Rows(logical - stays, logical, total[elsewhere].sum().item())


def _both_ways(matrix: torch.Tensor, returns: str = "partials") -> Traffic:
    return Traffic(matrix.unsqueeze(0), matrix.T.unsqueeze(0), returns)


def _two_hops(
    placement: Placement, sources: torch.Tensor, chance: torch.Tensor, of_node: list[float], reduce_in_node: bool
) -> Traffic:
    size, via = placement.ep_size, forwarders(placement)
    first, second, home = torch.zeros(3, size, size, dtype=torch.float64)
    for source in range(size):
        going = float(sources[source]) * chance  # [R]
        for node, probability in zip(placement.nodes, of_node, strict=True):
            forwarder = via[source, node[0]]  # the same for all ranks of a node
            copies = float(sources[source]) * probability
            first[source, forwarder] += copies
            home[forwarder, source] += copies if reduce_in_node else going[node].sum()
        second.index_put_((via[source], torch.arange(size)), going, accumulate=True)
    return Traffic(torch.stack([first, second]), torch.stack([second.T, home]))


def _chunks(ids_per_rank: Sequence[torch.Tensor], chunk: int) -> Iterator[list[torch.Tensor]]:
    longest = max(len(ids) for ids in ids_per_rank)
    for start in range(0, max(longest, 1), chunk):
        yield [ids[start : start + chunk] for ids in ids_per_rank]
