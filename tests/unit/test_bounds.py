"""The bound: figures of GLM-5.1 worked out by hand beforehand, and expectations against routings that were counted."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_course.backends import BACKENDS
from moe_course.backends.traffic import RowBytes, Traffic
from moe_course.config import GLM_5_1
from moe_course.cost import bounds, compute
from moe_course.cost.imbalance import max_over_mean, routes_per_rank, uniform_max_over_mean
from moe_course.cost.replay import Shown, shown
from moe_course.cost.sizes import (
    metadata_per_row,
    padded_buffer,
    padded_fill,
    padding_per_row,
    row_sizes,
    selection_bytes,
)
from moe_course.errors import ConfigError
from moe_course.expert_map import Placement, make_placement

E, K, H = 256, 8, 6144
#: R -> rows per token and direction: distinct ranks, of those remote, all-gather, one for each route.
ROWS = {
    2: (1.993, 0.997, 1, 4.000),
    4: (3.614, 2.711, 3, 6.000),
    8: (5.295, 4.633, 7, 7.000),
    16: (6.523, 6.116, 15, 7.500),
    32: (7.267, 7.040, 31, 7.750),
    64: (7.676, 7.556, 63, 7.875),
    256: (8.000, 7.969, 255, 7.969),
}
#: R -> kB per token and layer, both ways: all-gather bf16, fp8 + bf16; per route bf16, fp8 + bf16; per rank likewise.
KILOBYTES = {
    2: (24.6, 18.6, 98.3, 74.5, 24.5, 18.6),
    4: (73.7, 55.9, 147.5, 111.7, 66.6, 50.5),
    8: (172.0, 130.4, 172.0, 130.4, 113.9, 86.3),
    16: (368.6, 279.4, 184.3, 139.7, 150.3, 113.9),
    32: (761.9, 577.3, 190.5, 144.3, 173.0, 131.1),
    64: (1548.3, 1173.3, 193.5, 146.7, 185.7, 140.7),
}
#: R -> rows that cross nodes of 8: with two hops, with one; kB across with two, fp8 + bf16, added up in the node.
ACROSS = {16: (0.997, 3.26, 18.6), 32: (2.711, 5.45, 50.5), 64: (4.633, 6.72, 86.3)}
BF16 = row_sizes(H, "bfloat16", None, "bfloat16")
FP8 = row_sizes(H, "bfloat16", "fp8_group", "bfloat16")


def per_token(shape: str, ranks: int, sizes: RowBytes = BF16, per_node: int = 0, **options) -> bounds.Bound:
    """What a token costs on average: every rank brings 1/R of it."""
    placement = make_placement(ranks, E, ranks_per_node=per_node)
    traffic = bounds.expected_traffic(shape, placement, [1 / ranks] * ranks, K, **options)
    return bounds.bound(traffic, sizes, placement)


@pytest.mark.parametrize("ranks", ROWS)
def test_rows_per_token(ranks):
    distinct, remote, gathered, routes = ROWS[ranks]
    once = per_token("high_throughput", ranks)
    assert once.dispatch.logical == pytest.approx(distinct, abs=6e-4)
    assert once.dispatch.wire == once.combine.wire == pytest.approx(remote, abs=6e-4)
    assert per_token("allgather_reducescatter", ranks).dispatch.wire == pytest.approx(gathered)
    for shape in ("all_to_all", "low_latency"):
        assert per_token(shape, ranks).dispatch.wire == pytest.approx(routes, abs=6e-4)
        assert per_token(shape, ranks).dispatch.logical == pytest.approx(K)
    assert per_token("one_sided", ranks).dispatch == once.dispatch
    assert per_token("no_dp_ep", ranks).dispatch.logical == 0


def test_gathering_ties_with_a_row_per_route_where_there_are_as_many_ranks_as_routes():
    ties = [r for r in ROWS if ROWS[r][2] == pytest.approx(per_token("all_to_all", r).dispatch.wire)]
    assert ties == [8]


@pytest.mark.parametrize("ranks", KILOBYTES)
def test_kilobytes_per_token_and_layer(ranks):
    found = [
        per_token(shape, ranks, sizes).wire_bytes / 1e3
        for shape in ("allgather_reducescatter", "all_to_all", "high_throughput")
        for sizes in (BF16, FP8)
    ]
    assert found == pytest.approx(KILOBYTES[ranks], abs=0.06)


@pytest.mark.parametrize("ranks", ACROSS)
def test_two_hops_cut_what_crosses_nodes(ranks):
    copies, single, kilobytes = ACROSS[ranks]
    two = per_token("two_hop", ranks, FP8, 8, reduce_in_node=True)
    assert two.dispatch.across == two.combine.across == pytest.approx(copies, abs=6e-4)
    assert two.across_bytes / 1e3 == pytest.approx(kilobytes, abs=0.06)
    one = per_token("high_throughput", ranks, FP8, 8)
    assert one.dispatch.across == pytest.approx(single, abs=6e-3)
    # without sums in the node as many partial sums cross as there are owners, so only the way out gets cheaper
    kept = per_token("two_hop", ranks, FP8, 8)
    assert kept.dispatch.across == two.dispatch.across
    assert kept.combine.across == pytest.approx(one.combine.across)
    # in its node, and in each other one, a row goes on to all owners but the one that forwards
    inside = two.dispatch.wire - two.dispatch.across
    assert inside == pytest.approx(ROWS[ranks][0] * (1 - 1 / 8), abs=1e-3)


def test_one_node_has_nothing_to_cross():
    assert per_token("two_hop", 8, FP8, 8).across_bytes == 0
    assert per_token("two_hop", 8).dispatch.wire == pytest.approx(per_token("high_throughput", 8).dispatch.wire)


def test_bytes_of_rows():
    assert (BF16.dispatch, FP8.dispatch, FP8.partial, FP8.contribution) == (12288, 6336, 12288, 12288)
    ours = row_sizes(H)  # partial sums travel in float32 here, and raw outputs in the model's dtype
    assert (ours.dispatch, ours.partial, ours.contribution) == (12288, 24576, 12288)
    assert row_sizes(64, "float64") == RowBytes(512, 512, 512)
    assert [metadata_per_row(shape, K) for shape in ("high_throughput", "all_to_all", "low_latency")] == [64, 4, 0]
    assert metadata_per_row("one_sided", 3) == 24 and padding_per_row("one_sided", 3, 132) == 4  # 160 together
    assert selection_bytes(7168) == 7168 + 224 + 16 and selection_bytes(7168, fp8=False) == 14336
    assert selection_bytes(H) - FP8.dispatch == 16
    with pytest.raises(ConfigError, match="float8"):
        row_sizes(H, "float8")


def test_one_token_through_all_layers_at_64_ranks():
    assert per_token("high_throughput", 64, FP8).wire_bytes * 75 / 1e6 == pytest.approx(10.6, abs=0.06)
    assert per_token("allgather_reducescatter", 64).wire_bytes * 75 / 1e6 == pytest.approx(116, abs=0.5)


def test_padded_buffers_do_not_depend_on_ranks():
    assert [padded_buffer(E, t, FP8.dispatch) / 1e6 for t in (32, 128, 256)] == pytest.approx(
        [51.9, 207.6, 415.2], abs=0.06
    )
    assert padded_buffer(E, 128, BF16.dispatch) / 1e6 == pytest.approx(402.7, abs=0.06)
    assert padded_fill(E, K) == pytest.approx(0.031, abs=3e-4)


def test_flops_and_weights():
    flops = compute.flops_per_token(GLM_5_1)
    assert [f / 1e6 for f in (flops.routed, flops.shared, flops.router)] == pytest.approx([604.0, 75.5, 3.1], abs=0.06)
    assert flops.total * 75 / 1e9 == pytest.approx(51.2, abs=0.06)
    one = compute.expert_parameters(GLM_5_1)
    assert [one / 1e6, one * E / 1e9, one * E * 75 / 1e9] == pytest.approx([37.75, 9.66, 724.8], rel=5e-4)


@pytest.mark.parametrize(
    ("ranks", "bf16", "fp8", "read_us", "tokens"),
    [(2, 724.8, 362.5, 1440, 8), (4, 362.4, 181.2, 721, 16), (8, 181.2, 90.6, 361, 32), (16, 90.6, 45.3, 180, 64),
     (32, 45.3, 22.7, 90, 128), (64, 22.6, 11.3, 45, 256)],
)  # fmt: skip
def test_weights_of_a_rank(ranks, bf16, fp8, read_us, tokens):
    local = E // ranks
    held = [compute.routed_weights_per_rank(GLM_5_1, local, size) / 1e9 for size in (2, 1)]
    assert held == pytest.approx([bf16, fp8], abs=0.13)
    layer = compute.routed_weights_per_rank(GLM_5_1, local, 1, layers=1)
    assert compute.floor_s(layer, 3.35e12) * 1e6 == pytest.approx(read_us, rel=6e-3)
    assert compute.tokens_per_expert(128, ranks, GLM_5_1) == tokens


@pytest.mark.parametrize(
    ("ranks", "slow", "fast", "gathered", "long"),
    [(8, 221, 24.5, 334, 7.07), (16, 292, 32.4, 715, 9.3), (32, 336, 37.3, 1478, 10.7), (64, 360, 40.0, 3004, 11.5)],
)
def test_time_floors(ranks, slow, fast, gathered, long):
    once = per_token("high_throughput", ranks, FP8).wire_bytes
    everybody = per_token("allgather_reducescatter", ranks, FP8).wire_bytes
    found = [compute.floor_s(b * 128, r) * 1e6 for b, r in ((once, 50e9), (once, 450e9), (everybody, 50e9))]
    assert found == pytest.approx([slow, fast, gathered], rel=3e-3)
    assert compute.floor_s(once * 4096, 50e9) * 1e3 == pytest.approx(long, rel=6e-3)
    assert compute.floor_s(compute.flops_per_token(GLM_5_1).routed * 4096, 600e12) * 1e3 == pytest.approx(4.1, abs=0.05)


def test_a_kernel_against_three_bounds():
    """DeepEP low latency, 64 ranks, H 7168, 128 tokens, takes 487 us; at 50 GB/s the floor depends on the unit."""
    sizes = row_sizes(7168, "bfloat16", "fp8_group", "bfloat16")
    routes = per_token("low_latency", 64, sizes).wire_bytes
    once = per_token("high_throughput", 64, sizes, 8)
    found = [compute.floor_s(b * 128, 50e9) * 1e6 for b in (routes, once.wire_bytes, once.across_bytes)]
    assert found[:2] == pytest.approx([438, 420], abs=1)
    assert routes * 7 / 8 * 64 / 63 * 128 / 50e9 * 1e6 == pytest.approx(389, abs=1)  # routes that leave the node
    assert found[2] == pytest.approx(420 * 6.72 / 7.556, abs=1)


# -- expectations against routings that were counted ------------------------------------------------------------------


def counted(line: Shown, placement: Placement, ids: list[torch.Tensor]) -> Traffic:
    return bounds.observed_traffic(BACKENDS[line.shape].traffic, ids, placement, **line.options)


def all_routings(experts: int, top_k: int) -> torch.Tensor:
    return torch.tensor(list(combinations(range(experts), top_k)), dtype=torch.int32)


@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "nodes"),
    [(1, 4, 2, 0), (2, 5, 2, 0), (3, 7, 3, 2), (4, 6, 2, (1, 3)), (5, 9, 4, (2, 3)), (4, 4, 4, 2)],
)
def test_the_mean_over_all_routings_is_the_expectation(ranks, experts, top_k, nodes):
    """Every possible choice of K of E experts once on every rank, uneven ranks and nodes: exact, no chance in it."""
    placement = make_placement(ranks, experts, ranks_per_node=nodes)
    choices = all_routings(experts, top_k)
    tokens = list(range(ranks))  # a rank without rows, too
    ids = [choices.repeat(n, 1) for n in tokens]
    for line in shown(placement):
        seen = counted(line, placement, ids)
        expected = bounds.expected_traffic(
            line.shape, placement, [n * len(choices) for n in tokens], top_k, **line.options
        )
        assert seen.returns == expected.returns
        torch.testing.assert_close(seen.dispatch.double(), expected.dispatch, rtol=1e-12, atol=1e-9, msg=line.name)
        torch.testing.assert_close(seen.combine.double(), expected.combine, rtol=1e-12, atol=1e-9, msg=line.name)


def test_an_expectation_that_forgets_something_is_noticed():
    """Known wrong: with replacement, equal experts for all, and no diagonal."""
    placement, choices = make_placement(3, 7), all_routings(7, 3)
    seen = counted(Shown("", "high_throughput"), placement, [choices] * 3).dispatch.double() / len(choices)
    held = torch.tensor([3.0, 2, 2])
    right = torch.tensor([bounds.hit(int(n), 7, 3) for n in held], dtype=torch.float64)
    assert torch.allclose(seen[0], right.expand(3, 3))
    for wrong in (1 - (1 - held.double() / 7) ** 3, 1 - (1 - torch.ones(3).double() / 3) ** 3):
        assert not torch.allclose(seen[0], wrong.expand(3, 3), atol=1e-3)
    assert bounds.rows(seen, placement).wire < bounds.rows(seen, placement).logical


def test_hit_is_a_probability_of_whole_numbers():
    for here in range(6):
        for top_k in range(6):
            missed = sum(1 for chosen in combinations(range(5), top_k) if not set(chosen) & set(range(here)))
            assert bounds.hit(here, 5, top_k) == float(1 - Fraction(missed, comb(5, top_k)))


@st.composite
def routings(draw):
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(ranks, 12))
    top_k = draw(st.integers(1, min(5, experts)))
    cuts = sorted(draw(st.sets(st.integers(1, ranks - 1)))) if ranks > 1 else []
    nodes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, ranks], strict=True))
    strategy = draw(st.sampled_from(["linear", "round_robin"]))
    placement = make_placement(ranks, experts, strategy, ranks_per_node=nodes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    ids = []
    for n in draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks)):
        chosen = torch.rand(n, experts, generator=generator).argsort(1)[:, :top_k].int()
        chosen[torch.rand(n, top_k, generator=generator) < 0.2] = -1
        ids.append(chosen)
    return placement, ids


@given(routings())
def test_shapes_stand_in_order(case):
    placement, ids = case
    found = {
        line.name: bounds.bound(counted(line, placement, ids), RowBytes(2, 1, 1), placement)
        for line in shown(placement)
    }
    once, routes, gathered = (found[n] for n in ("high_throughput", "all_to_all", "allgather_reducescatter"))
    assert found["one_sided"] == once
    for way in ("dispatch", "combine"):
        ours = {name: getattr(one, way) for name, one in found.items()}
        assert ours["high_throughput"].wire <= min(ours["all_to_all"].wire, ours["allgather_reducescatter"].wire)
        assert ours["low_latency"] == ours["all_to_all"]
        assert ours["two_hop"].across <= ours["high_throughput"].across
        assert ours["two_hop"].logical >= ours["high_throughput"].logical  # two hops do not remove rows, they move them
        assert all(rows.across <= rows.wire <= rows.logical for rows in ours.values())
        if "two_hop, sums in node" in ours:
            assert ours["two_hop, sums in node"].across <= ours["two_hop"].across
            assert ours["two_hop, sums in node"].wire <= ours["two_hop"].wire
    if len(placement.nodes) == 1:
        assert found["two_hop"].dispatch.wire == once.dispatch.wire
        assert found["two_hop"].across_bytes == 0
    assert once.dispatch.wire == once.combine.wire and routes.dispatch.wire == routes.combine.wire
    assert gathered.dispatch.logical == sum(map(len, ids)) * placement.ep_size


@given(routings())
def test_rows_counted_in_parts_are_the_same_rows(case):
    placement, ids = case
    for line in shown(placement):
        whole = BACKENDS[line.shape].traffic(ids, placement, **line.options)
        parts = bounds.observed_traffic(BACKENDS[line.shape].traffic, ids, placement, 2, **line.options)
        assert torch.equal(whole.dispatch, parts.dispatch) and torch.equal(whole.combine, parts.combine)


def test_refusals():
    placement = make_placement(2, 4)
    with pytest.raises(ConfigError, match="3 numbers of rows for 2 ranks"):
        bounds.expected_traffic("all_to_all", placement, [1, 1, 1], 2)
    with pytest.raises(ConfigError, match="K = 5 of 4"):
        bounds.expected_traffic("all_to_all", placement, [1, 1], 5)
    with pytest.raises(ConfigError, match="'pigeon'"):
        bounds.expected_traffic("pigeon", placement, [1, 1], 2)


# -- imbalance --------------------------------------------------------------------------------------------------------


def test_chance_alone_is_uneven():
    """Two ranks can be worked out: the routes of one are a sum of hypergeometric numbers."""
    one = [comb(128, n) * comb(128, K - n) / comb(E, K) for n in range(K + 1)]
    total = [1.0]
    for _ in range(2):  # one token on each rank
        total = [
            sum(total[i] * one[n - i] for i in range(max(0, n - K), min(n, len(total) - 1) + 1))
            for n in range(len(total) + K)
        ]
    exact = sum(p * max(n, 2 * K - n) for n, p in enumerate(total)) / K
    assert uniform_max_over_mean(make_placement(2, E), K, 2, draws=4000) == pytest.approx(exact, abs=0.006)
    assert exact == pytest.approx(1.1935, abs=1e-4)


@pytest.mark.parametrize(
    ("tokens", "figures", "draws"),
    [
        (1, (1.20, 1.56, 1.96), 400),
        (8, (1.07, 1.18, 1.31), 80),
        (32, (1.05, 1.09, 1.15), 20),
        (128, (1.03, 1.03, 1.08), 4),
    ],
)
def test_uniform_imbalance(tokens, figures, draws):
    """Figures of an earlier draw; ours differ from some of them by up to 0.06."""
    found = [uniform_max_over_mean(make_placement(r, E), K, tokens * r, draws=draws) for r in (2, 8, 64)]
    assert found == pytest.approx(figures, abs=0.07 if tokens == 1 else 0.025)
    again = uniform_max_over_mean(make_placement(2, E), K, tokens * 2, draws=draws)
    assert again == found[0]  # seeded


def test_seen_imbalance():
    placement = make_placement(2, 5)  # experts 0 to 2, and 3 and 4
    ids = torch.tensor([[0, 1], [2, -1], [4, 0], [-1, -1]])
    assert routes_per_rank(ids, placement).tolist() == [4, 1]
    assert max_over_mean(torch.tensor([4, 1])) == 1.6
    assert max_over_mean(torch.zeros(3)) is None
