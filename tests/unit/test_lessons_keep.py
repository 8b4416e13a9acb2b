"""What differs in words and pictures; check, reveal, keep and use, as cells call them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from lesson_cases import cell

from moe_course.dispatch import permute_by_expert
from moe_course.errors import ConfigError
from moe_course.launch import RunResult
from moe_course.lessons import check, report, run_live, use
from moe_course.lessons.check import verdict
from moe_course.lessons.checks import find
from moe_course.lessons.exercise import Case, Exercise, Look
from moe_course.lessons.folder import FOLDER_ENV, my_moe
from moe_course.lessons.judging.compare import difference
from moe_course.lessons.judging.draw import as_picture, as_text
from moe_course.lessons.keeping import keep, kept_functions


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "my_moe"))
    return tmp_path / "my_moe"


# -- comparing and drawing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "yours", "what"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2]), None),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), None),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), "is [2] int32, expected [2] int64"),
        (torch.zeros(0, 2), torch.zeros(0, 2), None),
        (torch.zeros(0, 2), torch.zeros(1, 2), "is [1, 2] float32, expected [0, 2] float32"),
        (torch.tensor(True), torch.tensor(False), "differs"),
        (None, 3, "is 3, expected None"),
        (3, True, "is True, expected 3"),
        ([3, 0], [3, 1], "is [3, 1], expected [3, 0]"),
        ([torch.ones(1)], [torch.ones(1)], None),
        ("rows", "routes", "is 'routes', expected 'rows'"),
        (torch.ones(2), [1.0, 1.0], "is [1, 1], expected a tensor [2] float32"),
    ],
)
def test_differences_in_words(expected, yours, what):
    found = difference(expected, yours)
    assert (found.what if found else None) == what


def test_tolerance_is_of_floats_only():
    a = torch.tensor([1.0, 2.0])
    assert difference(a, a + 5e-6, 1e-5) is None and difference(a, a + 5e-6) and difference(a, a + 5e-5, 1e-5)
    assert difference(torch.tensor([1]), torch.tensor([2]), 5.0)


def test_tables_show_the_place_and_digits_that_tell_numbers_apart():
    a = torch.arange(400.0).view(20, 20)
    b = a.clone()
    b[12, 15] += 1e-4
    table = difference(a, b).table
    lines = as_text(table)
    assert table.labels[0] == "10" and len(lines) == 9 and lines[0].split() == ["expected", "|", "yours"]
    assert [line.endswith("<") for line in lines].count(True) == 1 and "255.0001" in lines[3]
    cube = difference(torch.zeros(2, 2, 1), torch.ones(2, 2, 1)).table
    assert cube.labels == ["0,0", "0,1", "1,0", "1,1"]
    assert as_text(difference(torch.zeros(1, 2), torch.zeros(2, 2)).table)[2].split() == [
        "1",
        "·",
        "·",
        "|",
        "0",
        "0",
        "<",
    ]


def test_the_picture_is_the_same_every_time():
    table = difference(torch.zeros(2, 2), torch.eye(2)).table
    assert as_picture(table, "title") == as_picture(table, "title") != as_picture(table, "other")
    assert as_picture(table, "title").startswith(b"\x89PNG")


# -- check, reveal, keep, use --------------------------------------------------------------------------------------


def test_unknown_names_list_the_exercises():
    with pytest.raises(ConfigError, match=r"no exercise 'nothing'; there are nb00: combine_rows \(0\.1\)"):
        check.nothing(len)
    assert {"combine_rows", "keep", "reveal"} <= set(dir(check)) and not hasattr(check, "_repr_html_")


def test_check_prints_its_verdict_and_reveal_the_package(capsys):
    check.combine_rows(cell("def f(a, b): return a"))
    assert capsys.readouterr().out.startswith("0.1 not right yet: the sum differs\n")
    check.reveal("combine_rows")
    out = capsys.readouterr().out
    assert "# moe_course.combine\ndef sum_contributions(" in out and "return total" in out
    short, _, own = out.partition("\n\nthe package's own:\n\n# moe_course")
    assert own and len(short.splitlines()) == 2
    check.combine_rows(cell(short, "combine_rows"))
    assert capsys.readouterr().out.startswith("0.1 ok")


def test_a_notebook_gets_the_table_as_a_picture_too(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("moe_course.lessons.judging.verdict._in_kernel", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    check.combine_rows(cell("def f(a, b): return a"))
    check.combine_rows(cell("def f(a, b): return a + b"))
    assert [sorted(bundle) for bundle in shown] == [["image/png", "text/plain"]]
    assert "0.1 ok" in capsys.readouterr().out


def test_keep_writes_a_file_that_stands_alone(folder, capsys):
    fn = cell("def my_combine_rows(a: torch.Tensor, b):\n    return torch.stack([a,b]).sum(dim = 0)", "my_combine_rows")
    check.keep(fn)
    assert capsys.readouterr().out == "0.1 kept in my_moe/combine_rows.py\n"
    text = (folder / "combine_rows.py").read_text()
    assert text.startswith("# Exercise 0.1, combine_rows: ") and text.endswith("combine_rows = my_combine_rows\n")
    program = "import torch, combine_rows as m; print(m.combine_rows(torch.tensor([1]), torch.tensor([2])).tolist())"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[3]\n", done.stderr


def test_keep_puts_earlier_versions_away_and_refuses_what_fails(folder, capsys):
    for body in ("return a + b", "return a + b", "return b + a", "return torch.add(a, b)"):
        check.keep(cell(f"def combine_rows(a, b):\n    {body}\n", "combine_rows"))
    assert len(set(capsys.readouterr().out.splitlines())) == 1
    assert sorted(path.name for path in (folder / "old").iterdir()) == ["combine_rows-1.py", "combine_rows-2.py"]
    assert "a + b" in (folder / "old" / "combine_rows-1.py").read_text()
    kept = (folder / "combine_rows.py").read_text()
    check.keep(cell("def combine_rows(a, b): return a", "combine_rows"))
    check.keep(cell("def combine_rows(a, b): ...", "combine_rows"))
    assert capsys.readouterr().out.splitlines() == [
        "0.1 not right yet: the sum differs; nothing is kept",
        "0.1 not attempted yet; nothing is kept",
    ]
    assert (folder / "combine_rows.py").read_text() == kept


def test_keep_adds_the_imports_of_package_names_and_the_functions_kept_earlier(folder):
    def answer(ids, n):
        return permute_by_expert(ids, n)[1]

    def cases(seed):
        return [Case(f"{n} experts", (torch.tensor([[seed % n, -1]]), n)) for n in (2, 3, 4)]

    counts = Exercise(
        "9.3", "expert_counts", answer, cases, (Look("counts"),), names={"permute_by_expert": permute_by_expert}
    )
    fn = cell("def expert_counts(ids, n):\n    return permute_by_expert(ids, n)[1]", "expert_counts")
    assert keep(counts, fn) == "9.3 kept in my_moe/expert_counts.py"
    again = replace(counts, number="9.4", name="again")
    assert (
        keep(again, cell("def again(ids, n):\n    return expert_counts(ids, n)", "again"))
        == "9.4 kept in my_moe/again.py"
    )
    text = (folder / "again.py").read_text()
    assert "from moe_course.dispatch import permute_by_expert" in text and "def expert_counts" in text
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    program = "import torch; exec(open('again.py').read()); print(again(torch.tensor([[1, -1]]), 2).tolist())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[0, 1]\n", done.stderr


def test_what_was_kept_passes_again_and_so_does_the_answer_key(folder, capsys):
    check.keep(find("combine_rows").answer)
    assert "import combine_rows" in (folder / "combine_rows.py").read_text()
    assert verdict("combine_rows", kept_functions()["combine_rows"]).ok
    assert verdict("combine_rows", find("combine_rows").answer).ok
    capsys.readouterr()


def test_use_brings_stages_back_and_says_whose_they_are(folder, capsys):
    assert use().dispatch is None
    assert capsys.readouterr().out.splitlines() == [
        "yours, from my_moe: none yet",
        "the package's: route, expert_map, dispatch, experts, combine",
    ]
    folder.mkdir()
    (folder / "dispatch.py").write_text("def dispatch(*args, **keywords):\n    return 'mine'\n")
    (folder / "notes.py").write_text("not python")
    stages = use("my_moe")
    assert stages.dispatch() == "mine" and stages.combine is None and "0x" not in repr(stages)
    assert capsys.readouterr().out.splitlines()[0] == "yours, from my_moe: dispatch"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def dispatch(:\n", r"dispatch\.py, line 1: invalid syntax; repair the file or remove it"),
        ("x = 1\nimport nothing_like_it\n", r"dispatch\.py, line 2: ModuleNotFoundError: .*; repair the file"),
        ("def other(): pass\n", r"dispatch\.py does not define a function dispatch; rename the function"),
    ],
)
def test_files_that_do_not_load_are_named_with_their_line(folder, text, says):
    folder.mkdir()
    (folder / "dispatch.py").write_text(text)
    with pytest.raises(ConfigError, match=says):
        use("my_moe")
    assert not list(folder.glob("__pycache__"))


def test_the_folder_lies_beside_the_notebooks(tmp_path, monkeypatch, folder):
    assert my_moe() == folder != my_moe("other")
    monkeypatch.delenv(FOLDER_ENV)
    (tmp_path / "course" / "notebooks" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "course" / "notebooks" / "deep")
    assert my_moe() == tmp_path / "course" / "my_moe" and my_moe("other") == tmp_path / "course" / "other"
    monkeypatch.chdir(tmp_path)
    assert my_moe() == tmp_path / "my_moe"


@pytest.mark.parametrize(
    ("guess", "answer", "says"),
    [
        (None, 3, "no guess yet; measured: 3. Set your guess above, run that cell and this one again."),
        (3, 3, "your guess 3 is right"),
        (5, 3, "your guess 5 is 2 too many; measured: 3."),
        ((1, 2), (2, 1), "your guess (1, 2) is not it; measured: (2, 1)."),
    ],
)
def test_guesses_are_compared(guess, answer, says, capsys):
    report(guess, answer)
    assert capsys.readouterr().out.startswith(says)


# -- keeping what was kept, and what cannot be written ------------------------------------------------------------

GATHERED_BY_HAND = """\
def dispatch(hidden_states, topk_weights, topk_ids, *, comm, placement):
    gathered = comm.all_gather_rows(hidden_states, topk_weights, topk_ids)
    weights, ids = gathered.metadata
    ids = torch.where((placement.owner[ids.clamp(min=0).long()] == comm.rank) & (ids >= 0), ids, -1)
    return Dispatched(gathered.rows, None, ids, weights, None, "rows", gathered.counts)
