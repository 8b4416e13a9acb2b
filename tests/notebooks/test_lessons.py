"""What notebooks need from `lessons`, the notebook runner, and each notebook rule against a notebook that breaks it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from notebook_rules import NOTEBOOKS, RULES, Notebook

import moe_course.lessons as lessons
from moe_course.errors import ConfigError
from moe_course.expert_map import Placement, determine_expert_map
from moe_course.launch import RunResult
from moe_course.layer import MoELayer
from moe_course.lessons import notebooks as runner
from moe_course.lessons.environment import READY, NotReady

ENVIRONMENT, PROGRESS = sys.modules["moe_course.lessons.environment"], sys.modules["moe_course.lessons.progress"]


def test_importing_lessons_loads_nothing_heavy():
    heavy = ("torch", "transformers", "matplotlib", "IPython", "ipywidgets", "nbclient")
    program = f"import sys, moe_course.lessons; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# start


def test_start_prints_one_stable_line(capsys):
    lessons.start()
    assert capsys.readouterr().out == READY + "\n"


def test_start_names_a_missing_package_and_the_cure(monkeypatch):
    monkeypatch.setattr(ENVIRONMENT, "PACKAGES", ("torch", "no_such_package", "neither_this"))
    with pytest.raises(
        NotReady, match="not ready: no_such_package, neither_this not installed; cure: run `make setup`"
    ):
        lessons.start()


def test_start_names_a_torch_that_does_not_load(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libgomp is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    (problem,) = ENVIRONMENT.missing_packages()
    assert problem.startswith("torch does not load (libgomp is missing); cure: run `make setup`")


def test_start_names_missing_model_files(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(ENVIRONMENT, "TINY", tmp_path)
    with pytest.raises(NotReady, match="the tiny model lacks model.safetensors; cure: `git checkout"):
        lessons.start()


@pytest.mark.parametrize(
    "command", ["/no/such/python", shutil.which("false")], ids=["cannot-be-started", "never-calls-back"]
)
def test_start_names_processes_that_cannot_meet(monkeypatch, command):
    monkeypatch.setattr(ENVIRONMENT.sys, "executable", command)
    monkeypatch.setattr(ENVIRONMENT, "_WAIT_S", 0.2)
    (problem,) = ENVIRONMENT.missing_processes()
    assert "2 processes cannot meet" in problem and "cure: allow new processes" in problem


def test_not_ready_has_no_traceback_and_a_line_for_each_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(ENVIRONMENT, "TINY", tmp_path)
    monkeypatch.setattr(ENVIRONMENT, "PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(NotReady) as caught:
        lessons.start()
    lines = caught.value._render_traceback_()
    assert len(lines) == 2 and all(line.startswith("not ready: ") and "cure: " in line for line in lines)


def test_start_tells_that_widgets_are_missing(monkeypatch, capsys):
    real = ENVIRONMENT.importlib.util.find_spec
    monkeypatch.setattr(
        ENVIRONMENT.importlib.util, "find_spec", lambda name: name != "ipywidgets" and real(name) or None
    )
    lessons.start()
    assert "ipywidgets is missing" in capsys.readouterr().out


# show


def test_show_prints_the_source_with_one_line_of_docstring(capsys):
    lessons.show(determine_expert_map)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["# moe_course.expert_map", "def determine_expert_map("]
    assert len(lines) <= 25
    assert '    """Number of experts on `ep_rank` and its map from global id to local row."""' in lines
    assert "Returns:" not in "".join(lines) and lines[-1] == "    return count, expert_map"


def test_show_prints_a_method_and_code_without_docstring(capsys):
    lessons.show(Placement.num_local)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "def num_local(self, rank: int) -> int:",
        "    return int((self.owner == rank).sum())",
    ]


@pytest.mark.parametrize("wrong", [print, "text", json.dumps, test_importing_lessons_loads_nothing_heavy], ids=repr)
def test_show_refuses_what_is_not_of_the_package(wrong):
    with pytest.raises(ConfigError, match="show prints functions and classes of moe_course"):
        lessons.show(wrong)


def test_show_refuses_long_source():
    with pytest.raises(ConfigError, match=r"MoELayer has \d+ lines, a cell shows 25; show a smaller function"):
        lessons.show(MoELayer)


# report


@pytest.mark.parametrize(
    ("guess", "answer", "said"),
    [
        (None, 60, "no guess yet; measured: 60."),
        (60, 60, "your guess 60 is right"),
        ((2, 11), (2, 11), "your guess (2, 11) is right"),
        (30, 60, "your guess 30 is 30 too few; measured: 60."),
        (61.5, 60, "your guess 61.5 is 1.5 too many; measured: 60."),
        ((2, 10), (2, 11), "your guess (2, 10) is not it; measured: (2, 11)."),
        (True, 60, "your guess True is not it"),
    ],
)
def test_report(capsys, guess, answer, said):
    lessons.report(guess, answer)
    assert capsys.readouterr().out.startswith(said)


# run_live

EVENTS = [
    {"event": "start", "rank": 0, "pid": 1},
    {"event": "start", "rank": 1, "pid": 2},
    {"event": "plan", "rank": 0},
    {"event": "loaded", "rank": 1},
    {"event": "loaded", "rank": 0},
    *({"event": "step", "rank": 0, "step": step, "steps": 3} for step in range(3)),
    {"event": "token", "rank": 0, "prompt": 0, "token": 10},
    {"event": "checking", "rank": 0},
]
PROMPT = {"prompt": "def f", "text": "():\n\treturn\x1b", "dp_rank": 1}


def launch_of(events, result):
    def launch(argv, world_size, on_event=None, timeout=600):
        for event in events:
            on_event(event)
        return result

    return launch


def test_progress_never_falls_and_ends_before_the_verdict():
    progress = PROGRESS.Progress(2)
    seen = [progress.after(event) for event in EVENTS]
    percents = [percent for percent, _ in seen]
    assert percents == sorted(percents) and percents[0] > 0 and percents[-1] == 95
    assert seen[4] == (50, "2 of 2 ranks loaded their experts") and seen[5] == (63, "token 1 of 3")


def test_run_live_without_a_front_end_prints_lines(monkeypatch, capsys):
    result = RunResult(0, None, {"prompts": [PROMPT]})
    monkeypatch.setattr(PROGRESS, "launch", launch_of(EVENTS, result))
    assert lessons.run_live(["--prompt=def f"], 2) is result
    assert capsys.readouterr().out.splitlines() == [
        "  5 % 1 of 2 ranks started",
        " 10 % 2 of 2 ranks started",
        " 30 % 1 of 2 ranks loaded their experts",
        " 50 % 2 of 2 ranks loaded their experts",
        " 90 % token 3 of 3",
        " 95 % comparing with the untouched one-process model",
        "100 % done",
        "prompt 0 on rank 1: 'def f' goes on with",
        "  │():",
        r"  │\treturn\x1b",
    ]


def test_run_live_prints_the_error_of_a_failed_run(monkeypatch, capsys):
    failed = RunResult(4, "error: rank 1: rows differ", None)
    monkeypatch.setattr(PROGRESS, "launch", launch_of(EVENTS[:2], failed))
    assert lessons.run_live([], 2) is failed
    assert capsys.readouterr().out.splitlines()[-2:] == [" 10 % failed", "error: rank 1: rows differ"]


FAKE_RUN = """
import sys
import moe_course.lessons
from moe_course.launch import RunResult
progress = sys.modules["moe_course.lessons.progress"]
def launch(argv, world_size, on_event=None, timeout=600):
    for event in EVENTS:
        on_event(event)
    return RunResult(0, None, {"prompts": [PROMPT]})
