"""From the flags to the plan: who is where, who owns what, does anything travel, and why.

Source: vLLM `parallel_state.py : initialize_model_parallel` and `FM/config.py : FusedMoEParallelConfig.make`.
Built in: notebook 04.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from moe_course.backends.capabilities import SHAPES, current_name
from moe_course.backends.select import Selection, select
from moe_course.backends.support import check_support
from moe_course.config import MoEConfig
from moe_course.errors import BackendUnavailable, ConfigError, MoECourseError
from moe_course.expert_map import Placement, resolve_placement
from moe_course.flags import ParallelConfig
from moe_course.layout import AXES, rank_groups, stage_layers
from moe_course.planner.notes import find_notes, find_refusals

__all__ = ["MoEParallel", "ParallelConfig", "Plan", "RankPlan", "make_plan", "moe_parallel", "rank_groups"]


@dataclass(frozen=True)
class MoEParallel:
    """What the MoE layers make of the flags (vLLM `FusedMoEParallelConfig`)."""

    tp_size: int  # matrices of one expert are cut into this many parts
    ep_size: int  # whole experts are spread over this many ranks
    use_ep: bool
    use_all2all: bool  # rows travel to whole experts (vLLM `use_all2all_kernels`)


@dataclass(frozen=True)
class RankPlan:
    """One rank of a plan. Ranks in `groups` are world ranks; `groups` has every kind that the rank is in."""

    rank: int
    external_dp: int
    dp: int
    pp: int
    pcp: int
    tp: int
    ep_rank: int  # place in the EP group: dp * pcp_size * tp_size + pcp * tp_size + tp
    groups: dict[str, list[int]]
    experts: list[int]  # global ids; with expert parallelism off a slice of each
    layers: list[int]  # sparse layers of this pipeline stage

    @property
    def coordinates(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}


@dataclass(frozen=True)
class Plan:
    """All that the ranks must agree on before the first row moves.

    Attributes:
        dispatch_group: kind of group in which rows travel, None when none do. Rows that go to the owners of their
            experts travel over "ep"; all-gather needs only the ranks that lack them, "dp" or "pcp".
        reduce_group: kind of group over which partial sums of shared rows are added afterwards ("tp"), or None.
        split_group: kind of group over which a rank's rows are split before the layer and gathered after it.
        sequence_parallel: is that split the sequence-parallel one, over TP ranks?
        refusals: why this plan can be shown and not run.
    """

    parallel: ParallelConfig
    config: MoEConfig
    moe: MoEParallel
    placement: Placement
    backend: Selection
    dispatch_group: str | None
    reduce_group: str | None
    split_group: str | None
    sequence_parallel: bool
    notes: tuple[str, ...] = ()
    refusals: tuple[MoECourseError, ...] = ()

    @property
    def world_size(self) -> int:
        return self.parallel.world_size

    @property
    def shape(self) -> str:
        """The module whose traffic this plan has, also where a library was asked for and refused."""
        if self.dispatch_group is None:
            return "no_dp_ep"
        return self.backend.shape if self.moe.use_all2all else "allgather_reducescatter"

    @cached_property
    def groups(self) -> dict[str, list[list[int]]]:
        """All groups of the world by kind, in world ranks."""
        _, dp, pp, pcp, tp = self.parallel.sizes
        return rank_groups(self.world_size, dp=dp, pp=pp, pcp=pcp, tp=tp)

    @cached_property
    def _group_of(self) -> dict[str, dict[int, list[int]]]:
        return {kind: {rank: group for group in groups for rank in group} for kind, groups in self.groups.items()}

    def rank(self, rank: int) -> RankPlan:
        """Coordinates, groups and experts of one world rank. Raises ConfigError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not in a world of {self.world_size}")
        place, rest = {}, rank
        for axis, size in zip(reversed(AXES), reversed(self.parallel.sizes), strict=True):
            rest, place[axis] = divmod(rest, size)
        mine = {kind: group_of[rank] for kind, group_of in self._group_of.items()}
        ep_rank = mine["ep"].index(rank)
        owner = ep_rank if self.moe.use_ep else 0
        first, end = stage_layers(self.config.num_hidden_layers, place["pp"], self.parallel.pipeline_parallel_size)
        layers = [layer for layer in self.config.sparse_layers if first <= layer < end]
        return RankPlan(
            rank, **place, ep_rank=ep_rank, groups=mine, experts=self.placement.experts_of(owner), layers=layers
        )

    def as_dict(self) -> dict:
        """JSON-ready summary, the same on all ranks. `planner.document.plan_json` adds what each rank holds."""
        parallel, placement = self.parallel, self.placement
        return {
            "world_size": self.world_size,
            "external_dp": parallel.external_data_parallel_size,
            "dp": parallel.data_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "pcp": parallel.prefill_context_parallel_size,
            "tp": parallel.tensor_parallel_size,
            "enable_expert_parallel": parallel.enable_expert_parallel,
            "use_ep": self.moe.use_ep,
            "ep_size": self.moe.ep_size,
            "moe_tp_size": self.moe.tp_size,
            "use_all2all": self.moe.use_all2all,
            "use_all2all_manager": parallel.use_all2all,
            "sequence_parallel": self.sequence_parallel,
            "dispatch_group": self.dispatch_group,
            "reduce_group": self.reduce_group,
            "split_group": self.split_group,
            "all2all_backend": parallel.all2all_backend,
            "backend": self.backend.name,
            "backend_reason": self.backend.reason,
            "expert_placement_strategy": parallel.expert_placement_strategy,
            "placement": placement.strategy,
            "placement_reason": placement.reason,
            "nodes": [len(node) for node in placement.nodes],
            "experts_per_rank": [placement.num_local(rank) for rank in range(self.moe.ep_size)],
            "notes": list(self.notes),
            "refused": [str(error) for error in self.refusals],
        }


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


