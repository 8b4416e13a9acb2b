"""`moe-course bench`: figures measured here, two variants side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine, two variants side by side.")
LIMITS = {"prefill": 0.05, "decode": 0.15}  # shares of a step, for 2 ranks


@bench.callback()
def _bench() -> None:
    """Measure on this machine, two variants side by side."""


@bench.command()
def guard(
    rounds: Annotated[int, typer.Option(help="Blocks of steps for each variant.")] = 24,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> int:
    """What header and watchdog cost of a step: a prefill of 512 rows a rank, and a decode of one; 2 and 4 ranks."""
    from rich.console import Console
    from rich.table import Table

    from moe_course.launch import launch

    console, figures = Console(), []
    for ranks in (2, 4):
        with console.status(f"{ranks} ranks"):
            ended = launch([str(rounds)], ranks, module="moe_course.bench.guard_ranks")
        if ended.error:
            print(ended.error, file=sys.stderr)
            return ended.returncode
        figures += [event | {"ranks": ranks} for event in ended.events if event["event"] == "measured"]
    table = Table(title=f"the guard's share of a step ({rounds} rounds, in turns)", title_justify="left")
    for name in ("ranks", "step", "with guard", "without", "share, fastest", "share, median", "aim"):
        table.add_column(name, justify="right")
    for one in figures:
        aim = f"<= {LIMITS[one['step']]:.0%}" if one["ranks"] == 2 else ""
        table.add_row(
            str(one["ranks"]),
            one["step"],
            f"{one['guard_ms']:.2f} ms",
            f"{one['bare_ms']:.2f} ms",
            f"{one['share_of_fastest']:.1%}",
            f"{one['share_median']:.1%}",
            aim,
        )
    console.print(table)
    if json_file is not None:
        from moe_course.result import write_json

        write_json(json_file, {"schema": "moe_course.bench.guard/1", "rounds": rounds, "figures": figures})
    return 0
