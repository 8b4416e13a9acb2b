"""Notebooks with every exercise solved: all checks green, everything kept, no other output changed."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection
from pathlib import Path

import nbformat
import pytest
from exercise_rules import Place, of_notebook, places
from nbformat.v4 import new_code_cell, new_notebook
from notebook_file import NOTEBOOKS, Notebook

from moe_course.lessons import notebooks as runner

WRONG = Path(__file__).parents[1] / "wrong"
sys.path.insert(0, str(WRONG))
ANSWERS = {
    name: answers
    for file in sorted(WRONG.glob("nb*.py"))
    for name, answers in importlib.import_module(file.stem).ANSWERS.items()
}
FILES = sorted(NOTEBOOKS.glob("*.ipynb"))
#: Those that start no processes: they are run from top to bottom.
WHOLE = [file for file in FILES if "run_live" not in file.read_text(encoding="utf-8")]


def text_of(cell: dict) -> str:
    return "".join(output.get("text", "") for output in cell["outputs"])


def other_texts(notebook: nbformat.NotebookNode, but: Collection[str]) -> dict[str, list]:
    """What cells print, show as text, or raise; not those of `but`, nor those that are never compared."""
    return {
        cell.id: [(out.get("text"), out.get("evalue"), out.get("data", {}).get("text/plain")) for out in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.id not in but and runner.IGNORE_TAG not in cell.metadata.get("tags", [])
    }


def written(place: Place, answer: Callable) -> str:
    """The stub cell with the text of `answer` in the place of its function."""
    stub = place.stub["source"]
    functions = [node for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef)]
    (old,) = (node for node in functions if node.name == place.function)
    own = textwrap.dedent(inspect.getsource(answer)).replace(f"def {answer.__name__}(", f"def {place.function}(", 1)
    lines = stub.splitlines()
    return "\n".join([*lines[: old.lineno - 1], *own.rstrip().splitlines(), *lines[old.end_lineno :]])


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_a_solved_notebook_is_green_from_top_to_bottom(file, tmp_path):
    notebook, stored = Notebook.load(file), nbformat.read(file, as_version=4)
    exercises = {exercise.number: exercise for exercise in of_notebook(notebook)}
    stubs, checks = {}, {}
    for place in places(notebook):
        exercise = exercises[place.number]
        stubs[place.stub["id"]] = written(place, ANSWERS[exercise.name].right[0])
        checks[place.check["id"]] = [f"{place.number} ok", f"{place.number} kept in my_moe/{exercise.file}"]
    solved = copy.deepcopy(stored)
    for cell in solved.cells:
        cell.source = stubs.get(cell.id, cell.source)
    done = runner.normalise(runner.execute(solved, tmp_path, my_moe=tmp_path / "my_moe"))

    said = {cell.id: text_of(cell).splitlines() for cell in done.cells if cell.id in checks}
    assert {name: [line.split(" · ")[0] for line in lines] for name, lines in said.items()} == checks != {}
    assert other_texts(done, checks) == other_texts(stored, checks)
    kept = sorted(path.name for path in (tmp_path / "my_moe").iterdir())
    assert kept == sorted(exercise.file for exercise in exercises.values())


def test_each_exercise_is_green_without_the_cells_before_it(tmp_path):
    """Of every notebook the stubs, as imports of the package's answer, and the checks; nothing else."""
    cells, numbers = [new_code_cell("from moe_course.lessons import check")], []
    for notebook in map(Notebook.load, FILES):
        answers = {exercise.number: exercise.answer for exercise in of_notebook(notebook)}
        for place in places(notebook):
            answer = answers[place.number]
            line = f"from {answer.__module__} import {answer.__name__} as {place.function}"
            cells += [new_code_cell(line), new_code_cell(place.check["source"])]
            numbers.append(place.number)
    done = runner.execute(new_notebook(cells=cells), tmp_path, my_moe=tmp_path / "my_moe")
    lines = [text_of(cell).splitlines()[0] for cell in done.cells[2::2]]
    assert [line.split(" · ")[0] for line in lines] == [f"{number} ok" for number in numbers] and len(numbers) >= 6
