"""The page of a run, opened from disk: it asks for nothing, a prompt is text in it, and its pictures work together."""

from __future__ import annotations

import os

import checks
import pytest
from desk import frames
from prompts import HOSTILE, NEW_TOKENS, PROMPTS

from moe_course import cli
from moe_course.viz.page import as_data

SHOTS = os.environ.get("MOE_COURSE_SHOTS")
pytestmark = pytest.mark.browser
_FOCUSED = "document.activeElement.querySelector('code')?.textContent"


@pytest.fixture(scope="module")
def report(recorded, tmp_path_factory):
    """The file that the command line makes."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    assert cli.main(["report", str(recorded), "--out", str(file)]) == 0
    return file


def opened(watched, file):
    """A page of this file, when its pictures are there. A hostile one may stop before."""
    page = watched(file.as_uri())
    page.goto(file.as_uri())
    page.wait_for_load_state("load")
    return page


@pytest.fixture(scope="module")
def shared(watched, report):
    page = opened(watched, report)
    page.wait_for_selector(".mc-timeline canvas")
    yield page
    page.context.close()


@pytest.fixture
def page(shared):
    shared.errors.clear()
    shared.external.clear()
    return shared


def faults(page) -> list[str]:
    """What is wrong with a page of the hostile prompt."""
    found = checks.quiet(page)
    found += [f"an image of {src}" for src in page.locator("img").evaluate_all("(all) => all.map((e) => e.src)")]
    pictures = page.locator("[data-picture]")
    found += [] if pictures.count() == 3 else [f"{pictures.count()} pictures"]
    found += [fault for picture in pictures.all() for fault in checks.drawn(picture)]
    return found


def test_it_is_whole_and_quiet_and_small(watched, report):
    page = opened(watched, report)
    assert faults(page) == []
    page.context.close()
    assert len(PROMPTS) * NEW_TOKENS == 64 and report.stat().st_size <= 3_000_000


def test_the_hostile_prompt_is_text(page):
    line = page.get_by_role("toolbar", name="tokens of prompt 1")
    texts = line.locator("button code").all_text_contents()
    assert "".join(texts).replace("␣", " ").startswith(f"·start{HOSTILE}"), texts
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("broken", ["data", "text", "network"])
def test_a_page_that_is_not_whole_is_found(watched, report, tmp_path, broken):
    text = report.read_text()
    old, new, message = {
        "data": (as_data(HOSTILE)[1:-1], HOSTILE, "console:"),
        "text": ("<h2>The plan</h2>", f"<h2>{HOSTILE}</h2>", "console: dialog: 1"),
        "network": ("</head>", '<link rel="stylesheet" href="https://example.org/a.css"></head>', "request: https://"),
    }[broken]
    assert old in text
    file = tmp_path / "broken.html"
    file.write_text(text.replace(old, new))
    page = opened(watched, file)
    page.wait_for_timeout(300)  # for what happens behind the page's back
    found = faults(page)
    page.context.close()
    assert any(fault.startswith(message) for fault in found), found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_readable_and_axe_finds_nothing(page, axe, scheme):
    page.emulate_media(color_scheme=scheme)
    frames(page)
    found = []
    for picture in page.locator("[data-picture]").all():
        found += checks.readable(picture, scheme == "dark")
    found += checks.accessible(page.locator("html"), axe)
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/report_{scheme}.png", full_page=True)
    page.emulate_media(color_scheme="light")
    assert found + checks.quiet(page) == []


@pytest.mark.parametrize("width", [320, 375, 1280])
def test_it_does_not_scroll_sideways(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    frames(page)
    found = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert found <= width


def test_a_token_chosen_in_the_text_is_the_one_the_player_follows(page):
    player = page.locator("[data-picture=token_flow]")
    for prompt, place, row in ((2, 4, 4), (0, 1, 1)):
        page.get_by_role("toolbar", name=f"tokens of prompt {prompt}").get_by_role("button").nth(place).click()
        token = int(player.get_attribute("data-token"))
        told = player.evaluate(
            "(e, token) => e.querySelector('[aria-label=Token]').options[token + 1].textContent", token
        )
        assert told.endswith(f"rank {prompt}, row {row}"), told
        assert player.get_attribute("data-step") == "0"
    assert checks.quiet(page) == []


@pytest.mark.parametrize("before", ["at source", "dispatch", "combine"])
def test_a_token_chosen_in_the_text_shows_its_experts(page, before):
    """The player goes on to where they are seen, and stays where they are seen already."""
    player = page.locator("[data-picture=token_flow]")
    player.evaluate("(e, phase) => e.picture.set({phase, token: null})", before)
    page.set_viewport_size({"width": 1280, "height": 640})
    page.evaluate("scrollTo(0, 0)")
    page.get_by_role("toolbar", name="tokens of prompt 1").get_by_role("button").nth(3).click()
    assert player.get_attribute("data-phase") == ("combine" if before == "combine" else "experts")
    assert player.get_attribute("data-playing") == "false"
    told = player.locator(".mc-details p .mc-routed")
    assert "2 experts, weight" in told.inner_text() and told.is_visible()
    top, bottom = told.evaluate("(e) => { const {top, bottom} = e.getBoundingClientRect(); return [top, bottom]; }")
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert top >= 0 and bottom <= 640
    assert checks.quiet(page) == []


@pytest.mark.parametrize("width", [320, 1280])
def test_ranks_stay_in_sight_where_the_player_scrolls(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    frames(page)
    player = page.locator("[data-picture=token_flow]")
    for phase in ("at source", "experts"):
        player.evaluate("(e, phase) => e.picture.set({phase})", phase)
        names, stage = (player.locator(which).bounding_box() for which in (".mc-names", ".mc-stage"))
        scrolled = player.locator(".mc-stage").evaluate("(e) => e.scrollLeft")
        if width == 1280:
            assert names is None and scrolled == 0
        else:
            assert names["x"] == stage["x"] and (scrolled > 0) == (phase == "experts")
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert checks.quiet(page) == []


def test_arrows_walk_over_the_tokens(page):
    line = page.get_by_role("toolbar", name="tokens of prompt 0")
    line.get_by_role("button").first.focus()
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Home", "End", "End"):
        page.keyboard.press(key)
        seen.append(page.evaluate(_FOCUSED))
    texts = line.locator("button code").all_text_contents()
    assert seen == [texts[1], texts[2], texts[1], texts[0], texts[-1], texts[-1]]
    page.keyboard.press("Enter")
    assert page.locator("[data-picture=token_flow]").get_attribute("data-step") == str(NEW_TOKENS - 1)
    assert "position" in page.locator(".tt-detail").text_content()
    assert checks.quiet(page) == []
