"""Show the package's own code in a cell: the answer key is the package. Built in: notebook 00."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable

from moe_course.errors import ConfigError

MAX_LINES = 25


def show(function: Callable) -> None:
    """Print the source of a function or class of this package, its docstring cut to the first line.

    Raises:
        ConfigError: not from `moe_course`, or longer than a cell may be (25 lines).
    """
    name = getattr(function, "__qualname__", repr(function))
    module = getattr(function, "__module__", None) or ""
    if module.split(".")[0] != "moe_course" or not (inspect.isfunction(function) or inspect.isclass(function)):
        raise ConfigError(
            f"show prints functions and classes of moe_course, {name} is not one; its code is where you wrote it"
        )
    lines = [f"# {module}", *_without_long_docstring(textwrap.dedent(inspect.getsource(function)))]
    if len(lines) > MAX_LINES:
        raise ConfigError(
            f"{name} has {len(lines)} lines, a cell shows {MAX_LINES}; show a smaller function of {module}"
        )
    print("\n".join(lines))


def _without_long_docstring(source: str) -> list[str]:
    """The lines of a definition; of a docstring of several lines only the first one stays (`help` has them all)."""
    lines, definition = source.rstrip().split("\n"), ast.parse(source).body[0]
    text, first = ast.get_docstring(definition), definition.body[0]
    if text is None or first.lineno == first.end_lineno:
        return lines
    indent = " " * first.col_offset
    return [*lines[: first.lineno - 1], f'{indent}"""{text.splitlines()[0]}"""', *lines[first.end_lineno :]]
