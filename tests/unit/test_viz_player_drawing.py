"""Where the player draws things, from the calls on its canvases: each at its rank, at its expert, in its colour."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
from player_cases import RUNS, drawn, routes_of, rows_of, run_of

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


@pytest.mark.parametrize("rank", [None, 2])
def test_bars_of_load_belong_to_their_ranks(rank, tmp_path):
    data = run_of("high_throughput")
    program = f"""const scene = sceneFor(data, {{ rank: {"null" if rank is None else rank} }});
    const {{ g }} = scene;
    const calls = callsOf((context) => drawLoads(context, scene, END));
    const of = (wanted) => calls.filter(({{ name }}) => name === wanted);
    const found = {{
      texts: of("fillText").map(({{ args: [text, , y] }}) => [laneAt(g, y), text]),
      bars: of("fillRect").map(({{ args: [, y, wide], fillStyle, globalAlpha }}) =>
        [laneAt(g, y), COLOURS.indexOf(fillStyle), globalAlpha === 1, Math.round((1000 * wide) / g.loadWidth)]),
    }};"""
    found = drawn(tmp_path, data, program)
    every = routes_of(data)
    load = [sum(route["owner"] == at for route in every) for at in range(4)]
    shown = [sum(r["owner"] == at and rank in (None, r["source"], r["owner"]) for r in every) for at in range(4)]
    assert len(set(load)) > 1
    expected = [
        [at, at, solid, round(1000 * n[at] / max(load))] for at in range(4) for solid, n in ((0, load), (1, shown))
    ]
    assert found["bars"] == expected
    told = [f"{'' if one == all_ else f'{one} of '}{all_}{' ◀ busiest' * (all_ == max(load))}"
            for one, all_ in zip(shown, load, strict=True)]  # fmt: skip
    assert found["texts"] == [[at, text] for at, text in enumerate(told)]


@pytest.mark.parametrize("name", ["high_throughput", "two_hop"])
def test_arrivals_are_told_at_their_ranks(name, tmp_path):
    data = run_of(name)
    program = """const found = [1.9, END].map((t) => {
      const scene = sceneFor(data);
      countArrivals(scene, t);
      const calls = callsOf((context) => drawArrived(context, scene, t));
      return calls.map(({ args: [text, , y] }) => [laneAt(scene.g, y), text]);
    });"""
    found = drawn(tmp_path, data, program)
    for way, noun, side, told in zip(("dispatch", "combine"), ("row", "part"), ("in", "back"), found, strict=True):
        into = [sum(n for _, to, n, *_ in data["passes"][0]["wire"][way] if to == rank) for rank in range(4)]
        assert len(set(into)) > 1
        assert told == [[rank, f"{n} {noun}{'s' * (n != 1)} {side}"] for rank, n in enumerate(into)]


@pytest.mark.parametrize("name", ["all_to_all", "two_hop"])
def test_a_chosen_token_is_drawn_to_its_experts(name, tmp_path):
    """Frames, numbers and lines: at the expert, in the colour of the rank that owns it, through its door."""
    data = run_of(name)
    program = """const found = data.passes[0].tokens.map((_, token) => {
      const scene = sceneFor(data, { token });
      const { g, paths } = scene;
      const w = g.expertTile.w;
      const expertAt = (x, y) => g.experts.findIndex((at) => Math.abs(at.x - x) < 2 && Math.abs(at.y - y) < 2);
      const calls = callsOf((context) => drawLabels(context, scene, false));
      const of = (name) => calls.filter((call) => call.name === name);
      const ends = of("moveTo").map(({ args: [, y0] }, at) => [y0, ...of("lineTo")[at].args]);
      const token_ = g.tokens[token];
      const strokes = callsOf((context) => drawPaths(context, scene, 1)).filter(({ name }) => name === "stroke");
      const ways = strokes.map(({ args: [{ steps }], strokeStyle, lineWidth }, at) => {
        const [[x0], [x1, y1]] = [steps[0], steps.at(-1)];
        return {
          lanes: steps.map(([, y]) => laneAt(g, y)), colour: COLOURS.indexOf(strokeStyle), wide: lineWidth,
          dashed: paths[at].dash.length > 0, expert: expertAt(x1 + 2, y1 - w / 2),
          begins: x0 > token_.x && x0 <= token_.x + g.tokenTile.w,
        };
      });
      return {
        plates: of("fillRect").filter(({ args }) => args[3] === 2).map((one) => COLOURS.indexOf(one.fillStyle)),
        texts: of("fillText").map(({ args: [text, , y] }) => [text, laneAt(g, y)]),
        frames: [...new Set(of("strokeRect").map(({ args: [x, y] }) => expertAt(x, y)))],
        lines: ends.map(([from, x, y]) => expertAt(x - w / 2, from > y ? y - w - 2 : y + 2)), // from below, from above
        ways,
      };
    });"""
    every = routes_of(data)
    for token, shown in enumerate(drawn(tmp_path, data, program)):
        mine = [route for route in every if route["token"] == token]
        assert sorted(shown["texts"]) == sorted([str(route["expert"]), route["owner"]] for route in mine)
        for text, colour, expert in zip(shown["texts"], shown["plates"], shown["frames"], strict=True):
            assert int(text[0]) == expert and colour == data["owner"][expert]
        assert shown["lines"] == shown["frames"]
        for route, way in zip(mine, shown["ways"], strict=True):
            via = [] if name != "two_hop" else [route["via"] if route["via"] >= 0 else route["source"]]
            assert way == {
                "lanes": [route["source"]] * 2 + via + [route["owner"]] * 2,
                "colour": route["owner"],
                "wide": pytest.approx(1 + 3 * min(1, route["weight"]), abs=1e-4),
                "dashed": route["source"] == route["owner"],
                "expert": route["expert"],
                "begins": True,
            }


_MOVES = """const scene = sceneFor(data);
const { g, groups } = scene;
const inside = (at, w, h, x, y) => x >= at.x - 1 && x <= at.x + w + 1 && y >= at.y - 1 && y <= at.y + h + 1;
const place = (x, y) => {
  const expert = g.experts.findIndex((at) => inside(at, g.expertTile.w, g.expertTile.w, x, y));
  if (expert >= 0) return ["expert", expert];
  const token = g.tokens.findIndex((at) => inside(at, g.tokenTile.w, g.tokenTile.h, x, y));
  if (token >= 0) return ["token", token];
  return [x > (g.router + g.inbox) / 2 + 1 ? "door" : x > g.router ? "half" : "port", laneAt(g, y)];
};
const found = groups.flatMap((one) => Array.from({ length: one.n }, (_, i) => ({
  begin: one.begin, end: one.end, token: one.token[i], to: one.to[i],
  rank: Math.floor(one.look[i] / 3), kind: one.look[i] % 3,
  from: place(one.x0[i], one.y0[i]), at: place(one.x1[i], one.y1[i]),
})));"""


@pytest.mark.parametrize("name", RUNS)
def test_what_moves_goes_where_its_route_goes(name, tmp_path):
    data = run_of(name)
    every, tokens = routes_of(data), data["passes"][0]["tokens"]
    moves = drawn(tmp_path, data, _MOVES)

    def seen(begin: float, end: float, *fields: str) -> Counter:
        chosen = [move for move in moves if begin <= move["begin"] and move["end"] <= end]
        return Counter(tuple(str(move[field]) for field in fields) for move in chosen)

    def wanted(*lines: tuple) -> Counter:
        return Counter(tuple(map(str, line)) for line in lines)

    ends = [(r["token"], r["source"], ["token", r["token"]], ["port", r["source"]]) for r in every]
    assert seen(0, 1, "token", "rank", "from", "at") == wanted(*ends)
    ends = [(r["token"], r["source"], ["door", r["owner"]], ["expert", r["expert"]]) for r in every]
    assert seen(1.72, 2, "token", "rank", "from", "at") == wanted(*ends)
    ends = [(r["token"], r["owner"], ["expert", r["expert"]], ["door", r["owner"]]) for r in every]
    assert seen(3, 3.28, "token", "rank", "from", "at") == wanted(*ends)
    stays = {(r["token"], r["source"]) for r in every if r["source"] == r["owner"]}
    for begin, end, way in ((1, 1.72, "dispatch"), (3.28, 4, "combine")):
        there = [move for move in moves if begin <= move["begin"] and move["end"] <= end]
        flying = [move for move in there if move["to"] >= 0 and move["kind"] != 2]
        flights = Counter()
        for move in flying:
            kind, lane = move["at"]
            lane = tokens[lane]["rank"] if kind == "token" else lane
            assert lane == move["to"]  # it comes to the rank that counts it
            assert kind != "token" or move["at"][1] == move["token"] or data["reduce"]
            kind, start = move["from"]
            assert start == move["rank"] and kind in ("door", "half", "port")
            flights[move["rank"], lane] += 1
        expected = +rows_of(data, every)[way]
        if name == "no_dp_ep":  # ranks without a route of a row say so: their part is zeros
            expected = Counter({(source, to): n for source, to, n, *_ in data["passes"][0]["wire"][way]})
        assert flights == expected
        home = {(move["token"], move["rank"]) for move in there if move["kind"] == 1}
        assert home == stays and all(move["to"] == -1 for move in there if move["kind"] == 1)
        for move in there:  # a row that nobody needs goes to a rank that no route of it goes to
            if move["kind"] == 2:
                away = move["to"] if way == "dispatch" else move["rank"]
                assert away not in {route["owner"] for route in every if route["token"] == move["token"]}


def test_dots_are_drawn_where_they_are_and_in_the_colour_of_their_rank(tmp_path):
    data = run_of("all_to_all")
    program = """const scene = sceneFor(data, { token: 4 });
    const { groups, dots, badges } = scene;
    const rounded = (numbers) => numbers.map((one) => Math.round(one * 100) / 100);
    const found = groups.filter((one) => one.end - one.begin > 0.1).flatMap((part) => {
      const seen = (t, draw, sheet) => callsOf((context) => draw(context, scene, part, t))
        .filter(({ name, args }) => name === "drawImage" && args[0] === sheet.canvas)
        .map(({ args: [, sx, sy, size, , x, y, wide] }) => rounded([sx / size, sy / size, x + wide / 2, y + wide / 2]));
      const wanted = (picked, x, y) => [...Array(part.n).keys()].filter((i) => picked === (part.token[i] === 4))
        .map((i) => rounded([Math.floor(part.look[i] / 3), part.look[i] % 3, part[x][i], part[y][i]]));
      return [["x0", "y0", part.begin], ["x1", "y1", part.end]].flatMap(([x, y, t]) => [
        [seen(t, drawGroup, dots.small), wanted(false, x, y)], [seen(t, drawBadges, badges), wanted(true, x, y)]]);
    });"""
    found = drawn(tmp_path, data, program)
    assert len(found) == 5 * 4
    for shown, expected in found:
        assert shown
        for dot, place in zip(shown, expected, strict=True):
            assert dot == pytest.approx(place, abs=0.02)
