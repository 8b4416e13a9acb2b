"""What every expert made of every row: kept as the rows it came from, worked out after the run.

Built in: notebook 13.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.dispatch import Dispatched
from moe_course.experts import plain_rows, route_outputs
from moe_course.layer import MoELayer


@dataclass(frozen=True)
class Computed:
    """One pass of one layer's experts.

    Attributes:
        places: `[n]` int64, receive rows of `rows`.
        rows: layout "rows": the rows with an expert here, as they arrived; others: raw expert outputs `[n, H]`.
        topk_ids, scales: of rows that the experts summed up themselves, else None.
    """

    step: int
    layer: MoELayer
    places: torch.Tensor
    rows: torch.Tensor
    topk_ids: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @classmethod
    def keep(cls, layer: MoELayer, dispatched: Dispatched, expert_output: torch.Tensor) -> Computed:
        """Copy what counts: the buffers are used again by later passes."""
        step = layer.comm.step
        if dispatched.layout == "padded":
            slots = torch.arange(expert_output.shape[1], device=expert_output.device)
            places = (slots < dispatched.expert_num_tokens.unsqueeze(1)).view(-1).nonzero().flatten()
            return cls(step, layer, places, expert_output.flatten(0, 1)[places])
        places = (dispatched.topk_ids >= 0).any(dim=1).nonzero().flatten()
        if dispatched.layout == "routes":
            return cls(step, layer, places, expert_output[places])
        scales = None if dispatched.scales is None else dispatched.scales[places]
        return cls(step, layer, places, dispatched.hidden_states[places], dispatched.topk_ids[places], scales)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(receive_row [n], k [n], outputs [n, H])`: the unweighted contributions; k is -1 where a row is one route.

        The experts return sums of the rows with several routes here; those are computed once more, one by one. The
        groups are the same as in the run, and so are the bits.
        """
        if self.topk_ids is None:
            return self.places.cpu(), torch.full(self.places.shape, -1), self.rows.float().cpu()
        layer, k = self.layer, self.topk_ids.shape[1]
        dispatched = Dispatched(self.rows, self.scales, self.topk_ids, None, None, "rows", None)
        rows = plain_rows(dispatched, layer.w13.dtype)
        routes, outputs = route_outputs(rows, self.topk_ids, layer.w13, layer.w2, layer.expert_map)
        return self.places[routes // k].cpu(), (routes % k).cpu(), outputs.float().cpu()
