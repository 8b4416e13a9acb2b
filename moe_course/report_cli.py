"""`moe-course report`: the page of a run, from the folder of its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run with --trace.")],
    out: Annotated[Path | None, typer.Option(help="The page. Default: report.html in the folder.")] = None,
) -> int:
    """Make one page of a recorded run: verdict, text, player, timeline, load, bytes against the bound.

    The page needs no network: open it in a browser, send it, keep it.

    \b
    moe-course run --check --trace trace && moe-course report trace
    moe-course report trace --out page.html
    """
    from rich.console import Console

    from moe_course.trace.report import report_of, write_report

    file = out or folder / "report.html"
    text = report_of(folder)
    write_report(text, file)
    Console().print(f"report     {file} ({len(text) / 1e6:.1f} MB): open it in a browser", soft_wrap=True)
    return 0
