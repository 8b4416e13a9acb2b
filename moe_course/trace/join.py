"""One row of a run, from its routes to its output: what each expert contributed, and do the parts add up?

The parts are added here once more, by the recipe of `moe_course/combine.py` and by nothing else: no backend, no mode,
no router takes part. So a wrong place in the recorded order, a wrong weight or a lost contribution shows. Built in:
notebook 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_course.backends.capabilities import SHAPES
from moe_course.combine import accumulator, sum_contributions
from moe_course.errors import TraceError
from moe_course.layout import rank_groups
from moe_course.rows import TOLERANCE
from moe_course.trace.schema import COLUMNS

if TYPE_CHECKING:
    from moe_course.trace.trace import Trace


@dataclass(frozen=True)
class Partial:
    """What one owner made of a row: `value [H]`, the weighted contributions of `ks`, added in that order.

    `source_rank` took the row there; `via_rank` added it to others on the way home, -1 where nobody did.
    """

    source_rank: int
    via_rank: int
    owner_rank: int
    ks: tuple[int, ...]
    value: torch.Tensor


@dataclass(frozen=True)
class Explanation:
    """A row's way through one sparse layer. `str()` is a table.

    Attributes:
        token: `{"id", "text", "prompt", "position"}`, and where it was: `rank`, `row`, `layer`, `step`.
        routes: one dictionary per route, the columns of the trace and `contribution [H]`, fp32 and not yet weighted.
        partials: one for each owner, in the order in which they are added.
        total: `[H]`, their sum, rounded once to the dtype of the rows; recorded: `[H]`, what the run computed.
        equal: are the two the same to the bit?
        promised: should they be? Otherwise `within` says whether they agree to the tolerance of the dtype.
        note: what else there is to know about this run's numbers.
    """

    token: dict
    routes: list[dict]
    partials: list[Partial]
    total: torch.Tensor
    recorded: torch.Tensor
    promised: bool
    note: str

    @property
    def equal(self) -> bool:
        return torch.equal(self.total, self.recorded)

    @property
    def difference(self) -> float:
        """Largest absolute difference of sum and recorded output."""
        return (self.total.double() - self.recorded.double()).abs().max().item()

    @property
    def within(self) -> bool:
        scale = max(1.0, self.recorded.abs().max().item())
        return self.difference <= TOLERANCE[self.total.dtype] * scale

    def __str__(self) -> str:
        from moe_course.trace.explanation_text import as_text

        return as_text(self)


def explain(trace: Trace, rank: int, row: int, layer: int, step: int) -> Explanation:
    """See `Trace.explain`."""
    meta = trace.meta
    recorded = _recorded(trace, rank, row, layer, step)
    routes = []
    for member in _sharers(meta, rank):  # in the order in which their sums are added
        contributions = trace.values(member)["contribution"]
        first = sum(meta["routes"][:member])
        keep = torch.ones(len(contributions), dtype=torch.bool)
        for name, value in {"step": step, "layer": layer, "row": row}.items():
            keep &= trace.columns[name][first : first + len(contributions)] == value
        for place in keep.nonzero().flatten().tolist():
            columns = {name: trace.columns[name][first + place].item() for name in COLUMNS}
            routes.append(columns | {"contribution": contributions[place]})
    dtype = getattr(torch, meta["rows_dtype"])
    partials = _partials(routes, meta, accumulator(dtype))
    total = _total(partials, recorded.to(accumulator(dtype)), meta).to(dtype)
    routes.sort(key=lambda route: route["k"])
    return Explanation(
        token=_token(trace, routes, {"rank": rank, "row": row, "layer": layer, "step": step}),
        routes=routes,
        partials=partials,
        total=total,
        recorded=recorded.to(dtype),
        promised=meta["device"] == "cpu",
        note=_note(meta),
    )


def _recorded(trace: Trace, rank: int, row: int, layer: int, step: int) -> torch.Tensor:
    """The row's output `[H]`, as the run has it."""
    values = trace.values(rank)
    here = (values["output_step"] == step) & (values["output_layer"] == layer)
    found = (here & (values["output_row"] == row)).nonzero().flatten()
    if len(found) != 1:
        steps, layers = (sorted(set(values[f"output_{name}"].tolist())) for name in ("step", "layer"))
        raise TraceError(
            f"rank {rank} recorded {len(found)} outputs for row {row} of layer {layer}, step {step}; it has "
            f"{int(here.sum())} rows there, sparse layers {layers}, and steps "
            + (f"{steps[0]} to {steps[-1]}" if steps else "none: it brought no rows to any step")
        )
    return values["output"][found[0]]


