"""Notebooks are executed and stored in one form, and what was edited afterwards is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from moe_course.lessons import notebooks as runner


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
    assert "would change" in said.out and said.err == "error: would change: a.ipynb; `make notebooks` stores them\n"


def test_runner_names_the_notebook_and_the_cell_that_fails(tmp_path, capsys):
    bad, junk = write(tmp_path / "bad.ipynb", "x = 1", "unknown_name"), tmp_path / "junk.ipynb"
    junk.write_text("{}")
    before = bad.read_bytes()
    assert runner.main([str(bad), str(junk)]) == 1
    said = capsys.readouterr()
    assert "cell 1: NameError: name 'unknown_name' is not defined" in said.out and "not a notebook" in said.out
    assert said.err == "error: failed: bad.ipynb, junk.ipynb\n" and bad.read_bytes() == before


def test_runner_leaves_a_file_whose_ignored_outputs_alone_differ(tmp_path):
    path = write(
        tmp_path / "a.ipynb",
        "# not compared: differs every time\nimport os; print(os.urandom(8))",
        tags=(runner.IGNORE_TAG,),
    )
    assert runner.refresh(path, check=False) == "stored"
    first = path.read_bytes()
    assert runner.refresh(path, check=False) == "unchanged" and path.read_bytes() == first
    assert runner.refresh(path, check=True) == "unchanged"


def test_runner_refuses_a_file_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as ended:
        runner.main(["nowhere.ipynb"])
    assert ended.value.code == 2 and "no such notebook: nowhere.ipynb" in capsys.readouterr().err
