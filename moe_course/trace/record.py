"""Record every route of a run on one rank. A recorder is one receiver of `MoELayer` events.

Built in: notebook 13. Source: vLLM's routed-experts capture records ids only; this joins owner and buffer rows.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from moe_course.comm.ledger import Ledger
from moe_course.experts import plain_rows, route_outputs
from moe_course.layer import MoELayer

#: Integer columns of a trace, one entry per route, and `weight` (fp32).
COLUMNS = (
    "step",
    "layer",
    "source_rank",
    "row",
    "token_id",
    "k",
    "expert",
    "weight",
    "owner_rank",
    "local_expert",
    "send_row",
    "receive_row",
    "via_rank",
)


class Recorder:
    """Collects the routes of this rank's rows; with `values` also contributions and outputs.

    `slots` of False leaves out where rows lie in buffers, which may cost an exchange. Pass it as `on_event` to the
    model and `on_pass` to `generate`.
    """

    def __init__(self, values: bool = False, slots: bool = True):
        self.values, self.slots = values, slots
        self.token_ids = torch.empty(0, dtype=torch.int64)
        self.places: list[tuple[int, int]] = []
        self.passes: list[dict[str, Any]] = []  # one per (step, layer): ids and weights of this rank's live rows
        self.outputs: list[torch.Tensor] = []
        self.computed: list[dict[str, torch.Tensor]] = []  # contributions made here, by their receive row
        self.one_k = False  # does a received row stand for one route, whose k the owner does not know?
        self._route: dict[str, torch.Tensor] = {}
        self._dispatched: Any = None

    def on_pass(self, step: int, token_ids: torch.Tensor, places: list[tuple[int, int]]) -> None:
        """A pass over these tokens begins; `places` are their (prompt, position)."""
        self.token_ids, self.places = token_ids.cpu(), places

    def __call__(self, stage: str, layer: MoELayer, **tensors: Any) -> None:
        if stage == "route":
            self._route = tensors
        elif stage == "dispatch":
            self._on_dispatch(layer, tensors["dispatched"])
        elif stage == "experts" and self.values:
            self._on_experts(layer, tensors["expert_output"])
        elif stage == "combine" and self.values:
            self.outputs.append(tensors["output"].float().cpu())

    def _on_dispatch(self, layer: MoELayer, dispatched) -> None:
        """Of rows that ranks share, each route belongs to the rank that takes it to its owner."""
        ids, comm, mode = self._route["topk_ids"].cpu(), layer.comm, layer.mode
        own = mode.own_rows(len(self.token_ids))
        owner = mode.placement.owner[ids.long().clamp(min=0)]
        send_row, receive_row, via_rank = self._places(ids, layer, dispatched)
        self.passes.append(
            {
                "step": comm.step,
                "layer": layer.layer,
                "rank": comm.world_rank,
                "token_ids": self.token_ids[own],
                "places": self.places[own],
                "topk_ids": ids,
                "carried": (ids >= 0) & ((owner >= 0) if mode.travels else (owner == comm.rank)),
                "topk_weights": self._route["topk_weights"].cpu(),
                "owner": layer.placement.owner,
                "local": layer.placement.local,
                "send_row": send_row,
                "receive_row": receive_row,
                "via_rank": via_rank,
            }
        )
        self._dispatched = dispatched

    def _on_experts(self, layer: MoELayer, expert_output: torch.Tensor) -> None:
        """Keep the single contributions made here, by receive row and, where a row has several, k."""
        dispatched = self._dispatched
        self.one_k = dispatched.layout != "rows"
        if dispatched.layout == "rows":  # the experts return sums; compute the parts once more, the same bits
            rows = plain_rows(dispatched, layer.w13.dtype)
            routes, outputs = route_outputs(rows, dispatched.topk_ids, layer.w13, layer.w2, layer.expert_map)
            k = dispatched.topk_ids.shape[1]
        elif dispatched.layout == "routes":
            routes, k = (dispatched.topk_ids[:, 0] >= 0).nonzero().flatten(), 1
            outputs = expert_output[routes]
        else:
            slots = torch.arange(expert_output.shape[1], device=expert_output.device)
            routes, k = (slots < dispatched.expert_num_tokens.unsqueeze(1)).view(-1).nonzero().flatten(), 1
            outputs = expert_output.flatten(0, 1)[routes]
        self.computed.append(
            {
                "step": torch.full(routes.shape, layer.comm.step),
                "layer": torch.full(routes.shape, layer.layer),
                "receive_row": (routes // k).cpu(),
                "k": (routes % k).cpu(),
                "values": outputs.float().cpu(),
            }
        )

    def _places(self, ids: torch.Tensor, layer: MoELayer, dispatched) -> list[torch.Tensor]:
        """`send_row`, `receive_row` and `via_rank` `[T, K]`, -1 where they are not known. May be an exchange."""
        unknown, comm = torch.full(ids.shape, -1), layer.comm
        slots = getattr(layer.backend, "slots", None) if layer.stages.dispatch is None and self.slots else None
        if slots is None:
            return [unknown] * 3
        ledger, comm.ledger = comm.ledger, Ledger()  # what the trace costs is not part of the run
        try:
            found = slots(ids, dispatched, comm=comm, placement=layer.mode.placement)
        finally:
            comm.ledger = ledger
        if len(found) == 3:
            members = torch.tensor(comm.members)
            found = *found[:2], torch.where(found[2] >= 0, members[found[2].clamp(min=0)], -1)
        return [*found, unknown][:3]

    def routed(self) -> dict[tuple[int, int], dict[int, torch.Tensor]]:
        """(prompt, layer) -> position -> sorted expert ids `[K]`, of the rows this rank took through the layers."""
        found: dict[tuple[int, int], dict[int, torch.Tensor]] = defaultdict(dict)
        for entry in self.passes:
            for row, (prompt, position) in enumerate(entry["places"]):
                found[prompt, entry["layer"]][position] = entry["topk_ids"][row].sort().values
        return dict(found)

    def columns(self) -> dict[str, torch.Tensor]:
        """One 1-D tensor per column, one entry per route of this rank's rows; routes of -1 are left out."""
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        for entry in self.passes:
            ids = entry["topk_ids"].long()
            rows, ks = entry["carried"].nonzero(as_tuple=True)
            experts = ids[rows, ks]
            parts["step"].append(torch.full_like(rows, entry["step"]))
            parts["layer"].append(torch.full_like(rows, entry["layer"]))
            parts["source_rank"].append(torch.full_like(rows, entry["rank"]))
            parts["row"].append(rows)
            parts["token_id"].append(entry["token_ids"][rows])
            parts["k"].append(ks)
            parts["expert"].append(experts)
            parts["weight"].append(entry["topk_weights"][rows, ks])
            parts["owner_rank"].append(entry["owner"][experts].long())
            parts["local_expert"].append(entry["local"][experts].long())
            parts["send_row"].append(entry["send_row"][rows, ks])
            parts["receive_row"].append(entry["receive_row"][rows, ks])
            parts["via_rank"].append(entry["via_rank"][rows, ks])
        empty = {name: torch.empty(0, dtype=torch.int64) for name in COLUMNS} | {"weight": torch.empty(0)}
        return {name: torch.cat(parts[name]) if parts[name] else empty[name] for name in COLUMNS}
