"""Record every route of a run on one rank. A recorder is one receiver of `MoELayer` events.

During a pass it only keeps references and time stamps; what follows from them is worked out after the run. Built in:
notebook 13. Source: vLLM's routed-experts capture records ids only; this joins owner and buffer rows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from moe_course.layer import MoELayer
from moe_course.trace.contributions import Computed
from moe_course.trace.schema import COLUMNS, OUTPUTS, STAGES, dtype_of
from moe_course.trace.spans import OTHER, OUTSIDE, Clock

__all__ = ["COLUMNS", "Recorder"]


@dataclass
class Pass:
    """One rank's rows on their way through one layer; tensors lie where the layer left them."""

    step: int
    layer: MoELayer
    token_ids: torch.Tensor  # of the live rows of the pass, before they are split over ranks
    places: list[tuple[int, int]]  # their (prompt, position)
    topk_ids: torch.Tensor  # [T, K]
    topk_weights: torch.Tensor | None = None
    handle: Any = None  # what the backend's `slots` needs

    @property
    def own(self) -> slice:
        return self.layer.mode.own_rows(len(self.token_ids))


class Recorder:
    """Collects the routes of this rank's rows; with `values` also contributions and outputs.

    `trace` of False keeps the expert ids only, which every run counts. Pass it as `on_event` to the model and
    `on_pass` to `generate`; `watch` the loaded model for exact spans.
    """

    def __init__(self, trace: bool = True, values: bool = False):
        self.trace, self.values = trace, values
        self.passes: list[Pass] = []
        self.clock = Clock()
        self.outputs: list[torch.Tensor] = []
        self.computed: list[Computed] = []  # what the experts of this rank worked on
        self._token_ids, self._places = torch.empty(0, dtype=torch.int64), []
        self._step, self._hooks = 0, []
        self._columns: dict[str, torch.Tensor] | None = None

    def on_pass(self, step: int, token_ids: torch.Tensor, places: list[tuple[int, int]]) -> None:
        """A pass over these tokens begins; `places` are their (prompt, position)."""
        self._step, self._token_ids, self._places = step, token_ids, places
        if self.trace:
            self.clock.begin()

    def watch(self, model) -> None:
        """Take a time stamp where a sparse layer begins, and where a pass of this `LoadedModel` ends."""

        def stamp(*called: Any) -> None:
            self.clock.end(self._step, OUTSIDE, OTHER)

        self._hooks = [block.layer.register_forward_pre_hook(stamp) for block in model.blocks]
        self._hooks.append(model.shell.register_forward_hook(stamp))

    def unwatch(self) -> None:
        """Take the stamps of `watch` away again."""
        while self._hooks:
            self._hooks.pop().remove()

    def __call__(self, stage: str, layer: MoELayer, **tensors: Any) -> None:
        if self.trace:
            self.clock.end(layer.comm.step, layer.layer, STAGES.index(stage))
        if stage == "route":
            self.passes.append(
                Pass(layer.comm.step, layer, self._token_ids, self._places, tensors["topk_ids"])  # fmt: skip
            )
            if self.trace:
                self.passes[-1].topk_weights = tensors["topk_weights"]
        elif stage == "dispatch" and self.trace:
            self.passes[-1].handle = tensors["dispatched"].handle
        if self.values:
            self._keep_values(stage, layer, tensors)
            self.clock.begin()  # copies of values belong to no stage

    def _keep_values(self, stage: str, layer: MoELayer, tensors: dict[str, Any]) -> None:
        if stage == "dispatch":
            self._dispatched = tensors["dispatched"]
        elif stage == "experts":
            self.computed.append(Computed.keep(layer, self._dispatched, tensors["expert_output"]))
        elif stage == "combine":
            self.outputs.append(tensors["output"].clone())

    @property
    def knows_places(self) -> bool:
        """Only the package's own dispatch says where it puts rows."""
        return all(entry.layer.stages.dispatch is None for entry in self.passes)

    def rows_per_pass(self) -> dict[tuple[int, int], torch.Tensor]:
        """(step, layer) -> expert ids `[T, K]` of the rows this rank took through the layer."""
        return {(entry.step, entry.layer.layer): entry.topk_ids.cpu() for entry in self.passes}

    def routed(self) -> dict[tuple[int, int], dict[int, torch.Tensor]]:
        """(prompt, layer) -> position -> sorted expert ids `[K]`, of the rows this rank took through the layers."""
        found: dict[tuple[int, int], dict[int, torch.Tensor]] = defaultdict(dict)
        for entry in self.passes:
            experts = entry.topk_ids.cpu().sort(dim=1).values
            for row, (prompt, position) in enumerate(entry.places[entry.own]):
                found[prompt, entry.layer.layer][position] = experts[row]
        return dict(found)

    def columns(self) -> dict[str, torch.Tensor]:
        """One 1-D tensor per column, one entry per route of this rank's rows; routes of -1 are left out.

        Worked out at the first call, which may be an exchange: every rank must make it.
        """
        if self._columns is None:
            parts = [_columns_of(entry) for entry in self.passes]
            none = {name: torch.empty(0, dtype=dtype_of(name)) for name in COLUMNS}
            self._columns = {name: torch.cat([none[name], *(part[name] for part in parts)]) for name in COLUMNS}
        return self._columns

    def places_of_outputs(self) -> dict[str, torch.Tensor]:
        """Step, layer and row of each recorded output row, one int64 tensor each."""
        parts = [
            torch.tensor([[entry.step, entry.layer.layer, row] for row in range(len(entry.topk_ids))]).view(-1, 3)
            for entry in self.passes
        ]
        table = torch.cat([torch.empty(0, 3, dtype=torch.int64), *(part.long() for part in parts)])
        return dict(zip(OUTPUTS, (column.clone() for column in table.T), strict=True))


