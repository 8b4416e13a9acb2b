"""An error that the package raises on purpose says all in its message. In a cell it stands below your own lines alone.

Every other error keeps its whole traceback, and `%tb` brings that of this one. Built in: notebook 07.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from textwrap import fill
from types import TracebackType

import moe_course
from moe_course.errors import MoECourseError

WIDTH = 100
NOT_YOURS = tuple(
    Path(folder).resolve()
    for folder in (Path(moe_course.__file__).parent, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
)


def shorten_errors() -> None:
    """From now on cells show errors of `moe_course` with the lines of yours that led there. Nothing without IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.set_custom_exc((MoECourseError,), _show)


def your_lines(trail: TracebackType | None) -> list[traceback.FrameSummary]:
    """The steps of a traceback that are neither in this package nor in Python's library or an installed package."""
    return [step for step in traceback.extract_tb(trail) if not _inside(step.filename)]


def _inside(filename: str) -> bool:
    path = Path(filename)
    # names like <frozen importlib> are Python's own
    return filename.startswith("<") or any(path.resolve().is_relative_to(folder) for folder in NOT_YOURS)


def _show(shell, kind: type[BaseException], error: BaseException, trail: TracebackType | None, tb_offset=None) -> None:
    """What IPython calls; `%tb` reads the three `sys.last_` names."""
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trail
    lines = []
    for step in your_lines(trail):
        place = shell.compile.format_code_name(step.filename) or ("File", step.filename)
        lines.append(f"{' '.join(place)}, line {step.lineno}: {step.line}")
    # folded here: JupyterLab would break its lines inside words
    message = [fill(line, WIDTH, break_on_hyphens=False) for line in f"{kind.__name__}: {error}".splitlines()]
    shell._showtraceback(kind, error, [*lines, *message])
