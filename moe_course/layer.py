"""The sparse MoE layer: route, map, dispatch, compute, combine.

Source: vLLM `MoERunner.forward` and `DeepseekV2MoE`. Built in: notebook 08.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moe_course.combine import accumulator
from moe_course.comm.base import Comm
from moe_course.config import MoEConfig
from moe_course.dispatch import Dispatched
from moe_course.errors import CheckpointError, ConfigError
from moe_course.expert_map import Placement
from moe_course.experts import grouped_swiglu
from moe_course.fits import check_routing
from moe_course.gradients import no_gradient
from moe_course.modes import Mode, plain_mode
from moe_course.router import route
from moe_course.rows import TOLERANCE, RowInvariance, padded_linear, row_invariance
from moe_course.stages import Stages

PROBE_ROWS = 300  # batch that single rows are compared with when the layer is probed


class MoELayer(nn.Module):
    """One sparse layer on one EP rank. Inference only.

    Args:
        config: shape and routing of the model.
        placement: who owns which expert, the same on all ranks.
        comm: the EP group; `comm.rank` is this rank's EP rank. Not used when `mode` names the groups.
        backend: a module of `moe_course.backends`.
        mode: groups of a plan with more than one axis (`modes.make_mode`); None is one EP group.
        gate_weight: `[E, H]`; bias: `[E]` fp32 or None; the same on all ranks.
        w13, w2: `[E_local, 2I, H]` and `[E_local, H, I]`, this rank's experts in the order of their local ids;
            without expert parallelism a slice of all experts, I / moe_tp_size wide.
        shared: `(w13 [2I_s, H], w2 [H, I_s])` of the shared expert, or None. Held whole on every rank.
        stages: your own functions instead of the package's.
        layer: index in the model, for headers, ledger and trace.
        on_event: called as `on_event(stage, layer_object, **tensors)` after each stage.

    Raises:
        CheckpointError: weights whose shapes do not fit config and placement.
        ConfigError: experts of several dtypes, weights on several devices, or a stage's map that contradicts the
            placement.
    """

    def __init__(
        self,
        config: MoEConfig,
        placement: Placement,
        comm: Comm,
        backend: ModuleType,
        *,
        gate_weight: torch.Tensor,
        bias: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
        shared: tuple[torch.Tensor, torch.Tensor] | None = None,
        stages: Stages | None = None,
        mode: Mode | None = None,
        layer: int = 0,
        on_event: Callable[..., Any] | None = None,
    ):
        super().__init__()
        self.config, self.placement, self.backend = config, placement, backend
        self.mode = mode or plain_mode(comm, placement, backend)
        self.comm = self.mode.dispatch  # where rows travel
        self.stages, self.layer, self.on_event = stages or Stages(), layer, on_event
        self.gate_weight, self.bias = gate_weight, bias
        self.w13, self.w2, self.shared = w13, w2, shared
        num_local, self.expert_map = self.stages.expert_map(
            self.mode.ep_size, self.mode.ep_rank, placement.num_experts, placement.strategy
        )
        if self.expert_map is not None:
            self.expert_map = self.expert_map.to(w13.device)
        self._check(num_local)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[T, H]` -> `[T, H]`, source order. Every rank of the group must call it, also with `T = 0`.

        Raises ConfigError for rows of another shape, dtype or device than the weights take, and where gradient mode is
        on and rows or weights require grad.
        """
        self._check_rows(hidden_states)
        self.comm.layer = self.layer
        rows = hidden_states[self.mode.own_rows(len(hidden_states))]
        topk_weights, topk_ids = self.stages.route(rows, self.gate_weight, self.bias, self.config)
        self._emit("route", hidden_states=rows, topk_weights=topk_weights, topk_ids=topk_ids)
        routed = self.routed(rows, topk_weights, topk_ids)
        output = routed if self.shared is None else self.shared_expert(rows) + routed
        return self.mode.all_rows(output)

    def routed(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """The routed half for given ids: dispatch -> experts -> combine. `[T, H]` in the rows' dtype.

        Raises ConfigError for rows, weights and ids that do not fit together.
        """
        self.comm.layer = self.layer
        if self.stages.dispatch is not None:  # those of the backends do it themselves
            check_routing(hidden_states, topk_weights, topk_ids, self.comm.world_rank)
        dispatch = self.stages.dispatch or self.backend.dispatch
        combine = self.stages.combine or self.backend.combine

        dispatched: Dispatched = dispatch(
            hidden_states, topk_weights, topk_ids, comm=self.comm, placement=self.mode.placement
        )
        self._emit("dispatch", dispatched=dispatched, topk_ids=topk_ids)
        expert_output = self.stages.experts(dispatched, self.w13, self.w2, self.expert_map)
        self._emit("experts", expert_output=expert_output)
        routed = combine(expert_output, dispatched, comm=self.comm)  # [T, H], still in accumulator precision
        if routed.shape != hidden_states.shape:
            raise ConfigError(
                f"rank {self.comm.world_rank}, layer {self.layer}: combine returned {tuple(routed.shape)}, "
                f"expected {tuple(hidden_states.shape)}: one row for each of this rank's rows, in their order"
            )
        if self.mode.reduce is not None:
            # its ranks share rows and hold partial sums of them
            routed = self.mode.reduce.all_reduce(routed, accumulator(routed.dtype))
        routed = routed.to(hidden_states.dtype)  # the one rounding
        self._emit("combine", output=routed)
        return routed

    def shared_expert(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The expert every row visits: `[T, H]` -> `[T, H]`."""
        w13, w2 = self.shared
        gate, up = padded_linear(hidden_states, w13).chunk(2, dim=-1)
        return padded_linear(F.silu(gate) * up, w2)

    def row_invariance(self) -> RowInvariance:
        """Does this machine give a row the same bits in every batch of this layer?

        Asks for each of its products, then tries the router and one expert as a whole: activations count, too.
        """
        shapes = [(self.w13.shape[2], self.w13.shape[1]), (self.w2.shape[2], self.w2.shape[1])]
        if self.shared is not None:
            shapes += [(w.shape[1], w.shape[0]) for w in self.shared]
        gate = row_invariance([(self.gate_weight.shape[1], len(self.gate_weight))], torch.float32, self.w13.device)
        experts = row_invariance(shapes, self.w13.dtype, self.w13.device)
        if not (gate.exact and experts.exact):
            return experts if gate.exact else gate
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(PROBE_ROWS, self.config.hidden_size, generator=generator).to(self.w13.dtype)
        whole = self._probe(rows)
        for n in (1, 3, PROBE_ROWS // 3):
            if not all(torch.equal(part, all_[:n]) for part, all_ in zip(self._probe(rows[:n]), whole, strict=True)):
                why = f"{n} rows give other bits than {PROBE_ROWS} on this CPU"
                tolerance = f"results agree to {TOLERANCE[self.w13.dtype]:g} instead"
                return RowInvariance(False, experts.multiple, f"{why}; {tolerance}")
        return experts

    def _probe(self, rows: torch.Tensor) -> list[torch.Tensor]:
        counts = torch.tensor([len(rows)])
        found = list(route(rows, self.gate_weight, self.bias, self.config))
        found.append(grouped_swiglu(rows, counts, self.w13[:1], self.w2[:1]))
        return found if self.shared is None else [*found, self.shared_expert(rows)]

    def _emit(self, stage: str, **tensors: Any) -> None:
        if self.on_event is not None:
            self.on_event(stage, self, **tensors)

    def _check_rows(self, rows: torch.Tensor) -> None:
        w13, hidden = self.w13, self.config.hidden_size
        if rows.ndim != 2 or rows.shape[1] != hidden:
            raise ConfigError(
                f"rank {self.comm.world_rank}, layer {self.layer}: hidden_states are {list(rows.shape)}, expected "
                f"[T, {hidden}]; flatten them to one row per token, as in rows.reshape(-1, {hidden})"
            )
        if rows.dtype != w13.dtype or rows.device != w13.device:
            raise ConfigError(
                f"rank {self.comm.world_rank}, layer {self.layer}: hidden_states are {rows.dtype} on {rows.device}, "
                f"the experts {w13.dtype} on {w13.device}; bring the rows there, as in rows.to(w13)"
            )
        if torch.is_grad_enabled():
            shared = dict(zip(("shared w13", "shared w2"), self.shared or (None, None), strict=True))
            weights = {"gate_weight": self.gate_weight, "bias": self.bias, "w13": w13, "w2": self.w2}
            where = f"rank {self.comm.world_rank}, layer {self.layer}"
            no_gradient(where, hidden_states=rows, **weights, **shared)

    def _check(self, num_local: int) -> None:
        config, placement, mode = self.config, self.placement, self.mode
        rank, ep_rank = mode.dispatch.world_rank, mode.ep_rank
        if placement.ep_size != mode.ep_size:
            raise ConfigError(
                f"rank {rank}: placement is for {placement.ep_size} EP ranks, the group has {mode.ep_size}"
            )
        if mode.placement.ep_size != mode.dispatch.world_size:
            raise ConfigError(
                f"rank {rank}: rows travel among {mode.dispatch.world_size} ranks, the placement there is for "
                f"{mode.placement.ep_size}"
            )
        if num_local != placement.num_local(ep_rank):
            raise ConfigError(
                f"rank {rank}: expert_map says {num_local} local experts, placement says {placement.num_local(ep_rank)}"
            )
        mine = placement.experts_of(ep_rank)
        if self.expert_map is not None and self.expert_map.cpu()[mine].tolist() != placement.local[mine].tolist():
            raise ConfigError(f"rank {rank}: expert_map does not give the experts {mine} of the placement their rows")
        inter, hidden = config.moe_intermediate_size // mode.moe_tp_size, config.hidden_size
        expected = {
            "gate_weight": (self.gate_weight, (config.n_routed_experts, hidden)),
            "w13": (self.w13, (num_local, 2 * inter, hidden)),
            "w2": (self.w2, (num_local, hidden, inter)),
        }
        if self.bias is not None:
            expected["bias"] = (self.bias, (config.n_routed_experts,))
        if self.shared is not None:
            width = self.shared[1].shape[-1] if self.shared[1].ndim else 0
            expected["shared w13"] = (self.shared[0], (2 * width, hidden))
            expected["shared w2"] = (self.shared[1], (hidden, width))
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"rank {rank}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
            if tensor.device != self.w13.device:
                raise ConfigError(
                    f"rank {rank}: {name} is on {tensor.device}, w13 on {self.w13.device}; bring a rank's weights to "
                    "one device"
                )
            if name in ("w2", "shared w13", "shared w2") and tensor.dtype != self.w13.dtype:
                raise ConfigError(
                    f"rank {rank}: w13 is {self.w13.dtype}, {name} is {tensor.dtype}; the experts compute in one dtype"
                )
