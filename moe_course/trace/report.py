"""A run in one HTML file: verdict, text, player, timeline, load, bytes against bound, plan.

It needs no network and no server. What comes from a run, prompts first of all, is text in it and never markup.
Built in: notebook 13.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from moe_course.errors import TraceError
from moe_course.result import RESULT_FILE
from moe_course.trace.trace import Trace
from moe_course.viz.flow_data import flow_data
from moe_course.viz.page import Figure, page
from moe_course.viz.rank_timeline import timeline_data

_PICTURES = Path(__file__).parents[1] / "viz"
_VERDICTS = {
    "equal": "text, logits and chosen experts equal the untouched one-process model",
    "different": "the run differs from the untouched one-process model",
    "not checked": "nobody compared this run; add --check",
}


def report(trace: Trace, result: dict[str, Any]) -> str:
    """The page of a run.

    Args:
        trace: its trace; times and routes come from there.
        result: its JSON, schema `moe_course.run/1`.

    Raises:
        TraceError: trace and result are of different runs.
    """
    _same_run(trace, result)
    flow = flow_data(trace)
    parts: list[str | Figure] = [
        f"<h1>{escape(_title(result))}</h1>",
        _verdict(result),
        _facts(trace, result),
        "<h2>Where the tokens of your text went</h2>",
        '<p class="quiet">Under each token a bar: the ranks that own its experts, as wide as the router weighed them. '
        "The digit is the rank with most weight. A shaded token was written by the model. Choose one, and the player "
        "below follows it.</p>",
        Figure("token_text", flow),
        "<h2>Every token on its way</h2>",
        Figure("token_flow", flow),
        "<h2>What each rank did when</h2>",
        Figure("rank_timeline", timeline_data(trace)),
        "<h2>Load</h2>",
        _load(trace, result),
        "<h2>Bytes against the bound</h2>",
        _bytes(result),
        "<h2>The plan</h2>",
        "<details><summary>What all ranks agreed on before the first row moved</summary>",
        _plan(result),
        "</details>",
        f"<script>\n{_part('report.js')}</script>",
    ]
    return page(_title(result), parts, _part("report.css"))


def report_of(folder: str | Path) -> str:
    """The page of a folder written by `moe-course run --trace`. Raises TraceError when it is not complete."""
    trace, file = Trace.load(folder), Path(folder) / RESULT_FILE
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{file}: the figures of the run cannot be read ({error}); record the run again") from None
    return report(trace, result)


def write_report(text: str, file: str | Path) -> None:
    """Write a page, all of it or nothing. Raises TraceError."""
    path = Path(file)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise TraceError(f"--report {path}: cannot be written: {error.strerror}; name another file") from None


def _part(name: str) -> str:
    return (_PICTURES / name).read_text(encoding="utf-8")


def _same_run(trace: Trace, result: dict[str, Any]) -> None:
    told = {"world_size": result.get("world_size"), "prompts": [p["prompt"] for p in result.get("prompts", ())]}
    told["new_tokens"] = [p["tokens"] for p in result.get("prompts", ())]
    here = {"world_size": trace.meta["world_size"], "prompts": [p["prompt"] for p in trace.meta["prompts"]]}
    here["new_tokens"] = trace.meta["new_tokens"]
    for name, value in here.items():
        if told[name] != value:
            raise TraceError(f"trace and figures are of different runs: {name} is {value!r} and {told[name]!r}")


def _title(result: dict[str, Any]) -> str:
    ranks = result["world_size"]
    return f"Expert parallelism on {ranks} rank{'' if ranks == 1 else 's'}: {result['backend']}"


def _verdict(result: dict[str, Any]) -> str:
    verdict = str(result["verdict"])
    kind = verdict if verdict in ("equal", "different") else "other"
    means = _VERDICTS.get(verdict, "")
    difference = result["max_abs_logit_diff"]
    if verdict == "equal" and difference is not None:
        means += f" (largest difference of a logit {difference:.1e})"
    failures = "".join(f"<br>{escape(text)}" for text in result["failures"][:5])
    return f'<p class="verdict {kind}"><b>{escape(verdict)}</b>{escape(means)}{failures}</p>'


def _facts(trace: Trace, result: dict[str, Any]) -> str:
    meta, prompts = trace.meta, result["prompts"]
    new = sum(len(prompt["tokens"]) for prompt in prompts)
    read = sum(len(prompt["prompt_tokens"]) for prompt in prompts)
    facts = {
        "model": f"{Path(result['model']).name}: {meta['experts']} experts, {meta['top_k']} per token",
        "ranks": f"{result['world_size']} on {result['device']}, rows in {result['dtype']}",
        "rows travel": f"as {result['backend']}, carried by {result['transport']} ({result['transport_reason']})",
        "text": f"{len(prompts)} prompts, {read} tokens read, {new} written",
        "stages": ", ".join(f"{name} from {path}" for name, path in result["stages"].items()) or "the package's",
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f"<dl>{rows}</dl>"


def _load(trace: Trace, result: dict[str, Any]) -> str:
    """Routes each rank computed, by layer, with a bar against the mean."""
    ranks, layers = trace.meta["world_size"], sorted(set(trace.columns["layer"].tolist()))
    counts = {
        layer: trace.columns["owner_rank"][trace.columns["layer"] == layer].bincount(minlength=ranks).tolist()
        for layer in layers
    }
    sums = [sum(counts[layer][rank] for layer in layers) for rank in range(ranks)]
    most, mean = max(sums), sum(sums) / ranks  # a run has routes: prompts begin with a token
    rows = []
    for rank, numbers in enumerate(result["ranks"]):
        bar = f'<span class="bar" style="width:{200 * sums[rank] / most:.0f}px"></span>'
        cells = [str(rank), str(numbers["experts"]), *(f"{counts[layer][rank]:,}" for layer in layers)]
        rows.append([*cells, f"{sums[rank]:,}", bar, f"{numbers['rows_sent']:,}", f"{numbers['rows_received']:,}"])
    heads = [
        "rank",
        "experts",
        *(f"layer {layer}" for layer in layers),
        "routes",
        "against the most",
        "rows out",
        "rows in",
    ]
    busiest = sums.index(most)
    says = (
        f"Rank {busiest} was the busiest: {most:,} routes, {most / mean:.2f} times the mean." if most else "No routes."
    )
    return _table(heads, rows, says, raw={len(layers) + 3: "wide"})


def _bytes(result: dict[str, Any]) -> str:
    rows = [
        [
            str(line["layer"]),
            escape(line["phase"]),
            f"{line['rows']:,}",
            f"{line['payload']:,}",
            f"{line['bound']:,}",
            "" if line["ratio"] is None else f"{line['ratio']:.3f}",
            f"{line['padding']:,}",
        ]
        for line in result["moved"]
    ]
    heads = ["layer", "phase", "rows", "bytes", "bound", "counted / bound", "padding"]
    total = result["bytes"]
    says = (
        f"The transport was given {total['payload']:,} bytes of rows, {total['padding']:,} of padding and "
        f"{total['metadata']:,} of ids, weights, counts and headers. The bound is what this routing must move."
    )
    return _table(heads, rows, says, raw={1: "word"})


def _plan(result: dict[str, Any]) -> str:
    rows = [[escape(str(name)), escape(_short(value))] for name, value in result["plan"].items()]
    return _table(["field", "value"], rows, "", raw={0: "word", 1: "word"})


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 160 else f"{text[:157]}…"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str, raw: dict[int, str]) -> str:
    """A table of cells that are HTML already; `raw` gives columns a class."""

    def line(cells: Sequence[str], tag: str) -> str:
        classes = (f' class="{raw[place]}"' if place in raw else "" for place in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{c}>{cell}</{tag}>" for c, cell in zip(classes, cells, strict=True)) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    says = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{says}\n<thead>{line(heads, "th")}</thead>\n<tbody>{body}</tbody></table></div>'
