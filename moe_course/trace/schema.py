"""What a trace folder holds: columns, spans, outputs, and the fields of `meta.json`. Data, no code.

Built in: notebook 13.
"""

from __future__ import annotations

import torch

SCHEMA = "moe_course.trace/1"

#: One entry per route. All int64 but `weight`, which is fp32.
COLUMNS = (
    "step",
    "layer",
    "source_rank",  # who takes the route to its owner
    "row",  # of that rank's rows in this pass
    "token_id",
    "k",  # place among the row's K choices
    "expert",
    "weight",
    "owner_rank",
    "local_expert",  # slot of the owner: index into its w13 and w2
    "send_row",  # place among the rows for that owner, in the source's buffer
    "receive_row",  # place in the owner's `Dispatched.hidden_states`, flattened
    "via_rank",  # who forwards, -1 where nobody does
    "prompt",  # which of the run's prompts the row belongs to, and where in it
    "position",
)

#: Names of `span_stage`. "other" is what lies between sparse layers: attention, dense layers, shared expert, head.
STAGES = ("route", "dispatch", "experts", "combine", "other")
#: One entry per span of time on a rank; `span_layer` is -1 for "other". Times are `time.monotonic_ns()`.
SPANS = ("span_step", "span_layer", "span_stage", "span_begin_ns", "span_end_ns")

#: With `--trace-values`: the place of each row of `output`, and the values.
OUTPUTS = ("output_step", "output_layer", "output_row")
VALUES = ("contribution", "output")

#: Fields of `meta.json` and their types. `plan` is `Plan.as_dict()`.
META = {
    "schema": str,
    "world_size": int,
    "model": str,
    "plan": dict,
    "prompts": list,  # {"prompt": text, "tokens": ids}
    "new_tokens": list,  # ids that followed each prompt
    "token_text": dict,  # id (as text) -> its text, for ids that occur
    "backend": str,  # in vLLM's names
    "shape": str,  # module of moe_course.backends
    "transport": str,
    "device": str,
    "threads": int,  # torch threads of a rank: attention gives other last bits with another number
    "hidden_size": int,
    "experts": int,
    "top_k": int,
    "rows_dtype": str,
    "sizes": dict,  # bytes of a row: {"dispatch", "partial", "contribution"}
    "capacity": (int, type(None)),  # T_max of backends with fixed places
    "prefill_passes": int,
    "dispatch_quant": str,
    "combine_dtype": str,
    "reduce_in_node": bool,
    "values": bool,  # was it recorded with --trace-values?
    "exact": bool,  # did this machine, with these options, give a row the same bits in every batch?
    "clock": dict,  # {"source", "hosts", "comparable", "note"}
    "options": dict,  # of RunOptions, those that differ from the defaults
    "routes": list,  # number of routes in each rank's file
}
#: Fields that are looked up inside others, and their types.
NESTED = {
    "plan": dict.fromkeys(("world_size", "dp", "pp", "pcp", "tp", "ep_size"), int)
    | {"placement": str, "experts_per_rank": list, "nodes": list}
    | dict.fromkeys(("dispatch_group", "reduce_group", "split_group"), (str, type(None))),
    "sizes": dict.fromkeys(("dispatch", "partial", "contribution"), int),
    "clock": {"source": str, "hosts": int, "comparable": bool, "note": str},
}
#: Fields with few values. Those of `shape`, `transport` and `dispatch_quant` are tables of other modules.
ALLOWED = {
    "rows_dtype": ("float32", "bfloat16"),
    "combine_dtype": ("auto", "float32", "bfloat16"),
    "device": ("cpu", "cuda"),
    "plan.dispatch_group": (None, "ep", "dp", "pcp"),
    "plan.reduce_group": (None, "tp"),
    "plan.split_group": (None, "tp", "pcp"),
}
#: Fields that are sizes: the least, and the most, beyond which a file is damaged and not large.
LEAST = dict.fromkeys(("world_size", "hidden_size", "experts", "top_k", "threads", "clock.hosts"), 1)
LEAST |= dict.fromkeys([f"plan.{name}" for name in ("world_size", "dp", "pp", "pcp", "tp", "ep_size")], 1)
LEAST |= dict.fromkeys([f"sizes.{name}" for name in ("dispatch", "partial", "contribution")], 0) | {"prefill_passes": 1}
MOST = dict.fromkeys(("world_size", "experts", "top_k", "plan.ep_size"), 2**16) | {"hidden_size": 2**24}
MOST |= {"plan.pp": 1}  # pipelines are planned, and not recorded
#: Options of a run in which rows may get fewer routes than K, twice the same expert, or weights of any kind, and in
#: which ranks may send what no route asks for.
LOOSE = ("stages", "faults", "overrides")
#: A run is shorter than this, in nanoseconds (104 days): a browser has no whole numbers beyond.
LONGEST = 2**53


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a column, a span or a value."""
    return torch.float32 if name == "weight" or name in VALUES else torch.int64
