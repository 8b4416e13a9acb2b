"""A function built again from its own text, so that names left over from earlier cells cannot help or harm it.

Built in: notebook 00.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import math
import symtable
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from moe_course.errors import ConfigError

#: What every function may use.
ALWAYS: dict[str, Any] = {"torch": torch, "F": F, "math": math}
#: Modules whose functions are taken as they are: the answer key, and what was kept.
TRUSTED = ("moe_course", "my_moe")


class CannotRebuild(ConfigError):
    """A function that cannot stand alone; the message says why, and the cure."""


@dataclass(frozen=True)
class Rebuilt:
    """A function and the text it was made from.

    Attributes:
        function: what to call.
        source: its text, not indented; of a function taken as it is, "".
        filename: of its code, as tracebacks name it.
    """

    function: Callable
    source: str
    filename: str

    def line_of(self, frame: FrameType | None) -> tuple[int, str] | None:
        """`(line, text)` where the innermost frame of this function stands; line 1 is its first. None: not in it."""
        while frame is not None and frame.f_code.co_filename != self.filename:
            frame = frame.f_back
        return None if frame is None else (frame.f_lineno, self.text(frame.f_lineno))

    def text(self, line: int) -> str:
        return linecache.getline(self.filename, line).strip()


def rebuild(fn: Callable, names: Mapping[str, Any]) -> Rebuilt:
    """Build `fn` again in a namespace that holds `ALWAYS` and `names` and nothing else.

    Raises:
        CannotRebuild: not a function written with `def`, no source, or a name that comes from outside.
    """
    source = source_of(fn)
    if not source:
        return Rebuilt(fn, "", inspect.unwrap(fn).__code__.co_filename)
    namespace = {**ALWAYS, **names, "__name__": "your_function"}
    if unknown := sorted(outside_names(source) - namespace.keys() - set(dir(builtins))):
        raise CannotRebuild(_stranger(unknown[0], fn))
    filename = f"<your {fn.__name__}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    exec(_compiled(source, filename), namespace)
    return Rebuilt(namespace[ast.parse(source).body[0].name], source, filename)


def source_of(fn: Callable) -> str:
    """The text of a function, not indented; "" for one of the package or of `my_moe`. Raises CannotRebuild."""
    plain = inspect.unwrap(fn) if callable(fn) else fn
    if not inspect.isfunction(plain):
        what = (
            f"the {type(fn).__name__} {fn!r}" if not callable(fn) else f"{getattr(fn, '__name__', type(fn).__name__)!r}"
        )
        raise CannotRebuild(f"a check takes a function that you wrote with `def`, and got {what}")
    if plain.__name__ == "<lambda>":
        raise CannotRebuild("a check takes a function that you wrote with `def`, and got a lambda; give it a name")
    if plain is not fn and inspect.isfunction(fn) and not _decorated(plain):
        plain = fn  # it only says that it is like the other, by functools.wraps: what runs is its own text
    if module_root(plain) in TRUSTED:
        return ""
    try:
        source = textwrap.dedent(inspect.getsource(plain.__code__)).rstrip() + "\n"
        ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        raise CannotRebuild(
            f"the text of {plain.__name__} cannot be found; define it with `def` in a cell, and run that cell"
        ) from None
    return source


def module_root(fn: Callable) -> str:
    """The first part of the module that a function was written in, whatever `functools.wraps` says."""
    return str(fn.__globals__.get("__name__", "")).split(".")[0]


def _decorated(fn: Callable) -> bool:
    """Does the text of `fn` carry its decorator? Then it is the text of what the decorator made, too."""
    try:
        return bool(ast.parse(textwrap.dedent(inspect.getsource(fn.__code__))).body[0].decorator_list)
    except (OSError, TypeError, SyntaxError, AttributeError, IndexError):
        return False


def outside_names(source: str) -> set[str]:
    """Names that a definition uses and does not define itself."""
    table = symtable.symtable(_without_annotations(source), "<source>", "exec")
    found, own = set(), {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    tables = [table]
    while tables:
        here = tables.pop()
        tables += here.get_children()
        found |= {s.get_name() for s in here.get_symbols() if s.is_referenced() and s.is_global()}
    return found - own


def _without_annotations(source: str) -> str:
    """Annotations are never evaluated here, so a name in one is no dependency."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.unparse(tree)


def _compiled(source: str, filename: str) -> CodeType:
    return compile(source, filename, "exec", flags=annotations.compiler_flag, dont_inherit=True)


def _stranger(name: str, fn: Callable) -> str:
    value = getattr(inspect.unwrap(fn), "__globals__", {}).get(name)
    if isinstance(value, ModuleType):
        return f"it uses `{name}`, imported in another cell; write the import inside {fn.__name__}"
    if callable(value):
        return f"it uses `{name}`, defined in another cell; move it inside {fn.__name__}"
    where = "which is not defined anywhere" if value is None else "a value from another cell"
    return f"it uses `{name}`, {where}; make it inside {fn.__name__}, or from its arguments"
