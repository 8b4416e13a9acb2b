"""Runs for the tests of the player, and what it has to say of them, worked out here from the routes alone."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

from test_viz_flow import SHAPES, record
from test_viz_player import evaluate

from moe_course.viz.flow_data import flow_data

WAYS = ("dispatch", "combine")
#: A row costs less on its way there than a part on its way home, as in a run that quantizes.
BYTES = {"dispatch": 160, "combine": 256}
RUNS = [*SHAPES, "no_dp_ep", "two_hop with sums in the node"]
_PAGE = (Path(__file__).parent / "player_page.js").read_text()
_SINGLE = ("all_to_all", "low_latency")


@cache
def run_of(name: str) -> dict:
    """The player's data of one layer on four ranks (three that share rows), not to be changed."""
    if name == "no_dp_ep":
        data = flow_data(record(name, [5, 5, 5], (3,))[0])
    elif name.startswith("two_hop with"):
        data = flow_data(record("two_hop", [6, 0, 9, 6], (2, 2), reduce_in_node=True)[0])
    else:
        data = flow_data(record(name)[0])
    only = data["passes"][0]
    wire = {way: [[*entry[:4], entry[2] * BYTES[way]] for entry in only["wire"][way]] for way in WAYS}
    return data | {"row_bytes": BYTES["dispatch"], "partial_bytes": BYTES["combine"], "passes": [only | {"wire": wire}]}


def drawn(folder: Path, data: dict, program: str) -> object:
    """What `program`, which ends in `found`, makes of the player with a page that remembers what is drawn."""
    return evaluate(folder, data, f"{_PAGE}\n{program}")


def routes_of(data: dict) -> list[dict]:
    """All routes of the pass, each with the rank that it starts from."""
    only = data["passes"][0]
    lines = [dict(zip(only["routes"], line, strict=True)) for line in zip(*only["routes"].values(), strict=True)]
    return [line | {"source": only["tokens"][line["token"]]["rank"]} for line in lines]


def fits(route: dict, rank: int | None, expert: int | None) -> bool:
    """Does a choice show this route?"""
    return (rank is None or rank in (route["source"], route["owner"])) and expert in (None, route["expert"])


def rows_of(data: dict, routes: list[dict]) -> dict[str, Counter]:
    """Rows that carry these routes, {way: {(source, destination): rows}}, by the rules of the backend."""
    shape, pairs = data["shape"], [(r["token"], r["source"], r["owner"]) for r in routes]
    if shape == "no_dp_ep":
        return {"dispatch": Counter(), "combine": _sums(data, routes)}
    if shape == "two_hop":
        return _hops(data, routes)
    once = pairs if shape in _SINGLE else set(pairs)
    there = Counter((source, owner) for _, source, owner in once if source != owner)
    return {"dispatch": there, "combine": Counter({(owner, source): n for (source, owner), n in there.items()})}


def _hops(data: dict, routes: list[dict]) -> dict[str, Counter]:
    ways = {(r["token"], r["source"], r["source"] if r["via"] < 0 else r["via"], r["owner"]) for r in routes}
    nodes = {(token, source, via) for token, source, via, _ in ways}
    second = [(via, owner) for *_, via, owner in ways if via != owner]
    first = [(source, via) for _, source, via in nodes if source != via]
    back = first if data["reduce_in_node"] else [(source, via) for _, source, via, _ in ways if source != via]
    return {"dispatch": Counter(first + second), "combine": Counter((to, of) for of, to in second + back)}


def _sums(data: dict, routes: list[dict]) -> Counter:
    ranks, tokens = data["ranks"], data["passes"][0]["tokens"]
    rows = 1 + max(token["row"] for token in tokens)
    parts = {(tokens[r["token"]]["row"], r["source"]) for r in routes}
    base, rest = divmod(rows, ranks)
    adders = [rank for rank in range(ranks) for _ in range(base + (rank < rest))]
    to_adder = [(rank, adders[row]) for row, rank in parts if rank != adders[row]]
    everywhere = [(adders[row], rank) for row in {row for row, _ in parts} for rank in range(ranks)]
    return Counter(to_adder + [(adder, rank) for adder, rank in everywhere if adder != rank])
