"""Keep a function that passed: a file that stands alone, with the imports it needs. Built in: notebook 00."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_course.errors import ConfigError
from moe_course.lessons.exercise import Exercise
from moe_course.lessons.folder import FOLDER_ENV, my_moe
from moe_course.lessons.judging.judge import judge
from moe_course.lessons.judging.rebuild import module_root, outside_names, source_of

OLD = "old"
_ALIASES = {"torch": "import torch", "F": "import torch.nn.functional as F", "math": "import math"}


def keep(exercise: Exercise, fn: Callable) -> str:
    """Check `fn`, write `my_moe/<stage or name>.py`, and return the line to print.

    Raises:
        ConfigError: the file cannot be written; with its path and the cure.
    """
    verdict = judge(exercise, fn, kept_functions())
    if not verdict.ok:
        return f"{verdict.headline}; nothing is kept"
    path = my_moe() / exercise.file
    try:
        if file_of(fn) == path.resolve():  # writing it again could only lose it
            now = kept_functions().get(path.stem)
            if now is None or inspect.unwrap(now).__code__ != inspect.unwrap(fn).__code__:
                return (
                    f"my_moe/{exercise.file} has changed since this function was loaded; nothing is kept, run use again"
                )
            return f"{exercise.number} is kept already, in my_moe/{exercise.file}"
        _write(path, _formatted(file_text(exercise, fn, path.parent)))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        place = getattr(error, "filename", None) or path
        raise ConfigError(
            f"{place}: {reason}, so {path} cannot be written; move what is there away, or let "
            f"{FOLDER_ENV} name another folder"
        ) from None
    return f"{exercise.number} kept in my_moe/{exercise.file}"


def file_of(fn: Callable) -> Path | None:
    """The file that a kept function was loaded from; of every other function None."""
    plain = inspect.unwrap(fn)
    return Path(plain.__code__.co_filename).resolve() if module_root(plain) == "my_moe" else None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_bytes() != text.encode():
        _put_away(path)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def kept_functions() -> dict[str, Any]:
    """Functions in `my_moe/`, by the name of their file. Files that do not load are left out: they are only helpers."""
    from moe_course.own_stages import load_function

    found = {}
    for path in sorted(my_moe().glob("*.py")):
        try:
            found[path.stem] = load_function(path, path.stem)
        except ConfigError:
            continue
    return found


def file_text(exercise: Exercise, fn: Callable, folder: Path) -> str:
    """The file: header, imports, kept functions that this one calls, the function, and the name a run looks for."""
    name = exercise.stage or exercise.name
    header = f"# Exercise {exercise.number}, {exercise.name}: your own, kept by check.keep.\n"
    source, kept = source_of(fn), file_of(fn)
    if kept is not None:  # from another folder of stages: its file stands alone already
        return kept.read_text(encoding="utf-8-sig") + _alias(name, kept.stem)
    if not source:  # the answer key itself
        return f"{header}{import_line(fn.__name__, fn)}\n" + _alias(name, fn.__name__)
    helpers, imports = _helpers(source, exercise.names, folder)
    lines = sorted({*imports, *imports_for(source, exercise.names)}, key=lambda line: (line.startswith("from"), line))
    imported = "from __future__ import annotations\n\n" + "\n".join(lines)
    return "\n\n".join([header + imported + "\n", *helpers, source + _alias(name, ast.parse(source).body[0].name)])


def _alias(wanted: str, name: str) -> str:
    return "" if wanted == name else f"\n\n{wanted} = {name}\n"


def imports_for(source: str, names: Mapping[str, Any]) -> list[str]:
    """One import for each name that the source uses; annotations count, too, so that a reader can follow them."""
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    found = [line for name, line in _ALIASES.items() if name in used]
    return found + [import_line(name, value) for name, value in names.items() if name in used]


def import_line(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        parent, _, last = value.__name__.rpartition(".")
        line = f"from {parent} import {last}" if parent else f"import {last}"
        return line if last == name else f"{line} as {name}"
    own = value.__name__
    return f"from {value.__module__} import {own}" + ("" if own == name else f" as {name}")


def _helpers(source: str, names: Mapping[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Text of the kept functions that `source` calls, without what it can import, and the imports they bring."""
    texts, imports = [], []
    for name in sorted(outside_names(source) - names.keys()):
        path = folder / f"{name}.py"
        if path.is_file():
            text = path.read_text(encoding="utf-8-sig")
            for node in ast.parse(text).body:
                part = ast.get_source_segment(text, node)
                if isinstance(node, ast.Import | ast.ImportFrom):
                    imports += [] if "__future__" in part else [part]
                else:
                    texts.append(part + "\n")
    return texts, imports


def _put_away(path: Path) -> None:
    """Move an earlier version to old/<name>-1.py, or the next free number."""
    old = path.parent / OLD
    old.mkdir(exist_ok=True)
    number = 1
    while (old / f"{path.stem}-{number}.py").exists():
        number += 1
    shutil.move(path, old / f"{path.stem}-{number}.py")


def _formatted(text: str) -> str:
    """As ruff has it, where it is installed; else as it is."""
    ruff = shutil.which("ruff", path=sysconfig.get_path("scripts")) or shutil.which(
        "ruff", path=str(Path(sys.executable).parent)
    )
    if ruff is None:
        return text
    command = [ruff, "format", "--line-length=120", "--no-cache", "--isolated", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, encoding="utf-8")
    return done.stdout if done.returncode == 0 else text
