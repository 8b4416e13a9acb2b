"""What a check says about a function: tried on two small exercises of its own."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import pytest
from lesson_cases import GATHER, SCALE, cell, gather, scale

from moe_course.lessons.exercise import Cost
from moe_course.lessons.judging.judge import judge


def wrong_ids_on_rank_1(rows, ids, *, comm):
    gathered = comm.all_gather_rows(rows, ids)
    return gathered.rows, gathered.metadata[0] + (comm.rank == 1)


def raises_on_rank_1(rows, ids, *, comm):
    if comm.rank == 1:
        raise KeyError("x")
    return comm.all_gather_rows(rows)


def sends_twice(rows, ids, *, comm):
    comm.all_gather_rows(rows)
    gathered = comm.all_gather_rows(rows, ids)
    return gathered.rows, gathered.metadata[0]


def never_ends_on_rank_1(rows, ids, *, comm):
    while comm.rank == 1:
        rows = rows + 1
    return comm.all_gather_rows(rows, ids)


def changes_ids(rows, ids, *, comm):
    gathered = comm.all_gather_rows(rows, ids)
    ids += 1
    return gathered.rows, gathered.metadata[0]


def gathers_twice(rows, ids, *, comm):
    return comm.all_gather_rows(rows).rows, comm.all_gather_rows(ids).rows


def test_right_answers_are_counted_and_billed():
    assert str(judge(SCALE, cell("def f(rows, factor): return factor * rows"))) == (
        "9.1 ok · 3 cases, and 3 more with other numbers"
    )
    for fn in (gather, gathers_twice):  # ids that travel by themselves are no rows, and cost the same
        text = "9.2 ok · 2 cases, and 2 more with other numbers · 7 rows (budget 7), 140 bytes (budget 140)"
        assert str(judge(GATHER, fn)) == text


@pytest.mark.parametrize(
    "body",
    ["pass", "...", '"""Only words."""', "raise NotImplementedError", 'raise NotImplementedError("your turn")',
     '"""Words."""\n    raise NotImplementedError', "x = rows\n    raise NotImplementedError"],
)  # fmt: skip
def test_stubs_are_not_attempted_yet(body):
    found = judge(SCALE, cell(f"def f(rows, factor):\n    {body}"))
    assert (found.kind, str(found)) == ("not attempted", "9.1 not attempted yet")
    assert str(judge(GATHER, cell(f"def f(rows, ids, *, comm):\n    {body}"))) == "9.2 not attempted yet"


def test_the_first_wrong_look_of_the_smallest_failing_case_is_drawn():
    wrong = cell("def f(rows, factor):\n    return rows * factor if len(rows) < 2 else rows * factor + (rows == 101)")
    found = judge(SCALE, wrong)
    assert found.look == "rows" and str(found).splitlines() == [
        "9.1 not right yet: rows differs in 1 of 3 numbers",
        "  smallest failing case: 3 rows",
        "     expected | yours",
        "  0  300      | 300",
        "  1  303      | 304   <",
        "  2  306      | 306",
    ]
    shape = judge(SCALE, cell("def f(rows, factor): return rows.T * factor"))
    assert shape.look == "shape" and "shape is [1, 3], expected [3, 1]" in str(shape)


def test_ranks_are_named_and_their_errors_keep_the_line():
    found = judge(
        GATHER,
        wrong_ids_on_rank_1,
    )
    assert str(found).startswith("9.2 not right yet: ids on rank 1 is [1, 1] ") or "ids on rank 1 differs" in str(found)
    found = judge(
        GATHER,
        raises_on_rank_1,
    )
    assert str(found).splitlines() == [
        "9.2 raised KeyError: 'x' (on rank 1)",
        "  smallest failing case: 2 ranks, one row",
        '  line 3 of your function: raise KeyError("x")',
    ]


def test_cost_is_compared_last_and_explained():
    found = judge(
        GATHER,
        sends_twice,
    )
    assert str(found).splitlines()[0] == (
        "9.2 right, but too dear: 2 rows sent, budget 1, 32 bytes sent, budget 20: rows went twice"
    )
    tight = replace(GATHER, budget=lambda case: Cost(0, 0))
    assert judge(tight, gather).kind == "dear"


@pytest.mark.parametrize(
    "body",
    ["pass", "try:\n            x = 1\n        except:\n            pass"],
    ids=["loop", "loop-that-catches-all"],
)
def test_endless_loops_end(body):
    before, began = threading.active_count(), time.monotonic()
    found = judge(SCALE, cell(f"def f(rows, factor):\n    while True:\n        {body}"))
    assert found.kind == "slow" and "takes too long: ended after 0.6 s; does a loop never end?" in str(found)
    assert "it was in line " in str(found) and time.monotonic() - began < 20
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_an_endless_loop_on_one_rank_ends_and_is_found():
    before = threading.active_count()
    found = judge(
        GATHER,
        never_ends_on_rank_1,
    )
    assert "still waiting for ranks [1]" in str(found) or found.kind == "slow"
    assert "of your function: " in str(found).splitlines()[-1] and "line 4" not in str(found).splitlines()[-1]
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("text", "earlier", "says"),
    [
        ("def f(rows, factor): return rows * factor + shift", {"shift": 0}, "uses `shift`, a value from another cell"),
        (
            "def f(rows, factor): return helper(rows, factor)",
            {"helper": scale},
            "uses `helper`, defined in another cell",
        ),
        ("def f(rows, factor): return sys.intern(rows)", {"sys": sys}, "uses `sys`, imported in another cell"),
        ("def f(rows, factor): return nowhere", {}, "uses `nowhere`, which is not defined anywhere"),
        ("def f(rows, factor=FACTOR): return rows", {"FACTOR": 1}, "uses `FACTOR`"),
        ("@wrap\ndef f(rows, factor): return rows", {"wrap": lambda f: f}, "uses `wrap`"),
        ("def f(rows, factor):\n    def g():\n        return hidden\n    return g()", {"hidden": 1}, "uses `hidden`"),
        ("def outer(v):\n    def f(rows, factor): return v\n    return f\nf = outer(1)", {}, "uses `v`"),
    ],
)
def test_names_of_earlier_cells_never_matter(text, earlier, says):
    found = judge(SCALE, cell(text, **earlier))
    assert found.kind == "refused" and says in str(found)


@pytest.mark.parametrize(
    "text",
    [
        "def f(rows: 'Tensor', factor: Anything) -> Whatever: return rows * factor",
        "@torch.no_grad()\ndef f(rows, factor): return rows * factor",
        "def f(rows, factor, extra=torch.ones(1).long()):\n    import math\n    return rows * factor * extra",
        "def f(rows, factor):\n    def times(x):\n        return x * factor\n    return times(rows)",
        "def f(rows, factor):\n    x = [row * factor for row in rows]\n    return torch.stack(x) if x else rows",
        "def f(*args):\n    rows, factor = args\n    return rows * factor",
    ],
)
def test_functions_may_be_written_in_many_ways(text):
    from typing import Any

    found = judge(SCALE, cell(text, F=None, math=None, Anything=Any, Whatever=Any))
    assert found.ok, str(found)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda rows, factor: rows, "got a lambda"),
        (len, "got 'len'"),
        (3, "got the int 3"),
        (SCALE.__class__, "got 'Exercise'"),
    ],
)
def test_what_is_no_function_is_refused(fn, says):
    assert judge(SCALE, fn).kind == "refused" and says in str(judge(SCALE, fn))


def test_functions_without_text_or_with_other_parameters_are_refused():
    names = {}
    exec("def f(rows, factor): return rows", names)
    assert "the text of f cannot be found" in str(judge(SCALE, names["f"]))
    assert "missing a required argument: 'other'; the signature is scale(rows, factor)" in str(
        judge(SCALE, cell("def f(rows, factor, other): return rows"))
    )
    assert "the signature is gather(rows, ids, *, comm)" in str(judge(GATHER, cell("def f(rows, ids): return rows")))


def test_inputs_are_not_to_be_changed():
    assert "changes its input `rows` in place" in str(
        judge(SCALE, cell("def f(rows, factor): return rows.mul_(factor)"))
    )
    on_a_rank = changes_ids
    assert "changes its input `ids` in place" in str(judge(GATHER, on_a_rank))


def test_hard_coded_answers_and_inputs_given_back_are_caught():
    shown = "def f(rows, factor):\n    return rows * factor if not len(rows) or rows[0, 0] < 200 else rows"
    found = judge(SCALE, cell(shown))
    assert found.kind == "wrong" and "are values written into the code?" in str(found)
    assert not judge(SCALE, cell("def f(rows, factor): return rows")).ok
    assert not judge(SCALE, cell("def f(rows, factor): return torch.tensor([[200]])")).ok


def test_verdicts_are_the_same_in_every_run():
    wrong = cell("def f(rows, factor): return object()")
    assert str(judge(SCALE, wrong)) == str(judge(SCALE, wrong)) and "0x" not in str(judge(SCALE, wrong))


def test_ending_the_program_is_told():
    found = judge(SCALE, cell("def f(rows, factor):\n    import sys\n    sys.exit(0)"))
    assert str(found).splitlines()[0] == ("9.1 raised SystemExit: it ends the whole program; let the function return")
    assert "9.2 raised SystemExit: " in str(judge(GATHER, cell("def f(rows, ids, *, comm): raise SystemExit")))


def test_results_that_cannot_be_looked_at_are_told():
    text = "def f(rows, factor):\n    class Odd:\n        shape = property(lambda self: 1 / 0)\n    return Odd()"
    assert "the function returned an Odd" in str(judge(SCALE, cell(text)))
    nested = "def f(rows, factor):\n    found = []\n    found.append(found)\n    return found"
    assert judge(SCALE, cell(nested)).kind == "wrong"


def test_a_function_that_only_says_it_is_another_is_checked_itself():
    text = "import functools\n\n@functools.wraps(scale)\ndef f(rows, factor):\n    return rows\n"
    found = judge(SCALE, cell(text, scale=scale))
    assert found.kind == "refused" and "it uses `" in str(found)


def test_annotations_of_local_names_are_no_dependencies():
    text = "def f(rows, factor):\n    total: Tensor = rows * factor\n    rest: Tensor\n    return total"
    assert judge(SCALE, cell(text)).ok
