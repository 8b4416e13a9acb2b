"""What the player says and counts while only a rank or an expert is shown; and what it makes of odd wishes."""

from __future__ import annotations

import json
import shutil

import pytest
from player_cases import BYTES, RUNS, WAYS, drawn, fits, routes_of, rows_of, run_of

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
_EACH_CHOICE = """const found = [];
for (let rank = -1; rank < data.ranks; rank++) {
  for (let expert = -1; expert < data.experts; expert++) {
    const choice = { rank: rank < 0 ? null : rank, expert: expert < 0 ? null : expert };
    const scene = sceneFor(data, choice);
    found.push({ ...choice, ...READ });
  }
}"""


def each_choice(folder, data: dict, read: str) -> list[dict]:
    """What `read`, an object made of `scene`, is under every choice of rank and expert."""
    return drawn(folder, data, _EACH_CHOICE.replace("READ", read))


def amount(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def size(n: int) -> str:
    if n < 10_000:
        return f"{n:,} B"
    return f"{n / 1000:.{0 if n >= 100_000 else 1}f} kB"


@pytest.mark.parametrize("name", RUNS)
def test_counts_are_those_of_the_rows_that_are_shown(name, tmp_path):
    data = run_of(name)
    read = """(countArrivals(scene, END), { into: [...scene.into],
      legs: [0, 1].map((leg) => legText("way", scene.totals[leg], scene.arrived[leg], scene.everything[leg])) })"""
    every, wire = routes_of(data), data["passes"][0]["wire"]
    found = each_choice(tmp_path, data, read)
    for one in found:
        shown = [route for route in every if fits(route, one["rank"], one["expert"])]
        rows = rows_of(data, shown)
        for way, leg in zip(WAYS, one["legs"], strict=True):
            all_rows, empty = (sum(entry[place] for entry in wire[way]) for place in (2, 3))
            padding = f" + {empty:,} empty places, {size(empty * BYTES[way])}" if empty else ""
            in_all = f"{amount(all_rows, 'row')}, {size(all_rows * BYTES[way])}{padding}"
            n = all_rows if len(shown) == len(every) else rows[way].total()
            expected = f"way: {n} of {amount(n, 'shown row')} between ranks, {size(n * BYTES[way])} (in all {in_all})"
            if len(shown) == len(every):
                lines = f"{amount(n, 'row')} between ranks, {size(n * BYTES[way])}"
                expected = f"way: {n} of {lines}{padding}"
            assert leg == (expected if all_rows + empty else "way: no row leaves its rank"), one
        moved = [(to, n) for (_, to), n in rows["combine"].items()]
        if len(shown) == len(every):
            moved = [(to, n) for _, to, n, *_ in wire["combine"]]
        assert one["into"] == [sum(n for to, n in moved if to == rank) for rank in range(data["ranks"])]
    assert len({str(one["legs"]) for one in found}) > 3


@pytest.mark.parametrize("name", RUNS)
def test_what_flies_carries_a_route_that_is_shown(name, tmp_path):
    data = run_of(name)
    read = "{ flies: travelling(data, scene.model, scene.visible) }"
    every = routes_of(data)
    for one in each_choice(tmp_path, data, read):
        shown = [route for route in every if fits(route, one["rank"], one["expert"])]
        if len(shown) == len(every):
            continue
        for way, leg in zip(WAYS, ("there", "home"), strict=True):
            pairs = [(source, to) for _, source, to, *_ in one["flies"][leg]]
            assert sorted(pairs) == sorted(rows_of(data, shown)[way].elements()), one
            assert all(copy[3] for copy in one["flies"][leg])  # none is drawn as a row that nobody needs


def shares(routes: list[dict]) -> str:
    """Where contributions come from."""
    found = []
    for owner in sorted({route["owner"] for route in routes}):
        weights = [route["weight"] for route in routes if route["owner"] == owner]
        found.append(f"rank {owner}: {amount(len(weights), 'expert')}, weight {sum(weights):.2f}")
    return " · ".join(found)


@pytest.mark.parametrize("name", ["allgather_reducescatter", "no_dp_ep"])
def test_a_sentence_on_a_token_names_all_its_parts(name, tmp_path):
    data = run_of(name)
    read = """{ told: scene.model.tokens.map((token, i) => {
      const routes = sameToken(scene.model.tokens, i).flatMap((same) => scene.model.routesOf[same]);
      return chosenDetails(data, scene.model, token, routes, scene.state, false)[0].textContent;
    }) }"""
    tokens, every = data["passes"][0]["tokens"], routes_of(data)
    places = [(token["prompt"], token["position"]) for token in tokens]
    seen = set()
    for one in each_choice(tmp_path, data, read):
        choice = [f"from or to rank {one['rank']}"] if one["rank"] is not None else []
        choice += [f"to expert {one['expert']}"] if one["expert"] is not None else []
        for place, token, told in zip(places, tokens, one["told"], strict=True):
            mine = [route for route in every if places[route["token"]] == place]
            shown = [route for route in mine if fits(route, one["rank"], one["expert"])]
            hidden = [route for route in mine if not fits(route, one["rank"], one["expert"])]
            where = shares(shown) or f"none of its routes is {' and '.join(choice)}"
            where += f" · left out here: {shares(hidden)}" if hidden else ""
            total = f"the sum of all {len(mine)} contributions" if hidden else "their sum"
            named = f"Token “\u2068{token['text']}\u2069”, row {token['row']} of rank {token['rank']}"
            assert told == f"{named}: not routed yet → {where} → back on rank {token['rank']}: {total}"
            seen.add((bool(shown), bool(hidden)))
    assert seen == {(True, False), (True, True), (False, True)}


def test_a_note_says_what_is_left_out(tmp_path):
    data = run_of("high_throughput")
    read = """{ note: shownText(scene.model, scene.state),
      told: inWords(scene.model, scene.everything, scene.state, "router", "Shown: x.") }"""
    every = routes_of(data)
    for one in each_choice(tmp_path, data, read):
        n = sum(fits(route, one["rank"], one["expert"]) for route in every)
        rest = len(every) - n
        begin, end = (
            f", {n} of {len(every)}, and the rows that carry them; the other ",
            f"{'is' if rest == 1 else 'are'} left out.",
        )
        named = {"rank": f"from or to rank {one['rank']}", "expert": f"to expert {one['expert']}"}
        choice = " and ".join(named[name] for name in named if one[name] is not None)
        expected = f"Shown: only routes {choice}{begin}{amount(rest, 'route')} {end}" if choice else ""
        assert one["note"] == expected
        assert one["told"] == "Step 0, layer 1, router: 10 tokens, 20 routes. Shown: x."


def test_a_note_says_where_a_choice_leaves_nothing_out(tmp_path):
    data = run_of("high_throughput")
    only = data["passes"][0]
    owners = [0] * len(only["routes"]["owner"])
    same = data | {"passes": [only | {"routes": only["routes"] | {"owner": owners}}]}
    program = "const { model, state } = sceneFor(data, { rank: 0 }); const found = shownText(model, state);"
    assert drawn(tmp_path, same, program) == "Shown: routes from or to rank 0, which are all 20."


def test_strips_show_every_part_and_pale_ones_are_left_out(tmp_path):
    """The new row is the sum of all its parts, whatever is shown."""
    data = run_of("all_to_all")
    program = """const found = [null, 2].map((rank) => {
      const scene = sceneFor(data, { rank });
      const { g } = scene;
      const strip = Math.round(g.tokenTile.h * 0.36);
      const { w, h: high } = g.tokenTile;
      const rectangles = tokenSheet(scene, true).getContext().calls.filter(({ name }) => name === "fillRect");
      return rectangles.filter(({ args }) => args[3] === strip).map(({ args: [x, y], fillStyle, globalAlpha }) => {
        const inside = (at) => x >= at.x - 0.01 && x < at.x + w - 0.01 && y > at.y && y < at.y + high;
        return [g.tokens.findIndex(inside), COLOURS.indexOf(fillStyle), globalAlpha < 0.3];
      });
    });"""
    every = sorted(routes_of(data), key=lambda route: (route["token"], route["owner"]))
    for rank, strips in zip((None, 2), drawn(tmp_path, data, program), strict=True):
        expected = [[route["token"], route["owner"], not fits(route, rank, None)] for route in every]
        assert sorted(strips) == sorted(expected)


def test_experts_that_can_be_chosen_say_their_rank_and_their_routes(tmp_path):
    data = run_of("all_to_all")
    program = (
        "const { model } = sceneFor(data); const found = [null, 0, 1].map((rank) => expertsWith(data, model, rank));"
    )
    every = routes_of(data)
    for rank, listed in zip((None, 0, 1), drawn(tmp_path, data, program), strict=True):
        expected = []
        for expert, owner in enumerate(data["owner"]):
            load = [sum(fits(route, at, expert) for route in every) for at in (rank, None)]
            part = "" if load[0] == load[1] else f"{load[0]} of "
            if load[0]:
                expected.append([expert, f"{expert} · rank {owner} · {part}{amount(load[1], 'route')}"])
        assert listed == expected


ODD = ["null", "undefined", "NaN", "Infinity", '"2"', "1.5", "-1", "77", "true", "[]", "{}", "1e20"]


def test_what_there_is_not_cannot_be_wished_for(tmp_path):
    first = run_of("all_to_all")
    other = first["passes"][0] | {"step": 3, "layer": 4, "tokens": first["passes"][0]["tokens"][:4]}
    data = first | {"passes": [*first["passes"], other | {"layer": 2}, other]}
    good = [{"step": 3}, {"layer": 4}, {"step": 3, "layer": 4, "token": 3}, {"step": 3, "token": 4}, {"token": 9}]
    good += [{"rank": 0}, {"expert": 7}, {"other": 5}]
    program = f"""const known = {{ step: 0, layer: 1, token: 2, rank: 1, expert: 3 }};
    const later = {{ ...known, step: 3, layer: 4 }};
    const after = (wish) => stateAfter(data, known, wish).state;
    const found = {{
      odd: Object.keys(known).map((name) => [{", ".join(ODD)}].map((value) => after({{ [name]: value }}))),
      good: {json.dumps(good)}.map(after),
      elsewhere: [{{ step: 77 }}, {{ layer: 77 }}, {{ step: "0" }}].map((wish) => stateAfter(data, later, wish).state),
      gone: stateAfter(data, {{ ...known, token: 9 }}, {{ step: 3 }}).state,
    }};"""
    found = drawn(tmp_path, data, program)
    known = {"step": 0, "layer": 1, "token": 2, "rank": 1, "expert": 3}
    for name, states in zip(known, found["odd"], strict=True):
        none = known | ({} if name in ("step", "layer") else {name: None})  # to choose nothing is a choice
        assert states == [none, none] + [known] * (len(ODD) - 2), name
    later = known | {"step": 3, "layer": 4}
    assert found["elsewhere"] == [later] * 3
    begun = later | {"layer": 2}  # the first layer of step 3
    expected = [begun, known, later | {"token": 3}, begun, known | {"token": 9}, known | {"rank": 0}]
    assert found["good"] == [*expected, known | {"expert": 7}, known]
    assert found["gone"] == begun | {"token": None}
