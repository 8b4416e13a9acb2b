"""A notebook in JupyterLab that a test works with: its last two cells are run again and again, the others stay."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import nbformat
from lab import Lab, command, open_notebook, wait_until_idle
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, Page

QUESTION, STAGE = -1, -2
_PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"
# The outputs of a cell after its source was run.
_RUN = """async ([place, source]) => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  const cell = notebook.widgets.at(place);
  notebook.deselectAll();
  notebook.activeCellIndex = notebook.widgets.indexOf(cell);
  if (source !== null) cell.model.sharedModel.setSource(source);
  await window.jupyterapp.commands.execute("notebook:run-cell");
  return cell.model.outputs.toJSON();
}"""
_OUTPUTS = "(place) => window.jupyterapp.shell.currentWidget.content.widgets.at(place).model.outputs.toJSON()"
# JupyterLab covers itself while a theme loads, and the cover fades.
_THEMED = """(light) => document.body.dataset.jpThemeLight === light && !document.querySelector("#jupyterlab-splash")"""
# What JupyterLab's own keys would change.
_STANCE = """() => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  return {cells: notebook.widgets.length, active: notebook.activeCellIndex, mode: notebook.mode,
          kinds: notebook.widgets.map((cell) => cell.model.type).join(), scrolled: notebook.outerNode.scrollTop};
}"""


@dataclass(frozen=True)
class Desk:
    """An open notebook. Its last cell is for questions, so they are asked in a later cell than the pictures'; the one
    before is for pictures of a single test."""

    page: Page
    lab: Lab

    def run(self, source: str | None = None, place: int = QUESTION) -> list[dict]:
        """Run a cell, with another source if one is given; its outputs as JSON. Raises AssertionError if it fails."""
        outputs = self.page.evaluate(_RUN, [place, source])
        failed = [output for output in outputs if output["output_type"] == "error"]
        assert not failed, f"{failed[0]['ename']}: {failed[0]['evalue']}"
        return outputs

    def outputs(self, place: int = QUESTION) -> list[dict]:
        return self.page.evaluate(_OUTPUTS, place)

    def printed(self, place: int = QUESTION) -> str:
        return "".join(output["text"] for output in self.outputs(place) if output["output_type"] == "stream")

    def value(self, expression: str) -> Any:
        """A value of the kernel, as JSON has it."""
        self.run(f"import json; print(json.dumps({expression}))")
        return json.loads(self.printed())

    def becomes(self, expression: str, wanted: Any, seconds: float = 10) -> Any:
        """The value of the kernel once it is `wanted`, or the last one after `seconds`."""
        deadline = time.monotonic() + seconds
        while (value := self.value(expression)) != wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        return value

    def cell(self, place: int = QUESTION) -> Locator:
        """A cell, scrolled to."""
        script = "(place) => window.jupyterapp.shell.currentWidget.content.widgets.at(place).node.scrollIntoView()"
        self.page.evaluate(script, place)
        return self.page.locator(f"{_PANEL} .jp-Cell").nth(place)

    def stance(self) -> dict[str, Any]:
        """Cells, active cell, mode and place: what a key of JupyterLab would change."""
        return self.page.evaluate(_STANCE)

    @contextlib.contextmanager
    def dark(self) -> Iterator[None]:
        self._theme("JupyterLab Dark", "false")
        try:
            yield
        finally:
            self._theme("JupyterLab Light", "true")

    def _theme(self, name: str, light: str) -> None:
        command(self.page, "apputils:change-theme", theme=name)
        self.page.wait_for_function(_THEMED, arg=light)
        frames(self.page)


def frames(page: Page, number: int = 3) -> None:
    """Let the page draw."""
    page.evaluate(
        "async (n) => { while (n--) await new Promise((go) => requestAnimationFrame(go)); }",
        number,
    )


def write_notebook(lab: Lab, name: str, *cells: str) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}  # else Lab asks
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=kernel), lab.root / name)


def open_desk(page: Page, lab: Lab, name: str, *cells: str) -> Desk:
    """Write a notebook of these code cells and two empty ones, open it, and forget what JupyterLab said meanwhile."""
    write_notebook(lab, name, *cells, "", "")
    open_notebook(page, lab, name)
    wait_until_idle(page)
    page.errors.clear()
    return Desk(page, lab)
