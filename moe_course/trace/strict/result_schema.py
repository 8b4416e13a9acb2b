"""What `run.json` holds: its fields and their types. Data, no code. `result.build_result` writes it.

Whole numbers are counts and ranks, so none of them is negative. Built in: notebook 13.
"""

from __future__ import annotations

NUMBER = (int, float)
_NONE = type(None)

#: Fields of `run.json`.
RESULT = {
    "schema": str,
    "world_size": int,
    "model": str,
    "device": str,
    "dtype": str,
    "backend": str,
    "transport": str,
    "transport_reason": str,
    "quantised": (dict, _NONE),
    "plan": dict,  # that of `meta.json`
    "ranks": list,
    "prompts": list,
    "max_abs_logit_diff": (*NUMBER, _NONE),  # NaN where logits are
    "topk_ids_equal": (bool, _NONE),
    "routed_rows_compared": (int, _NONE),
    "near_ties": list,
    "rows_after_near_ties": (int, _NONE),
    "rows": dict,
    "bytes": dict,
    "bound": dict,
    "moved": list,
    "across_nodes": (dict, _NONE),
    "reduce_in_node": bool,
    "max_num_batched_tokens": int,
    "combine_dtype": str,
    "static_shapes": bool,
    "stages": dict,  # stage -> file
    "ledger": list,
    "load": dict,
    "phases": dict,
    "tokens_per_s": NUMBER,
    "guard": dict,  # part -> seconds or count
    "row_invariance": (str, _NONE),
    "failures": list,
    "verdict": str,
    "wall_s": NUMBER,
}

#: Fields inside others.
INSIDE = {
    "rows": dict.fromkeys(("sent", "received"), int),
    "bytes": dict.fromkeys(("payload", "padding", "metadata"), int),
    "bound": {"payload": int, "ratio": (*NUMBER, _NONE)},
    "load": {"routes_per_rank": (list, _NONE), "max_over_mean": (*NUMBER, _NONE)},
    "phases": dict.fromkeys(("load_s", "prefill_s", "decode_s"), NUMBER)
    | dict.fromkeys(("prefill_passes", "prefill_tokens", "decode_tokens"), int)
    | dict.fromkeys(("prefill_tokens_per_s", "decode_tokens_per_s"), (*NUMBER, _NONE)),
    "quantised": {"format": str, "when": str, "row_bytes": int, "plain_row_bytes": int}
    | dict.fromkeys(("relative_rms", "max_abs"), NUMBER),
    "across_nodes": {"ranks": list, "rows": int, "payload": int},
}

#: Fields of each entry of a list.
EACH = {
    "ranks": dict.fromkeys(("rank", "dp", "tp", "pcp", "ep_rank", "experts", "params", "expert_bytes"), int)
    | dict.fromkeys(("tensors_read", "tensors_skipped", "bytes_read", "bytes_skipped"), int)
    | {"tensors_ignored": list, "waited_s": NUMBER}
    | dict.fromkeys(("rows_sent", "rows_received", "peak_rss"), int),
    "prompts": {"prompt": str, "text": str, "prompt_tokens": list, "tokens": list, "dp_rank": int}
    | {"matches_reference": (bool, _NONE)},
    "moved": {"layer": int, "phase": str, "passes": int, "rows": int, "payload": int, "bound": int}
    | {"ratio": (*NUMBER, _NONE), "padding": int},
    "near_ties": {"prompt": int, "position": int, "layer": int, "gap": NUMBER},
}
#: The ledger's layer is -1 for what ranks agree on outside of layers.
LEDGER = {"op": str} | dict.fromkeys(("layer", "src", "dst", "payload", "padding", "metadata", "rows", "messages"), int)

VERDICTS = ("equal", "different", "reported", "not checked")
#: Fields that hold fractions, not amounts: any number is one of them.
SIGNED = ("max_abs_logit_diff", "gap", "relative_rms", "max_abs")
