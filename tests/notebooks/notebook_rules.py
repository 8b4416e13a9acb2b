"""The rules a notebook of the course has to keep, each a function from a notebook to a list of violations.

Here are those about its form; `lesson_rules` and `exercise_rules` have those about what a lesson consists of.

The rules read files only; nothing is executed. `test_static_rules.py` holds the notebooks against them,
`test_rules_bite.py` proves that each rule catches a notebook that breaks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import nbformat
from exercise_rules import every_exercise_has_its_place, exercises_are_complete
from lesson_rules import (
    anatomy,
    breaks_it,
    ends_with_contract_and_questions,
    guess_is_tagged,
    has_a_live_picture,
    names_in_prose_exist,
    nothing_is_retyped,
)
from notebook_file import Notebook, outputs, split_prose, words

from moe_course.lessons.notebooks import IGNORE_TAG, KERNEL, dumps, normalise

CELLS = range(24, 33)
CODE_LINES, PROSE_WORDS = 25, 80
CODE_WIDTH, BLOCK_WIDTH = 104, 90  # what fits JupyterLab in a window of 1280 pixels, in a cell and in its text
TABLE_ROWS, TABLE_CELL_WORDS = 16, 16
FILE_BYTES = 300_000
IGNORED_CELLS = 3
REASON = re.compile(r"^# not compared: \w+ \w+", re.MULTILINE)  # a cell that ignores its output says why


def number_of_cells(notebook: Notebook) -> list[str]:
    count = len(notebook.cells)
    return [] if count in CELLS else [f"{count} cells, wanted {CELLS.start} to {CELLS.stop - 1}"]


def code_cells_are_short(notebook: Notebook) -> list[str]:
    lengths = {cell["id"]: len(cell["source"].splitlines()) for cell in notebook.code}
    return [f"{name}: {length} lines of code" for name, length in lengths.items() if not 1 <= length <= CODE_LINES]


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


def lines_fit_the_page(notebook: Notebook) -> list[str]:
    """JupyterLab hides the end of a long line of code, and breaks a printed one inside a word."""
    found = [(cell["id"], line, CODE_WIDTH) for cell in notebook.code for line in cell["source"].splitlines()]
    for cell in notebook.code:
        printed = "".join("".join(out["text"]) for out in cell["outputs"] if out["output_type"] == "stream")
        found += [(cell["id"], line, CODE_WIDTH) for line in printed.splitlines()]
    for cell in notebook.prose:
        blocks = split_prose(cell["source"])[2]
        found += [(cell["id"], line, BLOCK_WIDTH) for block in blocks for line in block.splitlines()]
    return [f"{name}: {len(line)} characters: {line.strip()}" for name, line, width in found if len(line) > width]


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


RULES: tuple[Callable[[Notebook], list[str]], ...] = (
    number_of_cells,
    code_cells_are_short,
    prose_cells_are_short,
    lines_fit_the_page,
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
    guess_is_tagged,
    every_exercise_has_its_place,
    exercises_are_complete,
    has_a_live_picture,
    breaks_it,
    ends_with_contract_and_questions,
    names_in_prose_exist,
    nothing_is_retyped,
)