"""


def test_a_kept_stage_is_not_lost_by_keeping_it_again(folder, capsys, monkeypatch, tmp_path):
    check.keep(cell(GATHERED_BY_HAND, "dispatch"))
    first = (folder / "dispatch.py").read_text()
    mine = use().dispatch
    check.keep(mine)
    assert capsys.readouterr().out.splitlines()[-1] == "7.1 is kept already, in my_moe/dispatch.py"
    assert (folder / "dispatch.py").read_text() == first and not (folder / "old").exists()
    newer = first.replace("ids.clamp(min=0)", "ids.clamp_min(0)")
    (folder / "dispatch.py").write_text(newer)
    check.keep(mine)
    says = "my_moe/dispatch.py has changed since this function was loaded; nothing is kept, run use again\n"
    assert capsys.readouterr().out == says and (folder / "dispatch.py").read_text() == newer
    (folder / "dispatch.py").write_text(first)
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "second"))  # a folder that does not have it yet
    check.keep(mine)
    assert (tmp_path / "second" / "dispatch.py").read_text() == first


def test_a_folder_that_cannot_be_written_is_named(folder):
    fn = cell("def combine_rows(a, b): return a + b", "combine_rows")
    folder.write_text("a file")
    with pytest.raises(ConfigError, match=r"my_moe: File exists, so .*combine_rows\.py cannot be written; move what"):
        check.keep(fn)
    folder.unlink()
    (folder / "combine_rows.py").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"combine_rows\.py: Is a directory, so "):
        check.keep(fn)
    (folder / "combine_rows.py").rmdir()
    (folder / "combine_rows.py").write_bytes(b"\xff\xfe\x00")  # no text: it is put away like any other
    check.keep(fn)
    assert (folder / "old" / "combine_rows-1.py").read_bytes() == b"\xff\xfe\x00"


def test_files_of_any_editor_load_and_those_that_end_the_program_are_named(folder):
    folder.mkdir()
    file = folder / "dispatch.py"
    file.write_text("def dispatch(): pass\n", encoding="utf-8-sig")  # as Windows Notepad saves it
    assert use().dispatch() is None
    file.write_bytes("def dispatch(): 'é'\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"dispatch\.py: .*save the file as UTF-8"):
        use()
    file.write_text("import sys\nsys.exit(1)\n")
    with pytest.raises(ConfigError, match=r"dispatch\.py, line 2: SystemExit: it ends the program \(sys\.exit\(1\)\)"):
        use()
    check.combine_rows(cell("def f(a, b): return a + b"))  # a helper file that fails harms nobody else


def test_a_huge_wrong_answer_is_compared_in_no_time():
    began = time.monotonic()
    found = difference(torch.zeros(3, 2), torch.zeros(4_000_000, 2))
    assert found.table.labels == [str(row) for row in range(1, 9)] and found.what.startswith("is [4000000, 2] float32")
    assert difference([1, 2], [1] * 1_000_000).table.marked
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("yours", "what"),
    [
        (torch.zeros(2, 2).to_sparse(), "is [2, 2] float32, sparse_coo, on cpu; expected [2, 2] float32, strided"),
        (torch.zeros(2, 2, device="meta"), "is [2, 2] float32, strided, on meta; expected"),
        (torch.zeros(2, 2, dtype=torch.complex64), "is [2, 2] complex64, expected [2, 2] float32"),
    ],
)
def test_strange_tensors_are_told(yours, what):
    assert difference(torch.zeros(2, 2), yours).what.startswith(what)


def test_a_run_that_fails_prints_who_waited_for_whom(monkeypatch, capsys):
    ended = RunResult(5, "error: rank 1: late", None, graph=["rank 0 is still computing", "rank 1 waits for rank 0"])
    monkeypatch.setattr("moe_course.lessons.progress.launch", lambda *given: ended)
    assert run_live([], 2) is ended
    out = capsys.readouterr().out
    assert out.endswith("error: rank 1: late\n  rank 0 is still computing\n  rank 1 waits for rank 0\n")
