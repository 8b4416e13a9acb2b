"""The texts that a run continues: those it has by itself, and those of `--prompts-file`. Built in: notebook 13."""

from __future__ import annotations

import json
from pathlib import Path

from moe_course.errors import ConfigError

DEFAULT_PROMPTS = (
    "def add(a, b):\n    return ",
    "    try:\n        value = int(text)\n    except ",
    "def größe(länge):\n    return ",
    "class Stack:\n    def push(self, item):\n        ",
)


def read_prompts(path: Path) -> tuple[str, ...]:
    """One prompt a line, or for `.jsonl` one JSON string (or object with "prompt") a line. Raises ConfigError."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts-file {path} cannot be read: {error}") from None
    # not splitlines: a form feed or U+2028 inside a prompt ends no line
    lines = [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")] if content else []
    if path.suffix != ".jsonl":
        return tuple(lines)
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            prompts.append(value["prompt"] if isinstance(value, dict) else value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--prompts-file {path}, line {number} is not JSON: {error}") from None
        except KeyError:
            raise ConfigError(f'--prompts-file {path}, line {number}: an object needs a field "prompt"') from None
        if not isinstance(prompts[-1], str):
            raise ConfigError(f"--prompts-file {path}, line {number}: expected a string, got {prompts[-1]!r}")
    return tuple(prompts)
