"""One server and one browser for all browser tests. Without chromium or playwright they are skipped, with the cure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from prompts import NEW_TOKENS, PROMPTS

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
CURE = "`make setup` brings playwright, `apt install chromium fonts-dejavu-core` the browser"


def missing() -> str | None:
    """What browser tests lack on this machine, or None."""
    if importlib.util.find_spec("playwright") is None:
        return f"playwright is not installed; {CURE}"
    return None if Path("/usr/bin/chromium").exists() else f"no /usr/bin/chromium; {CURE}"


def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in Path(item.path).parents]
    for item in here:
        item.add_marker(pytest.mark.browser)
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


@pytest.fixture(scope="session")
def watched(chromium):
    """`watched(*ours)`: a page that remembers what must not be: console errors, dialogs, and requests for URLs that
    begin with none of `ours`, as `page.errors` and `page.external`."""
    contexts = []

    def make(*ours: str):
        contexts.append(chromium.new_context(viewport={"width": 1280, "height": 1000}))
        page = contexts[-1].new_page()
        page.errors, page.external = [], []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.errors.append(message.text))
        page.on("dialog", lambda dialog: (page.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(ours) or page.external.append(request.url))
        return page

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def page(watched):
    """A page that may ask for files and for what is on this machine."""
    opened = watched("http://127.0.0.1:", "file:", "data:", "blob:", "about:")
    yield opened
    opened.context.close()


@pytest.fixture(scope="session")
def axe():
    """The text of axe-core, from where the slides have it. Without npm, or where npm reaches nothing, there is none."""
    from moe_course.lessons.slides import tools
    from moe_course.lessons.slides.errors import SlidesError

    try:
        modules = tools.reveal(REPOSITORY / "slides").parent
    except SlidesError as error:
        pytest.skip(str(error))
    return (modules / "axe-core" / "axe.min.js").read_text()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Folder of a real run: four ranks, four prompts, one of them hostile, sixteen new tokens each."""
    from moe_course.launch import launch

    sys.path.append(str(HERE.parent / "run"))
    from warm import warm_starts

    folder = tmp_path_factory.mktemp("recorded") / "trace"
    options = [f"--max-new-tokens={NEW_TOKENS}", f"--trace={folder}", "--device=cpu"]
    with warm_starts():
        run = launch([*(f"--prompt={prompt}" for prompt in PROMPTS), *options], 4)
    assert run.returncode == 0, run.error
    return folder
