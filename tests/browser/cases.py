"""The pictures, and what each of them is asked in JupyterLab."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Locator

#: The first cell of the notebook; FOLDER is that of a recorded run.
START = """
import torch
from moe_course.trace import Trace
from moe_course.viz import rank_timeline, ribbon, score_grid, token_flow
from moe_course.viz.picture import source
from moe_course.viz.rank_timeline import RankTimeline
from moe_course.viz.ribbon import Ribbon
from moe_course.viz.score_grid import ScoreGrid
from moe_course.viz.token_flow import TokenFlow
trace = Trace.load(FOLDER)
logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(2))
"""
_FOCUSED = "[...root.querySelectorAll('button')].indexOf(document.activeElement)"


@dataclass(frozen=True)
class Case:
    """A picture.

    Attributes:
        cls: its class in the kernel.
        arguments: of the picture's function, and of its class's `of`.
        css: class of its root.
        act, chosen: something a viewer does, and the state it makes.
        told, shown: a state that a cell sets, and the attributes it makes.
        begin: the state before keys are tried.
        focus, presses: where keys go, and (key, expression of `root`, value after it).
    """

    cls: str
    arguments: str
    css: str
    act: Callable[[Locator], None]
    chosen: dict[str, Any]
    told: dict[str, Any]
    shown: dict[str, str]
    begin: tuple[dict[str, Any], dict[str, str]]
    focus: str
    presses: list[tuple[str, str, Any]]


def _choose_layer_and_token(root: Locator) -> None:
    root.get_by_label("Layer", exact=True).select_option("2")
    root.get_by_label("Token", exact=True).select_option("5")
    root.get_by_role("button", name="experts", exact=True).click()


def _choose_expert_and_bias(root: Locator) -> None:
    root.get_by_label("Expert", exact=True).fill("5")
    root.get_by_role("slider").focus()
    root.page.keyboard.press("End")


PICTURES = {
    "ribbon": Case(
        cls="Ribbon",
        arguments="'router'",
        css="mc-ribbon",
        act=lambda root: root.get_by_role("button", name="dispatch").click(),
        chosen={"stage": "dispatch"},
        told={"stage": "combine"},
        shown={"stage": "combine"},
        begin=({"stage": None}, {"stage": ""}),
        focus="button",
        presses=[
            ("ArrowRight", _FOCUSED, 1),
            ("End", _FOCUSED, 4),
            ("ArrowLeft", _FOCUSED, 3),
            ("Home", _FOCUSED, 0),
            (" ", "root.dataset.stage", "router"),
            ("Enter", "root.dataset.stage", ""),
        ],
    ),
    "score_grid": Case(
        cls="ScoreGrid",
        arguments="logits, top_k=4, n_group=4, topk_group=2",
        css="mc-score-grid",
        act=_choose_expert_and_bias,
        chosen={"expert": 5, "bias": 1},
        told={"expert": 9, "bias": -0.5, "token": 3},
        shown={"expert": "9", "bias": "-0.5", "token": "3"},
        begin=({"expert": 3, "bias": 0.0, "token": 2}, {"expert": "3", "bias": "0", "token": "2"}),
        focus=".mc-cells",
        presses=[
            ("ArrowRight", "root.dataset.expert", "4"),
            ("ArrowLeft", "root.dataset.expert", "3"),
            ("Home", "root.dataset.expert", "0"),
            ("End", "root.dataset.expert", "15"),
            ("ArrowUp", "root.dataset.token", "1"),
            ("ArrowDown", "root.dataset.token", "2"),
            ("+", "Number(root.dataset.bias) > 0", True),
            (" ", "root.dataset.bias", "0"),
            (" ", "Number(root.dataset.bias) > 0", True),
        ],
    ),
    "token_flow": Case(
        cls="TokenFlow",
        arguments="trace, steps=range(3)",
        css="mc-token-flow",
        act=_choose_layer_and_token,
        chosen={"layer": 2, "token": 5, "phase": "experts"},
        told={"step": 1, "layer": 1, "phase": "combine", "token": 2},
        shown={"step": "1", "layer": "1", "phase": "combine", "token": "2"},
        begin=({"step": 0, "phase": "at source", "token": None}, {"step": "0", "phase": "at source", "token": ""}),
        focus=".mc-stage",
        presses=[
            ("ArrowRight", "root.dataset.phase", "router"),
            ("ArrowRight", "root.dataset.phase", "dispatch"),
            ("ArrowLeft", "root.dataset.phase", "router"),
            ("End", "root.dataset.phase", "done"),
            ("Home", "root.dataset.phase", "at source"),
            ("ArrowDown", "root.dataset.token", "0"),
            ("ArrowDown", "root.dataset.token", "1"),
            ("ArrowUp", "root.dataset.token", "0"),
            ("Escape", "root.dataset.token", ""),
            (" ", "root.dataset.playing", "true"),
            (" ", "root.dataset.playing", "false"),
        ],
    ),
    "rank_timeline": Case(
        cls="RankTimeline",
        arguments="trace",
        css="mc-timeline",
        act=lambda root: root.get_by_role("combobox").select_option("2"),
        chosen={"step": 2},
        told={"step": 1, "rank": 3},
        shown={"step": "1", "rank": "3"},
        begin=({"step": None, "rank": 1}, {"step": "whole", "rank": "1"}),
        focus=".mc-lanes",
        presses=[
            ("Home", "root.dataset.rank", "1"),
            (" ", "root.dataset.step", "0"),
            ("ArrowDown", "root.dataset.rank", "2"),
            ("ArrowUp", "root.dataset.rank", "1"),
            ("PageDown", "root.dataset.step", "1"),
            (" ", "root.dataset.step", "whole"),
            ("End", "root.dataset.phase !== ''", True),
            ("+", "root.dataset.zoom", "1"),
            ("-", "root.dataset.zoom", "0"),
        ],
    ),
}
