"""A plan in a dozen labelled lines: what was decided, what fell back, what it costs. Built in: notebook 04."""

from __future__ import annotations

from collections.abc import Iterable

from moe_course.backends.capabilities import SHAPES
from moe_course.cost.memory import RankMemory, model_bytes
from moe_course.errors import BackendUnavailable
from moe_course.layout import AXES
from moe_course.parallel import Plan
from moe_course.planner.explain_rows import no_sequence_parallel
from moe_course.planner.spans import spans

NAMES = {"external_dp": "copy", "dp": "DP", "pp": "PP", "pcp": "PCP", "tp": "TP"}
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def summary(
    plan: Plan, memories: list[RankMemory], model: str, dtype: str, max_num_batched_tokens: int
) -> list[tuple[str, str]]:
    """`(label, text)` lines; `memories` are those of all ranks, in order."""
    config, sizes = plan.config, zip(AXES, plan.parallel.sizes, strict=True)
    axes = " · ".join(
        f"{'copies' if axis == 'external_dp' else NAMES[axis]} {many}" for axis, many in sizes if many > 1
    )
    lines = [
        ("model", f"{model}: {config.n_routed_experts} experts, {config.num_experts_per_tok} per token, in "
                  f"{len(config.sparse_layers)} of {config.num_hidden_layers} layers"),
        ("ranks", f"{plan.world_size} = {axes}" if axes else "1"),
        ("experts", _experts(plan)),
        ("placement", _placement(plan)),
        ("dispatch", _dispatch(plan)),
        ("backend", _backend(plan)),
        ("sum", _sum(plan)),
        ("shared", _shared(plan)),
        ("SP-MoE", _sequence_parallel(plan)),
    ]  # fmt: skip
    if plan.parallel.pipeline_parallel_size > 1:
        lines.append(("stages", _stages(plan)))
    lines += [("memory", text) for text in _memory(plan, memories, dtype, max_num_batched_tokens)]
    fallbacks = {plan.backend.warning, plan.placement.reason}
    lines += [("fallback" if note in fallbacks else "note", note) for note in plan.notes]
    if config.quantization:
        lines.append(("note", f"the checkpoint is quantised ({config.quantization}); sizes here are for {dtype}"))
    return lines + [("refused", str(error)) for error in plan.refusals]


def _experts(plan: Plan) -> str:
    moe, total = plan.moe, plan.config.n_routed_experts
    if moe.use_ep:
        counts = sorted({plan.placement.num_local(rank) for rank in range(moe.ep_size)}, reverse=True)
        return f"whole, spread over EP {moe.ep_size}: {' or '.join(map(str, counts))} on each rank"
    if moe.tp_size == 1:
        return f"all {total} whole on each rank"
    return f"cut over {moe.tp_size} ranks (DP * PCP * TP), each has a slice of all {total}"


def _placement(plan: Plan) -> str:
    asked, found = plan.parallel.expert_placement_strategy, plan.placement.strategy
    if not plan.moe.use_ep:
        return "none needed"
    return f"{found}, as asked" if found == asked else f"{found} instead of {asked}"


def _dispatch(plan: Plan) -> str:
    if plan.dispatch_group is None:
        return "none, no row travels"
    way = "rows travel to the ranks of their experts"
    if not _over_ep(plan):
        way = "every row travels to all ranks of its group"
    return f"{way}, in {plan.dispatch_group.upper()} groups of {len(plan.groups[plan.dispatch_group][0])}"


def _over_ep(plan: Plan) -> bool:
    """Does a row go to the owners of its experts only? All-gather knows no experts, and brings it to everybody."""
    return plan.shape in SHAPES and SHAPES[plan.shape].over_ep


def _backend(plan: Plan) -> str:
    if any(isinstance(error, BackendUnavailable) for error in plan.refusals):
        return f"{plan.backend.name}, which is not run here"
    stands = plan.moe.use_all2all and plan.backend.name != plan.backend.backend
    name = f"{plan.backend.name}, the shape of {plan.backend.backend}" if stands else plan.backend.name
    return f"{name}, because {plan.backend.reason}"


def _sum(plan: Plan) -> str:
    word = "combine" if _over_ep(plan) else "reduce-scatter"
    back = f"{word} over {plan.dispatch_group.upper()}" if plan.dispatch_group else ""
    due = f"all-reduce of partial sums over {plan.reduce_group.upper()}" if plan.reduce_group else ""
    gathered = f"finished rows gathered over {plan.split_group.upper()}" if plan.split_group else ""
    return ", then ".join(part for part in (back, due, gathered) if part) or "complete on each rank, nothing to add"


def _shared(plan: Plan) -> str:
    return "whole on each rank, for its own rows, added once at the end" if plan.config.n_shared_experts else "none"


def _sequence_parallel(plan: Plan) -> str:
    if plan.sequence_parallel:
        return "sequence parallel: each TP rank takes a slice of the rows"
    return f"no sequence parallel: {', '.join(no_sequence_parallel(plan)) or 'turned off by flag'}"


def _stages(plan: Plan) -> str:
    texts = [f"{at}: {spans(plan.rank(rank).layers)}" for at, rank in enumerate(plan.groups["pp"][0])]
    return "sparse layers of stage " + " · ".join(texts if len(texts) <= 8 else [*texts[:3], "…", texts[-1]])


def _memory(plan: Plan, memories: list[RankMemory], dtype: str, max_num_batched_tokens: int) -> list[str]:
    whole = f"{size(sum(model_bytes(plan.config, dtype).values()))} in one whole model"
    weights = [memory.weights for memory in memories if memory.weights is not None]
    if not weights:
        return [f"no equal slices, so no weights per rank; {whole}"]
    lines = [f"{_range(weights)} per rank, MoE weights only ({dtype})", whole]
    most = max(memories, key=lambda memory: memory.sparse_layers)
    if most.shared_upstream != most.shared:
        cut = "cannot cut it evenly" if most.shared_upstream is None else f"holds {size(most.shared_upstream)} of it"
        lines.append(f"shared expert {size(most.shared)} per rank; vLLM, which cuts it over TP, {cut}")
    if most.buffers is None:
        return [*lines, f"buffers of {plan.backend.name} are not counted here"]
    buffers, shape = _range([memory.buffers for memory in memories]), SHAPES[plan.shape]
    kind = ", whatever the router says" if shape.fixed else ", at most" if shape.over_ep else ""
    return [*lines, f"{buffers} of buffers per rank{kind}, for {max_num_batched_tokens} tokens an engine"]


def size(amount: int | None) -> str:
    """Bytes in the largest unit that leaves at least 1 before the point."""
    unit = unit_of([amount])
    return number(amount, unit) + (f" {unit[0]}" if amount is not None else "")


def number(amount: int | None, unit: tuple[str, int]) -> str:
    """The bare number for a column in `unit`; a dash where there is none."""
    if amount is None:
        return "–"
    return f"{amount:,}" if unit[1] == 1 else f"{amount / unit[1]:,.2f}"


def unit_of(amounts: Iterable[int | None]) -> tuple[str, int]:
    """The unit for a column of bytes: the largest one that its largest number fills."""
    known = [amount for amount in amounts if amount is not None]
    if not known:
        return "", 1
    return next((unit for unit in UNITS if max(known) >= unit[1]), UNITS[-1])


def _range(amounts: list[int]) -> str:
    low, high = min(amounts), max(amounts)
    return size(low) if low == high else f"{size(low)} to {size(high)}"
