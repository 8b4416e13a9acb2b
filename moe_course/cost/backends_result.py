"""What `moe-course backends` found: counted against bound, bits against bits. The JSON `moe_course.backends/1`.

Built in: notebook 11.
"""

from __future__ import annotations

from statistics import median

import torch

from moe_course.backends.capabilities import names_of
from moe_course.cost import bounds
from moe_course.cost.compare import Job, shared_bound
from moe_course.cost.sizes import row_sizes
from moe_course.quant import format_named
from moe_course.rows import TOLERANCE

SCHEMA = "moe_course.backends/1"


def build_result(job: Job, parts: list[dict], refused: dict[str, str], notes: list[str], transport: str, file) -> dict:
    """The JSON of the command, with everything that is not as promised under `failures`."""
    exact = all(part["exact"] for part in parts)
    if not exact:
        notes = [*notes, f"equal bits are not promised here: {parts[0]['exact_reason']}"]
    lines = [_line(job, line, parts, exact) for line in job.backends()]
    failures = [failure for line in lines for failure in line.pop("failures")]
    lines += [_refused(name, reason) for name, reason in refused.items()]
    rows = [len(ids) for number in range(job.passes) for ids in job.ids_per_rank(number)]
    verdict = "; ".join(failures)
    if not failures:
        verdict = "every backend sent what its bound says, " + (
            "and where it is promised all outputs have the same bits" if exact else "and outputs agree to a tolerance"
        )
    return {
        "schema": SCHEMA,
        "routing": None if file is None else str(file),
        "world_size": job.world_size,
        "transport": transport,
        "ranks_per_node": [len(node) for node in job.placement.nodes],
        "experts": job.experts,
        "top_k": job.ids.shape[1],
        "placement": job.strategy,
        "hidden_size": job.hidden_size,
        "dtype": job.dtype,
        "dispatch_quant": job.dispatch_quant,
        "max_num_batched_tokens": job.max_num_tokens,
        "passes": job.passes,
        "most_rows": max(rows),
        "rounds": job.rounds,
        "seed": job.seed,
        "bits_promised": exact,
        "backends": lines,
        "notes": notes,
        "failures": failures,
        "verdict": verdict,
    }


def _line(job: Job, line, parts: list[dict], exact: bool) -> dict:
    sent = {key: sum(part["sent"][line.name][key] for part in parts) for key in parts[0]["sent"][line.name]}
    seconds = [max(times) for times in zip(*(part["seconds"][line.name] for part in parts), strict=True)]
    rows, bound = _bound(job, line)
    difference = max(part["difference"][line.name] for part in parts)
    promised = exact and not line.reduce_in_node
    if job.dispatch_quant and format_named(job.dispatch_quant).scale_per == "tensor":
        promised = promised and line.shape != "no_dp_ep"  # its ranks quantise all rows together
    failures = []
    if (sent["rows"], sent["payload"]) != (rows, bound):
        failures.append(
            f"{line.name} sent {sent['rows']} rows with {sent['payload']} bytes, the bound for this routing is "
            f"{rows} rows with {bound} bytes"
        )
    limit = 0.0 if promised else TOLERANCE[getattr(torch, job.dtype)]
    if difference > limit:
        failures.append(
            f"{line.name}: outputs differ from allgather_reducescatter by {difference:.1e}, {limit:g} allowed"
        )
    return {
        "backend": line.name,
        "shape": line.shape,
        "stands_for": names_of(line.shape),
        "refused": None,
        **sent,
        "bound_rows": rows,
        "bound": bound,
        "ratio": sent["payload"] / bound if bound else None,
        "seconds": seconds,
        "least_s": min(seconds),
        "median_s": median(seconds),
        "same_bits": difference == 0,
        "bits_promised": promised,
        "max_difference": difference,
        "failures": failures,
    }


def _bound(job: Job, line) -> tuple[int, int]:
    """Rows and bytes that the routing of all passes must move in this shape."""
    if line.shape == "no_dp_ep":
        return shared_bound(job)
    placement, count = job.placement, job.backends()[line].traffic
    traffic = bounds.add([count(job.ids_per_rank(number), placement) for number in range(job.passes)])
    found = bounds.bound(traffic, row_sizes(job.hidden_size, job.dtype, job.dispatch_quant), placement)
    return found.dispatch.wire + found.combine.wire, found.wire_bytes


def _refused(name: str, reason: str) -> dict:
    return {"backend": name, "shape": name, "stands_for": names_of(name), "refused": reason}
