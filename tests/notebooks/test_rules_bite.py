"""Each rule against a notebook that breaks it: lesson 00 with one change."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from nbformat.v4 import new_code_cell
from notebook_file import NOTEBOOKS, Notebook
from notebook_rules import RULES

from moe_course.expert_map import determine_expert_map
from moe_course.lessons import notebooks as runner

GOOD = Notebook.load(NOTEBOOKS / "00_start_here.ipynb")


def code(source: str, *outputs: dict, tags: tuple[str, ...] = ()):
    """A change: append a code cell with these outputs. The number of cells stays."""

    def change(content: dict) -> None:
        count = max(cell["execution_count"] for cell in content["cells"] if cell["cell_type"] == "code") + 1
        cell = new_code_cell(source, outputs=list(outputs), execution_count=count, metadata={"tags": list(tags)})
        cell.id = f"added-{count}"
        content["cells"].insert(-1, cell)
        del content["cells"][next(i for i, c in enumerate(content["cells"]) if i > 1 and c["cell_type"] == "markdown")]

    return change


def prose(text: str):
    """A change: put this text into the first Markdown cell behind the opening."""

    def change(content: dict) -> None:
        next(cell for cell in content["cells"][2:] if cell["cell_type"] == "markdown")["source"] = text

    return change


def printed(text: str, name: str = "stdout") -> dict:
    return {"output_type": "stream", "name": name, "text": text}


def shown(**data: str) -> dict:
    return {
        "output_type": "display_data",
        "metadata": {},
        "data": {kind.replace("__", "/"): v for kind, v in data.items()},
    }


def raised(value: str) -> dict:
    return {"output_type": "error", "ename": "ValueError", "evalue": value, "traceback": [f"ValueError: {value}"]}


def replaced(old: str, new: str):
    """A change: this text becomes another one in every cell."""
    return rewritten(re.escape(old), new.replace("\\", r"\\"))


def rewritten(pattern: str, new: str):
    """The same with a pattern, where the words of the lesson may change."""

    def change(content: dict) -> None:
        found = [cell for cell in content["cells"] if re.search(pattern, cell["source"])]
        assert found, f"nothing to break: {pattern}"
        for cell in found:
            cell["source"] = re.sub(pattern, new, cell["source"])

    return change


def tagged(old: str, *new: str):
    """A change: cells with the tag `old` get the tags `new` instead of theirs."""

    def change(content: dict) -> None:
        found = [cell for cell in content["cells"] if old in cell["metadata"].get("tags", [])]
        assert found, f"no cell is tagged {old}"
        for cell in found:
            cell["metadata"]["tags"] = list(new)

    return change


def behind(tag: str, source: str):
    """A change: a Markdown cell behind each cell with this tag; the number of cells grows."""

    def change(content: dict) -> None:
        place = next(i for i, cell in enumerate(content["cells"]) if tag in cell["metadata"].get("tags", []))
        content["cells"].insert(place + 1, dict(content["cells"][0], id="between", source=source))

    return change


def each(*changes):
    def change(content: dict) -> None:
        for one in changes:
            one(content)

    return change


def drop(number: int):
    def change(content: dict) -> None:
        del content["cells"][3 : 3 + number]

    return change


def forget_a_count(content: dict) -> None:
    next(cell for cell in content["cells"] if cell["cell_type"] == "code")["execution_count"] = None


def swap_counts(content: dict) -> None:
    first, second = [cell for cell in content["cells"] if cell["cell_type"] == "code"][:2]
    first["execution_count"], second["execution_count"] = 2, 1


SKIPPED = (runner.IGNORE_TAG,)
#: Another name, another line: still the package's code.
RETYPED = (
    inspect.getsource(determine_expert_map)
    .replace("determine_expert_map", "best_rows")
    .replace("dtype=torch.int32", "dtype=torch.int64")
)
BROKEN = [
    ("number_of_cells", drop(9), "23 cells"),
    ("number_of_cells", lambda content: content["cells"].append(dict(content["cells"][3], id="more")), "33 cells"),
    ("code_cells_are_short", code("\n".join(f"x{i} = {i}" for i in range(26))), "26 lines of code"),
    ("code_cells_are_short", code(""), "0 lines of code"),
    ("prose_cells_are_short", prose("word " * 81), "81 words"),
    ("prose_cells_are_short", prose("| a |\n|---|\n" + "| b |\n" * 16), "table of 17 rows"),
    ("prose_cells_are_short", prose("| a |\n|---|\n| " + "b " * 17 + "|"), "long table cell"),
    ("prose_cells_are_short", prose("```text\n" + "x\n" * 26 + "```"), "long block"),
    ("lines_fit_the_page", code("x = 1  # " + "y" * 96), "105 characters: x = 1"),
    ("lines_fit_the_page", code("1", printed("fine\n" + "y" * 105)), "105 characters: yyy"),
    ("lines_fit_the_page", prose("```text\n" + "y" * 91 + "\n```"), "91 characters: yyy"),
    ("no_forbidden_code", code("!pip install torch"), "shell command"),
    ("no_forbidden_code", code("%pip install torch"), "magic"),
    ("no_forbidden_code", code("%%writefile worker.py\nx = 1"), "magic"),
    ("no_forbidden_code", code("%timeit 1 + 1"), "magic"),
    ("no_forbidden_code", code("mp.spawn(worker, nprocs=2)"), "processes of cell functions"),
    ("no_forbidden_code", code("import multiprocessing"), "processes of cell functions"),
    ("no_forbidden_code", code("from tqdm import tqdm"), "tqdm"),
    ("no_forbidden_code", code("page = 'https://example.org'"), "network"),
    ("no_forbidden_code", code("from torch import *"), "star import"),
    ("no_forbidden_prose", prose("You simply run it."), "belittles: simply"),
    ("no_forbidden_prose", prose("![a figure](https://example.org/a.png)"), "picture from the network"),
    ("no_forbidden_prose", prose("Open /home/me/file."), "path of a machine"),
    ("no_forbidden_prose", code("path = '/tmp/trace'"), "path of a machine"),
    ("no_forbidden_prose", prose("See #12."), "issue number"),
    ("no_stderr", code("1", printed("a warning", "stderr")), "stderr"),
    ("outputs_are_stable", code("1", printed("took 3.2 s")), "time: 3.2 s"),
    ("outputs_are_stable", code("1", printed("12 ms per pass")), "time: 12 ms"),
    ("outputs_are_stable", code("1", printed("at 12:31:07")), "time: 12:31:07"),
    ("outputs_are_stable", code("1", printed("2026-11-30")), "date"),
    ("outputs_are_stable", code("1", printed("wrote trace/rank/meta.json and /srv/data/x")), "path: /srv/data/x"),
    ("outputs_are_stable", code("1", shown(text__plain="PosixPath('/tmp')")), "root folder"),
    ("outputs_are_stable", code("1", shown(text__plain="<object at 0x7f3a2b>")), "address: 0x7f3a2b"),
    ("outputs_are_stable", code("1", printed("127.0.0.1")), "address"),
    ("outputs_are_stable", code("1", printed("pid: 4711")), "address"),
    ("outputs_are_stable", code("1", printed("version 2.13.0")), "version: 2.13.0"),
    ("outputs_are_stable", code("1", printed("Python 3.11")), "version of a package"),
    ("outputs_are_stable", code("1", raised("no file /etc/x/y"), tags=("raises-exception",)), "path: /etc/x/y"),
    ("errors_are_meant", code("1", raised("oops")), "an error without the tag"),
    ("errors_are_meant", code("1", tags=("raises-exception",)), "tagged, but no error"),
    ("executed_in_order", forget_a_count, "[None, 2, 3"),
    ("executed_in_order", swap_counts, "[2, 1, 3"),
    ("few_outputs_ignored", code("1", tags=SKIPPED), "no reason"),
    ("few_outputs_ignored", code("1  # NBVAL_IGNORE_OUTPUT"), "hidden comment"),
    ("few_outputs_ignored", each(*[code("# not compared: an order of times\n1", tags=SKIPPED)] * 4), "4 cells"),
    ("file_is_small", code("1", printed("x" * 300_000)), "bytes"),
    ("anatomy", replaced("# 00 · Start", "# Start"), "the title does not start with 00"),
    ("anatomy", replaced("You will be able to", "Goals"), "You will be able to"),
    ("anatomy", replaced("start()", "pass"), "not start()"),
    ("anatomy", replaced("guess = None", "guess = 3"), "guess = None"),
    ("anatomy", replaced("report(guess", "print(guess"), "report"),
    ("anatomy", replaced("show(determine", "print(determine"), "show"),
    ("anatomy", replaced("**Next:**", "Then"), "what is next"),
    ("anatomy", rewritten(r"\*Read \d+ min, .*?\*", "Half an hour."), "do 25 min"),
    ("anatomy", replaced("ribbon()", "1"), "not the ribbon"),
    ("guess_is_tagged", tagged("predict", "other"), "are tagged predict"),
    ("guess_is_tagged", code("1", tags=("predict",)), "are tagged predict"),
    ("has_a_live_picture", replaced("token_flow(trace)", "print(trace)"), "no cell shows a live picture"),
    ("has_a_live_picture", replaced("One thing to look at", "Look"), "one thing to look at"),
    ("breaks_it", rewritten(r"(?i)\bbreak it\b", "change it"), "nothing is broken"),
    ("ends_with_contract_and_questions", replaced("In → out", "From that to"), "the layout contract"),
    ("ends_with_contract_and_questions", rewritten(r"(?i)\bsimplified\b", "today"), "`simplified`"),
    ("ends_with_contract_and_questions", replaced("vLLM adds", "vLLM has"), "what vLLM adds"),
    ("ends_with_contract_and_questions", rewritten(r"(<summary>3\..*)\?</summary>", r"\1</summary>"), "have 2 quick"),
    (
        "ends_with_contract_and_questions",
        rewritten(r"(3\..*</summary>).*</details>", r"\1</details>"),
        "have 2 quick",
    ),
    ("every_exercise_has_its_place", tagged("exercise:0.1", "other"), "has exercises [], its checks are ['0.1']"),
    ("every_exercise_has_its_place", tagged("note:scope", "exercise:0.2"), "['0.2', '0.1'], its checks are ['0.1']"),
    ("exercises_are_complete", rewritten("(## Exercise 0.1).*", r"\1"), "its heading is not"),
    ("exercises_are_complete", rewritten(r"●○○ (\d+ min)", r"○●○ \1"), "its heading is not"),
    ("exercises_are_complete", replaced("```text\ncombine_rows(", "```text\ncombine("), "`combine_rows(…) -> …`"),
    ("exercises_are_complete", replaced(") -> [T] int64", ")"), "`combine_rows(…) -> …`"),
    ("exercises_are_complete", replaced("[T]", "T"), "no text block has shapes"),
    ("exercises_are_complete", rewritten("Hint 3.*</summary>", "More</summary>"), "2 hints, wanted 3"),
    ("exercises_are_complete", replaced('check.reveal("combine_rows")', "the package"), "nothing says check.reveal"),
    ("exercises_are_complete", replaced("check.keep(", "keep("), "nothing says check.keep"),
    ("exercises_are_complete", tagged("stub", "exercise:0.1"), "is tagged exercise:0.1 and stub"),
    ("exercises_are_complete", tagged("check", "check"), "is tagged exercise:0.1 and check"),
    ("exercises_are_complete", behind("stub", "## Another heading"), "is tagged exercise:0.1 and check"),
    ("exercises_are_complete", replaced("def combine_rows(", "def add("), "its stub defines add"),
    ("exercises_are_complete", rewritten("#.*repair me.*", ""), "its stub neither raises"),
    ("exercises_are_complete", replaced("check.combine_rows(", "print("), "check.combine_rows(combine_rows)"),
    (
        "nothing_is_retyped",
        code("def grouped_topk(scores, k):\n    return 1"),
        "call it naive_grouped_topk or my_grouped_topk",
    ),
    ("nothing_is_retyped", code("def f(:"), "not Python, line 1"),
    ("nothing_is_retyped", code(RETYPED), "best_rows repeats moe_course.expert_map.determine_expert_map"),
    (
        "names_in_prose_exist",
        prose("See `moe_course.router.no_such_function`."),
        "no moe_course.router.no_such_function",
    ),
]
#: Rules about what storing removes: broken by writing the file past `make notebooks`.
UNSTORED = [
    (
        "kernel_is_python3",
        lambda content: content["metadata"]["kernelspec"].update(name="conda-env-moe-py"),
        "conda-env",
    ),
    ("no_widget_state", lambda content: content["metadata"].update(widgets={}), "metadata.widgets"),
    ("no_widget_state", code("1", shown(**{"application__vnd.jupyter.widget-view+json": "{}"})), "widget-view"),
    ("is_normalised", lambda content: content["cells"][0]["metadata"].update(collapsed=True), "make notebooks"),
    ("is_normalised", lambda content: content["metadata"]["language_info"].update(version="3.11.7"), "make notebooks"),
]


def test_other_code_under_a_name_of_its_own_is_no_copy():
    other = "def naive_grouped_topk(scores, k):\n    return 1\n\ndef combine_two(a, b):\n    return a + b"
    assert verdicts(GOOD.changed(code(other))) == {}


def verdicts(notebook: Notebook) -> dict[str, list[str]]:
    return {rule.__name__: found for rule in RULES if (found := rule(notebook))}


@pytest.mark.parametrize(("rule", "change", "message"), BROKEN, ids=[f"{b[0]}-{i}" for i, b in enumerate(BROKEN)])
def test_rule_catches_a_notebook_that_breaks_it(rule, change, message):
    found = verdicts(GOOD.changed(change))
    assert any(message in line for line in found.get(rule, [])), found


@pytest.mark.parametrize(("rule", "change", "message"), UNSTORED, ids=[f"{b[0]}-{i}" for i, b in enumerate(UNSTORED)])
def test_rule_catches_a_file_that_was_not_normalised(rule, change, message):
    content = json.loads(GOOD.text)
    change(content)
    text = json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    found = verdicts(Notebook.parse(GOOD.name, text))
    assert any(message in line for line in found.get(rule, [])), found


def test_every_rule_has_a_notebook_that_breaks_it():
    assert {rule.__name__ for rule in RULES} == {name for name, _, _ in (*BROKEN, *UNSTORED)}


def test_outputs_that_look_like_trouble_and_are_not():
    fine = "\n".join(
        [
            "16 sparse layers, 3 spare rows, 8 choices",
            "weights add up to 2.500, scale 2.5, 1 of 8 elsewhere, ratio 3.2",
            "shape [3, 2] and [T, K], a1 / a1q, TP x PCP / DP",
            "1:30 is a slice, moe_course.expert_map is a name",
        ]
    )
    assert verdicts(GOOD.changed(code("1", printed(fine)))) == {}
