"""What a learner kept goes into real processes: the last cells of the last lesson, on right answers."""

from __future__ import annotations

import importlib
from pathlib import Path

import nbformat
import pytest

from moe_course.lessons import check
from moe_course.lessons.checks import exercises, notebooks
from moe_course.lessons.folder import FOLDER_ENV

TESTS = Path(__file__).parents[1]
LESSON = TESTS.parent / "notebooks" / "13_the_real_run.ipynb"
ASKED = ["--prompt=for i in range(", "--prompt=raise TypeError(", "--max-new-tokens=3", "--device=cpu"]


@pytest.fixture
def cell():
    """The cell of the lesson that puts what was kept into processes."""
    cells = nbformat.read(LESSON, as_version=4).cells
    (found,) = (cell.source for cell in cells if "run_mine(asked" in cell.source)
    assert "world_size=4" in found
    return compile(found, "<cell>", "exec")


def test_kept_stages_run_on_four_processes(warm, cell, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "my_moe"))
    monkeypatch.setenv(warm.mark_name, warm.mark)
    monkeypatch.syspath_prepend(TESTS / "wrong")
    stages = []
    for notebook in notebooks():
        modules = [importlib.import_module(file.stem) for file in sorted((TESTS / "wrong").glob(f"{notebook}*.py"))]
        answers = {name: answer for module in modules for name, answer in module.ANSWERS.items()}
        for exercise in exercises(notebook):
            if exercise.stage:
                check.keep(answers[exercise.name].right[-1], exercise.name)
                stages.append(exercise.stage)
    kept = capsys.readouterr().out
    assert kept.count(" kept in my_moe/") == len(stages) >= 2, kept

    exec(cell, {"asked": ASKED})
    said = capsys.readouterr().out
    assert f"verdict with your {', '.join(stages)} on 4 processes: equal" in said, said
    assert "4 of 4 ranks loaded their experts" in said and not warm.wait_until_gone()


def test_without_anything_kept_nothing_starts(cell, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "my_moe"))
    monkeypatch.setattr("moe_course.lessons.progress.launch", lambda *_: pytest.fail("a run was started"))
    exec(cell, {"asked": ASKED})
    assert capsys.readouterr().out.startswith("nothing is kept in my_moe yet: check.keep in lessons 02 and 07")
