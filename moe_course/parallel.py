"""From the flags to the plan: who is where, who owns what, does anything travel, and why.

Source: vLLM `parallel_state.py : initialize_model_parallel` and `FM/config.py : FusedMoEParallelConfig.make`.
Built in: notebook 04.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_course.backends.select import Selection, select
from moe_course.config import MoEConfig
from moe_course.errors import ConfigError
from moe_course.expert_map import Placement, resolve_placement

#: Axes of the rank layout, slowest first.
AXES = ("external_dp", "dp", "pp", "pcp", "tp")


@dataclass(frozen=True)
class ParallelConfig:
    """vLLM's parallel flags."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = True
    all2all_backend: str = "allgather_reducescatter"
    expert_placement_strategy: str = "linear"

    def __post_init__(self) -> None:
        for name in ("tensor", "data", "prefill_context", "pipeline"):
            size = getattr(self, f"{name}_parallel_size")
            if size < 1:
                raise ConfigError(f"{name}_parallel_size is {size}, needs to be at least 1")

    @property
    def world_size(self) -> int:
        return (
            self.data_parallel_size
            * self.pipeline_parallel_size
            * self.prefill_context_parallel_size
            * self.tensor_parallel_size
        )


@dataclass(frozen=True)
class MoEParallel:
    """What the MoE layers make of the flags (vLLM `FusedMoEParallelConfig`)."""

    tp_size: int  # matrices of one expert are cut into this many parts
    ep_size: int  # whole experts are spread over this many ranks
    use_ep: bool
    use_all2all: bool  # rows travel


@dataclass(frozen=True)
class Plan:
    """All that the ranks must agree on before the first row moves."""

    world_size: int
    parallel: ParallelConfig
    moe: MoEParallel
    placement: Placement
    backend: Selection
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict:
        """JSON-ready summary."""
        return {
            "world_size": self.world_size,
            "tp": self.parallel.tensor_parallel_size,
            "dp": self.parallel.data_parallel_size,
            "pcp": self.parallel.prefill_context_parallel_size,
            "pp": self.parallel.pipeline_parallel_size,
            "enable_expert_parallel": self.parallel.enable_expert_parallel,
            "ep_size": self.moe.ep_size,
            "moe_tp_size": self.moe.tp_size,
            "use_all2all": self.moe.use_all2all,
            "backend": self.backend.name,
            "backend_reason": self.backend.reason,
            "placement": self.placement.strategy,
            "placement_reason": self.placement.reason,
            "experts_per_rank": [self.placement.num_local(rank) for rank in range(self.moe.ep_size)],
            "notes": list(self.notes),
        }


def rank_groups(world_size: int, *, dp: int = 1, pp: int = 1, pcp: int = 1, tp: int = 1) -> dict[str, list[list[int]]]:
    """All groups of a world, in one reshape of `arange`: ranks lie as (external_dp, dp, pp, pcp, tp).

    A group varies its own axis and fixes the others; the EP group varies dp, pcp and tp within a pipeline stage.
    """
    inner = dp * pp * pcp * tp
    if world_size % inner:
        raise ConfigError(f"world size {world_size} is not a multiple of dp * pp * pcp * tp = {inner}")
    grid = torch.arange(world_size).view(-1, dp, pp, pcp, tp)

    def varying(*axes: int) -> list[list[int]]:
        fixed = [axis for axis in range(5) if axis not in axes]
        size = torch.Size([grid.shape[axis] for axis in axes]).numel()
        return grid.permute(*fixed, *axes).reshape(-1, size).tolist()

    return {"dp": varying(1), "pp": varying(2), "pcp": varying(3), "tp": varying(4), "ep": varying(1, 3, 4)}


def moe_parallel(
    tp: int = 1, dp: int = 1, pcp: int = 1, *, enable_expert_parallel: bool, sequence_parallel: bool = False
) -> MoEParallel:
    """The decision table: whole experts spread (EP) or every expert cut (TP), and does anything travel?"""
    flat = tp * dp * pcp
    use_ep = flat > 1 and enable_expert_parallel
    use_all2all = use_ep and (dp > 1 or pcp > 1 or sequence_parallel)
    if use_ep:
        return MoEParallel(1, flat, True, use_all2all)
    return MoEParallel(flat, 1, False, False)


def make_plan(parallel: ParallelConfig, config: MoEConfig) -> Plan:
    """Decide everything from the flags and the model. Raises ConfigError, BackendUnavailable."""
    if parallel.data_parallel_size > 1 and parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size {parallel.data_parallel_size} with prefill_context_parallel_size "
            f"{parallel.prefill_context_parallel_size}: use one of them, as in vLLM (platforms/cuda.py)"
        )
    moe = moe_parallel(
        parallel.tensor_parallel_size,
        parallel.data_parallel_size,
        parallel.prefill_context_parallel_size,
        enable_expert_parallel=parallel.enable_expert_parallel,
    )
    if config.moe_intermediate_size % moe.tp_size:
        raise ConfigError(
            f"moe_intermediate_size {config.moe_intermediate_size} cannot be cut into {moe.tp_size} equal parts; "
            "enable expert parallelism, or use a number of ranks that divides it"
        )
    backend = select(parallel.all2all_backend, use_all2all=moe.use_all2all)
    placement = resolve_placement(
        parallel.expert_placement_strategy,
        ep_size=moe.ep_size,
        num_experts=config.n_routed_experts,
        n_group=config.n_group,
        use_all2all=moe.use_all2all,
        backend=backend.name,
    )
    notes = []
    if config.n_routed_experts % moe.ep_size:
        notes.append(
            f"{config.n_routed_experts} experts on {moe.ep_size} ranks: fine here and on vLLM's all-gather path; "
            f"upstream's other backends and EPLB need E % R = 0"
        )
    if placement.strategy != parallel.expert_placement_strategy:
        notes.append(placement.reason)
    if backend.warning:
        notes.append(backend.warning)
    return Plan(parallel.world_size, parallel, moe, placement, backend, tuple(notes))
