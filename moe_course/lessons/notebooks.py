"""Execute notebooks and store them so that running an unchanged notebook again gives the same bytes.

    python -m moe_course.lessons.notebooks notebooks/*.ipynb            execute and store
    python -m moe_course.lessons.notebooks --check notebooks/*.ipynb    exit 1 and name those that would change
    python -m moe_course.lessons.notebooks --script notebooks/X.ipynb   print it as a script for a shell

Seconds are those that a reader waits: from the start of the kernel to the end of the last cell, without its shutdown.
Nothing that you kept is seen by these runs: `my_moe/` is an empty folder to them.

Stored are sources, tags, outputs and execution counts: no times, no widget state, no traceback with paths in it.
Nothing of the course imports this module; it needs nbclient and nbformat, which JupyterLab brings.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moe_course.lessons.folder import FOLDER_ENV
from moe_course.lessons.script import to_script

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
#: Cells whose outputs differ from run to run, e.g. orders of times. They say why in a comment.
IGNORE_TAG = "nbval-ignore-output"
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_COLOURS = {"unchanged": "green", "stored": "cyan", "would change": "yellow", "failed": "red"}


class ThisPython(AsyncKernelManager):
    """Starts the kernel with the Python that runs this module, whatever other kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


def execute(
    notebook: NotebookNode,
    folder: Path,
    on_cell: Callable[[int], None] | None = None,
    timeout: int = 900,
    my_moe: Path | None = None,
) -> NotebookNode:
    """A copy of `notebook` with fresh outputs, run in `folder`; `on_cell(index)` is called before and after each cell.

    `my_moe` is the folder of what was kept; None: an empty one, so that outputs do not depend on what you did before.

    Raises nbclient's CellExecutionError, CellTimeoutError or DeadKernelError.
    """
    fresh = copy.deepcopy(notebook)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        fresh,
        timeout=timeout,
        kernel_name=KERNEL["name"],
        kernel_manager_class=ThisPython,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_start=lambda cell, cell_index: on_cell and on_cell(cell_index),
        on_cell_complete=lambda cell, cell_index: on_cell and on_cell(cell_index),
        resources={"metadata": {"path": str(folder)}},
    )
    with TemporaryDirectory(prefix="moe-course-") as nothing:
        environment = os.environ | {FOLDER_ENV: str(my_moe or Path(nothing) / "my_moe")}
        # stderr is what the kernel logs; what cells write comes as messages
        client.execute(stderr=subprocess.DEVNULL, env=environment)
    return fresh


def normalise(notebook: NotebookNode) -> NotebookNode:
    """A copy that holds only what is the same after every run."""
    plain = copy.deepcopy(notebook)
    stable_ids = (plain.nbformat, plain.nbformat_minor) >= (4, 5) and _unique(cell.get("id") for cell in plain.cells)
    plain.nbformat, plain.nbformat_minor = 4, 5
    plain.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for index, cell in enumerate(plain.cells):
        if not stable_ids:
            cell.id = f"cell-{index:02d}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": sorted(set(tags))} if tags else {})
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_plain_output, cell.outputs) if output is not None]
    return plain


def _unique(ids) -> bool:
    ids = list(ids)
    return all(ids) and len(set(ids)) == len(ids)


def _plain_output(output: NotebookNode) -> NotebookNode | None:
    if output.output_type == "error":  # one line instead of a coloured traceback with paths
        output.traceback = [f"{output.ename}: {output.evalue}"]
    data = output.get("data")
    if data is not None:
        # Without stored state a reader would see "Loading widget…" instead of the text or picture beside it.
        data.pop(_WIDGET_VIEW, None)
        if not data:
            return None
        output.metadata = nbformat.from_dict({})
    return output


