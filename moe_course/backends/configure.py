"""A backend with what a run sets about it: capacity, quantised rows, narrower sums on the way home.

Quantising does not depend on how rows travel, so it is done here, around any shape: before the rows leave, as packed
bytes with their scales, or after they arrived. Built in: notebook 09. Source: facts of vLLM
`prepare_finalize/*.py`; which backend quantises when is `quant/policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from moe_course import quant
from moe_course.backends import BACKENDS
from moe_course.backends.unprobed import unprobed
from moe_course.comm.base import Comm
from moe_course.dispatch import Dispatched
from moe_course.expert_map import Placement


@dataclass(frozen=True)
class Backend:
    """A backend module and its options; it stands wherever the module may stand.

    Attributes:
        max_num_tokens: T_max of the shapes with fixed places.
        reduce_in_node: of `two_hop`.
        format: quantised rows, a name of `quant.FORMATS`; None sends them as they are.
        before: quantise before the rows travel? Otherwise after they arrived.
        combine_dtype: partial sums and outputs travel home in it; None: as they are.
    """

    module: ModuleType | SimpleNamespace
    max_num_tokens: int | None = None
    reduce_in_node: bool = False
    format: str | None = None
    before: bool = True
    combine_dtype: torch.dtype | None = None

    @property
    def CAPABILITIES(self) -> dict[str, Any]:  # noqa: N802, the module's name for it
        return self.module.CAPABILITIES

    @property
    def capacity(self) -> int | None:
        """Rows a rank may bring to one dispatch; None where nothing is fixed."""
        fixed = getattr(self.module, "MAX_NUM_TOKENS", None)
        return None if fixed is None else self.max_num_tokens or fixed

    @property
    def slots(self) -> Callable:
        return self.module.slots

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        comm: Comm,
        placement: Placement,
    ) -> Dispatched:
        """The module's dispatch; see there for shapes and errors."""
        rows = hidden_states
        if self.format and self.before:
            q, scales = quant.quantize(hidden_states, self.format)
            rows = quant.pack(q, scales)  # [T, B] bytes
            # int8 codes travel as int8, so that no header takes them for fp8
            rows = rows.view(torch.int8) if q.dtype == torch.int8 else rows
        options = self._options()
        arrived = self.module.dispatch(rows, topk_weights, topk_ids, comm=comm, placement=placement, **options)
        if self.format is None:
            return arrived
        if self.before:
            q, scales = quant.unpack(arrived.hidden_states.view(torch.uint8), self.format, hidden_states.shape[1])
            return replace(arrived, hidden_states=q, scales=scales)
        return _quantized(arrived, self.format)

    def combine(self, expert_output: torch.Tensor, dispatched: Dispatched, *, comm: Comm) -> torch.Tensor:
        """The module's combine, with rows rounded to `combine_dtype` first. `[T, H]`."""
        if self.combine_dtype is not None:
            expert_output = expert_output.to(self.combine_dtype)
        return self.module.combine(expert_output, dispatched, comm=comm)

    def traffic(self, topk_ids_per_rank: list[torch.Tensor], placement: Placement):
        """The module's `traffic` with these options."""
        options = {"reduce_in_node": True} if self.reduce_in_node else {}
        return self.module.traffic(topk_ids_per_rank, placement, **options)

    def exact(self, rows: int = 0) -> Backend:
        """The same backend, with rows and sums as they are, and places for at least so many rows."""
        return replace(self, format=None, combine_dtype=None, max_num_tokens=max(rows, self.capacity or 0) or None)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.capacity is not None:
            options["max_num_tokens"] = self.capacity
        if self.reduce_in_node:
            options["reduce_in_node"] = True
        return options


def configure(name: str, **options: Any) -> Backend:
    """The backend of this name with options of `Backend`: a key of `BACKENDS`, or a library that nobody looked for."""
    return Backend(BACKENDS.get(name) or unprobed(name), **options)


def _quantized(arrived: Dispatched, fmt: str) -> Dispatched:
    """Rows quantised where they arrived, those that count: others hold anything, and would have a say in a scale."""
    rows = arrived.hidden_states
    if arrived.layout == "padded":
        used = torch.arange(rows.shape[1], device=rows.device) < arrived.expert_num_tokens.unsqueeze(1)  # [E_local, C]
    else:
        used = (arrived.topk_ids >= 0).any(dim=1)  # [M]
    found, found_scales = quant.quantize(rows[used], fmt)
    q = found.new_zeros(*rows.shape[:-1], found.shape[-1])
    scales = found_scales.new_zeros(*rows.shape[:-1], found_scales.shape[-1])
    q[used], scales[used] = found, found_scales
    return replace(arrived, hidden_states=q, scales=scales)
