"""From what the ranks hand in to the one JSON of a run (`moe_course.run/1`). Built in: notebook 13."""

from __future__ import annotations

from typing import Any

SCHEMA = "moe_course.run/1"
#: The JSON of a run in the folder of its trace.
RESULT_FILE = "run.json"


def build_result(job, everybody: list[dict], reference, facts: dict) -> tuple[dict, Any]:
    """The run's JSON, and the comparison with the reference if there was one.

    Args:
        job: rank 0's `Job`.
        everybody: what each rank handed in after the run, in rank order.
        reference: the running `verify.Reference`, or None when nothing is checked.
        facts: loaded_s and row invariance of rank 0.
    """
    from moe_course.comm.ledger import Ledger

    options, prompts, plan, dtype = job.options, job.prompts, job.plan, job.dtype
    generations = {g.index: (part["rank"], g) for part in everybody for g in part["generations"]}
    tokens = [generations[i][1].tokens for i in range(len(prompts))]
    comparison = _compare(job, everybody, generations, tokens, reference)
    ledger = Ledger.merge(part["ledger"] for part in everybody)
    total, inside, moved = ledger.total(), ledger.of_layers(), _moved(job, everybody)
    rows = inside.total()  # what is agreed on outside of layers has a number of bytes, but no row of theirs
    metadata = total.payload + total.padding + total.metadata - rows.payload - rows.padding
    bound = sum(row["bound"] for row in moved)
    payload = sum(row["payload"] for row in moved)
    result = {
        "schema": SCHEMA,
        "world_size": plan.world_size,
        "model": str(options.model),
        "device": job.device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": plan.backend.name,
        "transport": job.transport,
        "transport_reason": job.travel.reason,
        "quantised": _quantised(job, everybody),
        "plan": plan.as_dict(),
        "ranks": [_rank_row(part, plan) for part in everybody],
        "prompts": [
            {
                "prompt": options.prompts[i],
                "text": job.tokenizer.decode(tokens[i]),
                "prompt_tokens": prompts[i],
                "tokens": tokens[i],
                "dp_rank": plan.rank(generations[i][0]).dp,
                "matches_reference": comparison.matches[i] if comparison else None,
            }
            for i in range(len(prompts))
        ],
        "max_abs_logit_diff": comparison.max_abs_logit_diff if comparison else None,
        "topk_ids_equal": comparison.topk_ids_equal if comparison else None,
        "routed_rows_compared": comparison.rows_compared if comparison else None,
        "near_ties": comparison.near_ties if comparison else [],
        "rows_after_near_ties": comparison.excused if comparison else None,
        "rows": {"sent": rows.rows, "received": inside.rows_received},
        "bytes": {"payload": rows.payload, "padding": rows.padding, "metadata": metadata},
        "bound": {"payload": bound, "ratio": payload / bound if bound else None},
        "moved": moved,
        "across_nodes": _across_nodes(plan, ledger),
        "reduce_in_node": options.reduce_in_node,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "combine_dtype": options.combine_dtype,
        "static_shapes": options.static_shapes,
        "stages": {name: str(path) for name, path in job.own.files.items()} if job.own else {},
        "ledger": ledger.as_rows(),
        "load": _load(plan, everybody),
        **_speed([part for part in everybody if part["lead"]], tokens, facts["loaded_s"]),
        "guard": everybody[0]["guard"],
        "row_invariance": facts["invariance"].reason if facts["invariance"] else None,
        "failures": comparison.failures if comparison else [],
        "verdict": _verdict(comparison, (job.travel.same_text or not moved) and dtype),
    }
    return result, comparison


def _compare(job, everybody, generations, tokens, reference):
    import torch

    from moe_course.verify import compare

    if reference is None:
        return None
    routed: dict = {}  # ranks that split a prompt's rows each know some of its positions
    for part in everybody:
        for key, positions in part["routed"].items():
            routed.setdefault(key, {}).update(positions)
    logits = [torch.stack(generations[i][1].logits) for i in range(len(job.prompts))]
    return compare(reference.finish(), job.prompts, tokens, logits, routed, job.config.sparse_layers)


def _moved(job, everybody) -> list[dict]:
    """For every sparse layer, in prefill and in decode: bytes of rows counted, and what its routing must move."""
    from moe_course.combine import accumulator
    from moe_course.comm.ledger import Ledger
    from moe_course.modes import payload_bound

    widths = [job.config.hidden_size * d.itemsize for d in (job.dtype, accumulator(job.dtype))]
    passes = sorted({key for part in everybody for key in part["rows_per_pass"]})
    first_decode = everybody[0]["timing"].prefill_passes
    found = []
    for phase in ("prefill", "decode"):
        ledger = Ledger.merge(part["ledgers"][phase] for part in everybody)
        for layer in sorted({layer for _, layer in passes}):
            mine = [key for key in passes if key[1] == layer and (key[0] < first_decode) == (phase == "prefill")]
            bound = sum(
                payload_bound(
                    job.plan, job.backend, [part["rows_per_pass"][key] for part in everybody], job.travel.sizes, *widths
                )
                for key in mine
            )
            counted = ledger.total(layer=layer)
            ratio = counted.payload / bound if bound else None
            moved = {"payload": counted.payload, "bound": bound, "ratio": ratio, "padding": counted.padding}
            found.append({"layer": layer, "phase": phase, "passes": len(mine), "rows": counted.rows} | moved)
    return found


