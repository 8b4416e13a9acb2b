"""Every control of the player, used in a page from disk: what the page says of itself, and what is seen, follow."""

from __future__ import annotations

import re
from collections.abc import Callable

import checks
import pytest
from player_page import PHASES, Player, open_player

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def shared(watched, recorded, tmp_path_factory):
    player = open_player(watched, recorded, tmp_path_factory.mktemp("player"))
    yield player
    player.page.context.close()


@pytest.fixture
def player(shared) -> Player:
    """The player at its beginning."""
    shared.page.set_viewport_size({"width": 1280, "height": 1000})
    shared.tell(step=0, layer=shared.data["passes"][0]["layer"], token=None, rank=None, expert=None, phase="at source")
    return shared


def changed(player: Player, act: Callable[[], object]) -> bool:
    """Does an act change the picture?"""
    before = player.picture()
    act()
    return player.picture() != before


def test_tabs_and_slider_choose_the_phase(player):
    seen, said = set(), set()
    for place, phase in enumerate(PHASES):
        player.root.get_by_role("button", name=phase, exact=True).click()
        assert player.state("phase") == phase and player.place() == pytest.approx(place, abs=0.01)
        assert player.root.locator(".mc-phase[aria-pressed=true]").all_text_contents() == [phase]
        seen.add(player.picture())
        said.add(player.said())
        assert f", {phase}: " in player.said()
    assert len(seen) == len(said) == 6
    slider = player.root.get_by_label("Time in this layer")
    for place in (3, 1):
        assert changed(player, lambda: player.slide_to(place))  # noqa: B023
        assert player.state("phase") == PHASES[place] and slider.get_attribute("aria-valuetext") == PHASES[place]


def test_lists_choose_step_layer_and_token(player):
    passes = player.data["passes"]
    steps, layers = (sorted({one[name] for one in passes}) for name in ("step", "layer"))
    for label, name, value in (("Layer", "layer", layers[1]), ("Step", "step", steps[1])):
        player.press("dispatch")
        assert changed(player, lambda: player.choose(label, value))  # noqa: B023
        assert player.state(name) == str(value) and player.said().startswith(f"Step {player.state('step')}, layer")
        assert f"layer {player.state('layer')}, dispatch: " in player.said()
    player.tell(step=0)
    tokens = next(one for one in passes if (one["step"], one["layer"]) == (0, layers[1]))["tokens"]
    assert changed(player, lambda: player.choose("Token", 5))
    named = f"“\u2068{tokens[5]['text']}\u2069”, row {tokens[5]['row']} of rank {tokens[5]['rank']}"
    assert player.state("token") == "5" and player.details().startswith(f"Token {named}")
    player.choose("Step", steps[1])
    assert player.state("token") == "" and player.state("step") == str(steps[1])


@pytest.mark.parametrize("phase", ["dispatch", "experts", "done"])
def test_only_a_rank_and_only_an_expert_are_shown_and_said(player, phase):
    player.tell(phase=phase, token=5)
    routes, tokens = player.data["passes"][0]["routes"], player.data["passes"][0]["tokens"]
    sources = [tokens[token]["rank"] for token in routes["token"]]
    counts, note = player.root.locator(".mc-counts"), player.root.locator(".mc-filter")
    assert not note.is_visible() and "shown" not in counts.text_content()
    assert changed(player, lambda: player.choose("Only rank", 2))
    ends = list(zip(sources, routes["owner"], routes["expert"], strict=True))
    mine = [end for end in ends if 2 in end[:2]]
    assert player.state("rank") == "2" and counts.text_content().count("shown row") == 2
    assert f"routes from or to rank 2, {len(mine)} of {len(ends):,}, and" in note.text_content()
    assert note.is_visible() and player.said().endswith(note.text_content())
    assert "left out here: rank" in player.details()
    offered = player.root.get_by_label("Only expert").locator("option").all_text_contents()[1:]
    assert [int(text.split(" ")[0]) for text in offered] == sorted({expert for *_, expert in mine})
    expert = mine[0][2]
    assert changed(player, lambda: player.choose("Only expert", expert))
    fitting = [end for end in mine if end[2] == expert]
    assert player.state("expert") == str(expert)
    assert f"from or to rank 2 and to expert {expert}, {len(fitting)} of" in note.text_content()
    player.choose("Only rank", "")
    player.choose("Only expert", "")
    assert not note.is_visible() and "shown" not in counts.text_content()


def test_the_table_lists_what_is_shown(player):
    button = player.root.get_by_role("button", name="as table")
    lines = player.root.locator(".mc-scroll tbody tr")
    routes = player.data["passes"][0]["routes"]
    button.click()
    try:
        assert not player.root.locator(".mc-stage").is_visible()
        assert lines.count() == 600 < len(routes["token"])
        player.choose("Token", 5)
        assert lines.count() == routes["token"].count(5)
        player.choose("Token", "")
        expert = routes["expert"][0]
        player.choose("Only expert", expert)
        assert lines.count() == routes["expert"].count(expert)
    finally:
        button.click()
    assert player.root.locator(".mc-stage").is_visible() and not lines.first.is_visible()


