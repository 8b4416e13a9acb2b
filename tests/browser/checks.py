"""What a picture in a page has to do. Each function returns faults as text, none for a good picture.

They take any picture, so that one that was broken on purpose can be given to them, too.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from desk import Desk, frames
from PIL import Image
from playwright.sync_api import Locator, Page
from playwright.sync_api import TimeoutError as TooLate

# What canvases show, as [name, colours, pixels near the text colour of the page]. Those on one spot count together.
_INK = """(root) => {
  const wanted = getComputedStyle(root).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const spots = new Map();
  for (const canvas of root.querySelectorAll("canvas")) {
    const {x, y, width, height} = canvas.getBoundingClientRect();
    if (width < 100 || height < 20) continue;
    const spot = spots.get(`${x} ${y}`) ?? {names: [], colours: new Set(), near: 0};
    spots.set(`${x} ${y}`, spot);
    if (canvas.hasAttribute("aria-label")) spot.names.push(canvas.getAttribute("aria-label").slice(0, 40));
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] < 128) continue;
      spot.colours.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
      if (wanted.every((value, part) => Math.abs(value - data[i + part]) < 40)) spot.near += 1;
    }
  }
  return [...spots.values()].map(({names, colours, near}) => [names.join() || "no name", colours.size, near]);
}"""
_WAIT = "([root, wanted]) => Object.entries(wanted).every(([name, value]) => root.dataset[name] === value)"
_CUT_OFF = """(root) => {
  const edge = root.parentElement.getBoundingClientRect().right + 1;
  const scrolls = (e) => /auto|scroll|hidden/.test(getComputedStyle(e).overflowX);
  const seen = (e) => { for (; e !== root; e = e.parentElement) if (scrolls(e)) return false; return true; };
  return [...root.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > edge && seen(e.parentElement))
    .map((e) => `${e.tagName} reaches beyond the output`).slice(0, 2);
}"""
_AXE = """async (root) => (await axe.run(root, {resultTypes: ["violations"]})).violations
  .map((v) => `axe ${v.id}: ${v.nodes[0].html.slice(0, 120)}`)"""


@dataclass(frozen=True)
class View:
    """A picture in a notebook: its root in the page, and what the kernel calls it."""

    desk: Desk
    root: Locator
    name: str

    @property
    def page(self) -> Page:
        return self.desk.page


def quiet(page: Page) -> list[str]:
    """Nothing was asked for elsewhere, and nothing was complained about."""
    return [f"request: {url}" for url in page.external] + [f"console: {error}" for error in page.errors]


def drawn(root: Locator) -> list[str]:
    """It is there, not empty and not cut off. JupyterLab gives a picture its size when one scrolls to it."""
    root.scroll_into_view_if_needed()
    frames(root.page)
    box = root.bounding_box()
    if box is None or box["height"] < 40:
        return ["nothing is to be seen"]
    canvases = root.evaluate(_INK)
    return [f"{name} is empty" for name, colours, _ in canvases if colours < 3] + root.evaluate(_CUT_OFF)


def reaches_kernel(view: View, act: Callable[[Locator], None], wanted: dict[str, Any]) -> list[str]:
    """What the viewer does in the page is the picture's state in a later cell."""
    act(view.root)
    picked = f"{{name: {view.name}.state.get(name) for name in {list(wanted)}}}"
    state = view.desk.becomes(picked, wanted, seconds=5)
    return [] if state == wanted else [f"the kernel knows {state}, chosen was {wanted}"]


def follows_kernel(view: View, state: dict[str, Any], wanted: dict[str, str]) -> list[str]:
    """What a cell sets is shown."""
    view.desk.run(f"{view.name}.state = {view.name}.state | {state!r}")
    return shows(view.root, wanted)


def shows(root: Locator, wanted: dict[str, str], seconds: float = 5) -> list[str]:
    """The data-* attributes of the picture become these."""
    try:
        root.page.wait_for_function(_WAIT, arg=[root.element_handle(), wanted], timeout=seconds * 1000)
    except TooLate:
        found = {name: root.get_attribute(f"data-{name}") for name in wanted}
        return [f"it shows {found}, not {wanted}"]
    return []


def keys(view: View, focus: str, presses: list[tuple[str, str, Any]]) -> list[str]:
    """Each key does what it should, (key, expression of `root`, value after it), and JupyterLab takes no part."""
    view.root.locator(focus).first.focus()
    frames(view.page, 2)
    before, found = view.desk.stance(), []
    for key, expression, wanted in presses:
        view.page.keyboard.press(key)
        value = view.root.evaluate(f"(root) => {expression}")
        if value != wanted:
            found.append(f"{key}: {expression} is {value!r}, not {wanted!r}")
    view.page.keyboard.press("b")  # adds a cell, where JupyterLab hears it
    after = view.desk.stance()
    changed = [name for name in before if after[name] != before[name]]
    return found + [f"JupyterLab: {name} was {before[name]}, is {after[name]}" for name in changed]


def motionless(root: Locator, press: str = ".mc-play") -> list[str]:
    """With reduced motion nothing moves by itself: play is one step for a press."""
    page, found = root.page, []
    page.emulate_media(reduced_motion="reduce")
    try:
        if root.locator(press).count():
            before = root.get_attribute("data-phase")
            root.locator(press).click()
            if root.get_attribute("data-playing") == "true":
                found.append("it plays")
                root.locator(press).click()
            elif root.get_attribute("data-phase") == before:
                found.append(f"play does nothing, phase is {before}")
        moving = root.evaluate("(root) => root.getAnimations({subtree: true}).length")
        return found + ([f"{moving} animations run"] if moving else [])
    finally:
        page.emulate_media(reduced_motion="no-preference")


def readable(root: Locator, dark: bool) -> list[str]:
    """The ground is as dark or light as the page's, and canvases are written on in the page's own text colour."""
    pixels = Image.open(io.BytesIO(root.screenshot())).convert("RGB")
    small = pixels.resize((pixels.width // 2, pixels.height // 2), Image.Resampling.NEAREST)
    counts = Counter(zip(*[iter(small.tobytes())] * 3, strict=True))
    ground = counts.most_common(1)[0][0]
    found = []
    if (luminance(ground) < 0.18) != dark:
        found.append(f"the ground is {ground} in a {'dark' if dark else 'light'} page")
    glaring = sum(n for colour, n in counts.items() if luminance(colour) > 0.8) / sum(counts.values())
    if dark and glaring > 0.15:
        found.append(f"{glaring:.0%} of the picture is glaring")
    strong = sum(n for colour, n in counts.items() if contrast(colour, ground) >= 4.5) / sum(counts.values())
    if strong < 0.005:
        found.append(f"only {strong:.2%} of the picture stands out from its ground")
    return found + [f"{name}: no text in the page's colour" for name, _, near in root.evaluate(_INK) if near < 20]


def accessible(root: Locator, axe: str) -> list[str]:
    """axe-core finds nothing."""
    if not root.page.evaluate("() => Boolean(window.axe)"):
        root.page.evaluate(axe)
    return root.evaluate(_AXE)


def luminance(colour: tuple[int, int, int]) -> float:
    """Of sRGB, as WCAG 2 has it: 0 black, 1 white."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in colour)
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
