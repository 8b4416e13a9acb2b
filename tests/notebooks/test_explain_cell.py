"""The cell of notebook 13 behind exercise 13.1: the learner's function on the rows that a run recorded."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from notebook_file import NOTEBOOKS, Notebook

from moe_course.lessons.checks import find
from moe_course.options import RunOptions
from moe_course.trace import Trace
from moe_course.trace.simulate import run_here

sys.path.insert(0, str(Path(__file__).parents[1] / "wrong"))
import nb13

check = import_module("moe_course.lessons.check")  # the module; its package has an object of this name


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return run_here(RunOptions(prompts=("x = 1", "if"), max_new_tokens=1, trace_values=True, world_size=3))


def not_yet(weights, owners, contributions):
    raise NotImplementedError


def forgets_to_return(weights, owners, contributions):
    contributions.sum(dim=0)


def a_list(weights, owners, contributions):
    return (weights[:, None] * contributions).sum(dim=0).tolist()


def raises(weights, owners, contributions):
    return {}["boom"]


def never_ends(weights, owners, contributions):
    while True:
        pass


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


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (not_yet, "not attempted yet"),
        (forgets_to_return, "not right yet: the output is None, expected a tensor [16] float32"),
        (a_list, "not right yet: the output is a list, expected a tensor [16] float32"),
        (raises, "raised KeyError: 'boom'"),
        (never_ends, "takes too long: ended after 1 s; does a loop never end?"),
        (nb13.right_and_then_widened, "not right yet: the output is [16] float64, expected [16] float32"),
        (nb13.in_k_order, "not right yet: the output differs in"),
        (nb13.for_rows_of_16_numbers, "raised RuntimeError"),
    ],
)
def test_every_other_answer_gets_the_line_of_its_check(recorded, answer, says, capsys, monkeypatch):
    monkeypatch.setattr(check, "_exercise", lambda name: replace(find(name), seconds=1))
    theirs, own = said(recorded, answer, capsys)
    assert re.match(r"(\d+) of \1 rows of this run", theirs)
    assert own.startswith(f"your explain_token: 13.1 {says}")
