"""What text, timeline and grid say, number by number, from their own functions and without a page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moe_course.viz.page import Figure, page
from moe_course.viz.source import source

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def evaluate(folder: Path, module: str, program: str, data: Any = None) -> Any:
    """What `program`, which ends in `found`, makes of a module's own functions and of `data`."""
    file = folder / "words.mjs"
    file.write_text(
        f"{source(module)}\nconst data = {json.dumps(data)};\n{program}\nconsole.log(JSON.stringify(found));",
        encoding="utf-8",
    )
    done = subprocess.run(["node", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def a_pass(step: int, layer: int, tokens: list[tuple], routes: list[tuple]) -> dict:
    """Tokens are (text, rank, prompt, position), routes (token, expert, weight, owner)."""
    names = ("token", "expert", "weight", "owner")
    return {
        "step": step,
        "layer": layer,
        "tokens": [dict(zip(("text", "rank", "prompt", "position"), token, strict=True)) for token in tokens],
        "routes": {name: [route[i] for route in routes] for i, name in enumerate(names)},
    }


#: Two ranks share the row of "a", and each has the routes of its own experts. "b" comes a step later.
SHARED = {
    "ranks": 3,
    "prompts": [{}],
    "passes": [
        a_pass(0, 1, [("a", 0, 0, 0), ("a", 1, 0, 0)], [(0, 1, 0.2, 0), (1, 7, 0.5, 1), (1, 6, 0.3, 1)]),
        a_pass(0, 2, [("a", 0, 0, 0), ("a", 1, 0, 0)], [(0, 0, 0.9, 0), (1, 8, 0.1, 1)]),
        a_pass(1, 1, [("b", 2, 0, 1)], [(0, 3, 0.4, 0), (0, 9, 0.6, 2)]),
    ],
}


@needs_node
def test_shares_are_of_the_ranks_that_own_the_experts(tmp_path):
    program = """const tokens = tokenShares(data, 1)[0];
    const numbers = ({ text, shares, indices }) => [text, shares, indices, mainRank(shares)];
    const found = tokens.map((token) => [...numbers(token), describeToken(data, token)]);
    found.push(tokenShares(data, 2)[0].map((token) => token.shares), [[0, 2, 2], [3, 1, 2]].map(mainRank));"""
    first, second, other, mains = evaluate(tmp_path, "token_text", program, SHARED)
    said = (
        "\u2068a\u2069 at position 0, on ranks 0, 1. Experts (weight) on rank 0: 1 (0.20); rank 1: 7 (0.50), 6 (0.30)"
    )
    assert first == ["a", [0.2, 0.8, 0], [0, 1], 1, said]
    said = "\u2068b\u2069 at position 1, from rank 2. Experts (weight) on rank 0: 3 (0.40); rank 2: 9 (0.60)"
    assert second == ["b", [0.4, 0, 0.6], [0], 2, said]
    assert other == [[0.9, 0.1, 0]] and mains == [1, 0]


SPANS = {
    "ranks": 2,
    "stages": ["route", "dispatch"],
    "passes": [{"step": 0, "phase": "prefill"}, {"step": 1, "phase": "decode"}],
    "comparable": True,
    "spans": {
        "rank": [0, 0, 1], "step": [0, 1, 0], "layer": [3, 3, -1], "stage": [0, 1, 1],
        "begin": [0, 9, 5], "time": [2_000_000, 1_250_000, 7_600], "wait": [0, 500_000, 0],
    },
}  # fmt: skip


@needs_node
def test_spans_and_tables_are_told_in_milliseconds(tmp_path):
    program = """const found = [[0, 1, 2].map((i) => describeSpan(data, i)), tableOf(data, null), tableOf(data, 0).rows,
      known(data, { step: 1, rank: 1, layer: 3, stage: "route" }),
      known(data, { step: null, layer: null, stage: null }),
      known(data, { step: 2, rank: 2, layer: 4, stage: "x", span: 1 }), known(data, { rank: "1" })];"""
    told, table, first, *states = evaluate(tmp_path, "rank_timeline", program, SPANS)
    assert told == [
        "Rank 0, step 0, layer 3: route, 2.0 ms.",
        "Rank 0, step 1, layer 3: dispatch, 1.3 ms, of it 0.500 ms before the last rank came.",
        "Rank 1, step 0, outside the sparse layers: dispatch, 0.008 ms.",
    ]
    assert table["heads"] == ["ms", "route", "dispatch", "waiting", "sum"]
    assert table["rows"] == [
        ["rank 0", "2.000", "0.750", "0.500", "3.250"],
        ["rank 1", "0.000", "0.008", "0.000", "0.008"],
    ]
    assert first == [["rank 0", "2.000", "0.000", "0.000", "2.000"], table["rows"][1]]
    assert states[:2] == [
        {"step": 1, "rank": 1, "layer": 3, "stage": "route"},
        dict.fromkeys(("step", "layer", "stage")),
    ]
    assert states[2:] == [{}, {}]


@needs_node
def test_data_in_a_line_keeps_to_itself(tmp_path):
    program = """const smiles = shortened("😀".repeat(9), 4);
    const found = [data.map(isolated), shortened("abc", 3), shortened("abcd", 3), [...smiles]];"""
    lines, *cut = evaluate(tmp_path, "ribbon", program, ["a b", "ש₁", "\u202ex\u2069", "₁", "a\nö₂"])
    assert lines == [
        "\u2068a b\u2069",
        "\u2068ש\u2069₁",
        "\u2068\\u202ex\\u2069\u2069",
        "\u2068\u2069₁",
        "\u2068a\nö\u2069₂",
    ]
    assert cut == ["abc", "ab…", ["😀", "😀", "😀", "…"]]


@needs_node
def test_the_kernel_hears_what_was_refused_and_no_echo(tmp_path):
    """A picture that knows layers 0 to 2, and a model as anywidget makes it."""
    program = """const sent = [];
    let state = { layer: 0, more: 1 };
    let changed;
    const model = { get: (name) => (name === "state" ? state : {}), save_changes: () => sent.push(state),
      set(name, value) { state = value; changed(); }, on: (event, f) => { changed = f; } };
    let layer = 0;
    const picture = { set: (wanted) => { if (wanted.layer < 3) layer = wanted.layer; }, get: () => ({ layer }) };
    adapter(() => picture).render({ model, el: null });
    const told = (wanted) => new Promise((done) => {
      state = wanted;
      changed();
      setTimeout(() => done(sent.splice(0)), 150);
    });
    const found = [await told({ layer: 2 }), await told({ layer: 99 }), await told({}), layer];"""
    assert evaluate(tmp_path, "ribbon", program) == [[], [{"layer": 2}], [], 2]


def test_a_page_of_pictures_says_what_it_needs_and_its_title_turns_nothing():
    text = page("\u202eab\u2069", [Figure("ribbon", {})])
    assert text.count("<noscript>") == 1 and "JavaScript" in text.split("<noscript>")[1].split("</noscript>")[0]
    assert "<title>\\u202eab\\u2069</title>" in text
    assert "<noscript>" not in page("x", ["<p>no picture</p>"])
