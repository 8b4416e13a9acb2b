"""`moe-course bench`: figures measured here, two variants side by side."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from moe_course.errors import RankLost
from moe_course.launch import launch

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine, two variants side by side.")
LIMITS = {"prefill": 0.05, "decode": 0.15}  # shares of a step, for 2 ranks
TRACE_LIMIT = 0.05  # what a trace may add to a step
SMOOTH = {64: 60, 2048: 24}  # tokens of a pass -> frames per second that the player is to reach


@bench.callback()
def _bench() -> None:
    """Measure on this machine, two variants side by side."""


@bench.command()
def guard(
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of steps for each variant.")] = 24,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> int:
    """What header and watchdog cost of a step: a prefill of 512 rows a rank, and a decode of one; 2 and 4 ranks."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    figures = _measure(console, "moe_course.bench.guard_ranks", rounds)
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
    _store(json_file, "guard", rounds, figures)
    return 0


@bench.command()
def headers(
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of exchanges for each way.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> int:
    """How long one header takes to every peer: over gloo, and over the plain sockets in use; 2 and 4 ranks."""
    from rich.console import Console
    from rich.table import Table

    console, figures = Console(), []
    table = Table(title=f"one header to every peer and back ({rounds} rounds, in turns)", title_justify="left")
    for name in ("ranks", "gloo, least", "sockets, least", "gloo, median", "sockets, median"):
        table.add_column(name, justify="right")
    for one in _measure(console, "moe_course.bench.header_ranks", rounds):
        figures.append(one)
        ways = [one["times"][way] for way in ("gloo", "sockets")]
        found = [f"{1e6 * of(seconds):.0f} us" for of in (min, median) for seconds in ways]
        table.add_row(str(one["ranks"]), *found)
    console.print(table)
    _store(json_file, "headers", rounds, figures)
    return 0


@bench.command()
def trace(
    rounds: Annotated[int, typer.Option(min=1, help="Each is 2 prefills and 20 decodes in each way.")] = 30,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> int:
    """What a trace adds to a step: a prefill of 512 rows a rank, and a decode of one; 2 and 4 ranks."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    ways = {"bare": "no recorder", "ids": "a run", "trace": "--trace", "values": "--trace-values"}
    figures = _measure(console, "moe_course.bench.trace_ranks", rounds)
    title = "what a trace adds to a step, step by step in turns"
    # close together: 80 columns also hold a step of a second
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for name in ("ranks", "step", "turns", "way", "median", "adds", "+-", "aim"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in figures:
        for way, name in ways.items():
            added = ["", ""] if way == "bare" else [f"{one[f'{way}_adds']:+.1%}", f"{one[f'{way}_error']:.1%}"]
            aim = {"ids": "0%", "trace": f"<= {TRACE_LIMIT:.0%}"}.get(way, "")
            turns, median_ms = str(len(one["times"][way])), f"{one[f'{way}_ms']:.2f} ms"
            table.add_row(str(one["ranks"]), one["step"], turns, name, median_ms, *added, aim)
        table.add_section()
    console.print(table)
    console.print(
        "adds: to the step without recorder of the same turn, median over the turns. +-: what that median is known to.",
        highlight=False,
    )
    _store(json_file, "trace", rounds, figures)
    return 0


@bench.command()
def player(
    rounds: Annotated[int, typer.Option(min=1, help="Times a pass is drawn and played, 9 seconds each.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> int:
    """How smoothly the player runs in a headless chromium, and how soon its first picture is there."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from moe_course.bench.player_fps import measure, summary

    console, figures = Console(), []
    title = f"the player on 8 ranks, {rounds} round{'' if rounds == 1 else 's'}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("tokens", "routes", "fps", "least", "aim", "first", "least", "aim"):
        table.add_column(name, justify="right", no_wrap=True)
    for tokens, aim in SMOOTH.items():
        with console.status(f"{tokens} tokens"):
            figures.append(measure(tokens, rounds))
        cells = summary(figures[-1])
        table.add_row(*cells[:4], f">= {aim}", *cells[4:], "< 500 ms")
    console.print(table)
    console.print(
        "The routings are made up with a seed, not recorded. fps: median and least of the means of 30 frames; the "
        "screen allows 60. first: from the data to the frame that shows the first picture, median and least.",
        highlight=False,
    )
    _store(json_file, "player", rounds, figures)
    return 0


@bench.command()
def transports(
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of exchanges for each way.")] = 30,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> int:
    """How long an all-to-all takes over gloo and over shared memory, by size; 2 and 4 ranks."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    figures = _measure(console, "moe_course.bench.transport_ranks", rounds)
    parts = {"primitive": "the exchange alone", "operation": "with header and ledger"}
    for part, what in parts.items():
        for name, of in (("least", min), ("median", median)):
            title = f"all-to-all, {what}: {name} of {rounds} rounds in turns, us"
            table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
            for column in ("ranks", "KB", "gloo", "views", "x", "one", "x", "copied", "x"):
                table.add_column(column, justify="right", no_wrap=True)
            for one in [figure for figure in figures if figure["part"] == part]:
                gloo, *others = (of(seconds) for seconds in one["times"].values())
                cells = [cell for other in others for cell in (f"{1e6 * other:.0f}", f"{gloo / other:.1f}")]
                table.add_row(str(one["ranks"]), str(one["bytes"] >> 10), f"{1e6 * gloo:.0f}", *cells)
            console.print(table)
    console.print(
        "KB: what a rank sends, its own part included. Shared memory, read where it lies: views of each source, or one "
        "tensor; or copied out of it. x: how many times as fast as gloo.",
        highlight=False,
    )
    _store(json_file, "transports", rounds, figures)
    return 0


def _measure(console, module: str, rounds: int) -> list[dict]:
    """Events of a rank program, run with 2 and with 4 ranks. Raises RankLost when it fails."""
    found = []
    for ranks in (2, 4):
        with console.status(f"{ranks} ranks"):
            ended = launch([str(rounds)], ranks, module=module)
        if ended.error:
            raise RankLost(ended.error.removeprefix("error: "))
        found += [event | {"ranks": ranks} for event in ended.events if event["event"] == "measured"]
    return found


def _store(file: Path | None, name: str, rounds: int, figures: list[dict]) -> None:
    if file is not None:
        from moe_course.targets import write_json

        write_json(file, {"schema": f"moe_course.bench.{name}/1", "rounds": rounds, "figures": figures})
