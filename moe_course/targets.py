"""Files that a command is asked to write: refused before anything starts, written whole or not at all.

Does not import torch. Built in: notebook 13.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from moe_course.errors import ConfigError

_OF_A_TRACE = re.compile(r"meta\.json|run\.json|routes\.jsonl|.*\.safetensors")


def check_targets(files: Mapping[str, Path | None], trace: Path | None = None) -> None:
    """Can these be written, each of them to a place of its own? Raises ConfigError naming the option.

    Args:
        files: option -> the file it names.
        trace: the folder of the run's trace, whose own files are no targets.
    """
    told = {name: path for name, path in files.items() if path is not None}
    for name, path in told.items():
        if path.is_dir():
            raise ConfigError(f"{name} {path}: is a folder; name a file in it")
        check_place(name, path)
        real = Path(os.path.realpath(path))
        if trace is not None and real == Path(os.path.realpath(trace)):
            raise ConfigError(f"{name} {path}: is the folder of the trace; name another file")
        if trace is not None and real.parent == Path(os.path.realpath(trace)) and _OF_A_TRACE.fullmatch(real.name):
            raise ConfigError(f"{name} {path}: is a file of the trace itself; name another file")
    names: dict[str, str] = {}
    for name, path in told.items():
        real = os.path.realpath(path)
        if real in names and not _is_device(path):
            raise ConfigError(f"{names[real]} and {name} are both {path}: one would replace the other; name two files")
        names[real] = name


def check_place(name: str, path: Path) -> None:
    """Is there a folder for it that can be written to? Raises ConfigError naming the option."""
    place = path if path.is_dir() or _is_device(path) else Path(os.path.realpath(path)).parent
    if not place.exists():
        raise ConfigError(f"{name} {path}: folder {path.parent} does not exist")
    if not os.access(place, os.W_OK) or not (place.is_dir() or place == path):
        raise ConfigError(f"{name} {path}: cannot write there")


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file, see `write_text`."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write all of it or nothing: readers see the old file or the whole new one.

    A link stays, and the file it leads to is replaced; a device or a pipe is written to. Halves of a surrogate pair,
    which UTF-8 does not know, are spelt out. Raises ConfigError if that is impossible.
    """
    content, temporary = text.encode("utf-8", "backslashreplace"), None
    try:
        if _is_device(path):
            with path.open("wb") as out:
                out.write(content)
            return
        real = Path(os.path.realpath(path))
        temporary = real.with_name(f".{real.name[:200]}.{os.getpid()}.tmp")
        temporary.write_bytes(content)
        temporary.replace(real)
    except (OSError, ValueError) as error:  # ValueError: a name that no file has
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be written: {reason}; name another file") from None


def _is_device(path: Path) -> bool:
    """Something that takes what is written, and is neither file nor folder."""
    return path.exists() and not path.is_file() and not path.is_dir()
