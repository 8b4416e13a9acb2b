"""Every picture in a real JupyterLab, and every check with a picture that was broken on purpose."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import checks
import pytest
from cases import PICTURES, START
from checks import View
from desk import STAGE, frames, open_desk
from lab import command, shut_down

REPOSITORY = Path(__file__).parents[2]
SHOTS = os.environ.get("MOE_COURSE_SHOTS")
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def shared_desk(watched, lab, recorded):
    """A notebook with one picture in a cell, each drawn once for all tests, and a last cell for what tests want."""
    page = watched(lab.base, lab.base.replace("http", "ws"), "data:", "blob:")
    cells = [f"{name}_ = {name}({case.arguments})\n{name}_" for name, case in PICTURES.items()]
    desk = open_desk(page, lab, "pictures.ipynb", START.replace("FOLDER", repr(str(recorded))), *cells)
    desk.run(place=0)
    for place, (name, case) in enumerate(PICTURES.items(), start=1):
        desk.run(place=place)
        page.wait_for_selector(f".{case.css} button", timeout=30_000)
        assert desk.page.errors == [], name
    yield desk
    shut_down(page)


@pytest.fixture
def desk(shared_desk):
    """The desk, with nothing remembered of earlier tests."""
    shared_desk.page.errors.clear()
    shared_desk.page.external.clear()
    return shared_desk


@pytest.fixture
def view(desk, request):
    """`view`: the picture that the test names, in its own cell."""
    name = request.param
    place = 1 + list(PICTURES).index(name)
    return View(desk, desk.cell(place).locator(f".{PICTURES[name].css}"), f"{name}_")


every_picture = pytest.mark.parametrize("view", PICTURES, indirect=True)


def case_of(view: View):
    return PICTURES[view.name.removesuffix("_")]


@every_picture
def test_it_is_drawn(view):
    assert checks.drawn(view.root) + checks.quiet(view.page) == []


@every_picture
def test_controls_reach_the_kernel_and_the_kernel_moves_the_picture(view):
    case = case_of(view)
    assert checks.reaches_kernel(view, case.act, case.chosen) == []
    assert checks.follows_kernel(view, case.told, case.shown) == []
    assert checks.quiet(view.page) == []


@every_picture
def test_keys_belong_to_the_picture(view):
    case = case_of(view)
    state, attributes = case.begin
    assert checks.follows_kernel(view, state, attributes) == []
    assert checks.keys(view, case.focus, case.presses) == []
    assert checks.quiet(view.page) == []


@every_picture
def test_reduced_motion_is_kept(view):
    assert checks.motionless(view.root) == []


@every_picture
def test_light_and_dark_are_readable_and_axe_finds_nothing(view, axe):
    found = []
    for dark in (False, True):
        with view.desk.dark() if dark else nullcontext():
            view.root.scroll_into_view_if_needed()
            frames(view.page)
            seen = checks.readable(view.root, dark) + checks.accessible(view.root, axe)
            found += [f"{'dark' if dark else 'light'}: {fault}" for fault in seen]
            if SHOTS:
                view.root.screenshot(path=f"{SHOTS}/{view.name}{'dark' if dark else 'light'}.png")
    assert found + checks.quiet(view.page) == []


@pytest.mark.parametrize("view", ["score_grid", "token_flow", "rank_timeline"], indirect=True)
def test_the_table_says_it_too(view, axe):
    button = view.root.get_by_role("button", name="as table")
    button.click()
    try:
        assert view.root.locator("table tbody tr").count() > 1
        assert checks.accessible(view.root, axe) == []
    finally:
        button.click()
    assert checks.drawn(view.root) == []


def test_a_hostile_prompt_is_text(desk, recorded):
    assert desk.page.locator("img[src='x']").count() == 0
    assert desk.value("token_flow_.data['prompts'][1]['text']").startswith("</script>")


def test_the_player_plays(desk):
    view = View(desk, desk.cell(3).locator(".mc-token-flow"), "token_flow_")
    assert checks.follows_kernel(view, {"phase": "at source"}, {"phase": "at source"}) == []
    view.root.locator(".mc-play").click()
    assert checks.shows(view.root, {"playing": "true"}) == []
    desk.page.wait_for_function("() => Number(document.querySelector('.mc-token-flow').dataset.fps) > 0")
    view.root.locator(".mc-play").click()
    assert view.root.get_attribute("data-phase") != "at source"
    assert checks.quiet(desk.page) == []


# What is broken in the module's text, the check that has to see it, and a part of what it says.
MUTANTS = {
    "a control without its handler": (
        "ribbon",
        ", onclick: () => choose(open === stage.name ? null : stage.name)",
        "",
        "reaches_kernel",
        "the kernel knows {'stage': 'router'}, chosen was",
    ),
    "a state that is not sent": ("score_grid", 'model.set("state", state);', "", "reaches_kernel", "the kernel knows"),
    "a picture deaf to the kernel": (
        "rank_timeline",
        'model.on("change:state", follow);',
        "",
        "follows_kernel",
        "it shows",
    ),
    "keys without their handler": (
        "token_flow",
        'root.addEventListener("keydown", key);',
        "",
        "keys",
        "ArrowRight: root.dataset.phase is 'at source', not 'router'",
    ),
    "keys that JupyterLab takes as well": (
        "token_flow",
        "ownKeys(root);",
        "",
        "keys",
        "JupyterLab: cells was",
    ),
    "reduced motion ignored": (
        "token_flow",
        'matchMedia("(prefers-reduced-motion: reduce)").matches',
        "false",
        "motionless",
        "it plays",
    ),
    "a module from outside": (
        "ribbon",
        "// The five stages",
        'import "https://example.org/x.js";\n// The five stages',
        "drawn",
        "request: https://example.org/x.js",
    ),
    "a file from outside": (
        "ribbon",
        "root.append(row, order, note);",
        'root.append(row, order, note); fetch("https://example.org/seen").catch(() => 0);',
        "drawn",
        "request: https://example.org/seen",
    ),
    "an error in the console": (
        "ribbon",
        "root.append(row, order, note);",
        'root.append(row, order, note); console.error("oh");',
        "drawn",
        "console: oh",
    ),
    "a canvas written on in black in a dark page": (
        "token_flow",
        'text: read("--mc-text", "#1b1b1b")',
        'text: "#1b1b1b"',
        "dark",
        "no text in the page's colour",
    ),
    "white ground in a dark page": (
        "ribbon",
        'root.classList.add("moe-course", "mc-ribbon");',
        'root.classList.add("moe-course", "mc-ribbon"); root.style.background = "#fff";',
        "dark",
        "the ground is (255, 255, 255) in a dark page",
    ),
    "a slider without a name": ("token_flow", ', "aria-label": "Time in this layer"', "", "accessible", "axe label"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_picture_is_found(desk, request, mutant):
    name, old, new, check, message = MUTANTS[mutant]
    case = PICTURES[name]
    desk.run(
        f"text = source({name!r})\nassert text.count({old!r}) == 1\n"
        f"Broken = type('Broken', ({case.cls},), {{'_esm': text.replace({old!r}, {new!r})}})\n"
        f"broken = Broken.of({case.arguments})\nbroken",
        STAGE,
    )
    cell = desk.cell(STAGE)
    root = cell.locator(f".{case.css}")
    if "import" not in new:
        root.locator("button").first.wait_for()
    view = View(desk, root, "broken")
    found = []
    if check == "drawn":
        desk.page.wait_for_timeout(300)
    elif check == "reaches_kernel":
        found = checks.reaches_kernel(view, case.act, case.chosen)
    elif check == "follows_kernel":
        found = checks.follows_kernel(view, case.told, case.shown)
    elif check == "keys":
        checks.follows_kernel(view, *case.begin)
        cells = desk.stance()["cells"]
        found = checks.keys(view, case.focus, case.presses)
        while desk.stance()["cells"] > cells:
            command(desk.page, "notebook:delete-cell")
    elif check == "motionless":
        found = checks.motionless(root)
    elif check == "accessible":
        found = checks.accessible(root, request.getfixturevalue("axe"))
    else:
        with desk.dark():
            found = checks.readable(root, dark=True)
    found += checks.quiet(desk.page)
    assert any(message in fault for fault in found), found
