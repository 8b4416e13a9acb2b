"""Notebooks are executed and stored in one form, and what was edited afterwards is noticed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nbformat
import pytest
from inner_pytest import faults_of_cells
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from moe_course.lessons import notebooks as runner
from moe_course.lessons.folder import FOLDER_ENV, my_moe


def write(path: Path, *cells: str, tags: tuple[str, ...] = ()) -> Path:
    notebook = new_notebook(cells=[new_code_cell(source, metadata={"tags": list(tags)}) for source in cells])
    notebook.cells.append(new_markdown_cell("The end."))
    nbformat.write(notebook, path)
    return path


def test_runner_stores_the_same_bytes_again_and_check_finds_a_change(tmp_path, capsys):
    path = write(
        tmp_path / "a.ipynb",
        "import ipywidgets; ipywidgets.Label('x')",
        "print('früh'); 1 / 0",
        tags=("raises-exception",),
    )
    path.write_text(
        path.read_text().replace(
            '"metadata": {},\n "nbformat"', '"metadata": {"widgets": {}, "signed": 1},\n "nbformat"'
        )
    )
    assert runner.main([str(path)]) == 0
    first = path.read_bytes()
    assert "stored" in capsys.readouterr().out
    stored = json.loads(first)
    assert stored["metadata"] == {"kernelspec": runner.KERNEL, "language_info": {"name": "python"}}
    assert [cell.get("execution_count") for cell in stored["cells"]] == [1, 2, None]
    assert stored["cells"][0]["outputs"][0]["data"] == {"text/plain": ["Label(value='x')"]}
    assert stored["cells"][1]["outputs"][1]["traceback"] == ["ZeroDivisionError: division by zero"]

    assert runner.main([str(path), "--check"]) == 0
    assert path.read_bytes() == first
    changed = first.decode().replace("früh", "spät", 1)
    path.write_text(changed)
    assert runner.main([str(path), "--check"]) == 1
    assert path.read_text() == changed
    said = capsys.readouterr()
    assert "would change" in said.out and "; other outputs in cells 1\n" in said.out
    assert said.err == "error: would change: a.ipynb; `make notebooks` stores them\n"


EDITS = {
    "output": ("früh", "spät", [2]),
    "count": ('"execution_count": 2', '"execution_count": null', [1]),
    "picture": ("iVBOR", "iVBOS", [0]),
    "form": ('"outputs": [', '"outputs":  [', []),
}


@pytest.mark.parametrize("edit", EDITS)
def test_check_notices_an_edit(tmp_path, monkeypatch, edit):
    picture = new_output("display_data", {"image/png": "iVBORw0KGgo=", "text/plain": "a picture"})
    error = new_output("error", ename="ValueError", evalue="früh", traceback=["ValueError: früh"])
    cells = [
        new_code_cell("draw()", execution_count=1, outputs=[picture]),
        new_code_cell("print(21 * 2)", execution_count=2, outputs=[new_output("stream", text="42\n")]),
        new_code_cell("fail()", execution_count=3, outputs=[error], metadata={"tags": ["raises-exception"]}),
    ]
    fresh = runner.normalise(new_notebook(cells=cells))
    path = tmp_path / "a.ipynb"
    path.write_text(runner.dumps(fresh))

    monkeypatch.setattr(runner, "execute", lambda *_: fresh)
    assert runner.refresh(path, check=True) == ("unchanged", [])
    assert path.read_text().count(EDITS[edit][0]) >= 1
    path.write_text(path.read_text().replace(*EDITS[edit][:2]))
    assert runner.refresh(path, check=True) == ("would change", EDITS[edit][2])


def test_runs_see_nothing_of_what_was_kept(tmp_path, monkeypatch):
    """Else stored outputs would depend on how far the one who stores them has come."""
    mine = tmp_path / "my_moe"
    mine.mkdir()
    (mine / "route.py").write_text("")
    monkeypatch.setenv(FOLDER_ENV, str(mine))
    kept = "from moe_course.lessons.folder import my_moe\nprint([file.name for file in my_moe().glob('*')])"
    notebook = new_notebook(cells=[new_code_cell(kept)])
    seen = [runner.execute(notebook, tmp_path, my_moe=folder).cells[0].outputs[0].text for folder in (None, mine)]
    assert seen == ["[]\n", "['route.py']\n"]


def test_the_suite_sees_nothing_of_what_was_kept():
    assert Path(os.environ[FOLDER_ENV]).parent.is_dir() and not my_moe().exists()


def test_the_suite_compares_every_stored_output(tmp_path):
    """With the settings of this project: what was printed, shown or raised, and the tag of a cell that fails."""
    cells = ["print(21 * 2)", "print(21 * 2)", "21 * 2", "1 / 0", "2 / 0"]
    path = write(tmp_path / "a.ipynb", *cells, tags=("raises-exception",))
    assert runner.refresh(path, check=False)[0] == "stored"
    stored = json.loads(path.read_text())
    stored["cells"][1]["outputs"][0]["text"] = ["43\n"]
    stored["cells"][2]["outputs"][0]["data"]["text/plain"] = ["43"]
    stored["cells"][3]["outputs"][0]["evalue"] = "division by nothing"
    stored["cells"][4]["metadata"] = {}
    path.write_text(json.dumps(stored))
    settings = Path(__file__).parents[2] / "pyproject.toml"
    faults = faults_of_cells(path, "-c", settings, "--rootdir", tmp_path)
    assert [bool(fault) for fault in faults] == [False, True, True, True, True], faults


def test_runner_names_the_notebook_and_the_cell_that_fails(tmp_path, capsys):
    bad, junk = write(tmp_path / "bad.ipynb", "x = 1", "unknown_name"), tmp_path / "junk.ipynb"
    junk.write_text("{}")
    before = bad.read_bytes()
    assert runner.main([str(bad), str(junk)]) == 1
    said = capsys.readouterr()
    assert "cell 1: NameError: name 'unknown_name' is not defined" in said.out and "not a notebook" in said.out
    assert said.err == "error: failed: bad.ipynb, junk.ipynb\n" and bad.read_bytes() == before


NO_NOTEBOOKS = {
    "text": ("{", "not a notebook: Expecting property name"),
    "nothing": ("", "not a notebook: Expecting value"),
    "list": ("[]", "not a notebook: it holds a list, expected an object with cells"),
    "number": ('{"cells": 5, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "cells is 5, expected a list"),
    "object": (
        '{"cells": {"a": 1}, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
        "cells is {'a': 1}, expected",
    ),
    "cell of text": ('{"cells": ["x"], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "not a notebook: "),
    "version": ('{"cells": [], "metadata": {}, "nbformat": 99, "nbformat_minor": 5}', "not a notebook: "),
    "depth": ("[" * 100_000, "not a notebook: maximum recursion depth"),
}


def test_a_file_that_is_no_notebook_fails_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)  # it makes a terminal of what reads along here
    monkeypatch.setattr(runner, "execute", lambda old, *_: old)
    files = []
    for name, (content, _) in NO_NOTEBOOKS.items():
        files.append(tmp_path / f"{name}.ipynb")
        files[-1].write_text(content)
    good = write(tmp_path / "good.ipynb", "1")
    assert runner.main([*map(str, files), str(good)]) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert len(lines) == len(files) + 1 and lines[-1].startswith("stored")
    for line, (name, (_, message)) in zip(lines, NO_NOTEBOOKS.items(), strict=False):
        assert line.startswith("failed ") and f"{name}.ipynb" in line and message in line
    assert said.err.count("\n") == 1 and "good" not in said.err


@pytest.mark.parametrize("kind", NO_NOTEBOOKS)
def test_a_script_of_no_notebook_is_one_line(tmp_path, capsys, kind):
    (tmp_path / "a.ipynb").write_text(NO_NOTEBOOKS[kind][0])
    assert runner.main(["--script", str(tmp_path / "a.ipynb")]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("error: a.ipynb: not a notebook: ") and said.err.count("\n") == 1


def test_a_script_of_a_cell_that_is_no_python_is_one_line(tmp_path, capsys):
    assert runner.main(["--script", str(write(tmp_path / "a.ipynb", "1", "x = 1\n%time 1"))]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert said.err == "error: a.ipynb: cell 1, line 2: invalid syntax: it is not plain Python\n"


def test_runner_leaves_a_file_whose_ignored_outputs_alone_differ(tmp_path):
    path = write(
        tmp_path / "a.ipynb",
        "# not compared: differs every time\nimport os; print(os.urandom(8))",
        tags=(runner.IGNORE_TAG,),
    )
    assert runner.refresh(path, check=False)[0] == "stored"
    first = path.read_bytes()
    assert runner.refresh(path, check=False) == ("unchanged", []) and path.read_bytes() == first
    assert runner.refresh(path, check=True) == ("unchanged", [])


def test_runner_refuses_a_file_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as ended:
        runner.main(["nowhere.ipynb"])
    assert ended.value.code == 2 and "no such notebook: nowhere.ipynb" in capsys.readouterr().err
