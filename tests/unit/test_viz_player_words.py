"""What the player says, word for word: phases, counts, sentences, tables and legend, against the routes of a run."""

from __future__ import annotations

import shutil

import pytest
from player_cases import BYTES, RUNS, WAYS, drawn, routes_of, run_of
from test_viz_player_choice import amount, shares, size

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def test_amounts_are_in_units_of_a_thousand(tmp_path):
    told = {
        0: "0 B", 999: "999 B", 9_999: "9,999 B", 10_000: "10.0 kB", 10_240: "10.2 kB", 99_949: "99.9 kB",
        238_080: "238 kB", 1_048_576: "1.0 MB", 12_345_678: "12.3 MB", 5_400_000_000: "5.4 GB",
        3_000_000_000_000: "3,000 GB",
    }  # fmt: skip
    assert drawn(tmp_path, run_of("all_to_all"), f"const found = {list(told)}.map(bytesText);") == list(told.values())


@pytest.mark.parametrize("name", RUNS)
def test_phases_are_told_in_order_and_rows_are_rows(name, tmp_path):
    data = run_of(name)
    program = """const { model, everything, state } = sceneFor(data);
    const found = PHASES.map((phase) => inWords(model, everything, state, phase));"""
    wire, every = data["passes"][0]["wire"], routes_of(data)
    rows = {way: amount(sum(entry[2] for entry in wire[way]), "row") for way in WAYS}
    load = [sum(route["owner"] == rank for route in every) for rank in range(data["ranks"])]
    busiest = [str(rank) for rank, n in enumerate(load) if n == max(load)]
    most = f"; busiest rank{'s' if len(busiest) > 1 else ''} {' and '.join(busiest)} with {amount(max(load), 'route')}"
    tokens = len({(token["prompt"], token["position"]) for token in data["passes"][0]["tokens"]})
    begin, routes = f"{tokens} tokens", f"{tokens} tokens, {len(every)} routes"
    assert drawn(tmp_path, data, program) == [
        f"Step 0, layer 1, at source: {begin}, not routed yet.",
        f"Step 0, layer 1, router: {routes}.",
        f"Step 0, layer 1, dispatch: {routes}, {rows['dispatch']} between ranks.",
        f"Step 0, layer 1, experts: {routes}{most}.",
        f"Step 0, layer 1, combine: {routes}, {rows['combine']} between ranks{most}.",
        f"Step 0, layer 1, done: {routes}{most}.",
    ]


@pytest.mark.parametrize("name", ["high_throughput", "low_latency"])
def test_rows_and_bytes_tick(name, tmp_path):
    data = run_of(name)
    program = """const { everything } = sceneFor(data);
    const found = everything.map((total) => [0, 6, total.rows].map((rows) => legText("way", total, rows)));"""
    for way, ticks in zip(WAYS, drawn(tmp_path, data, program), strict=True):
        rows, empty = (sum(entry[place] for entry in data["passes"][0]["wire"][way]) for place in (2, 3))
        for n, told in zip((0, 6, rows), ticks, strict=True):
            places = round(empty * n / rows)
            padding = f" + {places:,} empty places, {size(round(empty * n / rows * BYTES[way]))}" if empty else ""
            assert told == f"way: {n} of {rows} rows between ranks, {size(n * BYTES[way])}{padding}"


@pytest.mark.parametrize("name", ["two_hop with sums in the node", "all_to_all"])
def test_tables_are_the_routes(name, tmp_path):
    data = run_of(name)
    program = """const { model } = sceneFor(data);
    const texts = (line) => line.children.map((cell) => cell.textContent);
    const cells = (table) => table.all("tbody")[0].children.map(texts);
    const all = [...Array(model.n).keys()];
    const found = [cells(routeTable(data, model, all, false)), cells(longTable(data, model, all).at(-1))];"""
    short, long = drawn(tmp_path, data, program)
    weights = [[float(line.pop(-4)) for line in table] for table in (short, long)]
    expected, ways = [], set()
    for route in routes_of(data):
        stops = [route["source"], *([route["via"]] if route["via"] >= 0 else []), route["owner"]]
        stops = [stop for place, stop in enumerate(stops) if place == 0 or stop != stops[place - 1]]
        stays = route["source"] == route["owner"]
        way = f"stays on {route['owner']}" if stays else " → ".join(map(str, stops))
        ways.add(len(stops))
        rows = ["–" if route[name] < 0 else f"{route[name]:,}" for name in ("send_row", "receive_row")]
        token = data["passes"][0]["tokens"][route["token"]]
        begin = [token["text"], f"● {token['rank']}", str(token["row"])]
        numbers = [str(route["k"]), str(route["expert"]), f"● {route['owner']}", way, *rows]
        expected.append((begin, numbers))
    assert short == [numbers for _, numbers in expected]
    assert long == [begin + numbers for begin, numbers in expected]
    assert weights[0] == weights[1] == pytest.approx([route["weight"] for route in routes_of(data)], abs=0.00051)
    assert max(ways) == (2 if name == "all_to_all" else 3)