def _sharers(meta: dict, rank: int) -> list[int]:
    """Ranks that hold this rank's rows too, and add up their sums, in rank order."""
    plan = meta["plan"]
    if plan["reduce_group"] is None:
        return [rank]
    sizes = {name: plan[name] for name in ("dp", "pp", "pcp", "tp")}
    groups = rank_groups(meta["world_size"], **sizes)[plan["reduce_group"]]
    return next(group for group in groups if rank in group)


def _partials(routes: list[dict], meta: dict, acc: torch.dtype) -> list[Partial]:
    """Step 1 of the recipe: each owner adds the weighted contributions of a row in k order."""
    narrow = None if meta["combine_dtype"] == "auto" else getattr(torch, meta["combine_dtype"])
    by_experts = SHAPES[meta["shape"]].weights_applied_by == "experts"

    def key(route: dict) -> tuple[int, int, int]:
        via = route["via_rank"] if meta["reduce_in_node"] else -1
        return meta["plan"]["reduce_group"] is not None and route["source_rank"], via, route["owner_rank"]

    found = []
    for source, via, owner in sorted({key(route) for route in routes}):
        mine = sorted((route for route in routes if key(route) == (source, via, owner)), key=lambda r: r["k"])
        weighted = []
        for route in mine:
            raw = route["contribution"] if by_experts or narrow is None else route["contribution"].to(narrow)
            weighted.append(raw.to(acc) * torch.tensor(route["weight"], dtype=torch.float32).to(acc))
        value = sum_contributions(weighted)
        if narrow is not None and by_experts:
            value = value.to(narrow).to(acc)
        found.append(Partial(mine[0]["source_rank"], via, owner, tuple(route["k"] for route in mine), value))
    return found


def _total(partials: list[Partial], like: torch.Tensor, meta: dict) -> torch.Tensor:
    """Steps 2 and 3: owners in rank order; before that those of a node, and after that ranks that share the row."""
    narrow = None if meta["combine_dtype"] == "auto" else getattr(torch, meta["combine_dtype"])
    shared = meta["plan"]["reduce_group"] is not None
    sums = []
    for source in sorted({shared and partial.source_rank for partial in partials}):
        mine = [partial for partial in partials if not shared or partial.source_rank == source]
        ways = []
        for via in sorted({partial.via_rank for partial in mine}):
            way = sum_contributions([partial.value for partial in mine if partial.via_rank == via])
            if meta["reduce_in_node"] and narrow is not None:
                way = way.to(narrow).to(like.dtype)  # it crosses to the source
            ways.append(way)
        sums.append(sum_contributions(ways))
    return sum_contributions(sums) if sums else torch.zeros_like(like)


def _token(trace: Trace, routes: list[dict], where: dict) -> dict:
    if not routes:
        return {"id": None, "text": "?", "prompt": None, "position": None} | where
    first = routes[0]
    text = trace.meta["token_text"].get(str(first["token_id"]), "?")
    return {"id": first["token_id"], "text": text, "prompt": first["prompt"], "position": first["position"]} | where


def _note(meta: dict) -> str:
    notes = []
    if meta["dispatch_quant"] != "none":
        notes.append(
            f"rows were quantised ({meta['dispatch_quant']}): these are the experts' outputs for quantised rows, and "
            "their sum; neither is that of a run without"
        )
    if meta["combine_dtype"] != "auto":
        notes.append(f"what came home was rounded to {meta['combine_dtype']} on the way, here too")
    if meta["reduce_in_node"]:
        notes.append("the forwarding rank of each node added first: another order than that of the other backends")
    if meta["device"] != "cpu":
        notes.append(f"single contributions were computed again on {meta['device']}, which promises no bits")
    return "; ".join(notes)
