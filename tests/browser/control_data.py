"""Small pictures by hand for the tests of controls: every number in them can be told from every other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_course import viz
from moe_course.viz.page import Figure, page

LONG = "W" * 10_000
#: What turns the direction of what follows, if nobody keeps it in.
TURNED = "\u202eevil"
_OWNER = [0, 0, 1, 1, 2, 2]
#: Text, rank, row, prompt, position of the tokens of each step. One runs from right to left, one is far too long.
_TOKENS = [
    [("·start", 0, 0, 0, 0), ("a", 0, 1, 0, 1), ("ש₁", 1, 0, 1, 0), (LONG, 1, 1, 1, 1)],
    [("b", 0, 0, 0, 2), ("c", 1, 0, 1, 2)],
]
#: Of each token the weights of experts 0, 2 and 4, on ranks 0, 1 and 2, by layer and step: most, least and home differ.
WEIGHTS = {
    (1, 0): [(0.2, 0.7, 0.1), (0.3, 0.1, 0.6), (0.6, 0.3, 0.1), (0.1, 0.3, 0.6)],
    (2, 0): [(0.25, 0.15, 0.6), (0.2, 0.7, 0.1), (0.1, 0.25, 0.65), (0.65, 0.2, 0.15)],
    (1, 1): [(0.3, 0.6, 0.1), (0.1, 0.2, 0.7)],
    (2, 1): [(0.2, 0.1, 0.7), (0.8, 0.15, 0.05)],
}


def flow() -> dict[str, Any]:
    """Three ranks, two layers, a step of four tokens and one of two."""
    passes = []
    for step, tokens in enumerate(_TOKENS):
        for layer in (1, 2):
            weights = WEIGHTS[layer, step]
            routes = [(t, k, 2 * k, weights[t][k], k, tokens[t][1]) for t in range(len(tokens)) for k in range(3)]
            names = ("token", "k", "expert", "weight", "owner", "via")
            columns = {name: list(column) for name, column in zip(names, zip(*routes, strict=True), strict=True)}
            columns |= {name: [route[0] for route in routes] for name in ("send_row", "receive_row")}
            names = ("text", "rank", "row", "prompt", "position")
            passes.append(
                {
                    "step": step,
                    "layer": layer,
                    "phase": "decode" if step else "prefill",
                    "tokens": [dict(zip(names, token, strict=True)) for token in tokens],
                    "routes": columns,
                    "wire": {
                        leg: [[a, b, 1, 0, 64] for a in range(2) for b in range(3) if a != b]
                        for leg in ("dispatch", "combine")
                    },
                }
            )
    return {
        "schema": "moe_course.flow/1", "ranks": 3, "experts": 6, "owner": _OWNER,
        "backend": "deepep_high_throughput", "shape": "high_throughput", "transport": "threads", "nodes": [3],
        "capacity": None, "reduce_in_node": False, "reduce": False, "after": None, "row_bytes": 64,
        "partial_bytes": 64, "passes": passes,
        "prompts": [
            {"text": "a", "length": 2, "rank": 0, "continuation": "b"},
            {"text": "שW", "length": 2, "rank": 1, "continuation": "c"},
        ],
    }  # fmt: skip


STAGES = ["route", "dispatch", "experts", "combine", "other"]


def timeline() -> dict[str, Any]:
    """Two ranks, three steps of which the middle one is the longest, one layer; times are all different."""
    names = ("rank", "step", "layer", "stage", "begin", "time", "wait")
    rows = []
    for rank in range(2):
        begin = 0
        for step, unit in enumerate((1_000_000, 4_000_000, 2_000_000)):
            for stage in (4, 0, 1, 2, 3):
                time = unit + 70_000 * stage + 11_000 * rank
                rows.append((rank, step, -1 if stage == 4 else 1, stage, begin, time, 300_000 if stage == 1 else 0))
                begin += time
    return {
        "schema": "moe_course.timeline/1", "ranks": 2, "stages": STAGES, "comparable": True, "note": TURNED,
        "passes": [{"step": step, "phase": "decode" if step else "prefill"} for step in range(3)],
        "spans": {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)},
    }  # fmt: skip


def told(spans: dict[str, list[int]], i: int) -> str:
    """The sentence of a span."""
    rank, step, stage, time = (spans[name][i] for name in ("rank", "step", "stage", "time"))
    where = "outside the sparse layers" if stage == 4 else "layer 1"
    waited = ", of it 0.300 ms before the last rank came" if stage == 1 else ""
    return f"Rank {rank}, step {step}, {where}: {STAGES[stage]}, {time / 1e6:.1f} ms{waited}."


#: What comes from a run in a report, in each element it may stand in.
AROUND = f"""<h1>{LONG}</h1><p class="verdict equal"><b>{LONG}</b>x</p><dl><dt>model</dt><dd>{LONG}</dd></dl>
<div class="scroll"><table><caption>{"many words " * 40}</caption><tr><td class="word">{LONG}</td></tr></table></div>
<span class="bar"></span><details><summary>The plan</summary><p>{LONG}</p></details>"""


def write_page(folder: Path) -> str:
    """The address of a page with all pictures, text and player linked as in a report."""
    here, both = Path(viz.__file__).parent, flow()
    figures = [
        Figure("ribbon", viz.ribbon().data),
        Figure("score_grid", viz.score_grid(torch.randn(5, 12, generator=torch.Generator().manual_seed(4)), 3).data),
        Figure("token_text", both),
        Figure("token_flow", both),
        Figure("rank_timeline", timeline()),
    ]
    link = f"<script>\n{(here / 'report.js').read_text()}</script>"
    file = folder / "controls.html"
    file.write_text(page("Controls", [AROUND, *figures, link], (here / "report.css").read_text()))
    return file.as_uri()


def open_page(watched: Any, address: str, before: str = "") -> Any:
    """That page, when its pictures are there; `before` is a script that runs first."""
    opened = watched(address)
    opened.add_init_script(before)
    opened.goto(address)
    opened.wait_for_load_state("load")
    return opened
