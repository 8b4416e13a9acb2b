"""`moe-course report`: the page of a run, from the folder of its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run with --trace.")],
    out: Annotated[Path | None, typer.Option(help="The page. Default: report.html in the folder.")] = None,
) -> int:
    """Make one page of a recorded run. Verdict, text, player, timeline, load, bytes against the bound.

    The page needs no network: open it in a browser, send it, keep it.

    \b
    moe-course run --check --trace trace && moe-course report trace
    moe-course report trace --out page.html
    """
    from moe_course.targets import check_targets, write_text

    file = out if out is not None else folder / "report.html"
    if out is not None or folder.is_dir():  # else the folder is what is wrong
        check_targets({"--out": file}, folder)

    from moe_course.trace.report import report_of

    text = report_of(folder)
    write_text(file, text)
    print(f"report     {file} ({len(text) / 1e6:.1f} MB): open it in a browser")
    return 0
