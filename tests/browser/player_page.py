"""A page from disk with players, whose frames a test may take into its hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Locator, Page

from moe_course.trace.trace import Trace
from moe_course.viz.flow_data import flow_data
from moe_course.viz.page import Figure, page

PHASES = ["at source", "router", "dispatch", "experts", "combine", "done"]
_ODD = {"step": "1", "layer": 99, "token": 10**9, "rank": 77, "expert": -1, "phase": "sideways"}
# What both canvases of the first player show.
_SEEN = "[...document.querySelector('.mc-sheets').children].map((e) => e.toDataURL()).join()"
# From now on frames come when the test says so.
_HOLD = """() => {
  window.held = {now: 0, due: new Map(), frames: 0};
  window.requestAnimationFrame = (f) => (held.due.set(++held.frames, f), held.frames);
  window.cancelAnimationFrame = (one) => held.due.delete(one);
  performance.now = () => held.now;
  held.run = (n) => {
    for (let i = 0; i < n; i++) {
      const due = [...held.due.values()];
      held.due.clear();
      held.now += 20;
      for (const f of due) f(held.now);
    }
  };
}"""
_SETTLED = "() => new Promise((go) => new ResizeObserver((_, me) => (me.disconnect(), go())).observe(document.body))"


@dataclass(frozen=True)
class Player:
    """The first player of a page."""

    page: Page
    data: dict

    @property
    def root(self) -> Locator:
        return self.page.locator("[data-picture]").first

    @property
    def canvas(self) -> Locator:
        return self.root.locator("canvas[role=img]")

    def tell(self, **state: object) -> None:
        """As the kernel does, or another picture."""
        self.page.evaluate("(state) => document.querySelector('[data-picture]').picture.set(state)", state)

    def get(self) -> dict:
        return self.page.evaluate("document.querySelector('[data-picture]').picture.get()")

    def state(self, name: str) -> str | None:
        return self.root.get_attribute(f"data-{name}")

    def picture(self) -> str:
        return self.page.evaluate(_SEEN)

    def said(self) -> str:
        """What a screen reader is told; of the canvas, too."""
        said = self.root.locator("[aria-live]").text_content()
        assert self.canvas.get_attribute("aria-label") == said
        return said

    def details(self) -> str:
        return self.root.locator(".mc-details > p").text_content()

    def choose(self, label: str, value: object) -> None:
        self.root.get_by_label(label, exact=True).select_option(str(value))

    def press(self, name: str) -> None:
        self.root.get_by_role("button", name=name, exact=True).click()

    def place(self) -> float:
        """Where the slider stands."""
        return float(self.root.get_by_label("Time in this layer").input_value())

    def slide_to(self, place: int) -> None:
        slider = self.root.get_by_label("Time in this layer")
        box = slider.bounding_box()
        slider.click(position={"x": 8 + (box["width"] - 16) * place / 5, "y": box["height"] / 2})

    def at(self, rank: int) -> tuple[float, float]:
        """The first token of a rank on the page, on a canvas of 1084 pixels and with four ranks."""
        box = self.canvas.bounding_box()
        return box["x"] + 94 + 6, box["y"] + 24 + 104 * rank + 12

    def point_at(self, rank: int) -> None:
        self.page.mouse.move(*self.at(rank))

    def hold(self) -> None:
        """Its frames are the test's, until the page is loaded again."""
        self.page.evaluate(_HOLD)

    def run(self, frames: int) -> int:
        """So many frames of 20 ms; how many were asked for since `hold`."""
        return self.page.evaluate("(n) => (held.run(n), held.frames)", frames)

    def again(self) -> None:
        """The page as it was."""
        self.page.emulate_media(reduced_motion="no-preference", color_scheme="light")
        self.page.reload()
        self.page.wait_for_selector(".mc-token-flow canvas")

    def settled(self) -> None:
        """What follows a change of size has happened."""
        for _ in range(2):
            self.page.evaluate(_SETTLED)


def open_player(watched: Callable[..., Page], recorded: Path, folder: Path) -> Player:
    """Two players of the first steps of a run; the second is given an odd state."""
    data = flow_data(Trace.load(recorded), steps=[0, 1])
    file = folder / "player.html"
    file.write_text(page("player", [Figure("token_flow", data), Figure("token_flow", data, state=_ODD)]))
    opened = watched(file.as_uri())
    opened.goto(file.as_uri())
    opened.wait_for_selector(".mc-token-flow canvas")
    return Player(opened, data)
