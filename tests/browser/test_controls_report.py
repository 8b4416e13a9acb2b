"""The page of a run at work: its text, its text and player together, in any width, on paper."""

from __future__ import annotations

import checks
import pytest
from control_data import LONG, WEIGHTS, open_page, write_page

pytestmark = pytest.mark.browser
#: Counts what watches the page: observers, and those who want to hear of dark and light.
WATCHERS = """window.watching = 0;
for (const name of ["ResizeObserver", "MutationObserver"]) {
  window[name] = class extends window[name] {
    observe(...all) { this.on ??= (window.watching += 1); super.observe(...all); }
    disconnect() { if (this.on) window.watching -= 1; this.on = undefined; super.disconnect(); }
  };
}
const {addEventListener: add, removeEventListener: remove} = EventTarget.prototype;
MediaQueryList.prototype.addEventListener = function (...all) { window.watching += 1; add.apply(this, all); };
MediaQueryList.prototype.removeEventListener = function (...all) { window.watching -= 1; remove.apply(this, all); };"""


@pytest.fixture(scope="module")
def shared(watched, tmp_path_factory):
    opened = open_page(watched, write_page(tmp_path_factory.mktemp("controls_report")))
    yield opened
    opened.context.close()


@pytest.fixture
def on(shared):
    """`on(name)`: the root of a picture. Nothing may be complained about meanwhile."""
    yield lambda name: shared.locator(f"[data-picture={name}]")
    assert checks.quiet(shared) == []


def data(root, name: str) -> str:
    return root.get_attribute(f"data-{name}")


def pressed(text) -> list[str]:
    return [code[:3] for code in text.locator("[aria-pressed=true] code").all_text_contents()]


def chips(text) -> list[tuple[str, list[float]]]:
    """Of each token the digit and the widths of the parts of its bar."""
    found = text.locator(".tt-token").evaluate_all(
        "(all) => all.map((e) => [e.querySelector('small').lastChild.textContent,"
        " [...e.querySelectorAll('.tt-bar i')].map((i) => [Number(i.style.flexGrow), i.style.backgroundColor])])"
    )
    legend = text.locator(".tt-legend i").evaluate_all("(all) => all.map((e) => e.style.backgroundColor)")
    assert len(set(legend)) == 3 and all([colour for _, colour in bar] == legend for _, bar in found)
    return [(digit, [share for share, _ in bar]) for digit, bar in found]


def test_bars_and_digits_are_of_the_layer_that_is_chosen(on):
    text = on("token_text")
    assert text.locator(".tt-legend").all_text_contents() == ["rank 0", "rank 1", "rank 2"]
    for layer in (2, 1):
        text.get_by_label("Layer").select_option(str(layer))
        first, second = WEIGHTS[layer, 0], WEIGHTS[layer, 1]
        wanted = [*first[:2], second[0], *first[2:], second[1]]  # prompt by prompt
        assert chips(text) == [(str(shares.index(max(shares))), list(shares)) for shares in wanted]
        assert data(text, "layer") == data(on("token_flow"), "layer") == str(layer)


def test_text_and_player_show_one_choice(on):
    text, player = on("token_text"), on("token_flow")
    state = "(e) => ['step', 'layer', 'token', 'rank', 'expert'].map((name) => e.picture.get()[name])"
    detail = text.locator(".tt-detail")
    player.evaluate("(e) => e.picture.set({layer: 1, rank: 2, expert: 4})")
    text.locator(".tt-token").nth(2).evaluate("(e) => e.click()")  # no focus, which tells of a token, too
    assert player.evaluate(state) == [1, 1, 0, None, None] and pressed(text) == ["b"]
    experts = "rank 0: 0 (0.30); rank 1: 2 (0.60); rank 2: 4 (0.10)"
    assert detail.text_content() == f"\u2068b\u2069 at position 2, from rank 0. Experts (weight) on {experts}"
    player.get_by_label("Token", exact=True).select_option("1")
    assert pressed(text) == ["c"] and "from rank 1" in detail.text_content()
    player.get_by_label("Layer", exact=True).select_option("2")
    assert (data(text, "layer"), pressed(text)) == ("2", ["c"]) and "rank 0: 0 (0.80)" in detail.text_content()
    player.get_by_label("Step", exact=True).select_option("0")
    assert pressed(text) == [] and detail.text_content().startswith("Choose a token")
    text.locator(".tt-token").first.click()
    assert player.evaluate(state) == [0, 2, 0, None, None] and pressed(text) == ["·st"]
    text.get_by_label("Layer").select_option("1")
    assert player.evaluate(state) == [0, 1, 0, None, None] and pressed(text) == ["·st"]
    text.locator(".tt-token").first.click()  # a second time: it is let go
    assert player.evaluate(state) == [0, 1, None, None, None] and pressed(text) == []