def dumps(notebook: NotebookNode) -> str:
    """The text of a notebook file: keys sorted, one space of indent, a newline at the end."""
    return json.dumps(json.loads(nbformat.writes(notebook)), sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def differing(old: NotebookNode, new: NotebookNode) -> list[int]:
    """Cells in which two normalised runs of one notebook differ; outputs tagged to be ignored do not count."""
    pairs = zip(_without_ignored(old).cells, _without_ignored(new).cells, strict=True)
    return [index for index, (a, b) in enumerate(pairs) if a != b]


def _without_ignored(notebook: NotebookNode) -> NotebookNode:
    kept = copy.deepcopy(notebook)
    for cell in kept.cells:
        if IGNORE_TAG in cell.metadata.get("tags", []):
            cell.outputs = []
    return kept


def read(path: Path) -> tuple[str, NotebookNode]:
    """The text of a file and the notebook in it. Raises ValueError, in one line, when it holds none."""
    try:
        text = path.read_text(encoding="utf-8")
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a notebook: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"not a notebook: it holds a {type(parsed).__name__}, expected an object with cells")
    if "worksheets" not in parsed and not isinstance(parsed.get("cells"), list):
        raise ValueError(f"not a notebook: cells is {parsed.get('cells')!r}, expected a list")
    try:
        notebook = nbformat.reads(text, as_version=4)
        nbformat.validate(notebook)
    except (nbformat.ValidationError, AttributeError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"not a notebook: {str(error).splitlines()[0] or type(error).__name__}") from None
    return text, notebook


def refresh(
    path: Path, check: bool, on_cell: Callable[[int], None] | None = None, timeout: int = 900
) -> tuple[str, list[int]]:
    """Execute one notebook and, unless `check`, store it.

    Returns "unchanged", "stored" or "would change", and the cells that differ; none where only the form does.
    """
    text, old = read(path)
    new = normalise(execute(old, path.parent.resolve(), on_cell, timeout))
    cells = differing(normalise(old), new)
    if not cells and text == dumps(old) == dumps(normalise(old)):
        return "unchanged", []
    if check:
        return "would change", cells
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(dumps(new), encoding="utf-8")
    temporary.replace(path)
    return "stored", cells


def main(argv: list[str] | None = None) -> int:
    """0; 1 when a notebook fails or, with `--check`, would change."""
    parser = argparse.ArgumentParser(prog="python -m moe_course.lessons.notebooks", description=__doc__.split("\n")[0])
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="store nothing; exit 1 if a notebook would change")
    parser.add_argument("--script", action="store_true", help="run nothing; print one notebook as a Python script")
    parser.add_argument("--timeout", type=int, default=900, help="seconds a cell may take")
    args = parser.parse_args(argv)
    if lost := [str(path) for path in args.notebooks if not path.is_file()]:
        parser.error(f"no such notebook: {', '.join(lost)}")
    if args.script:
        if len(args.notebooks) > 1 or args.check:
            parser.error("--script takes one notebook and no other option")
        return _print_script(args.notebooks[0])
    console = Console(highlight=False)
    outcomes = {path: _one(path, args, console) for path in args.notebooks}
    for bad, cure in (("failed", ""), ("would change", "; `make notebooks` stores them")):
        names = [path.name for path, outcome in outcomes.items() if outcome == bad]
        if names:
            print(f"error: {bad}: {', '.join(names)}{cure}", file=sys.stderr)
    return int(any(outcome in ("failed", "would change") for outcome in outcomes.values()))


def _print_script(path: Path) -> int:
    try:
        print(to_script(read(path)[1]), end="")
    except (ValueError, SyntaxError) as error:
        print(f"error: {path.name}: {error}", file=sys.stderr)
        return 1
    return 0


def _one(path: Path, args: argparse.Namespace, console: Console) -> str:
    """Run one notebook with a progress line; print and return the outcome."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    began, cell = time.monotonic(), 0
    ended = began
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(path.name, total=None)

        def on_cell(index: int) -> None:
            nonlocal cell, ended
            cell, ended = index, time.monotonic()
            progress.update(task, completed=index)

        try:
            progress.update(task, total=len(read(path)[1].cells))
            outcome, cells = refresh(path, args.check, on_cell, args.timeout)
            detail = f"{cell + 1} cells, {ended - began:.1f} s"
            detail += f"; other outputs in cells {', '.join(map(str, cells))}" if cells else ""
        except CellExecutionError as error:
            outcome, detail = "failed", f"cell {cell}: {error.ename}: {error.evalue}"
        except (CellTimeoutError, DeadKernelError) as error:
            outcome, detail = "failed", f"cell {cell}: {str(error).splitlines()[0]}"
        except (ValueError, OSError) as error:
            outcome, detail = "failed", str(error)
    console.print(f"[{_COLOURS[outcome]}]{outcome:13}[/]{path.name}", end="  ")
    console.print(detail, markup=False, soft_wrap=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
