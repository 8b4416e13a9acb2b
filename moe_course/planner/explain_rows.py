"""What a plan does to rows, in words: who takes them, where they travel, who adds up. Used by `explain`.

Built in: notebook 04.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_course.backends.capabilities import KNOWN_BACKENDS, SHAPES, Shape, upstream_hidden_size
from moe_course.backends.select import SEQUENCE_PARALLEL_BACKENDS, VENDOR_PACKAGES
from moe_course.cost.bounds import expected_traffic, rows
from moe_course.errors import ConfigError
from moe_course.planner.spans import spans

if TYPE_CHECKING:
    from moe_course.parallel import Plan


def no_sequence_parallel(plan: Plan) -> list[str]:
    """Every condition that fails, in words; empty when it is on, or turned off by flag."""
    parallel, found = plan.parallel, []
    if not parallel.enable_expert_parallel:
        found.append("expert parallelism is off")
    if parallel.tensor_parallel_size == 1:
        found.append("tp is 1")
    if parallel.data_parallel_size == 1:
        found.append("dp is 1")
    if plan.backend.backend not in SEQUENCE_PARALLEL_BACKENDS:
        found.append(f"{plan.backend.backend} is not among its backends")
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
    members, shape = plan.groups[kind][0], _shape(plan)
    where = f"in {kind.upper()} groups of {len(members)}, for example {spans(members)}"
    if shape.over_ep:
        text = f"Rows travel {where}: {shape.travels}. {_amount(plan)}"
        if tp > 1 and not plan.sequence_parallel:
            text += f" The {tp} TP ranks hold the same rows, and each sends them."
        return text
    if kind == "ep":
        return f"Rows are gathered {where}: each rank brings the slice that it took. {_amount(plan)}"
    text = f"Rows are gathered {where}"
    if tp > 1:
        text += f". Not in the EP group, for the {tp} TP ranks would bring the same rows again"
    return f"{text}. {_amount(plan)}"


def _shape(plan: Plan) -> Shape:
    return SHAPES.get(plan.shape, SHAPES["allgather_reducescatter"])  # a name that nobody knows is shown as all-gather


def _amount(plan: Plan) -> str:
    """How many rows leave a rank per token, as formula and number."""
    ranks, top_k, shape = len(plan.groups[plan.dispatch_group][0]), plan.config.num_experts_per_tok, _shape(plan)
    if not shape.over_ep:
        return f"That is {shape.formula} = {ranks - 1} rows a token."
    found = rows(expected_traffic(plan.shape, plan.placement, [1] * ranks, top_k).dispatch, plan.placement)
    letters, leaving, where = f"R = {ranks}", found.wire, ""
    if plan.shape == "two_hop":
        letters, leaving = f"N = {len(plan.placement.nodes)} nodes", found.across
        where = f", and {(found.wire - found.across) / ranks:.2f} inside nodes"
    number = f"{leaving / ranks:.2f} rows a token on average{where}"
    even = len({len(node) for node in plan.placement.nodes}) == 1 or plan.shape != "two_hop"
    if plan.placement.num_experts % ranks or not even:  # the formula is for equal shares
        return f"Counted for these experts and nodes, as their shares are not equal: {number}."
    return f"With {letters}, E = {plan.placement.num_experts}, K = {top_k} that is {shape.formula}: {number}."


def manager(plan: Plan) -> str:
    here, layers = plan.parallel.use_all2all, plan.moe.use_all2all
    rule = "The EP group gets an all-to-all manager when dp > 1, or sequence parallel, or EP with pcp > 1"
    if here == layers:
        return f"{rule}: here {'yes' if here else 'no'}, as for dispatch. They are two questions, though."
    text = f"{rule}: here yes, although nothing is sent to experts. This question asks for EP only when pcp > 1."
    if plan.backend.backend in VENDOR_PACKAGES:
        text += f" So vLLM makes the one of {plan.backend.backend}, and needs its library, all the same."
    return text


def backend(plan: Plan) -> str:
    asked, selection = plan.parallel.all2all_backend, plan.backend
    if selection.name in VENDOR_PACKAGES:  # asked for with --transport vendor, and refused
        return f"{selection.reason}. The other steps show how {selection.shape} moves rows in its place."
    warning = f" {selection.warning}." if selection.warning else ""
    if plan.dispatch_group == "pcp" and not plan.moe.use_ep:
        warning += " In vLLM the runner gathers over PCP here, and the backend is no_dp_ep."
    if asked == selection.name:
        taken = "as asked"
    elif plan.moe.use_all2all and selection.warning is None:
        taken = f"which stands for {asked}"
    else:
        taken = f"where {asked} was asked for"
    return f"{selection.name}, {taken}: {selection.reason}.{warning}"


def upstream(plan: Plan) -> str:
    """What the backend that was asked for is in vLLM, and where it would refuse or change what runs here."""
    name = plan.backend.backend
    known, config = KNOWN_BACKENDS[name], plan.config
    if not known.in_vllm:
        return f"vLLM has no name for {name}: {known.instead}. {_weights(known.weights_applied_by)}"
    parts = [f"format {known.format}", f"a rank receives {known.receives}"]
    if known.combine_dtype:
        parts.append(f"combine takes {known.combine_dtype} only")
    try:
        width = upstream_hidden_size(name, config.hidden_size)
        if width != config.hidden_size:
            parts.append(f"rows of H = {config.hidden_size} are padded to {width}")
    except ConfigError as error:
        parts.append(str(error))
    if known.uneven_experts is False:
        parts.append("E % R = 0 is needed")
    if known.cuda_graph is not None:
        parts.append("a CUDA graph may hold it" if known.cuda_graph else "no CUDA graphs with dp > 1")
    library = f"the library {known.package} moves rows" if known.package else "torch's collectives move rows"
    across = f" Across nodes {known.across_nodes}." if known.across_nodes else ""
    return f"In vLLM {library}: {'; '.join(parts)}. {_weights(known.weights_applied_by)}{across}"


def _weights(who: str) -> str:
    return {
        "experts": "Experts apply the weights.",
        "source": "The source applies the weights, when outputs are back.",
        "combine": "Combine applies the weights.",
    }[who]


def sums(plan: Plan) -> str:
    kind, tp = plan.dispatch_group, plan.parallel.tensor_parallel_size
    parts = "slices" if plan.moe.tp_size > 1 else "experts"
    shape = _shape(plan)
    if shape.over_ep:
        gathered = {"tp": " TP then gathers the slices.", "pcp": " PCP ranks then gather the finished rows."}
        owed = (
            " The rows of every TP rank are complete, so no all-reduce is due."
            if tp > 1
            else " Nothing is left to add."
        )
        return f"Over EP {shape.home}.{owed}{gathered.get(plan.split_group, '')}"
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