def _columns_of(entry: Pass) -> dict[str, torch.Tensor]:
    """Of rows that ranks share, each route belongs to the rank that takes it to its owner."""
    ids, layer, mode = entry.topk_ids.cpu().long(), entry.layer, entry.layer.mode
    owner = mode.placement.owner[ids.clamp(min=0)]
    carried = (ids >= 0) & ((owner >= 0) if mode.travels else (owner == layer.comm.rank))
    rows, ks = carried.nonzero(as_tuple=True)
    experts = ids[rows, ks]
    places = torch.tensor(entry.places[entry.own], dtype=torch.int64).view(-1, 2)
    send_row, receive_row, via_rank = _slots(entry)
    return {
        "step": torch.full_like(rows, entry.step),
        "layer": torch.full_like(rows, layer.layer),
        "source_rank": torch.full_like(rows, layer.comm.world_rank),
        "row": rows,
        "token_id": entry.token_ids.cpu()[entry.own][rows],
        "k": ks,
        "expert": experts,
        "weight": entry.topk_weights.cpu().float()[rows, ks],
        "owner_rank": layer.placement.owner[experts].long(),
        "local_expert": layer.placement.local[experts].long(),
        "send_row": send_row[rows, ks],
        "receive_row": receive_row[rows, ks],
        "via_rank": via_rank[rows, ks],
        "prompt": places[rows, 0],
        "position": places[rows, 1],
    }


def _slots(entry: Pass) -> list[torch.Tensor]:
    """`send_row`, `receive_row` and `via_rank` `[T, K]`, -1 where they are not known. May be an exchange."""
    layer, ids = entry.layer, entry.topk_ids.cpu()
    unknown, comm = torch.full(ids.shape, -1), layer.comm
    slots = getattr(layer.backend, "slots", None) if layer.stages.dispatch is None else None
    if slots is None:  # only the package's own dispatch says where it puts rows
        return [unknown] * 3
    comm.layer, comm.step = -1, 0  # after the run
    found = slots(entry.topk_ids, SimpleNamespace(handle=entry.handle), comm=comm, placement=layer.mode.placement)
    found = [column.cpu() for column in found]
    if len(found) == 3:
        members = torch.tensor(comm.members)
        found[2] = torch.where(found[2] >= 0, members[found[2].clamp(min=0)], -1)
    return [*found, unknown][:3]
