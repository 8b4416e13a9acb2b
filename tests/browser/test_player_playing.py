"""The player plays, at the speed that is chosen, for as long as it should; and follows the light of its page."""

from __future__ import annotations

import pytest
from checks import contrast, quiet
from player_page import Player, open_player

pytestmark = pytest.mark.browser
_PASS = 550  # frames of 20 ms: more than a pass has at speed 1


@pytest.fixture(scope="module")
def shared(watched, recorded, tmp_path_factory):
    player = open_player(watched, recorded, tmp_path_factory.mktemp("player"))
    yield player
    player.page.context.close()


@pytest.fixture
def player(shared) -> Player:
    """A fresh page, whose frames are the test's."""
    shared.again()
    shared.hold()
    return shared


def test_it_plays_at_the_speed_that_is_chosen(player):
    for speed in ("0.5", "1", "2", "4"):
        player.press("at source")
        player.choose("Speed", speed)
        player.press("▶ Play")
        player.run(24)
        assert player.state("playing") == "true"
        player.press("❚❚ Pause")
        t = -0.3 + 24 * 0.02 * 0.55 * float(speed)
        # of the slider: 0 to 0.5 is the time before 0, from there to 1 that until 0.8, to 1.5 that until 1
        place = (t + 0.3) / 0.6 if t <= 0 else 0.5 + t / 1.6 if t <= 0.8 else 1 + (t - 0.8) / 0.4
        assert player.place() == pytest.approx(place, abs=0.02), speed
        assert player.state("playing") == "false"
        frames = player.run(0)
        assert player.run(5) == frames  # no more are asked for


def test_a_pass_ends_and_all_steps_go_on(player):
    player.choose("Speed", "4")
    player.press("▶ Play")
    player.run(_PASS // 4)
    assert [player.state(name) for name in ("playing", "phase", "step")] == ["false", "done", "0"]
    player.root.get_by_label("all steps").check()
    player.press("▶ Play")
    player.run(_PASS // 4)
    assert [player.state(name) for name in ("playing", "step")] == ["true", "1"]
    player.run(_PASS // 4)
    assert [player.state(name) for name in ("playing", "phase", "step")] == ["false", "done", "1"]
    assert player.root.locator(".mc-play").text_content() == "▶ Play"


def test_what_moves_is_seen_and_counted(player):
    player.press("▶ Play")
    pictures, counts, words = set(), set(), {}
    live = player.root.locator("[aria-live]")
    for _ in range(12):
        player.run(40)
        pictures.add(player.picture())
        counts.add(player.root.locator(".mc-counts").text_content())
        words[player.state("phase")] = player.said()
        assert live.get_attribute("aria-live") == "off", "words follow the picture, and are not read out all the time"
    assert len(pictures) == 12 and len(counts) > 4
    assert len(words) >= 4 and all(f", {phase}: " in said or f" {phase}" in said for phase, said in words.items()), (
        words
    )
    player.press("❚❚ Pause")
    assert live.get_attribute("aria-live") == "polite"


_GONE = {
    "removed": "(root) => root.remove()",
    "destroyed": "(root) => root.picture.destroy()",
    "removed with its parent": "(root) => root.parentElement.remove()",
}


@pytest.mark.parametrize("how", _GONE)
def test_a_player_that_is_gone_asks_for_no_frame(player, how):
    player.press("▶ Play")
    frames = player.run(5)
    root = player.root.element_handle()
    root.evaluate(_GONE[how])
    assert player.run(10) <= frames + 1
    assert root.get_attribute("data-playing") == "false"
    if how == "destroyed":
        assert root.evaluate("(e) => e.children.length") == 0
        phase = root.get_attribute("data-phase")
        root.evaluate("(e) => e.dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}))")
        player.page.emulate_media(reduced_motion="reduce", color_scheme="dark")
        assert root.get_attribute("data-phase") == phase
    assert quiet(player.page) == []


def test_less_motion_stops_it_at_once(player):
    player.press("▶ Play")
    frames = player.run(5)
    player.page.emulate_media(reduced_motion="reduce")
    player.page.wait_for_function("document.querySelector('[data-picture]').dataset.playing === 'false'")
    assert player.run(10) == frames
    player.tell(phase="router")
    player.press("▶ Play")
    assert (player.state("playing"), player.state("phase")) == ("false", "dispatch")
    player.page.emulate_media(reduced_motion="no-preference")
    player.press("▶ Play")
    assert player.state("playing") == "true"


# The ways in which a page is dark or light: what it says of itself, and what the system prefers.
_LIGHTS = {
    "light": ("light", {}),
    "dark system": ("dark", {}),
    "dark page": ("light", {"data-theme": "dark"}),
    "light page on a dark system": ("dark", {"data-theme": "light"}),
    "dark page on a dark system": ("dark", {"data-theme": "dark"}),
}
_COLOURS = """(root) => {
  const of = (name) => getComputedStyle(root).getPropertyValue(`--mc-${name}`).trim();
  const pen = document.createElement("canvas").getContext("2d");
  const parts = (colour) => {
    pen.fillStyle = colour;
    return [1, 3, 5].map((at) => parseInt(pen.fillStyle.slice(at, at + 2), 16));
  };
  const names = ["background", "text", "muted", "panel", "lane", "accent"];
  return Object.fromEntries(names.map((name) => [name, parts(of(name))]));
}"""


def test_it_is_readable_in_every_light_and_drawn_anew(player):
    pictures = {}
    for name, (scheme, attributes) in _LIGHTS.items():
        player.page.emulate_media(color_scheme=scheme)
        player.page.evaluate(
            "(all) => { delete document.documentElement.dataset.theme; "
            "for (const [name, value] of Object.entries(all)) document.documentElement.setAttribute(name, value); }",
            attributes,
        )
        player.settled()
        colours = {part: tuple(colour) for part, colour in player.root.evaluate(_COLOURS).items()}
        dark = name.startswith("dark")
        assert (sum(colours["background"]) < 150) == dark, name
        for ink in ("text", "muted", "accent"):
            assert contrast(colours[ink], colours["background"]) >= 4.5, (name, ink)
        for ink in ("text", "muted"):
            assert contrast(colours[ink], colours["panel"]) >= 4.5, (name, ink)
            assert contrast(colours[ink], colours["lane"]) >= 4.5, (name, ink)
        blue = contrast((24, 69, 251), colours["lane"])
        assert blue >= 2.8, name  # rank 0 is seen on its lane
        pictures[name] = player.picture()
    dark = {pictures[name] for name in _LIGHTS if name.startswith("dark")}
    light = {pictures[name] for name in _LIGHTS if name.startswith("light")}
    assert len(dark) == len(light) == 1 and dark != light
