"""How smoothly the player runs in a headless browser, and how soon its first picture is there.

The routings are made up with a seed, not recorded: what counts here is how many rows have to be drawn.
"""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import Any

import torch

from moe_course.errors import ConfigError

WINDOW = 30  # frames that one figure is the mean of
_CURE = "apt install chromium, and make setup for playwright"
_LOAD = """async ([module, data]) => {
  window.picture = await import(URL.createObjectURL(new Blob([module], {type: "text/javascript"})));
  window.data = data;
}"""
# Milliseconds from the data to a picture on the screen: mount it, and wait for the frame that shows it.
_FIRST = """async () => {
  document.body.replaceChildren();
  const root = document.body.appendChild(document.createElement("div"));
  const begin = performance.now();
  window.shown = window.picture.mount(root, JSON.parse(window.data), {});
  await new Promise((go) => requestAnimationFrame(() => setTimeout(go)));
  return performance.now() - begin;
}"""
# Times of all frames from the press of play until the pass is over.
_PLAY = """async () => {
  const root = document.querySelector(".mc-token-flow"), times = [];
  root.querySelector(".mc-play").click();
  await new Promise((go) => {
    const frame = (now) => { times.push(now); root.dataset.playing === "true" ? requestAnimationFrame(frame) : go(); };
    requestAnimationFrame(frame);
  });
  return times;
}"""


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """Frames per second over a whole pass, and ms to the first picture, of `tokens` rows on 8 ranks.

    Returns `fps`, one figure for every 30 frames, and `first_ms`, one for every round.
    Raises ConfigError without playwright or chromium.
    """
    from moe_course.lessons.slides.errors import SlidesError
    from moe_course.lessons.slides.tools import CHROMIUM_FLAGS, chromium
    from moe_course.viz.page import as_data
    from moe_course.viz.source import source, styles

    if importlib.util.find_spec("playwright") is None:
        raise ConfigError(f"bench player: the Python package playwright is missing; {_CURE}")
    try:
        browser = chromium()
    except SlidesError:
        raise ConfigError(f"bench player: no chromium here, or CHROMIUM names none; {_CURE}") from None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=browser, headless=True, args=CHROMIUM_FLAGS)
        page = started.new_page(viewport={"width": 1280, "height": 1000})
        page.set_content(f"<!doctype html><style>{styles('token_flow')}</style><body></body>")
        page.evaluate(_LOAD, [source("token_flow"), as_data(made_up(tokens))])
        first, fps = [], []
        for _ in range(rounds):
            first.append(page.evaluate(_FIRST))
            fps += rates(page.evaluate(_PLAY))
        started.close()
    return {"tokens": tokens, "routes": tokens * 8, "ranks": 8, "fps": fps, "first_ms": first}


def rates(times: list[float]) -> list[float]:
    """Frames per second of each 30 frames. times: ms."""
    return [1000 * WINDOW / (end - begin) for begin, end in zip(times[::WINDOW], times[WINDOW::WINDOW], strict=False)]


def summary(figures: dict[str, Any]) -> list[str]:
    """The cells of its line: tokens, routes, median and least fps, median and least time to the first picture."""
    fps = [f"{of(figures['fps']):.0f}" for of in (median, min)]
    first = [f"{of(figures['first_ms']):.0f} ms" for of in (median, min)]
    return [f"{figures['tokens']:,}", f"{figures['routes']:,}", *fps, *first]


def made_up(tokens: int, ranks: int = 8, experts: int = 256, top_k: int = 8, seed: int = 0) -> dict[str, Any]:
    """The player's data for one pass in which every row chooses its experts by lot. Schema `moe_course.flow/1`."""
    from moe_course.trace.trace import Trace
    from moe_course.viz.flow_data import flow_data

    lots = torch.Generator().manual_seed(seed)
    mine, local = tokens // ranks, experts // ranks
    ids = torch.rand(tokens, experts, generator=lots).argsort(dim=1)[:, :top_k]  # [T, K]
    weights = torch.rand(tokens, top_k, generator=lots)
    source, row = torch.arange(tokens) // mine, torch.arange(tokens) % mine

    def each(column: torch.Tensor) -> torch.Tensor:
        return column.repeat_interleave(top_k)  # [T] -> [T*K]

    nothing = torch.zeros(tokens * top_k, dtype=torch.int64)
    columns = {
        "step": nothing,
        "layer": nothing,
        "source_rank": each(source),
        "row": each(row),
        "k": torch.arange(top_k).repeat(tokens),
        "expert": ids.flatten(),
        "weight": (weights / weights.sum(dim=1, keepdim=True)).flatten(),
        "owner_rank": (ids // local).flatten(),
        "send_row": each(row),
        "receive_row": nothing,
        "via_rank": nothing - 1,
        "prompt": each(source),
        "position": each(row),
    }
    meta = {
        **{"world_size": ranks, "experts": experts, "top_k": top_k, "prefill_passes": 1, "token_text": {}},
        **{"backend": "all_to_all", "shape": "all_to_all", "transport": "gloo", "capacity": None},
        **{"reduce_in_node": False, "hidden_size": 128, "rows_dtype": "float32"},
        "sizes": {"dispatch": 512, "partial": 512, "contribution": 512},
        "plan": {"ep_size": ranks, "placement": "linear", "dp": ranks, "reduce_group": None},
        "prompts": [{"prompt": "", "tokens": [33 + place % 90 for place in range(mine)]}] * ranks,
        "new_tokens": [[]] * ranks,
    }
    return flow_data(Trace(meta, columns))
