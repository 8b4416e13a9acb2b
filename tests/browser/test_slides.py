"""Every slide of every deck, from disk: nothing overflows, nothing is fetched, the player plays, notes are there.

Each fault that is looked for is put into a deck once, to see that it is found.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from moe_course.lessons.slides import deck as decks
from moe_course.lessons.slides import page as pages
from moe_course.lessons.slides import pdf, tools
from moe_course.lessons.slides.errors import SlidesError

ROOT = Path(__file__).parents[2]
SLIDES = ROOT / "slides"
DECKS = sorted(SLIDES.glob("[0-9]*.md"))
pytestmark = pytest.mark.browser

# What reaches beyond the slide or over its foot line, in the slide's own pixels. Hidden slides have no size, so the
# slide must be the current one. What a scrolling box hides does not count; the box does.
OVERFLOW = """() => {
  const {width, height} = Reveal.getConfig(), scale = Reveal.getScale();
  const edge = document.querySelector(".reveal .slides").getBoundingClientRect();
  const slide = Reveal.getCurrentSlide(), foot = slide.querySelector(".sources");
  const scrolls = (e) => /auto|scroll/.test(getComputedStyle(e).overflowY) && e.scrollHeight > e.clientHeight;
  const floor = foot ? (foot.getBoundingClientRect().top - edge.top) / scale : height;
  const inkOf = (text) => {  // a line that does not fit is wider than its box
    const range = document.createRange();
    range.selectNode(text);
    return range.getBoundingClientRect();
  };
  const found = [];
  for (const element of slide.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || element.closest("aside.notes, .unseen, .mc-hidden")) continue;
    if (element === foot || foot?.contains(element) || element.matches(".slide")) continue;
    let inside = false;
    for (let e = element.parentElement; e && e !== slide; e = e.parentElement) inside ||= scrolls(e);
    if (inside) continue;
    const boxes = [box, ...[...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map(inkOf)];
    const bottom = (Math.max(...boxes.map((b) => b.bottom)) - edge.top) / scale;
    const right = (Math.max(...boxes.map((b) => b.right)) - edge.left) / scale;
    if (bottom > floor + 0.5) found.push(`${Math.round(bottom - floor)} px too low: ${element.tagName}`);
    if (right > width + 0.5) found.push(`${Math.round(right - width)} px too far right: ${element.tagName}`);
  }
  return found;
}"""
AXE = """async () => (await axe.run(Reveal.getCurrentSlide(), {resultTypes: ["violations"]})).violations
  .filter((v) => ["serious", "critical"].includes(v.impact))
  .map((v) => `axe ${v.id}: ${v.nodes[0].html.slice(0, 120)}`)"""


@pytest.fixture(scope="module")
def reveal():
    """The folder of reveal.js. Without npm, or where it reaches no registry, there is none."""
    try:
        return tools.reveal(SLIDES)
    except SlidesError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def build(reveal):
    """`build(source, folder)`: the deck `source` as HTML in `folder`."""

    def made(source: Path, folder: Path) -> Path:
        read = decks.read(source, ROOT / "notebooks")
        html = folder / f"{read.name}.html"
        html.write_text(pages.page(read, SLIDES, reveal))
        return html

    return made


@pytest.fixture(scope="module")
def built(build, tmp_path_factory):
    """`built(name)`: that deck as HTML, made once."""
    folder = tmp_path_factory.mktemp("decks")
    return cache(lambda name: build(SLIDES / f"{name}.md", folder))


@pytest.fixture
def screen(page):
    """A page of the size of a slide."""
    page.set_viewport_size({"width": 1280, "height": 720})
    page.fetched = []
    page.on("request", lambda request: page.fetched.append(request.url))
    return page


def show(screen, html: Path, query: str = "") -> None:
    screen.goto(html.as_uri() + query)
    screen.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)


def faults(screen, html: Path) -> list[str]:
    """Visit every slide, show all its fragments, and say what is wrong with it."""
    show(screen, html)
    screen.add_script_tag(path=SLIDES / "node_modules" / "axe-core" / "axe.min.js")
    found = []
    for number in range(screen.evaluate("Reveal.getTotalSlides()")):
        screen.evaluate("(number) => { Reveal.slide(number); while (Reveal.nextFragment()); }", number)
        screen.evaluate("() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
        seen = screen.evaluate(OVERFLOW)[:3] + screen.evaluate(AXE)
        notes = screen.evaluate("Reveal.getCurrentSlide().querySelector('aside.notes')?.textContent ?? ''")
        if not re.match(r"\d+ min of \d+\.\s+\S", notes):
            seen.append("no notes with a time")
        found += [f"slide {number + 1}: {what}" for what in seen]
    found += [f"console: {error}" for error in screen.errors]
    found += [f"fetched: {url}" for url in screen.fetched if not url.startswith((html.as_uri(), "data:", "blob:"))]
    return found


@pytest.mark.parametrize("name", [path.stem for path in DECKS])
def test_every_slide_is_whole_quiet_and_readable(screen, built, name):
    assert faults(screen, built(name)) == []


@pytest.mark.parametrize("size", [(1920, 1080), (1024, 768)], ids=str)
def test_nothing_overflows_on_other_screens(screen, built, size):
    screen.set_viewport_size({"width": size[0], "height": size[1]})
    assert faults(screen, built("07_dispatch")) == []


SMALL = """---
notebook: 07_dispatch
---

