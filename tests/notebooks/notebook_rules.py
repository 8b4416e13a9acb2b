"""The rules a notebook of the course has to keep, each a function from a notebook to a list of violations.

The rules read files only; nothing is executed. `test_static_rules.py` holds the notebooks against them,
`test_lessons.py` proves that each rule catches a notebook that breaks it.
"""

from __future__ import annotations

import copy
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from moe_course.lessons.notebooks import IGNORE_TAG, KERNEL, dumps, normalise

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CELLS = range(24, 33)
CODE_LINES, PROSE_WORDS = 25, 80
TABLE_ROWS, TABLE_CELL_WORDS = 16, 16
FILE_BYTES = 300_000
IGNORED_CELLS = 3
REASON = re.compile(r"^# not compared: \w+ \w+", re.MULTILINE)  # a cell that ignores its output says why


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


def number_of_cells(notebook: Notebook) -> list[str]:
    count = len(notebook.cells)
    return [] if count in CELLS else [f"{count} cells, wanted {CELLS.start} to {CELLS.stop - 1}"]


def code_cells_are_short(notebook: Notebook) -> list[str]:
    lengths = {cell["id"]: len(cell["source"].splitlines()) for cell in notebook.code}
    return [f"{name}: {length} lines of code" for name, length in lengths.items() if not 1 <= length <= CODE_LINES]


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


def prose_cells_are_short(notebook: Notebook) -> list[str]:
    found = []
    for cell in notebook.prose:
        prose, table, fences = split_prose(cell["source"])
        if words(prose) > PROSE_WORDS:
            found.append(f"{cell['id']}: {words(prose)} words of prose")
        if len(table) > TABLE_ROWS:
            found.append(f"{cell['id']}: table of {len(table)} rows")
        found += [f"{cell['id']}: long table cell: {c}" for row in table for c in row if words(c) > TABLE_CELL_WORDS]
        found += [f"{cell['id']}: long block" for fence in fences if len(fence.splitlines()) > CODE_LINES + 2]
    return found


FORBIDDEN_CODE = {
    "shell command": r"^\s*!",
    "magic": r"^\s*%%?(writefile|bash|sh|pip|conda|time|timeit|system|sx)\b",
    "processes of cell functions": r"\bmp\.spawn\b|\bmultiprocessing\b|\bProcessPoolExecutor\b|\bos\.fork\b",
    "tqdm": r"\btqdm\b",
    "network": r"https?://",
    "star import": r"^\s*from \S+ import \*",
}


def no_forbidden_code(notebook: Notebook) -> list[str]:
    return [
        f"{cell['id']}: {name}"
        for cell in notebook.code
        for name, pattern in FORBIDDEN_CODE.items()
        if re.search(pattern, cell["source"], re.MULTILINE)
    ]


FORBIDDEN_PROSE = {
    "word that belittles": r"(?i)\b(simply|just|obviously|trivial(ly)?)\b",
    "picture from the network": r"!\[[^\]]*\]\(https?:|<img[^>]*src=.https?:",
}
FORBIDDEN_SOURCE = {
    "path of a machine": r"(?<![\w.])/(home|root|tmp|work|usr|var|opt|mnt|Users|private)\b",
    "issue number of this project": r"(?<![\w/&])#\d+\b",
}


def no_forbidden_prose(notebook: Notebook) -> list[str]:
    pairs = [(cell, FORBIDDEN_PROSE | FORBIDDEN_SOURCE) for cell in notebook.prose]
    pairs += [(cell, FORBIDDEN_SOURCE) for cell in notebook.code]
    return [
        f"{cell['id']}: {name}: {found[0]}"
        for cell, patterns in pairs
        for name, pattern in patterns.items()
        if (found := re.search(pattern, cell["source"]))
    ]


def no_stderr(notebook: Notebook) -> list[str]:
    return [f"{cell['id']}: stderr" for cell in notebook.code for out in cell["outputs"] if out.get("name") == "stderr"]


UNSTABLE = {
    "time": r"\b\d+(\.\d+)?\s?(ns|µs|us|ms|s|secs?|seconds?|min|mins|minutes?|h|hours?)\b|\b\d{1,2}:\d{2}:\d{2}\b",
    "date": r"\b20\d\d-\d\d-\d\d\b",
    "path": r"(?<![\w.])(~|\.{1,2})?/([\w.+-]+/)+[\w.+-]*",
    "root folder": r"(?<!\w)/(tmp|home|root|usr|var|opt|work|mnt|Users)\b|\b[A-Z]:\\|\bsite-packages\b",
    "address": r"\b0x[0-9a-fA-F]{4,}|\b\d{1,3}(\.\d{1,3}){3}\b|\blocalhost\b|\b(pid|port)\W{1,3}\d+",
    "version": r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])",
    "version of a package": r"(?i)\b(python|torch|transformers|numpy|cuda|nccl|vllm)\W{0,3}\d+\.\d+",
}


