"""Where every route leaves, arrives, and who forwards it: worked out again from the routes of all ranks.

Each shape keeps rows in an order that the routes alone decide, so each place is a rank in a sorted list. This is the
order in words; the backends have it in buffers. Built in: notebook 13.
"""

from __future__ import annotations

import torch

from moe_course.backends.two_hop import forwarders
from moe_course.expert_map import Placement
from moe_course.trace.strict.rows import sharers


def places_of(
    meta: dict, placement: Placement, columns: dict[str, torch.Tensor], counts: torch.Tensor
) -> dict[str, torch.Tensor]:
    """`send_row`, `receive_row` and `via_rank` `[n]` as the package's own dispatch gives them.

    Args:
        columns: of all ranks, with ranks, experts and places in range.
        counts: `[R, passes]`, rows that each rank brings to each pass.
    """
    step, layer, source, row, k, expert, owner, local = (
        columns[name] for name in ("step", "layer", "source_rank", "row", "k", "expert", "owner_rank", "local_expert")
    )
    shape, capacity, here = meta["shape"], meta["capacity"], _dense([step, layer])
    via = torch.full_like(row, -1)
    if shape == "no_dp_ep":
        send = receive = row
    elif shape == "allgather_reducescatter":  # behind the rows of lower ranks of its group
        before = torch.zeros_like(counts)
        for members in sharers(meta, meta["plan"]["dispatch_group"]):
            before[members] = counts[members].cumsum(0) - counts[members]
        send, receive = row, row + before[source, step]
    elif shape == "all_to_all":
        send = _place([here, source, owner], [row, k])
        receive = _place([here, owner], [source, row, k])
    elif shape == "low_latency":  # an expert's segment has room for T_max rows of every rank
        send = local * capacity + _place([here, source, expert], [row, k])
        receive = local * capacity * meta["world_size"] + _place([here, expert], [source, row, k])
    elif shape == "two_hop":
        via = forwarders(placement)[source, owner]
        send = _place([here, source, via], [row])
        receive = _place([here, owner], [via, source, row])
    else:  # a copy for each rank that owns some of the row's experts
        send = _place([here, source, owner], [row])
        receive = send + source * capacity if shape == "one_sided" else _place([here, owner], [source, row])
    return {"send_row": send, "receive_row": receive, "via_rank": via}


def _place(group: list[torch.Tensor], key: list[torch.Tensor]) -> torch.Tensor:
    """Place of each entry's key among the different keys of its group, from 0 on. `[n]` int64."""
    groups = _dense(group)
    order = _dense([groups, *key])
    first = torch.full_like(groups, len(groups)).scatter_reduce(0, groups, order, "amin")
    return order - first[groups]


def _dense(columns: list[torch.Tensor]) -> torch.Tensor:
    """Number of each entry among the different ones, sorted by these columns, the first one first. `[n]` int64."""
    found = torch.zeros_like(columns[0])
    for column in columns:
        values, place = column.unique(return_inverse=True)
        found = (found * len(values) + place).unique(return_inverse=True)[1]
    return found
