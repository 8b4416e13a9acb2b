"""An `Explanation` as a table. Built in: notebook 13."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_course.rows import TOLERANCE

if TYPE_CHECKING:
    from moe_course.trace.join import Explanation


def as_text(found: Explanation) -> str:
    """Routes in k order, then the sum of each owner, then the verdict."""
    token, total = found.token, found.total
    lines = [
        f"{token['text']!r} (token {token['id']}) is position {token['position']} of prompt {token['prompt']}: row "
        f"{token['row']} of rank {token['rank']} in step {token['step']}, layer {token['layer']}",
        "",
    ]
    forwarded = any(route["via_rank"] >= 0 for route in found.routes)
    heads = ["k", "expert", "owner", "slot", "sent as", "arrives as", "weight", "|output|", "weight x output"]
    rows = [
        [
            str(route["k"]),
            str(route["expert"]),
            f"rank {route['owner_rank']}",
            str(route["local_expert"]),
            _slot(route["send_row"]),
            _slot(route["receive_row"]),
            f"{route['weight']:.4f}",
            f"{route['contribution'].norm():.4f}",
            _first(route["contribution"] * route["weight"]),
        ]
        for route in found.routes
    ]
    if forwarded:
        heads.insert(4, "via")
        for row, route in zip(rows, found.routes, strict=True):
            row.insert(4, f"rank {route['via_rank']}")
    lines += _table(heads, rows)
    lines += ["", "each owner adds its own in k order, then the owners are added in this order:"]
    several = len({partial.source_rank for partial in found.partials}) > 1
    sums = [
        [
            f"rank {partial.owner_rank}"
            + (f" (row of rank {partial.source_rank})" if several else "")
            + (f" by way of rank {partial.via_rank}" if partial.via_rank >= 0 else ""),
            " + ".join(f"k{k}" for k in partial.ks),
            _first(partial.value),
        ]
        for partial in found.partials
    ]
    sums += [["sum", "rounded once", _first(total)], ["recorded", "by the run", _first(found.recorded)]]
    return "\n".join([*lines, *_table(["owner", "parts", "first numbers"], sums, left=True), "", *_verdict(found)])


def _verdict(found: Explanation) -> list[str]:
    n, dtype = len(found.total), found.total.dtype
    if found.equal:
        verdict = f"equal: all {n} numbers of the sum are those of the run, to the bit"
    elif found.promised:
        at = int((found.total.double() - found.recorded.double()).abs().argmax())
        verdict = (
            f"DIFFERENT: number {at} of the sum is {found.total[at]:.8g}, the run has {found.recorded[at]:.8g} "
            f"(largest difference {found.difference:.2e})"
        )
    else:
        verdict = f"{'within' if found.within else 'NOT within'} the tolerance of {dtype}, {TOLERANCE[dtype]:g}: "
        verdict += f"the largest difference is {found.difference:.2e}; bits are not promised here"
    return [verdict, *([f"note: {found.note}"] if found.note else [])]


def _table(heads: list[str], rows: list[list[str]], left: bool = False) -> list[str]:
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = []
    for row in [heads, ["-" * width for width in widths], *rows]:
        cells = (cell.ljust(width) if left else cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return lines


def _slot(row: int) -> str:
    return "?" if row < 0 else str(row)


def _first(values) -> str:
    numbers = " ".join(f"{value: .4f}" for value in values[:3].tolist())
    return f"[{numbers}{' …' if len(values) > 3 else ''}]"
