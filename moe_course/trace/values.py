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
        of the columns; `output [rows, H]` fp32, the combined rows, by step, layer and row.

    Every rank must call it. Raises TraceError when a contribution is missing.
    """
    columns, hidden = recorder.columns(), config.hidden_size
    wanted = {name: columns[name].long() for name in (*_KEYS, "owner_rank")}
    if recorder.one_k:
        wanted["k"] = torch.zeros_like(wanted["k"])
    # ask each owner for its contributions, by (step, layer, receive_row, k), in the order of the columns
    order = wanted["owner_rank"].argsort(stable=True)
    asked = torch.stack([wanted[name][order] for name in _KEYS], dim=1)  # [n, 4]
    asked_counts = torch.bincount(wanted["owner_rank"], minlength=comm.world_size).tolist()
    comm.layer, comm.step = -1, 0
    questions = comm.all_to_all_rows(asked, asked_counts)

    made = {name: torch.cat([c[name] for c in recorder.computed]) for name in _KEYS} if recorder.computed else {}
    values = torch.cat([c["values"] for c in recorder.computed]) if made else torch.empty(0, hidden)
    place = {key: i for i, key in enumerate(zip(*(made[n].tolist() for n in _KEYS), strict=True))} if made else {}
    try:
        found = [place[tuple(key)] for key in questions.rows.tolist()]
    except KeyError as error:
        raise TraceError(f"rank {comm.rank}: no contribution for (step, layer, receive_row, k) = {error}") from None
    answers = comm.all_to_all_rows(values[found], questions.counts, receive_counts=asked_counts)
    contribution = torch.empty(len(order), hidden)
    contribution[order] = answers.rows
    output = torch.cat(recorder.outputs) if recorder.outputs else torch.empty(0, hidden)
    return {"contribution": contribution, "output": output}
