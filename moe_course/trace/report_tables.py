"""Tables of a run's page: load of the ranks, bytes of the layers, the plan. Built in: notebook 13."""

from __future__ import annotations

import json
from typing import Any

from moe_course.trace.html import Html, element, table
from moe_course.trace.report_words import count, listed
from moe_course.trace.trace import Trace

_BAR = 200  # pixels of the longest


def load(trace: Trace, result: dict[str, Any]) -> Html:
    """Routes each rank computed, by layer, with a bar against the most."""
    ranks, layers = trace.meta["world_size"], sorted(set(trace.columns["layer"].tolist()))
    counts = {
        layer: trace.columns["owner_rank"][trace.columns["layer"] == layer].bincount(minlength=ranks).tolist()
        for layer in layers
    }
    sums = [sum(counts[layer][rank] for layer in layers) for rank in range(ranks)]
    rows = []
    for rank, told in enumerate(result["ranks"]):
        bar = element("span", class_="bar", style=f"width:{_BAR * sums[rank] / max(sums):.0f}px")
        routes = [f"{counts[layer][rank]:,}" for layer in layers] + [f"{sums[rank]:,}"]
        rows.append([rank, told["experts"], *routes, bar, f"{told['rows_sent']:,}", f"{told['rows_received']:,}"])
    by_layer = [f"layer {layer}" for layer in layers]
    heads = ["rank", "experts", *by_layer, "routes", "against the most", "rows out", "rows in"]
    return table(heads, rows, busiest(sums), {len(layers) + 3: "wide"})


def busiest(sums: list[int]) -> str:
    """Who computed most routes; all of those who did. A run has routes: prompts begin with a token."""
    most, mean = max(sums), sum(sums) / len(sums)
    first = [rank for rank, routes in enumerate(sums) if routes == most]
    if len(sums) == 1:
        return f"The one rank computed all {count(most, 'route')}."
    if len(first) == len(sums):
        return f"All ranks were equally busy: {count(most, 'route')} each."
    times = f"{most / mean:.2f} times the mean"
    if len(first) == 1:
        return f"Rank {first[0]} was the busiest: {count(most, 'route')}, {times}."
    return f"Ranks {listed(first)} were the busiest: {count(most, 'route')} each, {times}."


def moved(result: dict[str, Any]) -> Html:
    """Bytes of rows in each layer, and the least that the backend needs for its routing."""
    rows = [
        [
            line["layer"],
            line["phase"],
            f"{line['rows']:,}",
            f"{line['payload']:,}",
            f"{line['bound']:,}",
            "" if line["ratio"] is None else f"{line['ratio']:.3f}",
            f"{line['padding']:,}",
        ]
        for line in result["moved"]
    ]
    total = result["bytes"]
    says = (
        f"The transport was given {total['payload']:,} bytes of rows, {total['padding']:,} of padding and "
        f"{total['metadata']:,} of ids, weights, counts and headers. The bound is what this backend has to "
        "move for this routing; another may need less."
    )
    return table(["layer", "phase", "rows", "bytes", "bound", "counted / bound", "padding"], rows, says, {1: "word"})


def plan(result: dict[str, Any]) -> Html:
    """What all ranks agreed on."""
    rows = [[name, _short(value)] for name, value in result["plan"].items()]
    return table(["field", "value"], rows, classes={0: "word", 1: "word"})


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 160 else f"{text[:157]}…"
