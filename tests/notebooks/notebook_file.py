"""A notebook as data: what the rules look at."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from moe_course.lessons.notebooks import dumps, normalise

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@dataclass(frozen=True)
class Notebook:
    """A notebook as text and as parsed JSON, sources joined to strings."""

    name: str
    text: str
    content: dict

    @classmethod
    def load(cls, path: Path) -> Notebook:
        return cls.parse(path.name, path.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, name: str, text: str) -> Notebook:
        content = json.loads(text)
        for cell in content["cells"]:
            cell["source"] = "".join(cell["source"])
        return cls(name, text, content)

    def changed(self, change: Callable[[dict], None]) -> Notebook:
        """A copy after `change(content)`, stored as `make notebooks` would store it."""
        content = copy.deepcopy(self.content)
        change(content)
        return Notebook.parse(self.name, dumps(normalise(nbformat.from_dict(content))))

    @property
    def cells(self) -> list[dict]:
        return self.content["cells"]

    @property
    def code(self) -> list[dict]:
        return [cell for cell in self.cells if cell["cell_type"] == "code"]

    @property
    def prose(self) -> list[dict]:
        return [cell for cell in self.cells if cell["cell_type"] == "markdown"]

    def tagged(self, tag: str) -> list[dict]:
        return [cell for cell in self.cells if tag in cell["metadata"].get("tags", [])]


def outputs(notebook: Notebook) -> Iterator[tuple[dict, str]]:
    """(cell, text) of everything readable that is stored as output."""
    for cell in notebook.code:
        for output in cell["outputs"]:
            parts = [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
            parts += [value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")]
            yield cell, "\n".join("".join(part) if isinstance(part, list) else str(part) for part in parts)


def split_prose(source: str) -> tuple[str, list[list[str]], list[str]]:
    """(prose, table rows as lists of cells, fenced blocks) of a Markdown cell."""
    fences = re.findall(r"^```.*?^```$", source, re.MULTILINE | re.DOTALL)
    for fence in fences:
        source = source.replace(fence, "")
    rows = [line for line in source.splitlines() if line.startswith("|")]
    prose = "\n".join(line for line in source.splitlines() if not line.startswith("|"))
    table = [re.split(r"(?<!\\)\|", row.strip("|")) for row in rows if not re.fullmatch(r"[|:\- ]+", row)]
    return prose, table, fences


def words(text: str) -> int:
    return sum(any(char.isalnum() for char in word) for word in re.sub(r"<[^>]*>", " ", text).split())