<!-- class: title -->
# 07 · Dispatch: bring the rows to the experts

Note: 2 min. Say hello.

---

# This slide is fine until something is added

{}

Note: 3 min. Say more.
"""
MUTANTS = {
    "22 bullets": ("- one more point\n" * 22, "px too low: LI"),
    "text over the foot line": ('[12](nb:07 "sent, # arrived")\n' + "\nmore text\n" * 8, "px too low: P"),
    "a wide line": (f"<pre>{'wide ' * 60}</pre>", "too far right: PRE"),
    "an image from outside": ("![x](http://127.0.0.1:9/x.png)", "fetched: http://127.0.0.1:9/x.png"),
    "a script that fails": ("<script>none.such()</script>", "console: none is not defined"),
    "an image without words": ('<img src="data:,">', "axe image-alt"),
    "grey on white": ('<p style="color: #aaa">pale</p>', "axe color-contrast"),
}


@pytest.fixture
def small(build, tmp_path):
    """`small(added)`: a deck of two slides, `added` in the second."""

    def made(added: str) -> Path:
        (tmp_path / "small.md").write_text(SMALL.format(added))
        return build(tmp_path / "small.md", tmp_path)

    return made


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_fault_is_found(screen, small, mutant):
    added, message = MUTANTS[mutant]
    found = faults(screen, small(added))
    assert any(message in fault for fault in found), found
    assert all(fault.startswith(("slide 2: ", "console: ", "fetched: ")) for fault in found), found


def test_a_small_deck_without_fault_is_let_through(screen, small):
    assert faults(screen, small("- one point")) == []


def test_notes_that_are_gone_are_missed(screen, small, tmp_path):
    text = small("").read_text()
    (tmp_path / "mute.html").write_text(re.sub(r'<aside class="notes">.*?</aside>', "", text, count=1, flags=re.S))
    assert faults(screen, tmp_path / "mute.html") == ["slide 1: no notes with a time"]


@pytest.mark.parametrize("name", ["00_overview", "07_dispatch"])
def test_the_player_plays_in_the_deck_and_keeps_its_place(screen, built, name):
    show(screen, built(name))
    slide = screen.evaluate("Reveal.getSlides().findIndex((s) => s.querySelector('.player'))")
    assert screen.locator(".player .live > *").count() == (1 if slide == 0 else 0), "it waits until its slide is shown"
    screen.evaluate("(slide) => Reveal.slide(slide)", slide)
    player = screen.locator(".player [data-phase]")
    first = player.get_attribute("data-phase")
    player.get_by_role("button", name=re.compile("Play")).click()
    screen.wait_for_function(
        "(first) => document.querySelector('.player [data-phase]').dataset.phase !== first", arg=first
    )
    screen.evaluate("(slide) => Reveal.slide(slide + 1)", slide)
    assert screen.locator(".player .live > *").count() == 0, "it stops when its slide is left"
    screen.evaluate("(slide) => Reveal.slide(slide)", slide)
    assert player.get_attribute("data-phase") != first
    assert screen.errors == []


def test_keys_of_the_player_do_not_turn_the_slide(screen, built):
    show(screen, built("00_overview"))
    slide = screen.evaluate("Reveal.getSlides().findIndex((s) => s.querySelector('.player'))")
    screen.evaluate("(slide) => Reveal.slide(slide)", slide)
    screen.locator(".player [data-phase]").focus()
    screen.keyboard.press("ArrowRight")
    assert screen.evaluate("Reveal.getIndices().h") == slide
    screen.evaluate("document.activeElement.blur()")
    screen.keyboard.press("ArrowRight")
    assert screen.evaluate("Reveal.getIndices().h") == slide + 1


def test_the_speaker_sees_notes(screen, built):
    show(screen, built("00_overview"))
    with screen.expect_popup() as opened:
        screen.keyboard.press("s")
    notes = opened.value.locator(".speaker-controls-notes .value")
    notes.wait_for(state="attached")
    opened.value.wait_for_function(
        "document.querySelector('.speaker-controls-notes .value').textContent.includes(' min of ')"
    )


def test_on_paper_the_player_is_still_and_nothing_is_hidden(screen, built):
    show(screen, built("00_overview"), "?print-pdf")
    assert screen.locator(".pdf-page").count() == screen.evaluate("Reveal.getSlides().length")
    assert screen.locator(".player .live").evaluate("(e) => getComputedStyle(e).display") == "none"
    assert screen.locator(".player .still").evaluate(
        "(e) => e.getBoundingClientRect().height > 200 && e.naturalWidth > 600"
    )
    hidden = "[...document.querySelectorAll('.fragment')].filter((e) => getComputedStyle(e).opacity === '0').length"
    assert screen.evaluate(hidden) == 0


def test_a_deck_is_printed_twice_into_the_same_bytes(small, tmp_path):
    """In a thread of its own: playwright allows one driver per thread."""
    html = small("- one point")
    with ThreadPoolExecutor(1) as thread:
        for name in ("one.pdf", "two.pdf"):
            thread.submit(pdf.write, html, tmp_path / name, "0123456789abcdef").result()
    one, two = ((tmp_path / name).read_bytes() for name in ("one.pdf", "two.pdf"))
    assert one == two and len(re.findall(rb"/Type /Page\b", one)) == 2
    assert pdf.digest_of(tmp_path / "one.pdf") == "0123456789abcdef"
