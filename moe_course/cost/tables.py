"""The tables of `moe-course replay` and `moe-course backends`. On a narrow terminal one becomes several."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

_STANDS = "stands for, in one node"
_SHARED = "TP + EP, where ranks share their rows"
_CARRIES = {
    "gloo": "gloo carries whole segments here",
    "threads": "threads carry whole segments, as gloo does here",
    "shm": "shared memory takes only the rows in use, gloo carries whole segments here",
}
_NAMES_WIDTH = 46  # columns that vLLM's names need in the table; otherwise they stand below


def print_replay(console: Console, found: dict) -> None:
    """A recorded routing in every shape."""
    nodes = found["ranks_per_node"]
    hosts = f"{len(nodes)} nodes" if len(nodes) > 1 else "one node"
    console.print(
        f"{found['file']}: {found['rows']:,} rows x {len(found['layers'])} layers x K = {found['top_k']}, "
        f"{found['experts']} experts on {found['world_size']} ranks ({found['placement']}, {hosts})",
        markup=False,
    )
    per = found["rows"] * len(found["layers"])
    rows = []
    for line in found["backends"]:
        across = line["rows_across_nodes"]["dispatch"] + line["rows_across_nodes"]["combine"]
        ratio, fill = line["observed_over_uniform"], line["fill"]
        rows.append(
            {
                "rows out": f"{line['rows']['dispatch'] / per:.3f}",
                "rows back": f"{line['rows']['combine'] / per:.3f}",
                "across, both": f"{across / per:.3f}" if len(nodes) > 1 else "-",
                "kB on wire": f"{line['bytes']['wire'] / per / 1e3:,.1f}",
                "kB logical": f"{line['bytes']['logical'] / per / 1e3:,.1f}",
                "x uniform": f"{ratio:.3f}" if ratio is not None else "-",
                "fill": f"{fill:.1%}" if fill is not None else "-",
                "buffer MB": f"{line['buffer_bytes'] / 1e6:,.1f}" if line["buffer_bytes"] else "-",
            }
        )
    _print_table(console, "a row in a layer, on average over all", found["backends"], rows)
    sizes = found["row_bytes"]
    console.print(
        f"a row out has {sizes['dispatch']:,} B, a partial sum {sizes['partial']:,} B, an expert's output "
        f"{sizes['contribution']:,} B. on wire: rows that leave their rank; logical: also those that stay. both ways."
    )
    console.print(
        f"fill: places of a fixed size that hold a row. buffer: the places on a rank, for "
        f"{found['max_num_batched_tokens']:,} rows of each rank (--max-num-batched-tokens). Empty ones are memory: "
        "DeepEP and NIXL send rows and counts only, as shared memory does here. gloo and NCCL carry whole segments "
        f"here: for low_latency {_padding(found) / per / 1e3:,.1f} kB more for a row in a layer. kB: 10^3 bytes, MB: "
        "10^6 bytes."
    )
    _print_imbalance(console, found)
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)


def _padding(found: dict) -> int:
    return next(line["padding_bytes"] for line in found["backends"] if line["shape"] == "low_latency")


def _print_imbalance(console: Console, found: dict) -> None:
    load = found["imbalance"]
    if load["mean_layer"] is None:
        console.print("imbalance: no routes")
        return
    worst, busiest = load["worst_layer"], load["busiest_expert"]
    text = (
        f"imbalance, routes of the fullest rank / mean: {load['max_over_mean']:.3f} over all, "
        f"{load['mean_layer']:.3f} in a layer, {worst['max_over_mean']:.3f} in layer {worst['layer']}, the worst"
    )
    if load["uniform_layer"] is not None:
        text += f"; chance alone makes {load['uniform_layer']:.3f} of as many rows"
    console.print(
        f"{text}. Expert {busiest['expert']} has {busiest['over_mean']:.2f} times the mean, "
        f"{load['experts_never_chosen']} of {found['experts']} were never chosen."
    )


def print_backends(console: Console, found: dict) -> None:
    """All shapes over one transport, measured in one run."""
    rows = []
    for line in found["backends"]:
        if line["refused"]:
            rows.append({})
            continue
        rows.append(
            {
                "rows": f"{line['rows']:,}",
                "kB": f"{line['payload'] / 1e3:,.1f}",
                "bound": f"{line['bound'] / 1e3:,.1f}",
                "ratio": f"{line['ratio']:.3f}" if line["ratio"] is not None else "-",
                "padding": f"{line['padding'] / 1e3:,.0f}",
                "meta": f"{line['metadata'] / 1e3:,.1f}",
                "messages": f"{line['messages']:,}",
                "min ms": f"{1e3 * line['least_s']:.2f}",
                "median": f"{1e3 * line['median_s']:.2f}",
                "bits": "same" if line["same_bits"] else f"{line['max_difference']:.0e}",
            }
        )
    nodes = " + ".join(map(str, found["ranks_per_node"]))
    title = (
        f"{found['world_size']} ranks on {found['transport']}, on nodes of {nodes}, "
        f"{found['passes']} passes of up to {found['most_rows']} "
        f"rows a rank; kB (10^3 bytes) of all ranks in a round; time of a pass on the slowest rank"
    )
    _print_table(console, title, found["backends"], rows)
    for line in found["backends"]:
        if line["refused"]:
            console.print(f"{line['backend']}: {line['refused']}", markup=False)
    console.print(
        f"padding: of low_latency, empty places. {_CARRIES[found['transport']]}; DeepEP and NIXL send rows and counts "
        "only, and there empty places are memory"
    )
    if found["dispatch_quant"]:
        console.print("bits: every backend quantises alike, so they agree with each other, not with plain rows")
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print(f"verdict  {found['verdict']}", markup=False)


def _print_table(console: Console, title: str, lines: list[dict], rows: list[dict[str, str]]) -> None:
    """Backends by columns of numbers, and what each stands for; as many tables as the width asks for."""
    console.print(title, style="italic", markup=False)
    first = 4 + max(len(line["backend"]) for line in lines)  # with a gap, and the edges of the table
    widths = {name: 2 + max(len(name), *(len(row.get(name, "-")) for row in rows)) for name in max(rows, key=len)}
    groups: list[list[str]] = [[]]
    for name in widths:
        if groups[-1] and first + sum(widths[other] for other in [*groups[-1], name]) > console.width:
            groups.append([])
        groups[-1].append(name)
    names_fit = len(groups) == 1 and first + sum(widths.values()) + _NAMES_WIDTH <= console.width
    for group in groups:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("backend", no_wrap=True)
        for name in group:
            table.add_column(name, justify="right", no_wrap=True)
        if names_fit:
            table.add_column(_STANDS)
        for line, row in zip(lines, rows, strict=True):
            names = [", ".join(line["stands_for"]) or _SHARED] if names_fit else []
            table.add_row(line["backend"], *(row.get(name, "-") for name in group), *names)
        console.print(table)
    if not names_fit:
        console.print(_STANDS)
        for shape, names in {line["shape"]: line["stands_for"] for line in lines}.items():
            console.print(f"  {shape}: {', '.join(names) or _SHARED}", markup=False)