def test_the_pointer_names_a_token_and_chooses_it(player):
    tokens = player.data["passes"][0]["tokens"]
    for rank in (0, 2):
        index = next(i for i, token in enumerate(tokens) if token["rank"] == rank)
        player.point_at(rank)
        assert player.canvas.get_attribute("title") == f"“\u2068{tokens[index]['text']}\u2069”, row 0 of rank {rank}"
        assert changed(player, lambda: player.page.mouse.click(*player.at(rank)))  # noqa: B023
        assert player.state("token") == str(index)
    player.page.mouse.click(*player.at(2))
    assert player.state("token") == ""
    player.page.mouse.move(player.at(0)[0] + 350, player.at(0)[1])
    assert player.canvas.get_attribute("title") == ""


_TABS = """(all) => all.map((e) => {
  const range = document.createRange();
  range.selectNodeContents(e);
  return [e.textContent, e.scrollWidth - e.clientWidth, range.getClientRects().length];
})"""
_KEY = """([element, key, more]) => !element.dispatchEvent(
  new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true, ...more}))"""


@pytest.mark.parametrize("place", [".mc-stage", ".mc-phase", "[aria-label='Step']"])
def test_keys_with_others_held_are_not_the_players(player, place):
    player.tell(phase="dispatch", token=5)
    element = player.root.locator(place).first.element_handle()
    state = player.get()
    for more in ("ctrlKey", "altKey", "metaKey", "shiftKey"):
        for key in (" ", "ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "Escape"):
            assert player.page.evaluate(_KEY, [element, key, {more: True}]) is False, (more, key)
            assert player.get() == state and player.state("playing") == "false", (more, key)
    if place == ".mc-stage":
        assert player.page.evaluate(_KEY, [element, "ArrowLeft", {}]) and player.state("phase") == "router"


def test_what_there_is_not_is_refused(player):
    player.tell(phase="dispatch", token=5, rank=1)
    state, picture, labels = player.get(), player.picture(), ("Step", "Layer", "Token", "Only rank", "Only expert")
    for name in ("step", "layer", "token", "rank", "expert", "phase"):
        for value in (77_000, "2", 1.5):
            player.tell(**{name: value})
            assert player.get() == state, (name, value)
    for junk in ("null", "'x'", "7", "{unknown: 1}"):
        player.page.evaluate(f"document.querySelector('[data-picture]').picture.set({junk})")
    assert player.get() == state and player.picture() == picture
    values = [player.root.get_by_label(label, exact=True).input_value() for label in labels]
    assert values == ["0", str(state["layer"]), "5", "1", ""]


def test_a_page_with_an_odd_state_opens_at_the_beginning(player):
    first = player.data["passes"][0]
    state = player.page.evaluate("document.querySelectorAll('[data-picture]')[1].picture.get()")
    nothing = {"token": None, "rank": None, "expert": None}
    assert state == {"step": first["step"], "layer": first["layer"], "phase": "at source", **nothing}


@pytest.mark.parametrize("width", [320, 375, 640])
def test_a_narrow_page_does_not_scroll_sideways_but_the_picture_does(player, width):
    player.page.set_viewport_size({"width": width, "height": 800})
    player.settled()
    stage = player.root.locator(".mc-stage")
    assert player.canvas.evaluate("(e) => e.offsetWidth") == max(420, stage.evaluate("(e) => e.clientWidth"))
    player.tell(token=5, rank=2, phase="at source")
    wide, sight, left = stage.evaluate("(e) => [e.scrollWidth, e.clientWidth, e.scrollLeft]")
    assert player.page.evaluate("document.documentElement.scrollWidth") <= width
    assert wide >= 420 or wide == sight
    assert (wide > sight) == (width < 420) and left == 0
    player.press("experts")
    assert stage.evaluate("(e) => e.scrollLeft") == pytest.approx(max(0, wide - sight), abs=1)
    assert checks.drawn(player.root) == []
    player.press("dispatch")
    for phase, over, lines in player.root.locator(".mc-phase").evaluate_all(_TABS):
        assert over <= 1 and lines <= len(phase.split()), phase  # no name of a phase leaves its tab or is broken


def test_it_asks_for_nothing_and_complains_of_nothing(player):
    assert checks.quiet(player.page) == []


def test_heat_begins_with_the_colour_of_one_route(player):
    ground = player.root.locator(".mc-scale").evaluate("(e) => e.style.background")
    assert re.findall(r"#\w{6}|rgb\([^)]*\)", ground)[0] in ("#00224e", "rgb(0, 34, 78)")
    assert re.findall(r"#\w{6}|rgb\([^)]*\)", ground)[-1] in ("#fee838", "rgb(254, 232, 56)")
