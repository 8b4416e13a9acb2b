"""A recorded routing: which experts each row chose in each layer, and which rank the row belongs to.

Built in: notebook 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from moe_course.config import MoEConfig
from moe_course.errors import ConfigError

MOST_EXPERTS = 2**16  # no model comes near; a larger id is a mistake, and would cost memory for each number below it
#: How rows are given to ranks: blocks of neighbours, in turns, or as the trace says.
ROWS_OF = ("contiguous", "round_robin", "trace")


@dataclass(frozen=True)
class Routing:
    """What a file says.

    Attributes:
        name: of the file, for messages.
        ids: `[T, L, K]` int32; -1 is no route.
        layers: name of each of the L layers: its number in the model where the file tells, else its place.
        rank: `[T]` int64, the rank that brought a row, or None.
        step: `[T]` int64, the step it was in, or None.
        notes: what a reader should know: what was left out, or looks odd.
    """

    name: str
    ids: torch.Tensor
    layers: tuple[int, ...]
    rank: torch.Tensor | None = None
    step: torch.Tensor | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def largest(self) -> int:
        return int(self.ids.max()) if self.ids.numel() else -1

    def noting(self, *notes: str) -> Routing:
        return replace(self, notes=(*self.notes, *notes))


def checked(routing: Routing) -> Routing:
    """Refuse what cannot be a routing, leave out layers without a router, note what is odd.

    vLLM's capture has a place for every layer of the model; those of dense layers stay zero. A layer in which all
    rows name expert 0 only is taken for one of them.

    Raises ConfigError: no rows, ids below -1, or no layer left.
    """
    ids, name = routing.ids, routing.name
    if not ids.numel():
        raise ConfigError(f"{name}: shape {list(ids.shape)} has no routes; record at least one row")
    if int(ids.max()) < 0:
        raise ConfigError(f"{name}: shape {list(ids.shape)} and all ids are -1, no route at all; record a real pass")
    if ids.shape[2] > 1:
        unwritten = (ids == 0).all(dim=2).all(dim=0)  # [L]
        if unwritten.all():
            raise ConfigError(f"{name}: all ids are 0 in all {ids.shape[1]} layers; nothing was captured")
        if unwritten.any():
            dense = [layer for layer, empty in zip(routing.layers, unwritten.tolist(), strict=True) if empty]
            kept = tuple(layer for layer in routing.layers if layer not in dense)
            routing = replace(routing, ids=ids[:, ~unwritten].contiguous(), layers=kept)
            routing = routing.noting(f"left out layers {_listed(dense)}: all their ids are 0, as of a dense layer")
    repeated = _rows_that_repeat(routing.ids)
    if repeated:
        routing = routing.noting(
            f"{repeated:,} of {routing.ids.shape[0] * routing.ids.shape[1]:,} rows name an expert twice; a top-k never "
            "does, a simulated router may"
        )
    return routing


def fit_to_model(routing: Routing, config: MoEConfig, model: str) -> Routing:
    """Keep the model's sparse layers where the file has all layers; refuse another K.

    Raises ConfigError.
    """
    top_k, layers = routing.ids.shape[2], routing.ids.shape[1]
    if top_k != config.num_experts_per_tok:
        raise ConfigError(
            f"{routing.name}: shape {list(routing.ids.shape)} has K = {top_k}, --model {model} chooses "
            f"{config.num_experts_per_tok} experts for a row; name the model that was recorded, or leave --model out"
        )
    sparse = list(config.sparse_layers)
    if routing.layers == tuple(range(config.num_hidden_layers)) and layers != len(sparse):
        kept = replace(routing, ids=routing.ids[:, sparse].contiguous(), layers=tuple(sparse))
        return kept.noting(f"left out the {layers - len(sparse)} dense layers of {model}")
    if layers == len(sparse):
        return replace(routing, layers=tuple(sparse))
    if not set(routing.layers) <= set(sparse):
        return routing.noting(
            f"{layers} layers in the file, {model} has {len(sparse)} sparse ones of {config.num_hidden_layers}"
        )
    return routing


def number_of_experts(routing: Routing, asked: int | None, config: MoEConfig | None) -> tuple[int, Routing]:
    """E: as asked, as the model says, or the largest id + 1 rounded up to a multiple of 8, with a note.

    Raises ConfigError for an id that is not below it.
    """
    known, origin = asked, "--experts"
    if asked is not None and asked > MOST_EXPERTS:
        raise ConfigError(f"--experts is {asked}, the most is {MOST_EXPERTS}")
    if known is None and config is not None:
        known, origin = config.n_routed_experts, "the model's n_routed_experts"
    if known is None:
        known = -(-(routing.largest + 1) // 8) * 8
        return known, routing.noting(
            f"the largest id is {routing.largest}, taken as {known} experts; --experts says it better"
        )
    if routing.largest >= known:
        row, layer, k = (routing.ids >= known).nonzero()[0].tolist()
        raise ConfigError(
            f"{routing.name}: id {int(routing.ids[row, layer, k])} at row {row}, layer {routing.layers[layer]}, k {k}; "
            f"{origin} is {known}, so ids end with {known - 1}. Are these ids of physical experts, or of another model?"
        )
    return known, routing


def ranks_of_rows(routing: Routing, size: int, rows_of: str | None) -> torch.Tensor:
    """`[T]` int64: the rank that each row belongs to.

    Args:
        rows_of: one of `ROWS_OF`; None: as the trace says where its ranks are as many, else contiguous.

    Raises ConfigError.
    """
    rows, recorded = len(routing.ids), routing.rank
    ranks = int(recorded.max()) + 1 if recorded is not None and len(recorded) else 0
    if rows_of is None:
        rows_of = "trace" if recorded is not None and ranks <= size else "contiguous"
    if rows_of == "contiguous":
        return torch.arange(rows) * size // max(rows, 1)
    if rows_of == "round_robin":
        return torch.arange(rows) % size
    if rows_of != "trace":
        raise ConfigError(f"--rows-of is {rows_of!r}, known values: {', '.join(ROWS_OF)}")
    if recorded is None:
        raise ConfigError(f"{routing.name} does not say which rank a row belongs to; use --rows-of contiguous")
    if ranks > size:
        raise ConfigError(
            f"{routing.name} was recorded on {ranks} ranks or more, --world-size is {size}; use --rows-of contiguous"
        )
    return recorded


def batches(routing: Routing, rank: torch.Tensor, size: int, max_num_tokens: int) -> Iterator[list[torch.Tensor]]:
    """Which rows go through a layer together: for each batch a list over ranks of row numbers `[n]`.

    No rank has more than `max_num_tokens` of them. A trace knows its steps, and they stay apart.
    """
    steps = torch.zeros_like(rank) if routing.step is None else routing.step
    for step in steps.unique().tolist():
        mine = [((rank == r) & (steps == step)).nonzero().flatten() for r in range(size)]
        longest = max(len(rows) for rows in mine)
        for start in range(0, longest, max_num_tokens):
            yield [rows[start : start + max_num_tokens] for rows in mine]


def _rows_that_repeat(ids: torch.Tensor, chunk: int = 4096) -> int:
    found = 0
    for part in ids.split(chunk):
        ordered = part.sort(dim=2).values
        found += int(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(dim=2).sum())
    return found


def _listed(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