progress.launch = launch
run = moe_course.lessons.run_live([], 2)
""".replace("EVENTS", repr(EVENTS)).replace("PROMPT", repr(PROMPT))


def test_run_live_in_a_cell_moves_a_bar_and_stores_one_line(tmp_path):
    notebook = new_notebook(cells=[new_code_cell(FAKE_RUN)])
    client = NotebookClient(notebook, timeout=120, kernel_manager_class=runner.ThisPython, store_widget_state=True)
    client.execute(stderr=subprocess.DEVNULL, cwd=str(tmp_path))
    (state,) = notebook.metadata.widgets.values()
    models = [model["state"] for model in state["state"].values()]
    (bar,) = [model for model in models if model.get("_model_name") == "IntProgressModel"]
    (label,) = [model for model in models if model.get("_model_name") == "LabelModel"]
    assert (bar["value"], bar["bar_style"], label["value"]) == (100, "success", "done")
    shown, printed = runner.normalise(notebook).cells[0].outputs
    assert shown.data == {"text/plain": "[progress bar of a run on 2 ranks]"}
    assert printed.text.splitlines()[0] == "prompt 0 on rank 1: 'def f' goes on with"


REAL_RUN = """
from moe_course.lessons import run_live
run_live(["--prompt=a", "--max-new-tokens=397", "--device=cpu"], world_size=2)
"""


@pytest.mark.slow
def test_interrupting_the_cell_leaves_no_process():
    """The kernel's stop button, while the ranks start."""
    manager = runner.ThisPython(kernel_name="python3")

    def children() -> list[int]:
        found = subprocess.run(
            ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        return [int(line.split()[0]) for line in found if "moe_course.run" in line and "--max-new-tokens=397" in line]

    async def interrupt_when_running(cell, cell_index):
        import asyncio

        async def wait():
            while len(children()) < 3:  # torchrun and two ranks
                await asyncio.sleep(0.2)
            await manager.interrupt_kernel()

        asyncio.ensure_future(wait())

    notebook = new_notebook(cells=[new_code_cell(REAL_RUN, metadata={"tags": ["raises-exception"]})])
    client = NotebookClient(notebook, km=manager, timeout=200, on_cell_execute=interrupt_when_running)
    client.execute(stderr=subprocess.DEVNULL, cleanup_kc=True)
    assert notebook.cells[0].outputs[-1].ename == "KeyboardInterrupt"
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert children() == []


# the notebook runner


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


# every rule catches a notebook that breaks it

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
    """A change: put this text into a Markdown cell."""

    def change(content: dict) -> None:
        content["cells"][3]["source"] = text

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
    def change(content: dict) -> None:
        found = [cell for cell in content["cells"] if old in cell["source"]]
        assert found, f"nothing to break: {old}"
        for cell in found:
            cell["source"] = cell["source"].replace(old, new)

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
BROKEN = [
    ("number_of_cells", drop(9), "23 cells"),
    ("number_of_cells", lambda content: content["cells"].append(dict(content["cells"][3], id="more")), "33 cells"),
    ("code_cells_are_short", code("\n".join(f"x{i} = {i}" for i in range(26))), "26 lines of code"),
    ("code_cells_are_short", code(""), "0 lines of code"),
    ("prose_cells_are_short", prose("word " * 81), "81 words"),
    ("prose_cells_are_short", prose("| a |\n|---|\n" + "| b |\n" * 16), "table of 17 rows"),
    ("prose_cells_are_short", prose("| a |\n|---|\n| " + "b " * 17 + "|"), "long table cell"),
    ("prose_cells_are_short", prose("```text\n" + "x\n" * 26 + "```"), "long block"),
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


def verdicts(notebook: Notebook) -> dict[str, list[str]]:
    return {rule.__name__: rule(notebook) for rule in RULES if rule(notebook)}


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
