"""Notebook 13 in a browser, from its first cell to its last; and what is left of runs that are not let finish."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import urllib.request
from pathlib import Path

import checks
import nbformat
import pytest
from desk import Desk, frames, open_desk
from lab import command, open_notebook, shut_down, wait_until_idle

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHOTS = os.environ.get("MOE_COURSE_SHOTS")
NAME = "13_the_real_run.ipynb"
pytestmark = pytest.mark.browser
# Every value that a progress bar of the page has had, in order.
_WATCH = """() => {
  window.progress = [];
  setInterval(() => {
    for (const bar of document.querySelectorAll(".jp-OutputArea .progress-bar")) {
      if (window.progress.at(-1) !== bar.style.width) window.progress.push(bar.style.width);
    }
  }, 30);
}"""
_CELLS = """() => window.jupyterapp.shell.currentWidget.content.widgets.map(({model}) => ({
  type: model.type, count: model.executionCount, tags: model.getMetadata("tags") ?? [],
  outputs: model.type === "code" ? model.outputs.toJSON() : [],
}))"""
_HEIGHT = "() => window.jupyterapp.shell.currentWidget.content.viewportNode.scrollHeight"
#: A run whose second rank stops at its second token and waits: whoever is to be interrupted is still there.
_LONG = """from moe_course.lessons import run_live
run_live(["--prompt=x = ", "--device=cpu", "--fault=sleep@rank=1,layer=1,step=1", "--timeout=100"], 2)"""


@pytest.fixture
def lab_page(watched, lab):
    page = watched(lab.base, lab.base.replace("http", "ws"), "data:", "blob:")
    yield page
    if not page.is_closed():
        shut_down(page)
        page.context.close()


@pytest.mark.timeout(900)
def test_the_real_run_from_first_cell_to_last(lab_page, lab, axe):
    page = lab_page
    notebook = nbformat.read(NOTEBOOKS / NAME, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    nbformat.write(notebook, lab.root / NAME)
    open_notebook(page, lab, NAME)
    page.errors.clear()
    page.evaluate(_WATCH)
    command(page, "notebook:run-all-cells")
    wait_until_idle(page, 600)

    cells = [cell for cell in page.evaluate(_CELLS) if cell["type"] == "code"]
    assert all(cell["count"] for cell in cells), "every cell has run"
    for cell in cells:
        failed = [output for output in cell["outputs"] if output["output_type"] == "error"]
        assert not failed or "raises-exception" in cell["tags"], failed[0]["traceback"]
    widths = [float(width.rstrip("%")) for width in page.evaluate("window.progress") if width]
    assert len(set(widths)) >= 5 and widths[0] < 50 and max(widths) == 100, widths

    player = page.locator(".mc-token-flow")
    assert checks.drawn(player) + checks.accessible(player, axe) == []
    player.locator(".mc-stage").focus()
    page.keyboard.press("End")
    assert player.get_attribute("data-phase") == "done"
    assert lab.wait_until_gone() == {}
    if SHOTS:
        _photograph(page, lab)
    assert checks.quiet(page) == []


def _photograph(page, lab) -> None:
    """The whole notebook, light and dark."""
    page.set_viewport_size({"width": 1280, "height": page.evaluate(_HEIGHT) + 400})
    frames(page, 10)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.content.outerNode.scrollTo(0, 0)")
    frames(page, 10)
    page.screenshot(path=f"{SHOTS}/13_light.png")
    with Desk(page, lab).dark():
        frames(page, 10)
        page.screenshot(path=f"{SHOTS}/13_dark.png")


def _start(desk: Desk, source: str) -> None:
    """Start a cell, do not wait for its end, but until its ranks are there."""
    desk.page.evaluate(
        """(source) => {
          const notebook = window.jupyterapp.shell.currentWidget.content;
          notebook.activeCellIndex = 0;
          notebook.activeCell.model.sharedModel.setSource(source);
          window.jupyterapp.commands.execute("notebook:run-cell");
        }""",
        source,
    )
    deadline = time.monotonic() + 60
    while sum("-m moe_course.run" in text for text in desk.lab.started_by_kernels().values()) < 3:  # torchrun and two
        assert time.monotonic() < deadline, desk.lab.started_by_kernels()
        time.sleep(0.05)


@pytest.fixture
def desk(lab_page, lab):
    return open_desk(lab_page, lab, "runs.ipynb", "")


def test_a_failing_rank_is_named_in_the_cell(desk):
    desk.run(
        "from moe_course.lessons import run_live\n"
        'run_live(["--prompt=x = ", "--device=cpu", "--fault=raise@rank=1,layer=1,stage=experts"], 2)',
        0,
    )
    shown = desk.cell(0).inner_text()
    assert re.search(r"error: rank 1\b.*layer 1", shown), shown
    assert "failed" in shown
    assert desk.lab.wait_until_gone() == {}


def test_an_interrupt_ends_all_ranks(desk):
    _start(desk, _LONG)
    desk.page.wait_for_selector("text=token 2 of", timeout=120_000)
    command(desk.page, "notebook:interrupt-kernel")
    assert desk.lab.wait_until_gone(10) == {}
    desk.page.wait_for_selector("text=/KeyboardInterrupt/", timeout=20_000)
    shown = desk.cell(0).inner_text()
    assert "KeyboardInterrupt" in shown and "stopped, all ranks were ended" in shown, shown


def test_a_restart_of_the_kernel_ends_all_ranks(desk):
    _start(desk, _LONG)
    desk.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    assert desk.lab.wait_until_gone(10) == {}


def test_closing_and_shutting_down_ends_all_ranks_and_the_kernel(desk):
    _start(desk, _LONG)
    desk.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:close-and-shutdown') }")
    desk.page.locator(".jp-Dialog .jp-mod-accept").click()
    assert desk.lab.wait_until_gone(10, kernels=True) == {}


def test_a_run_whose_page_is_closed_comes_to_its_end(desk, lab):
    """The kernel lives on without a page, as JupyterLab has it; its ranks end with their run."""
    done = lab.root / "done.txt"
    _start(
        desk,
        "from pathlib import Path\nfrom moe_course.lessons import run_live\n"
        f'run = run_live(["--prompt=x = ", "--device=cpu", "--max-new-tokens=4"], 2)\n'
        f"Path({str(done)!r}).write_text(run.result['verdict'])",
    )
    desk.page.context.close()
    assert lab.wait_until_gone(120) == {}
    deadline = time.monotonic() + 10
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done.read_text() == "not checked"
    for session in json.loads(_ask(lab, "GET", "sessions")):
        _ask(lab, "DELETE", f"sessions/{session['id']}")
    assert lab.wait_until_gone(10, kernels=True) == {}


def _ask(lab, method: str, path: str) -> bytes:
    request = urllib.request.Request(f"{lab.base}/api/{path}", method=method)
    request.add_header("Authorization", f"token {lab.token}")
    return urllib.request.urlopen(request, timeout=20).read()


@pytest.mark.parametrize("notebook", [path.name for path in sorted(NOTEBOOKS.glob("*.ipynb"))])
def test_a_notebook_that_was_only_opened_shows_images(lab_page, lab, notebook):
    """A fresh copy is not trusted: no widget of it is shown, and the still image is."""
    cells = nbformat.read(NOTEBOOKS / notebook, as_version=4).cells
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    pictures = sum("image/png" in bundle for bundle in data)
    shutil.copy(NOTEBOOKS / notebook, lab.root / f"fresh_{notebook}")
    open_notebook(lab_page, lab, f"fresh_{notebook}", kernel=False)
    images = lab_page.locator(".jp-RenderedImage img")
    lab_page.wait_for_function(
        "(n) => document.querySelectorAll('.jp-RenderedImage img').length === n", arg=pictures, timeout=20_000
    )
    assert all(images.evaluate_all("(all) => all.map((image) => image.naturalWidth > 300)"))
    assert lab_page.locator(".moe-course, .jupyter-widgets-disconnected").count() == 0
    wait_until_idle(lab_page)
