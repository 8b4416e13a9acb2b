"""The cell of notebook 13 behind exercise 13.1: the learner's function on the rows that a run recorded."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from notebook_file import NOTEBOOKS, Notebook

from moe_course.options import RunOptions
from moe_course.trace import Trace
from moe_course.trace.simulate import run_here

sys.path.insert(0, str(Path(__file__).parents[1] / "wrong"))
import nb13


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return run_here(RunOptions(prompts=("x = 1", "if"), max_new_tokens=1, trace_values=True, world_size=3))


def not_yet(weights, owners, contributions):
    raise NotImplementedError


def said(trace: Trace, answer, capsys) -> list[str]:
    """The last two lines that the cell prints."""
    (cell,) = [c for c in Notebook.load(NOTEBOOKS / "13_the_real_run.ipynb").code if "trace.explain(" in c["source"]]
    prompts = [{"prompt_tokens": trace.meta["prompts"][0]["tokens"]}]
    exec(cell["source"], {"trace": trace, "result": {"prompts": prompts}, "explain_token": answer})
    return capsys.readouterr().out.splitlines()[-2:]


def test_a_right_function_gives_every_row_to_the_bit(recorded, capsys):
    for answer in nb13.ANSWERS["explain_token"].right:
        theirs, own = said(recorded, answer, capsys)
        rows = re.match(r"(\d+) of (\d+) rows of this run", theirs)
        assert rows[1] == rows[2] and own == f"your explain_token: {rows[1]} of them"


def test_a_wrong_one_falls_short_and_a_missing_one_is_named(recorded, capsys):
    theirs, own = said(recorded, nb13.in_k_order, capsys)
    assert 0 < int(own.split()[2]) < int(theirs.split()[0]) / 2
    assert said(recorded, not_yet, capsys)[1] == "your explain_token: not written yet (13.1)"
