"""`moe-course drill NAME`: break a run for real, and show what is said about it.

Built in: notebook 12.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from moe_course.drills.catalogue import DRILLS, Drill
from moe_course.errors import ConfigError
from moe_course.launch import RunResult, launch

RAW_LIMIT_S = 40.0  # how long a fault without guard may take
_CALM_S = 120.0  # how long one with guard may take; it ends by itself


def drill(
    name: Annotated[str | None, typer.Argument(help="One of the eight; see --list.", show_default=False)] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Describe all drills and end.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="The same fault without the guard: a hang, an abort, or silently wrong text.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for what happened.")] = None,
    raw_limit: Annotated[float, typer.Option(help="Seconds after which a raw drill is ended.")] = RAW_LIMIT_S,
) -> int:
    """Practise the eight ways a run breaks, on real processes.

    Exit code 0: the fault was named as it should be (with --raw: it was shown). 1: it was not.

    \b
    moe-course drill --list
    moe-course drill reduction
    moe-course drill reduction --raw
    """
    from rich.console import Console

    console = Console()
    if show_list or name is None:
        _print_list(console)
        return 0
    if name not in DRILLS:
        raise ConfigError(f"there is no drill {name!r}; drills: {', '.join(DRILLS)}")
    chosen = DRILLS[name]
    _print_story(console, chosen, raw)
    try:
        with console.status(f"{chosen.ranks} processes are on their way into trouble"):
            ended, line = run_drill(chosen, raw, raw_limit)
    except KeyboardInterrupt:
        print("error: interrupted, all ranks were ended", file=sys.stderr)
        return 130
    outcome = describe_outcome(ended, line, raw)
    if line:
        print(f"error: {line}", file=sys.stderr, flush=True)
        for more in ended.graph:
            print(f"  {more}", file=sys.stderr)
    named = line is not None and all(part in line for part in chosen.says)
    _print_outcome(console, chosen, raw, outcome, named, ended)
    if json_file is not None:
        from moe_course.targets import write_json

        content = {
            "schema": "moe_course.drill/1",
            "name": name,
            "raw": raw,
            "ranks": chosen.ranks,
            "diagnosis": line,
            "graph": ended.graph,
            "outcome": outcome,
            "exit_code": ended.returncode,
            "seconds": round(ended.wall_s, 2),
            "as_expected": named or raw,
        }
        write_json(json_file, content)
    return 0 if named or raw else 1


def run_drill(chosen: Drill, raw: bool = False, raw_limit: float = RAW_LIMIT_S) -> tuple[RunResult, str | None]:
    """Run it; returns how it ended, and the diagnosis in one line (without "error: ") if there was one."""
    from moe_course.guard.skew import describe_skew

    with tempfile.TemporaryDirectory(prefix="moe-course-drill-") as folder:
        arguments = chosen.arguments(Path(folder))
        if raw:
            arguments += ["--no-guard"] + ["--check"] * chosen.check
        ended = launch(arguments, chosen.ranks, timeout=raw_limit if raw else _CALM_S, module=chosen.module)
    line = ended.error.removeprefix("error: ") if ended.error else None
    if line is None and ended.result is not None and not raw:
        line = describe_skew(ended.result)
    return ended, line


def describe_outcome(ended: RunResult, line: str | None, raw: bool) -> str:
    """What a bystander sees."""
    result = ended.result
    if ended.returncode == 5 and line and "not finished after" in line:
        return f"hang: nothing happened any more, ended after {ended.wall_s:.0f} s"
    wrong = next((event["text"] for event in ended.events if event["event"] == "wrong"), None)
    if wrong is not None:
        return f"silently wrong: {wrong}"
    if result is not None and result["verdict"] == "different":
        return "silently wrong: the run finished, and only the comparison with the one-process model tells"
    if line and "killed by SIGABRT" in line:
        return "abort: the process was taken down by its own library, no Python error was raised"
    if ended.returncode:
        return f"error after {ended.wall_s:.1f} s" + (", in the words of whatever library met it" if raw else "")
    if result is not None and raw:
        return f"nothing to see: the run finished after {ended.wall_s:.1f} s, only slower"
    return f"the run finished after {ended.wall_s:.1f} s"


def _print_list(console) -> None:
    from rich.table import Table

    table = Table(title="drills", title_justify="left", show_lines=True)
    table.add_column("name", no_wrap=True, style="bold")
    table.add_column("what breaks, and what vLLM does", overflow="fold")
    table.add_column("what is done here")
    for one in DRILLS.values():
        table.add_row(one.name, f"{one.title}. {one.upstream}", f"{one.fault} {one.cure}")
    console.print(table)
    console.print("moe-course drill NAME shows the diagnosis; --raw shows the same fault without the guard.")


def _print_story(console, chosen: Drill, raw: bool) -> None:
    console.print(f"[bold]drill {chosen.name}[/]: {chosen.title}" + (" (guard off)" if raw else ""))
    _print_rows(console, [("here", chosen.fault), ("vLLM", chosen.upstream)])


def _print_outcome(console, chosen: Drill, raw: bool, outcome: str, named: bool, ended: RunResult) -> None:
    rows = [("then", f"{outcome}; exit code {ended.returncode}")]
    if raw:
        rows += [("text", repr(p["prompt"] + p["text"])) for p in (ended.result["prompts"] if ended.result else [])]
        rows.append(("guard", f"moe-course drill {chosen.name} shows what it says"))
    else:
        rows.append(("cure", chosen.cure))
        if not named:
            rows.append(("but", "the diagnosis above is not the one this drill is for"))
    _print_rows(console, rows)


def _print_rows(console, rows: list[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for label, text in rows:
        grid.add_row(Text(f"  {label}", style="red" if label == "but" else "dim"), Text(text))
    console.print(grid)
