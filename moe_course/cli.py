"""The command line: `moe-course run`, `report`, `plan`, `replay`, `backends`, `bench`, `drill` and `doctor`.

Flags are vLLM's where vLLM has them. Errors are one line on stderr. Exit codes: 2 usage, 3 verification failed,
4 mismatch between ranks, 5 lost rank or time-out, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import metadata
from typing import Annotated

import typer

from moe_course.bench.command import bench
from moe_course.cost.backends_command import backends
from moe_course.cost.replay_command import replay
from moe_course.drills.command import drill
from moe_course.errors import MoECourseError
from moe_course.planner.command import plan
from moe_course.report_cli import report
from moe_course.run_cli import run

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Expert parallelism in mixture-of-experts models: plan it, run it, trace it, check it, break it.",
)
#: Base of everything typer says about wrong flags and values.
UsageError = typer.BadParameter.__base__
_EXIT_CODES = (
    "Exit codes: 1 a stage of your own failed, 2 usage, 3 verification failed, 4 ranks disagree, "
    "5 lost rank or time-out, 130 Ctrl-C."
)


def _version(asked: bool) -> None:
    """All machines of a run need the same one."""
    if asked:
        print(f"moe-course {metadata.version('moe-course')}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


app.command(epilog=_EXIT_CODES)(run)
app.command()(drill)
app.add_typer(bench, name="bench")
app.command()(plan)
app.command()(replay)
app.command()(backends)
app.command()(report)


@app.command()
def doctor() -> int:
    """Say what works on this machine, and how to get the rest."""
    from moe_course.doctor import doctor as examine

    return examine()


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `moe-course plan | head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _main(argv: list[str] | None) -> int:
    try:
        code = app(args=argv, prog_name="moe-course", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands without a command: its help
            print(error.format_message())
            return 0
        print(f"error: {error.format_message().replace('Value error, ', '')}", file=sys.stderr)
        return 2
    except MoECourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
