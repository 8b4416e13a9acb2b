"""One server and one browser for all browser tests. Without chromium or playwright they are skipped, with the cure."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
CURE = "`apt install chromium fonts-dejavu-core` and `make setup` bring both"


def missing() -> str | None:
    """What browser tests lack on this machine, or None."""
    if importlib.util.find_spec("playwright") is None:
        return f"playwright is not installed; {CURE}"
    return None if Path("/usr/bin/chromium").exists() else f"no /usr/bin/chromium; {CURE}"


def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in Path(item.path).parents]
    for item in here:
        item.add_marker(pytest.mark.browser)
        item.add_marker(pytest.mark.xdist_group("browser"))
        if missing():
            item.add_marker(pytest.mark.skip(reason=missing()))


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A JupyterLab on an empty folder."""
    from lab import jupyter_lab

    with jupyter_lab(tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture(scope="session")
def playwright():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def chromium(playwright):
    from lab import CHROME_ARGS, CHROMIUM

    browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=CHROME_ARGS)
    yield browser
    browser.close()


@pytest.fixture
def page(chromium):
    """A page that remembers what must not be: `page.errors` of the console, `page.external` requests."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1000})
    opened = context.new_page()
    opened.errors, opened.external = [], []
    opened.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.on("console", lambda message: message.type == "error" and opened.errors.append(message.text))
    opened.on("request", lambda request: _is_local(request.url) or opened.external.append(request.url))
    yield opened
    context.close()


def _is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "file:", "data:", "blob:", "about:"))


@pytest.fixture
def in_lab(page, lab):
    """`in_lab(name, *cells)`: write a notebook of these code cells, open it, run it; returns the page."""
    from lab import close_notebook, open_notebook, run_all

    def start(name: str, *cells: str):
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
        nbformat.write(notebook, lab.root / name)
        open_notebook(page, lab, name)
        run_all(page)
        return page

    yield start
    close_notebook(page)