def test_a_number_of_a_byte_stands_behind_its_letter_and_data_turns_nothing(on):
    chip = on("token_text").locator(".tt-token", has_text="ש")
    letter, number = chip.locator("code").evaluate(
        "(e) => [...e.childNodes].map((node) => { const range = new Range(); range.selectNodeContents(node);"
        " return range.getBoundingClientRect().left; })"
    )
    assert letter < number and chip.get_attribute("title").startswith("\u2068ש\u2069₁ at position 0, from rank 1.")
    assert "About the clocks: \u2068\\u202eevil\u2069." in on("rank_timeline").text_content()


@pytest.mark.parametrize("width", [320, 375, 1280])
def test_no_page_scrolls_sideways(shared, on, width):
    shared.set_viewport_size({"width": width, "height": 900})
    shared.wait_for_function("(w) => document.querySelector('.mc-lanes canvas').clientWidth <= w", arg=width)
    found = shared.evaluate("[document.documentElement.scrollWidth, document.querySelector('caption').clientWidth]")
    shared.set_viewport_size({"width": 1280, "height": 1000})
    assert max(found) <= width
    chip = on("token_text").locator(".tt-token", has_text="WWW")
    assert chip.locator("code").text_content() == "W" * 23 + "…" and LONG in chip.get_attribute("title")


def test_paper_is_light_and_keeps_what_colours_say(shared, on):
    shared.emulate_media(color_scheme="dark")
    marks = ".tt-bar i, .tt-legend i, .bar, .mc-swatch, .mc-scale"
    kept = shared.locator(marks).evaluate_all("(all) => all.map((e) => getComputedStyle(e).printColorAdjust)")
    look = """() => [document.documentElement.dataset.theme ?? "", document.querySelector("details").open,
      getComputedStyle(document.querySelector(".token-text")).backgroundColor,
      document.querySelectorAll(".paper").length]"""
    before = shared.evaluate(look)
    shared.evaluate("dispatchEvent(new Event('beforeprint'))")
    printed = shared.evaluate(look)
    ground = shared.locator(".mc-sheets .paper").evaluate(
        "(e) => { const {data} = e.getContext('2d').getImageData(0, 0, e.width, e.height);"
        " const light = data.filter((red, i) => i % 4 === 0 && red > 230 && data[i + 3] === 255);"
        " return (4 * light.length) / data.length; }"
    )
    shared.evaluate("dispatchEvent(new Event('afterprint'))")
    after = shared.evaluate(look)
    shared.emulate_media(color_scheme="light")
    assert len(kept) > 10 and set(kept) == {"exact"}
    assert before == after == ["", False, "rgb(22, 24, 29)", 0] and printed == ["light", True, "rgb(255, 255, 255)", 1]
    assert ground > 0.5


def test_a_picture_that_is_gone_watches_nothing(watched, shared):
    opened = open_page(watched, shared.url, WATCHERS)
    left = opened.evaluate(
        "() => { const before = window.watching;"
        " for (const e of document.querySelectorAll('[data-picture]')) e.picture.destroy();"
        " return [before, window.watching]; }"
    )
    opened.context.close()
    assert left[0] >= 10 and left[1] == 1, left  # the link between text and player stays
