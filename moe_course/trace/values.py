"""Bring every contribution home to the rank of its row, so that a rank's trace file is complete.

Built in: notebook 13.
"""

from __future__ import annotations

import torch

from moe_course.comm.base import Comm
from moe_course.config import MoEConfig
from moe_course.errors import TraceError
from moe_course.trace.record import Recorder

_KEYS = ("step", "layer", "receive_row", "k")


def collect_values(comm: Comm, recorder: Recorder, config: MoEConfig) -> dict[str, torch.Tensor]:
    """Tensors to store beside a rank's columns.

    Returns:
        `contribution [n, H]` fp32, the unweighted expert output of every route of this rank's rows, in the order
        of the columns; `output [rows, H]` fp32, the combined rows, with `output_step`, `output_layer`, `output_row`.

    Every rank must call it, `comm` being the group of all. Raises TraceError when a contribution is missing.
    """
    columns, hidden = recorder.columns(), config.hidden_size
    made, values = _made_here(recorder, hidden)
    wanted = {name: columns[name] for name in (*_KEYS, "owner_rank")}
    if any(computed.topk_ids is None for computed in recorder.computed):  # a received row is one route there
        wanted["k"] = torch.full_like(wanted["k"], -1)
    # ask each owner for its contributions, by (step, layer, receive_row, k), in the order of the columns
    order = wanted["owner_rank"].argsort(stable=True)
    asked = torch.stack([wanted[name][order] for name in _KEYS], dim=1)  # [n, 4]
    asked_counts = torch.bincount(wanted["owner_rank"], minlength=comm.world_size).tolist()
    comm.layer, comm.step = -1, 0
    questions = comm.all_to_all_rows(asked, asked_counts)
    try:
        found = [made[tuple(key)] for key in questions.rows.tolist()]
    except KeyError as error:
        raise TraceError(
            f"rank {comm.rank}: no contribution for (step, layer, receive_row, k) = {error}; --trace-values needs the "
            "package's own dispatch, which says where it puts rows"
        ) from None
    answers = comm.all_to_all_rows(values[found], questions.counts, receive_counts=asked_counts)
    contribution = torch.empty(len(order), hidden)
    contribution[order] = answers.rows
    output = torch.cat([torch.empty(0, hidden), *(rows.float().cpu() for rows in recorder.outputs)])
    return {"contribution": contribution, "output": output} | recorder.places_of_outputs()


def _made_here(recorder: Recorder, hidden: int) -> tuple[dict[tuple[int, ...], int], torch.Tensor]:
    """Place of each contribution by (step, layer, receive_row, k), and the contributions `[n, H]`."""
    place: dict[tuple[int, ...], int] = {}
    values = [torch.empty(0, hidden)]
    for computed in recorder.computed:
        rows, ks, outputs = computed.outputs()
        for row, k in zip(rows.tolist(), ks.tolist(), strict=True):
            place[computed.step, computed.layer.layer, row, k] = len(place)
        values.append(outputs)
    return place, torch.cat(values)