@pytest.mark.parametrize("n, lines, note", [(600, 600, ""), (1300, 600, "The first 600 of 1,300 routes.")])
def test_a_long_table_says_where_it_ends(n, lines, note, tmp_path):
    program = f"""const {{ model }} = sceneFor(data);
    const parts = longTable(data, model, Array({n}).fill(0));
    const before = parts.slice(0, -1).map((one) => one.textContent).join();
    const found = [parts.at(-1).all("tbody")[0].children.length, before];"""
    found = drawn(tmp_path, run_of("all_to_all"), program)
    assert found[0] == lines and found[1].startswith(note) and bool(found[1]) == bool(note)


def test_a_sentence_tells_the_shares_of_each_rank(tmp_path):
    data = run_of("all_to_all")
    program = """const { model } = sceneFor(data);
    const found = model.routesOf.map((routes) => sharesOf(model, routes));"""
    every = routes_of(data)
    expected = [shares([r for r in every if r["token"] == token]) for token in range(len(data["passes"][0]["tokens"]))]
    assert drawn(tmp_path, data, program) == expected
    assert any(" · " in told for told in expected) and any("2 experts" in told for told in expected)


def test_the_legend_goes_from_few_to_many(tmp_path):
    """Its scale stands between 1 and the most, and begins with the colour of one route."""
    program = """const [most, dots, scale] = [h("span", {}, "MOST"), h("span"), h("span", { class: "SCALE" }, "SCALE")];
    const legend = legendOf(data, most, dots, scale);
    const entry = legend.children.find((one) => one?.textContent?.includes("SCALE"));
    const colours = scaleOn("#ffffff");
    const scene = sceneFor(data);
    const { g, model } = scene;
    const lit = litSheet(model, g, COLOURS_OF_PAGE, model.expertLoad).getContext().calls;
    const fills = lit.filter(({ name }) => name === "fillRect").map(({ args: [x, y], fillStyle }) => [
      model.expertLoad[g.experts.findIndex((at) => at.x + 1 === x && at.y + 1 === y)], colours.indexOf(fillStyle)]);
    const loads = [...model.expertLoad];
    const found = { text: entry.textContent, fills, last: colours.length - 1, most: model.mostOfExpert, loads };"""
    found = drawn(tmp_path, run_of("high_throughput"), program)
    assert found["text"] == "expert: 0 shown routes (empty), 1SCALEMOST"
    fills = sorted(found["fills"])
    assert [load for load, _ in fills] == sorted(n for n in found["loads"] if n)  # an expert without routes stays empty
    assert fills[0] == [1, 0] and fills[-1] == [found["most"], found["last"]]
    assert [colour for _, colour in fills] == sorted(colour for _, colour in fills)


def test_data_inside_a_line_leaves_the_words_around_it_alone(tmp_path):
    """Whatever way it runs; and a tile shows whole characters."""
    program = """const told = ["a", "א", "ö₁", "\\u202ex"].map((text) => named({ text, row: 1, rank: 2 }));
    const found = [...told, ...["·start", "👩🏽", "😀😀😀", "abc", "ab"].map((text) => shortText(text, 2))];"""
    a, hebrew, byte, hostile, *tiles = drawn(tmp_path, run_of("all_to_all"), program)
    assert a == "“\u2068a\u2069”, row 1 of rank 2" and hebrew == a.replace("a\u2069", "א\u2069")
    assert byte == "“\u2068ö\u2069₁”, row 1 of rank 2" and "\u202e" not in hostile
    assert tiles == ["·", "👩🏽", "😀…", "a…", "ab"]
