"""What the player says and where it puts things: nothing before it is known, nothing over what should be read."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_viz_flow import SHAPES, record

from moe_course.viz.flow_data import flow_data
from moe_course.viz.source import source
from moe_course.viz.token_flow_pen import Pen
from moe_course.viz.token_flow_still import Frame
from moe_course.viz.token_flow_still_tokens import draw_tokens, strips_of, texts_of, tiles_of

_needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
_LAYOUT = """
const layoutOf = (data, token, width) => {
  const model = readPass(data, data.passes[0]);
  const chosen = new Uint8Array(model.tokens.length);
  if (token !== null) chosen[token] = 1;
  const g = Object.assign(layout(data, model, width), { chosen });
  const routes = token === null ? [] : model.routesOf[token];
  const labels = labelsOf(model, g, routes);
  return { model, g, routes, labels, groups: groupsOf(data, model, g, () => true, berthsOf(labels)) };
};
"""


def evaluate(folder: Path, data: dict, program: str) -> object:
    """What `program`, which ends in `found`, makes of the player's own functions and of `data`."""
    (folder / "player.mjs").write_text(
        f"{source('token_flow')}\nconst data = {json.dumps(data)};\n{_LAYOUT}\n{program}\n"
        "console.log(JSON.stringify(found));",
        encoding="utf-8",
    )
    done = subprocess.run(["node", folder / "player.mjs"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@_needs_node
@pytest.mark.parametrize("shape", ["two_hop", "high_throughput"])
def test_slider_stands_over_the_phase(shape, tmp_path):
    program = """const found = { stops: stopsOf(data).map((t) => placeOf(data, t)), shown: [], back: [] };
    for (let tenth = 0; tenth <= 50; tenth += 1) {
      const t = timeAt(data, tenth / 10);
      if (tenth % 10 !== 5) found.shown.push([phaseAt(t), PHASES[Math.round(tenth / 10)]]);
      found.back.push(placeOf(data, t) * 10);
    }"""
    found = evaluate(tmp_path, flow_data(record(shape)[0]), program)
    assert found["stops"] == pytest.approx(range(6))
    assert [shown for shown, tab in found["shown"] if shown != tab] == [] and len(found["shown"]) == 46
    assert found["back"] == pytest.approx(range(51))


@_needs_node
def test_loads_are_told_when_they_are_computed(tmp_path):
    data = flow_data(record("high_throughput")[0])
    program = """const model = readPass(data, data.passes[0]);
    const totals = [wireTotals(data, model.pass.wire.dispatch, 1), wireTotals(data, model.pass.wire.combine, 1)];
    const found = PHASES.map((phase) => inWords(model, totals, { step: 0, layer: 1 }, phase));"""
    told = evaluate(tmp_path, data, program)
    assert told[0] == "Step 0, layer 1, at source: 10 tokens, not routed yet."
    assert told[1] == "Step 0, layer 1, router: 10 tokens, 20 routes."
    assert told[2] == "Step 0, layer 1, dispatch: 10 tokens, 20 routes, 15 rows between ranks."
    assert ["busiest rank" in line for line in told] == [False] * 3 + [True] * 3


def crowded() -> dict:
    """256 experts on 4 ranks, 8 a token: side by side, all on one rank, and far from each other."""
    chosen = [[*range(64, 72)], [*range(128, 192, 8)], [3, 60, 75, 110, 130, 190, 200, 255]]
    data = flow_data(record("high_throughput")[0])
    n = [*range(8)] * 3
    experts = [expert for line in chosen for expert in line]
    routes = {
        "token": [token for token in range(3) for _ in range(8)], "k": n, "expert": experts, "weight": [0.1] * 24,
        "owner": [expert // 64 for expert in experts], "send_row": n, "receive_row": n, "via": [-1] * 24,
    }  # fmt: skip
    only = data["passes"][0]
    passes = [only | {"tokens": only["tokens"][:3], "routes": routes}]
    return data | {"experts": 256, "owner": [expert // 64 for expert in range(256)], "passes": passes}


@_needs_node
@pytest.mark.parametrize("width", [1084, 584])
def test_numbers_of_chosen_experts_cover_no_expert_and_no_number(width, tmp_path):
    data = crowded()
    program = (
        f"const width = {width};"
        """const found = { over: 0, together: 0, outside: 0, longest: 0, shown: [] };
    data.passes[0].tokens.forEach((_, token) => {
      const { g, labels, routes } = layoutOf(data, token, width);
      const { w } = g.expertTile;
      found.shown.push([labels.length, routes.length]);
      const lines = labels.map(({ leader: [x0, y0, x1, y1] }) => Math.hypot(x1 - x0, y1 - y0));
      found.longest = Math.max(found.longest, ...lines);
      const across = (a, x, wide) => a.left < x + wide && x < a.left + a.wide;
      const meet = (a, x, y, wide, high) => across(a, x, wide) && a.top < y + high && y < a.top + PILL;
      labels.forEach((a, i) => {
        found.over += g.experts.filter(({ x, y }) => meet(a, x, y, w, w)).length;
        found.together += labels.filter((b, j) => j > i && meet(a, b.left, b.top, b.wide, PILL)).length;
        const lane = g.laneTop(data.owner[a.text]);
        if (a.top < lane || a.top + PILL > lane + g.lane || a.left + a.wide > g.loadAt) found.outside += 1;
      });
    });"""
    )
    found = evaluate(tmp_path, data, program)
    assert (found["over"], found["together"], found["outside"]) == (0, 0, 0)
    assert found["shown"] == [[8, 8]] * 3
    assert found["longest"] < 65  # eight neighbours: 22 pixels a number, on two sides


@_needs_node
def test_an_expert_with_one_route_is_no_empty_expert_in_the_dark(tmp_path):
    """Both stand on a black lane, and only one of them is filled."""
    program = """const light = (c) => [1, 3, 5].reduce((sum, at) => sum + parseInt(c.slice(at, at + 2), 16), 0);
    const sums = (page) => scaleOn(page).map(light);
    const found = { dark: sums("#212121"), light: sums("#ffffff") };"""
    found = evaluate(tmp_path, flow_data(record("high_throughput")[0]), program)
    assert found["dark"][0] > 2 * found["light"][0] and found["dark"][-1] == found["light"][-1]
    assert found["dark"] == sorted(found["dark"])


@_needs_node
@pytest.mark.parametrize("shape", SHAPES)
def test_every_copy_of_a_chosen_token_is_drawn(shape, tmp_path):
    """However many others there are; and while its experts compute, each copy waits beside its expert's number."""
    program = """const token = 6;
    const { model, groups, routes, labels } = layoutOf(data, token, 1084);
    const there = groups.filter((one) => one.begin >= 1 && one.end <= 1.72);
    const moves = there.flatMap((one) => one.mine.map((i) => one.to[i]));
    const experts = groups.find((one) => one.begin === 1.72 && one.end === 2);
    const all = [...Array(9000).keys()];
    const mark = all.map((i) => Number(i === 4001));
    const many = group(0, 1, [[all, (i) => ({ token: i, look: 0, to: -1 }), (i) => i]], mark);
    const on = ({ left, top, wide }, x, y) => left <= x && x <= left + wide && top <= y && y <= top + PILL;
    const found = {
      sent: travelling(data, model, () => true).there.filter((copy) => copy[0] === token).map((copy) => copy[2]),
      moves: moves.filter((rank) => rank >= 0),
      rest: experts.rest, waiting: experts.mine.length, routes: routes.length,
      beside: experts.mine.every((i) => labels.some((one) => on(one, experts.x1[i], experts.y1[i]))),
      mine: many.mine.map((i) => many.token[i]), drawn: many.n,
    };"""
    found = evaluate(tmp_path, flow_data(record(shape)[0]), program)
    assert sorted(found["sent"]) == sorted(found["moves"])
    assert found["waiting"] == found["routes"] == 2 and found["rest"] == 3 and found["beside"]
    assert found["mine"] == [4001] and found["drawn"] <= 1501


def tokens(texts: list[str]) -> list[dict]:
    return [{"rank": 0, "row": row, "text": text} for row, text in enumerate(texts)]


def test_letters_of_the_still_are_in_their_tiles():
    from matplotlib.figure import Figure

    listed = tokens([" ", "·start", *"return_value_if(x)WW", "\\n", "␣", "é₁"])
    tiles = tiles_of(Frame(4, 46.0), listed)
    for x, y, text in texts_of(listed, tiles):
        inside = [
            left < x < left + tiles.width and top < y < top + tiles.height
            for left, top in tiles.places
        ]  # fmt: skip
        assert sum(inside) == 1 and text
    axes = Figure().add_axes((0, 0, 1, 1))
    draw_tokens(Pen(axes), listed, tiles, [])
    (letters,) = (artist for artist in axes.patches if len(artist.get_path().vertices) > 10)
    path = letters.get_path()
    points = path.vertices[path.codes != path.CLOSEPOLY]
    left, top = np.array(tiles.places).T
    x, y = points[:, :1], points[:, 1:]
    inside = (left <= x) & (x <= left + tiles.width) & (top <= y) & (y <= top + tiles.height)  # [points, tiles]
    assert inside.any(1).all() and inside.any(0).tolist() == [False] + [True] * (len(listed) - 1)


def test_lines_of_the_still_are_under_its_tokens():
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.figure import Figure

    from moe_course.viz import token_flow_still

    data = flow_data(record("high_throughput")[0])
    frame = token_flow_still.Frame(4, 46.0)
    axes = Figure().add_axes((0, 0, 1, 1))
    token_flow_still._panel(Pen(axes), frame, data, data["passes"][0], "router")
    drawn = sorted(axes.get_children(), key=lambda artist: artist.get_zorder())  # as matplotlib does, and stable
    lines = max(i for i, artist in enumerate(drawn) if isinstance(artist, LineCollection))
    left = tiles_of(frame, data["passes"][0]["tokens"]).places[0][0]
    (tiles,) = (
        i for i, artist in enumerate(drawn)
        if isinstance(artist, PolyCollection) and artist.get_paths()[0].vertices[0, 0] == left
    )  # fmt: skip
    assert lines < tiles


@_needs_node
def test_a_row_that_ranks_share_is_the_sum_of_all_their_parts(tmp_path):
    data = flow_data(record("no_dp_ep", [4, 4], (2,))[0])
    shown = data["passes"][0]
    owners: dict = {}
    for token, owner in zip(shown["routes"]["token"], shown["routes"]["owner"], strict=True):
        owners.setdefault(shown["tokens"][token]["position"], set()).add(owner)
    parts = {(token, rank) for rank, strips in strips_of(shown) for token, _, _ in strips}
    expected = {(i, rank) for i, token in enumerate(shown["tokens"]) for rank in owners[token["position"]]}
    assert parts == expected and max(map(len, owners.values())) == 2
    program = """const model = readPass(data, data.passes[0]);
    const found = model.partsOf.flatMap((routes, token) => routes.map((i) => [token, model.owner[i]]));"""
    assert {tuple(pair) for pair in evaluate(tmp_path, data, program)} == expected