def outputs_are_stable(notebook: Notebook) -> list[str]:
    return [
        f"{cell['id']}: {name}: {found[0]}"
        for cell, text in outputs(notebook)
        for name, pattern in UNSTABLE.items()
        if (found := re.search(pattern, text))
    ]


def errors_are_meant(notebook: Notebook) -> list[str]:
    """An error is stored where, and only where, a cell is tagged `raises-exception`."""
    found = []
    for cell in notebook.code:
        raised = any(output["output_type"] == "error" for output in cell["outputs"])
        if raised != ("raises-exception" in cell["metadata"].get("tags", [])):
            found.append(f"{cell['id']}: {'an error without the tag' if raised else 'tagged, but no error'}")
    return found


def executed_in_order(notebook: Notebook) -> list[str]:
    counts = [cell["execution_count"] for cell in notebook.code]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"execution counts are {counts}"]


def kernel_is_python3(notebook: Notebook) -> list[str]:
    spec = notebook.content["metadata"].get("kernelspec", {})
    return [] if spec == KERNEL else [f"kernelspec is {spec}"]


def no_widget_state(notebook: Notebook) -> list[str]:
    found = ["metadata.widgets"] if "widgets" in notebook.content["metadata"] else []
    kinds = [(cell["id"], kind) for cell in notebook.code for out in cell["outputs"] for kind in out.get("data", {})]
    return found + [f"{name}: {kind}" for name, kind in kinds if kind.startswith("application/vnd.jupyter.widget")]


def file_is_small(notebook: Notebook) -> list[str]:
    size = len(notebook.text.encode())
    return [] if size <= FILE_BYTES else [f"{size} bytes"]


def few_outputs_ignored(notebook: Notebook) -> list[str]:
    """At most three cells are not compared, by tag and not by comment, and each says why."""
    skipping = {IGNORE_TAG, "nbval-skip", "nbval-test-skip"}
    ignored = [cell for cell in notebook.code if skipping & set(cell["metadata"].get("tags", []))]
    found = [f"{cell['id']}: no reason" for cell in ignored if not REASON.search(cell["source"])]
    found += [f"{cell['id']}: hidden comment" for cell in notebook.code if re.search(r"#\s*NBVAL_", cell["source"])]
    return found + ([f"{len(ignored)} cells are not compared"] if len(ignored) > IGNORED_CELLS else [])


def is_normalised(notebook: Notebook) -> list[str]:
    parsed = nbformat.reads(notebook.text, as_version=4)
    return [] if dumps(normalise(parsed)) == notebook.text else ["not as `make notebooks` stores it"]


def anatomy(notebook: Notebook) -> list[str]:
    """Title with the file's number, what you will be able to do, `start()` first, a guess, `show`, what is next."""
    code = [cell["source"] for cell in notebook.code]
    opening = "\n".join(cell["source"] for cell in notebook.cells[:2])
    heads = ("You will be able to", "You need", "vLLM reads along")
    found = [f"the first two cells lack {head!r}" for head in heads if head not in opening]
    if not notebook.cells[0]["source"].startswith(f"# {notebook.name[:2]} · "):
        found.append(f"the title does not start with {notebook.name[:2]}")
    if not code[0].endswith("\nstart()"):
        found.append("the first code cell is not start()")
    for wanted in (r"^guess = None\b", r"\breport\(guess\b", r"^show\("):
        if not any(re.search(wanted, source, re.MULTILINE) for source in code):
            found.append(f"no cell has {wanted}")
    if "**Next:**" not in notebook.cells[-1]["source"]:
        found.append("the last cell does not say what is next")
    return found


def names_in_prose_exist(notebook: Notebook) -> list[str]:
    """Every `moe_course.…` in backquotes can be imported."""
    found = []
    for cell in notebook.prose:
        for name in re.findall(r"`(moe_course(?:\.\w+)+)`", cell["source"]):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                found.append(f"{cell['id']}: no {name}")
    return found


RULES: tuple[Callable[[Notebook], list[str]], ...] = (
    number_of_cells,
    code_cells_are_short,
    prose_cells_are_short,
    no_forbidden_code,
    no_forbidden_prose,
    no_stderr,
    outputs_are_stable,
    errors_are_meant,
    executed_in_order,
    kernel_is_python3,
    no_widget_state,
    file_is_small,
    few_outputs_ignored,
    is_normalised,
    anatomy,
    names_in_prose_exist,
)