def _across_nodes(plan, ledger) -> dict | None:
    """Rows and their bytes that went from one node to another, where the plan has several; else None."""
    nodes = plan.placement.nodes
    if not plan.moe.use_ep or len(nodes) < 2:
        return None
    home = {rank: number for number, node in enumerate(nodes) for rank in node}  # by EP rank
    node = {rank: home[plan.rank(rank).ep_rank] for rank in range(plan.world_size)}
    crossed = [
        entry
        for (_, layer, source, destination), entry in ledger.entries.items()
        if layer >= 0 and node[source] != node[destination]
    ]
    rows, payload = (sum(getattr(entry, name) for entry in crossed) for name in ("rows", "payload"))
    return {"ranks": [len(node) for node in nodes], "rows": rows, "payload": payload}


def _quantised(job, everybody) -> dict | None:
    """What quantised rows cost and save here; None where rows travel as they are."""
    backend, hidden = job.backend, job.config.hidden_size
    losses = [loss for part in everybody for loss in part["quant_losses"].values()]
    if not losses:  # no format, or no sparse layer
        return None
    when = "before the rows travel" if backend.before else "where the rows arrive"
    when = when if job.plan.dispatch_group else "for the experts, none travels"
    return {
        "format": backend.format,
        "when": when,
        "row_bytes": job.travel.sizes.dispatch,
        "plain_row_bytes": hidden * job.dtype.itemsize,
        "relative_rms": max(loss.relative_rms for loss in losses),
        "max_abs": max(loss.max_abs for loss in losses),
    }


def _load(plan, everybody) -> dict:
    """Routes computed by each EP rank over the run, and how uneven that is. None where every rank computes all."""
    import torch

    if not plan.moe.use_ep:
        return {"routes_per_rank": None, "max_over_mean": None}
    counts = torch.zeros(plan.moe.ep_size, dtype=torch.int64)
    for part in everybody:
        mine = plan.rank(part["rank"])
        if plan.reduce_group is not None and mine.tp:  # another rank holds the same rows
            continue
        for ids in part["rows_per_pass"].values():
            live = ids[ids >= 0].long()
            counts += torch.bincount(plan.placement.owner[live].long(), minlength=len(counts))
    mean = counts.float().mean().item()
    return {
        "routes_per_rank": counts.tolist(),
        "max_over_mean": round(counts.max().item() / mean, 3) if mean else None,
    }


def _speed(leads: list[dict], tokens: list[list[int]], loaded_s: float) -> dict:
    """Phases and rates. Ranks that share rows count once."""
    prefill_s, decode_s = (max(getattr(p["timing"], name) for p in leads) for name in ("prefill_s", "decode_s"))
    prefill, decode = (sum(getattr(p["timing"], n) for p in leads) for n in ("prefill_tokens", "decode_tokens"))
    return {
        "phases": {
            "load_s": round(loaded_s, 3),
            "prefill_s": round(prefill_s, 4),
            "decode_s": round(decode_s, 4),
            "prefill_passes": max(p["timing"].prefill_passes for p in leads),
            "prefill_tokens": prefill,
            "decode_tokens": decode,
            "prefill_tokens_per_s": round(prefill / prefill_s, 1) if prefill_s else None,
            "decode_tokens_per_s": round(decode / decode_s, 1) if decode_s else None,
        },
        "tokens_per_s": round(sum(map(len, tokens)) / (prefill_s + decode_s), 1),
    }


def _verdict(comparison, dtype) -> str:
    """`dtype` is False where rows are quantised or sums narrower than usual."""
    import torch

    if comparison is None:
        return "not checked"
    if dtype != torch.float32:  # rounding differs between batches; figures are reported, nothing is promised
        return "reported"
    return "equal" if comparison.equal else "different"


def why_reported(result: dict) -> str:
    """Why the verdict of a run that was compared is "reported": what its options do to sums and rows."""
    if result["quantised"]:
        return f"rows are quantised ({result['quantised']['format']}), so equality is not promised"
    if result["dtype"] == "float32":
        return "what comes home is rounded to bfloat16, so equality is not promised"
    return "equality is promised for float32 only"


def _rank_row(part: dict, plan) -> dict:
    mine, inside = plan.rank(part["rank"]), part["ledger"].of_layers()
    return {
        "rank": mine.rank,
        "dp": mine.dp,
        "tp": mine.tp,
        "pcp": mine.pcp,
        "ep_rank": mine.ep_rank,
        "experts": len(mine.experts),
        "params": part["params"],
        "expert_bytes": part["expert_bytes"],
        "tensors_read": part["report"].tensors_read,
        "tensors_skipped": part["report"].tensors_skipped,
        "bytes_read": part["report"].bytes_read,
        "bytes_skipped": part["report"].bytes_skipped,
        "tensors_ignored": part["report"].ignored,
        "rows_sent": inside.total().rows,
        "rows_received": inside.rows_received,
        "waited_s": round(part["waited_s"], 4),
        "peak_rss": part["peak_rss"],
    }
