"""What a plan does to rows, in words: who takes them, where they travel, who adds up. Used by `explain`.

Built in: notebook 04.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_course.backends.select import OLD_NAMES, SEQUENCE_PARALLEL_BACKENDS, VENDOR_PACKAGES
from moe_course.planner.spans import spans

if TYPE_CHECKING:
    from moe_course.parallel import Plan


def no_sequence_parallel(plan: Plan) -> list[str]:
    """Every condition that fails, in words; empty when it is on, or turned off by flag."""
    parallel, found = plan.parallel, []
    backend = OLD_NAMES.get(parallel.all2all_backend, parallel.all2all_backend)
    if not parallel.enable_expert_parallel:
        found.append("expert parallelism is off")
    if parallel.tensor_parallel_size == 1:
        found.append("tp is 1")
    if parallel.data_parallel_size == 1:
        found.append("dp is 1")
    if backend not in SEQUENCE_PARALLEL_BACKENDS:
        found.append(f"{backend} is not among its backends")
    return found


def sequence_parallel(plan: Plan) -> str:
    if plan.sequence_parallel:
        return (
            "Yes: expert parallelism is on, tp > 1, dp > 1, and the backend takes it. vLLM then turns it on by itself. "
            "Each TP rank takes a slice of the rows through the sparse layer, so no row is sent twice. Afterwards TP "
            "gathers the finished rows."
        )
    failing = no_sequence_parallel(plan)
    if not failing:
        return "No: vLLM would turn it on here, but --no-sequence-parallel-moe, a flag of ours, turns it off."
    return f"No: {', '.join(failing)}. vLLM turns it on with EP, tp > 1, dp > 1 and a backend that takes it."


def dispatch(plan: Plan) -> str:
    rule = "Rows are sent to experts when experts are spread and (dp > 1 or pcp > 1 or sequence parallel)."
    if plan.moe.use_all2all:
        return f"Yes. {rule} Ranks hold different rows, and a row's experts may be anywhere."
    if plan.moe.use_ep:
        return (
            f"No. {rule} Here dp = pcp = 1: all TP ranks hold the same rows, and each computes what its own experts "
            "add to them. Nothing crosses the EP group."
        )
    if plan.dispatch_group:
        return (
            f"No. {rule} Slices have no owner a row could be sent to. But ranks hold different rows, and each has a "
            "slice of every expert, so rows must be gathered all the same."
        )
    return f"No. {rule} Here no expert is elsewhere, and no rank has rows that another one lacks."


def group(plan: Plan) -> str:
    kind, tp = plan.dispatch_group, plan.parallel.tensor_parallel_size
    members = plan.groups[kind][0]
    text = f"Rows are gathered in {kind.upper()} groups of {len(members)}, for example {spans(members)}"
    if kind == "ep":
        return f"{text}: each rank brings the slice that it took."
    if tp > 1:
        text += f". Not in the EP group, for the {tp} TP ranks would bring the same rows again"
    if plan.moe.use_all2all and plan.parallel.all2all_backend in VENDOR_PACKAGES:
        text += f". So says the all-gather backend; {plan.parallel.all2all_backend} would send over the EP group"
    return f"{text}."


def manager(plan: Plan) -> str:
    here, layers = plan.parallel.use_all2all, plan.moe.use_all2all
    rule = "The EP group gets an all-to-all manager when dp > 1, or sequence parallel, or EP with pcp > 1"
    if here == layers:
        return f"{rule}: here {'yes' if here else 'no'}, as for dispatch. They are two questions, though."
    return f"{rule}: here yes, although nothing is sent to experts. This question asks for EP only when pcp > 1."


def backend(plan: Plan) -> str:
    asked, selection = plan.parallel.all2all_backend, plan.backend
    if asked in VENDOR_PACKAGES:
        return f"{selection.reason}. The other steps show what the all-gather backend does in its place."
    warning = f" {selection.warning}." if selection.warning else ""
    if plan.dispatch_group == "pcp" and not plan.moe.use_ep:
        warning += " In vLLM the runner gathers over PCP here, and the backend is no_dp_ep."
    taken = "as asked" if asked == selection.name else f"where {asked} was asked for"
    return f"{selection.name}, {taken}: {selection.reason}.{warning}"


def sums(plan: Plan) -> str:
    kind, tp = plan.dispatch_group, plan.parallel.tensor_parallel_size
    parts = "slices" if plan.moe.tp_size > 1 else "experts"
    if plan.sequence_parallel:
        return (
            "A reduce-scatter over EP brings each rank the finished sums of its slice of rows. TP then gathers rows; "
            "no all-reduce is due."
        )
    back = f"A reduce-scatter over {kind.upper()} brings rows home" if kind else ""
    gathered = " PCP ranks then gather the finished rows." if plan.split_group == "pcp" else ""
    if plan.reduce_group:
        partial = f"{back} with the {parts} of that group in the sum" if back else f"A rank has summed its own {parts}"
        return f"{partial}. One all-reduce over TP adds the {tp} partial sums.{gathered}"
    if back:
        return f"{back} with all {parts} in the sum. tp is 1, so nothing is left to add.{gathered}"
    return "All experts are here, so the sum is complete. The all-reduce over TP would be one over one rank."


def shared_expert(plan: Plan) -> str:
    tp = plan.parallel.tensor_parallel_size
    if not plan.config.n_shared_experts:
        return "This model has none."
    text = (
        "Each rank holds it whole, computes it for its own rows, which need not travel, and adds it once, at the end."
    )
    if plan.sequence_parallel:
        return f"{text} Its own rows are its slice. vLLM keeps it whole here, too."
    if tp == 1:
        return text
    return (
        f"{text} The {tp} TP ranks repeat this, as they share rows. vLLM cuts it over TP instead, and the same "
        "all-reduce adds its parts."
    )
