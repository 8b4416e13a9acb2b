"""From what the ranks hand in to the one JSON of a run (`moe_course.run/1`). Built in: notebook 13."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from moe_course.errors import ConfigError

SCHEMA = "moe_course.run/1"


def build_result(options, config, plan, tokenizer, prompts, everybody, reference, facts) -> tuple[dict, Any]:
    """The run's JSON, and the comparison with the reference if there was one.

    Args:
        everybody: what each rank handed in after the run, in rank order.
        reference: the running `verify.Reference`, or None when nothing is checked.
        facts: device, transport, dtype, loaded_s and row invariance of rank 0.
    """
    import torch

    from moe_course.backends import BACKENDS
    from moe_course.combine import accumulator
    from moe_course.comm.ledger import Ledger
    from moe_course.verify import compare

    generations = {g.index: (part["rank"], g) for part in everybody for g in part["generations"]}
    tokens = [generations[i][1].tokens for i in range(len(prompts))]
    comparison = None
    if reference is not None:
        comparison = compare(
            reference.finish(),
            prompts,
            tokens,
            [torch.stack(generations[i][1].logits) for i in range(len(prompts))],
            {key: rows for part in everybody for key, rows in part["routed"].items()},
            config.sparse_layers,
        )
    ledger = Ledger.merge(part["ledger"] for part in everybody)
    total = ledger.total()
    dtype = getattr(torch, facts["dtype"])
    row_bytes, partial_bytes = (config.hidden_size * d.itemsize for d in (dtype, accumulator(dtype)))
    passes = sorted({key for part in everybody for key in part["rows_per_pass"]})
    bound = sum(
        BACKENDS[plan.backend.name].payload_bound(
            [part["rows_per_pass"][key] for part in everybody], row_bytes, partial_bytes, plan.placement
        )
        for key in passes
    )
    prefill_s, decode_s = (max(getattr(p["timing"], name) for p in everybody) for name in ("prefill_s", "decode_s"))
    prefill, decode = (sum(getattr(p["timing"], n) for p in everybody) for n in ("prefill_tokens", "decode_tokens"))
    result = {
        "schema": SCHEMA,
        "world_size": plan.world_size,
        "model": str(options.model),
        "device": facts["device"],
        "dtype": facts["dtype"],
        "backend": plan.backend.name,
        "transport": facts["transport"],
        "plan": plan.as_dict(),
        "ranks": [_rank_row(part, plan) for part in everybody],
        "prompts": [
            {
                "prompt": options.prompts[i],
                "text": tokenizer.decode(tokens[i]),
                "prompt_tokens": prompts[i],
                "tokens": tokens[i],
                "dp_rank": generations[i][0],
                "matches_reference": comparison.matches[i] if comparison else None,
            }
            for i in range(len(prompts))
        ],
        "max_abs_logit_diff": comparison.max_abs_logit_diff if comparison else None,
        "topk_ids_equal": comparison.topk_ids_equal if comparison else None,
        "routed_rows_compared": comparison.rows_compared if comparison else None,
        "near_ties": comparison.near_ties if comparison else [],
        "rows_after_near_ties": comparison.excused if comparison else None,
        "rows": {"sent": total.rows, "received": ledger.rows_received},
        "bytes": {"payload": total.payload, "padding": total.padding, "metadata": total.metadata},
        "bound": {"payload": bound, "ratio": total.payload / bound if bound else None},
        "ledger": ledger.as_rows(),
        "phases": {
            "load_s": round(facts["loaded_s"], 3),
            "prefill_s": round(prefill_s, 4),
            "decode_s": round(decode_s, 4),
            "prefill_tokens": prefill,
            "decode_tokens": decode,
            "prefill_tokens_per_s": round(prefill / prefill_s, 1) if prefill_s else None,
            "decode_tokens_per_s": round(decode / decode_s, 1) if decode_s else None,
        },
        "tokens_per_s": round(sum(map(len, tokens)) / (prefill_s + decode_s), 1),
        "row_invariance": facts["invariance"].reason if facts["invariance"] else None,
        "failures": comparison.failures if comparison else [],
        "verdict": _verdict(comparison, dtype),
    }
    return result, comparison


def _verdict(comparison, dtype) -> str:
    import torch

    if comparison is None:
        return "not checked"
    if dtype != torch.float32:  # rounding differs between batches; figures are reported, nothing is promised
        return "reported"
    return "equal" if comparison.equal else "different"


def _rank_row(part: dict, plan) -> dict:
    rank = part["rank"]
    return {
        "rank": rank,
        "dp": rank,
        "tp": 0,
        "pcp": 0,
        "experts": plan.placement.num_local(rank),
        "params": part["params"],
        "expert_bytes": part["expert_bytes"],
        "tensors_read": part["report"].tensors_read,
        "tensors_skipped": part["report"].tensors_skipped,
        "bytes_read": part["report"].bytes_read,
        "bytes_skipped": part["report"].bytes_skipped,
        "tensors_ignored": part["report"].ignored,
        "rows_sent": part["ledger"].total().rows,
        "rows_received": part["ledger"].rows_received,
        "peak_rss": part["peak_rss"],
    }


def write_json(path: Path, content: dict) -> None:
    """Write atomically: readers see the old file or the whole new one. Raises ConfigError if that is impossible."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