def make_plan(parallel: ParallelConfig, config: MoEConfig, *, strict: bool = True, transport: str = "auto") -> Plan:
    """Decide everything from the flags and the model.

    Args:
        parallel: a `ParallelConfig` made by hand has expert parallelism on unless it says False, other than vLLM's and
            other than the command line once a size is named; `flags.parallel_config` has the command line's rule.
        strict: raise the first refusal. False returns a plan to look at, with its refusals in it.
        transport: value of `--transport`: one that cannot carry the backend's rows is refused, and so is "vendor"
            without a library to call.

    Raises:
        ConfigError, BackendUnavailable: flags that contradict each other, the model, or this machine.
    """
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    pcp = parallel.prefill_context_parallel_size
    sequence_parallel = parallel.use_sequence_parallel_moe
    moe = moe_parallel(
        tp, dp, pcp, enable_expert_parallel=parallel.enable_expert_parallel, sequence_parallel=sequence_parallel
    )
    refusals = find_refusals(parallel, config, moe)
    try:
        backend = select(
            parallel.all2all_backend,
            use_all2all=moe.use_all2all,
            dp=dp,
            pcp=pcp,
            sequence_parallel=sequence_parallel,
            transport=transport,
            num_experts=config.n_routed_experts,
            ep_size=moe.ep_size,
            hidden_size=config.hidden_size,
        )
        check_support(backend.shape, transport)
    except BackendUnavailable as error:
        refusals.append(error)
        backend = Selection(current_name(parallel.all2all_backend), parallel.all2all_backend, str(error))
    if strict and refusals:
        raise refusals[0]
    placement = resolve_placement(
        parallel.expert_placement_strategy,
        ep_size=moe.ep_size,
        num_experts=config.n_routed_experts,
        n_group=config.n_group,
        use_all2all=moe.use_all2all,
        backend=backend.backend,
        ranks_per_node=parallel.ranks_per_node if moe.use_ep else 0,
    )
    travels = dp > 1 or pcp > 1 or sequence_parallel
    over_ep = moe.use_all2all and backend.shape in SHAPES and SHAPES[backend.shape].over_ep
    plan = Plan(
        parallel,
        config,
        moe,
        placement,
        backend,
        dispatch_group=("ep" if sequence_parallel or over_ep else "dp" if dp > 1 else "pcp") if travels else None,
        reduce_group="tp" if tp > 1 and not (sequence_parallel or over_ep) else None,
        split_group="tp" if sequence_parallel else "pcp" if pcp > 1 else None,
        sequence_parallel=sequence_parallel,
        refusals=tuple(refusals),
    )
    return replace(plan, notes=tuple(find_notes(plan)))
