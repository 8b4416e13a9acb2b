"""Put your own function in the place of a stage. Built in: every notebook that ends with `check.keep`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from moe_course.expert_map import determine_expert_map
from moe_course.experts import local_experts
from moe_course.router import route


@dataclass(frozen=True)
class Stages:
    """The five functions of a MoE layer. `dispatch` and `combine` of None mean: those of the backend.

    Signatures:
        route(hidden_states, gate_weight, bias, config) -> (topk_weights, topk_ids)
        expert_map(ep_size, ep_rank, num_experts, strategy) -> (num_local_experts, expert_map | None)
        dispatch(hidden_states, topk_weights, topk_ids, *, comm, placement) -> Dispatched
        experts(dispatched, w13, w2, expert_map) -> Tensor
        combine(expert_output, dispatched, *, comm) -> Tensor [T, H]

    `combine` finds the way home by `dispatched.handle`, so your `dispatch` has to set what the `combine` of the run
    reads: for `allgather_reducescatter` the number of rows of each rank, in rank order; for the other backends the
    dataclass that their own `dispatch` makes. With a `combine` of your own it is between the two of them.
    """

    route: Callable = route
    expert_map: Callable = determine_expert_map
    dispatch: Callable | None = None
    experts: Callable = local_experts
    combine: Callable | None = None

    def __repr__(self) -> str:  # functions by name: the same text in every run
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        names = {name: getattr(f, "__qualname__", type(f).__name__) for name, f in shown.items() if f is not None}
        return "Stages(" + ", ".join(f"{n}={shown[n].__module__}.{name}" for n, name in names.items()) + ")"
