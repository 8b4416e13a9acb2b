"""What a run shows on the terminal when it is done: tables, texts and the verdict. Before that, see `progress.py`."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moe_course.result import why_reported

VERDICTS = {"equal": "bold green", "different": "bold red", "failed": "bold red"}


def print_timings(result: dict, console: Console) -> None:
    """Where the seconds of rank 0 went, and what the guard cost before the first token."""
    table = Table(title="timings", title_justify="left")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("what it does")
    guard = result["guard"]
    for name, text in _GUARD_PARTS.items():
        if name in guard:
            table.add_row(name.removesuffix("_s"), f"{guard[name]:.3f}", text.format(**guard))
    for name, text in _PHASES.items():
        table.add_row(name.removesuffix("_s"), f"{result['phases'][name]:.3f}", text.format(**result["phases"]))
    waited = [row["waited_s"] for row in result["ranks"]]
    table.add_row(
        "exchanges", f"{min(waited):.3f} to {max(waited):.3f}", "of that: in exchanges, least and most of a rank"
    )
    console.print(table)


_GUARD_PARTS = {
    "handshake_s": "statements compared, waiting for the slowest rank to start",
    "audit_s": "who holds what; {tensors:,} tensors, {bytes:,} bytes read again and compared",
    "canary_s": "a row with a known answer through every sparse layer",
}
_PHASES = {
    "load_s": "from the start of the rank to the first token, all of the above included",
    "prefill_s": "all prompts, passes: {prefill_passes}",
    "decode_s": "all other tokens",
}


def print_result(result: dict, console: Console | None = None, timings: bool = False) -> None:
    """Per-rank table, texts, ledger, speed and verdict of a finished run."""
    console = console or Console()
    console.print(_rank_table(result))
    for number, prompt in enumerate(result["prompts"]):
        body = Text.assemble((_printable(prompt["prompt"]), "dim"), (_printable(prompt["text"]), "bold"))
        title = f"prompt {number} · rank {prompt['dp_rank']}"
        mark = {True: " · as the reference", False: " · NOT as the reference", None: ""}[prompt["matches_reference"]]
        console.print(Panel(body, title=title + mark, title_align="left", border_style="cyan"))
    console.print(_ledger_table(result))
    if result["bound"]["payload"]:
        console.print(_moved_table(result))
    phases = result["phases"]
    prefill, decode = _rate(phases["prefill_tokens_per_s"]), _rate(phases["decode_tokens_per_s"])
    console.print(f"speed    prefill {prefill} · decode {decode} tokens/s over all ranks")
    console.print(f"time     {phases['load_s']:.1f} s to start and load · {result['wall_s']:.1f} s in the ranks")
    uneven = result["load"]["max_over_mean"]
    if uneven is not None and result["world_size"] > 1:
        console.print(f"load     the busiest rank computed {uneven:.2f} x the mean number of routes")
    if timings:
        print_timings(result, console)
    if result["row_invariance"]:
        console.print(f"rows     {result['row_invariance']}", markup=False)
    if result["quantised"]:
        console.print(_quantised_line(result["quantised"]), markup=False, highlight=False)
    if result["across_nodes"]:
        crossed, ranks = result["across_nodes"], " + ".join(map(str, result["across_nodes"]["ranks"]))
        console.print(
            f"nodes    {len(crossed['ranks'])} of {ranks} ranks: {crossed['rows']:,} rows, {crossed['payload']:,} "
            "payload bytes went from one to another"
        )
    if result["static_shapes"]:
        console.print(
            f"static   experts compiled once, for {result['max_num_batched_tokens']} rows of each rank: {_near(result)}"
        )
    if result["stages"]:
        yours = ", ".join(f"{name} ({file})" for name, file in result["stages"].items())
        console.print(f"stages   yours: {yours}; the package's: the rest", markup=False, highlight=False)
    if result["combine_dtype"] != "auto":
        console.print(f"sums     what comes home is rounded to {result['combine_dtype']} (--combine-dtype)")
    if result["reduce_in_node"]:
        console.print(f"sums     added in each node before they leave it: {_near(result)}")
    console.print(_verdict_line(result))


def _near(result: dict) -> str:
    """How near sums in another order come to those of other backends."""
    import torch

    from moe_course.rows import TOLERANCE

    near = TOLERANCE[getattr(torch, result["dtype"])]
    return f"sums in another order, up to {near:g} from other backends ({result['dtype']}, sums of size 1)"


def _rank_table(result: dict) -> Table:
    table = Table(title="ranks; rows: out to experts and home again, both ways", title_justify="left")
    for name in ("rank", "experts", "params", "read MB", "left MB", "rows out", "rows in", "peak MB"):
        table.add_column(name, justify="right")
    for row in result["ranks"]:
        table.add_row(
            str(row["rank"]),
            str(row["experts"]),
            f"{row['params'] / 1e6:.2f} M",
            f"{row['bytes_read'] / 1e6:.2f}",
            f"{row['bytes_skipped'] / 1e6:.2f}",
            f"{row['rows_sent']:,}",
            f"{row['rows_received']:,}",
            f"{row['peak_rss'] / 1e6:.0f}",
        )
    return table


def _ledger_table(result: dict) -> Table:
    table = Table(title="ledger: bytes given to the transport", title_justify="left")
    for name in ("operation", "messages", "rows", "payload", "padding", "metadata"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for entry in result["ledger"]:
        counted = entry if entry["layer"] >= 0 else _agreed(entry)
        for key in ("messages", "rows", "payload", "padding", "metadata"):
            totals[entry["op"]][key] += counted[key]
            totals["all"][key] += counted[key]
    totals["all"] = totals.pop("all", totals["all"])
    for op, total in totals.items():
        table.add_row(op, *(f"{total[key]:,}" for key in ("messages", "rows", "payload", "padding", "metadata")))
    return table


def _agreed(entry: dict) -> dict:
    """A line of the ledger about what ranks agree on outside of layers: bytes, none of them of a row."""
    none = {"rows": 0, "payload": 0, "padding": 0}
    return entry | none | {"metadata": entry["payload"] + entry["padding"] + entry["metadata"]}


def _moved_table(result: dict) -> Table:
    table = Table(title="rows of each layer, and the least that this backend needs for them", title_justify="left")
    for name in ("layer", "phase", "rows", "payload", "bound", "counted / bound"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for row in result["moved"]:
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.3f}"
        cells = [f"{row[name]:,}" for name in ("rows", "payload", "bound")]
        table.add_row(str(row["layer"]), row["phase"], *cells, ratio)
    ratio = result["bound"]["ratio"]
    if ratio is not None and len(result["moved"]) > 1:
        rows, payload = (sum(row[name] for row in result["moved"]) for name in ("rows", "payload"))
        table.add_row("all", "", f"{rows:,}", f"{payload:,}", f"{result['bound']['payload']:,}", f"{ratio:.3f}")
    return table


def _verdict_line(result: dict) -> Text:
    verdict = result["verdict"]
    style = VERDICTS.get(verdict, "bold yellow")
    if verdict == "not checked":
        detail = "add --check to compare with the one-process model"
    elif verdict == "equal":
        texts, difference = _count(len(result["prompts"]), "prompt"), result["max_abs_logit_diff"]
        detail = (
            f"text of {texts}, logits (max difference {difference:.1e}) and "
            f"topk_ids of {result['routed_rows_compared']:,} routed rows equal the untouched Hugging Face model"
        )
        if result["near_ties"]:
            after = _count(result["rows_after_near_ties"], "row")
            detail += f", but for {_count(len(result['near_ties']), 'near tie')} and {after} behind it"
    elif verdict == "reported":
        same = sum(bool(prompt["matches_reference"]) for prompt in result["prompts"])
        detail = (
            f"{result['dtype']}: {same} of {len(result['prompts'])} texts equal, "
            f"logits differ by up to {result['max_abs_logit_diff']:.1e}; {why_reported(result)}"
        )
    else:
        detail = "; ".join(result["failures"][:3])
    return Text.assemble("verdict  ", (verdict, style), f": {detail}")


def _quantised_line(found: dict) -> str:
    line = f"quant    {found['format']} {found['when']}: "
    if "none travels" not in found["when"]:
        line += f"{found['row_bytes']} bytes a row on the way out, {found['plain_row_bytes']} as it is; "
    return (
        f"{line}rows differ by {found['relative_rms']:.1%} (root mean square), a number by up to {found['max_abs']:.2g}"
    )


def _printable(text: str) -> str:
    """Control characters as \\xNN: they would move the cursor, or colour the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
