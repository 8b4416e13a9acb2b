"""What every notebook needs from `lessons`: start, show, report, and a run that is followed live."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

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


@pytest.mark.parametrize(
    "wrong",
    [print, "text", json.dumps, test_importing_lessons_loads_nothing_heavy],
    ids=["builtin", "text", "of json", "of a test"],
)
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
