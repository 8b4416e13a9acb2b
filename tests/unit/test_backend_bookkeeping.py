"""What dispatch says about the rows it delivers: which, in what order, for whom, and where a trace finds them.

`golden/dispatch.json` is four ranks with two experts each; rank 2 has no row of its own. A row is `[source, row]` in
it, and a route `[source, row, expert]`; in the tests the numbers are the first ones of `hidden_states`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from backend_cases import FIXED, backend, sizes_of
from layer_cases import make_batch, make_config

from moe_course.backends import BACKENDS, high_throughput, two_hop
from moe_course.comm.ledger import Ledger
from moe_course.comm.sim import run_threads
from moe_course.errors import ConfigError
from moe_course.expert_map import determine_expert_map, make_placement
from moe_course.experts import to_local

GOLDEN = SimpleNamespace(**json.loads((Path(__file__).parents[1] / "golden" / "dispatch.json").read_text()))
T_MAX = 3  # rank 3 has that many rows
RANKS = len(GOLDEN.ids)
PLACEMENT = make_placement(RANKS, GOLDEN.experts, ranks_per_node=GOLDEN.two_nodes["ranks_per_node"])


def numbered(counts: list[int], hidden: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Rows that say who they are: source and row in the first two columns."""
    rows = [torch.zeros(n, hidden, dtype=dtype) for n in counts]
    for source, part in enumerate(rows):
        part[:, 0], part[:, 1] = source, torch.arange(len(part))
    return rows


def identities(rows: torch.Tensor) -> list[list[int]]:
    return rows[:, :2].int().tolist()


def dispatch_golden(name: str):
    """What each rank is handed, and where its routes lie."""
    ids = [torch.tensor(rows, dtype=torch.int32).view(-1, 2) for rows in GOLDEN.ids]
    rows = numbered([len(part) for part in ids])
    weights = [part / 10 + 0.05 for part in ids]  # an expert's number, to be recognised
    module = backend(name, max_num_tokens=T_MAX if name in FIXED else None)

    def rank_function(comm):
        comm.ledger = Ledger()
        mine = [part[comm.rank] for part in (rows, weights, ids)]
        dispatched = module.dispatch(*mine, comm=comm, placement=PLACEMENT)
        entries = comm.ledger.as_rows()
        return dispatched, module.slots(mine[2], dispatched, comm=comm, placement=PLACEMENT), entries

    return run_threads(RANKS, rank_function)


# -- four ranks by hand ----------------------------------------------------------------------------------------------


def test_every_rank_processes_every_row_of_an_all_gather():
    for rank, (dispatched, _, _) in enumerate(dispatch_golden("allgather_reducescatter")):
        assert identities(dispatched.hidden_states) == GOLDEN.all_rows
        here = [[e if e in GOLDEN.owns[rank] else -1 for e in GOLDEN.ids[s][t]] for s, t in GOLDEN.all_rows]
        assert dispatched.topk_ids.tolist() == here
        assert (dispatched.layout, dispatched.expert_num_tokens, dispatched.handle) == ("rows", None, [2, 1, 0, 3])


@pytest.mark.parametrize("name", ["high_throughput", "two_hop"])
def test_rows_with_an_expert_here(name):
    """Rows, their order, global ids with -1, counts by expert; and the form in which vLLM hands ids on."""
    for rank, (dispatched, _, _) in enumerate(dispatch_golden(name)):
        assert identities(dispatched.hidden_states) == GOLDEN.rows[rank]
        assert dispatched.topk_ids.tolist() == GOLDEN.ids_here[rank]
        assert dispatched.topk_ids.dtype == dispatched.expert_num_tokens.dtype == torch.int32
        assert dispatched.expert_num_tokens.tolist() == GOLDEN.expert_num_tokens[rank]
        assert high_throughput.upstream_ids(dispatched.topk_ids, rank, PLACEMENT).tolist() == GOLDEN.upstream_ids[rank]
        live = dispatched.topk_ids >= 0
        assert torch.equal(dispatched.topk_weights[live], dispatched.topk_ids[live] / 10 + 0.05)
        assert (dispatched.layout, dispatched.scales) == ("rows", None)


@pytest.mark.parametrize("experts", [8, 9, 10])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_the_upstream_form_keeps_what_is_elsewhere_elsewhere(strategy, ranks, experts):
    """On every rank the form gives the local ids of -1, or is refused: one rank, or the last expert on rank 0."""
    placement, ids = make_placement(ranks, experts, strategy), torch.arange(-1, experts, dtype=torch.int32).unsqueeze(1)
    for rank in range(ranks):
        if rank == 0 and experts - 1 in placement.experts_of(0):
            with pytest.raises(
                ConfigError, match=f"rank 0 owns expert {experts - 1}, .* {strategy} placement.; use linear"
            ):
                high_throughput.upstream_ids(ids, rank, placement)
            continue
        _, expert_map = determine_expert_map(ranks, rank, experts, strategy)
        local = to_local(high_throughput.upstream_ids(ids, rank, placement), expert_map, experts)
        assert torch.equal(local, to_local(ids, expert_map, experts))
        assert high_throughput.upstream_ids(ids[:0], rank, placement).shape == (0, 1)


def test_rows_lie_where_their_sender_put_them():
    """One-sided: row i of rank s at s * T_max + i, ids of -1 in what nobody wrote, counts as with two sides."""
    for rank, (dispatched, _, _) in enumerate(dispatch_golden("one_sided")):
        assert dispatched.hidden_states.shape == (RANKS * T_MAX, 4)
        expected = [[-1, -1]] * (RANKS * T_MAX)
        places, used = [], [0] * RANKS
        for (source, row), ids in zip(GOLDEN.rows[rank], GOLDEN.ids_here[rank], strict=True):
            place = source * T_MAX + used[source]
            used[source] += 1
            expected[place] = ids
            places.append((place, [source, row]))
        assert dispatched.topk_ids.tolist() == expected
        for place, who in places:
            assert identities(dispatched.hidden_states[place : place + 1]) == [who]
        assert dispatched.expert_num_tokens.tolist() == GOLDEN.expert_num_tokens[rank]


def test_a_row_for_each_route_in_the_order_of_sources_rows_and_k():
    for rank, (dispatched, _, _) in enumerate(dispatch_golden("all_to_all")):
        assert dispatched.topk_ids.shape == (len(GOLDEN.routes[rank]), 1)
        found = torch.cat([dispatched.hidden_states[:, :2].int(), dispatched.topk_ids], dim=1)
        assert found.tolist() == GOLDEN.routes[rank]
        assert (dispatched.layout, dispatched.topk_weights, dispatched.scales) == ("routes", None, None)


def test_segments_of_a_fixed_size():
    """Each expert's rows from the front on, sources in rank order, and how many; room for R * T_max."""
    for rank, (dispatched, _, _) in enumerate(dispatch_golden("low_latency")):
        assert dispatched.hidden_states.shape == (2, RANKS * T_MAX, 4)
        assert dispatched.expert_num_tokens.dtype == torch.int32
        assert dispatched.expert_num_tokens.tolist() == GOLDEN.expert_num_tokens[rank]
        for rows, expert in zip(dispatched.hidden_states, GOLDEN.owns[rank], strict=True):
            assert identities(rows[: len(GOLDEN.by_expert[expert])]) == GOLDEN.by_expert[expert]
        assert (dispatched.layout, dispatched.topk_weights, len(dispatched.topk_ids)) == ("padded", None, 0)


def test_one_copy_for_each_node_then_one_for_each_owner():
    """Who forwards, and rows from rank to rank on both hops; what each rank counted is their sum."""
    assert two_hop.forwarders(PLACEMENT).tolist() == GOLDEN.two_nodes["via"]
    first, second = (torch.tensor(GOLDEN.two_nodes[hop]) for hop in ("first_hop", "second_hop"))
    ids = [torch.tensor(rows, dtype=torch.int32).view(-1, 2) for rows in GOLDEN.ids]
    traffic = two_hop.traffic(ids, PLACEMENT)
    assert torch.equal(traffic.dispatch, torch.stack([first, second]))
    assert second.sum(0).tolist() == [len(rows) for rows in GOLDEN.rows]
    for rank, (dispatched, (_, _, via), entries) in enumerate(dispatch_golden("two_hop")):
        assert torch.equal(dispatched.handle.first, first) and torch.equal(dispatched.handle.second, second)
        sent = [0] * RANKS
        for entry in entries:
            sent[entry["dst"]] += entry["rows"]
        due = (first + second)[rank].tolist()
        assert sent == [0 if peer == rank else n for peer, n in enumerate(due)]
        assert via.tolist() == [[GOLDEN.two_nodes["via"][rank][e // 2] for e in row] for row in GOLDEN.ids[rank]]


def test_what_a_shape_must_move_by_hand():
    """12 routes, 6 of them at home; 11 pairs of row and owner, 5 at home: rows of 16 bytes, sums of 16."""
    ids = [torch.tensor(rows, dtype=torch.int32).view(-1, 2) for rows in GOLDEN.ids]
    sizes = sizes_of(4, torch.float32)
    rows = {name: BACKENDS[name].traffic(ids, PLACEMENT) for name in BACKENDS}
    logical = {
        name: (int(t.dispatch.sum()), int(t.dispatch.diagonal(dim1=1, dim2=2).sum())) for name, t in rows.items()
    }
    assert logical == {
        "no_dp_ep": (0, 0),
        "allgather_reducescatter": (24, 6),
        "all_to_all": (12, 6),
        "high_throughput": (11, 5),
        "low_latency": (12, 6),
        "two_hop": (9 + 11, 5 + 9),
        "one_sided": (11, 5),
    }
    for name, (total, at_home) in logical.items():
        assert rows[name].dispatch_rows == total - at_home
        assert rows[name].payload(sizes) == 2 * (total - at_home) * 16 or name == "two_hop"


# -- where a trace finds a row ---------------------------------------------------------------------------------------

EVERYWHERE = ("no_dp_ep", "allgather_reducescatter")  # rows are numbered as their source numbers them


def dispatch_everywhere(placement, batch, rows):
    """Shape -> what each rank got, a copy of its rows, and its columns."""

    def rank_function(comm):
        mine = [part[comm.rank] for part in (rows, batch.topk_weights, batch.topk_ids)]
        found = {}
        for name in BACKENDS:
            module = backend(name, max_num_tokens=4 if name in FIXED else None)
            dispatched = module.dispatch(*mine, comm=comm, placement=placement)
            columns = module.slots(mine[2], dispatched, comm=comm, placement=placement)
            found[name] = dispatched, dispatched.hidden_states.clone(), columns
        return found

    results = run_threads(placement.ep_size, rank_function)
    return {name: [found[name] for found in results] for name in BACKENDS}


def misplaced(name, results, batch, placement) -> list[str]:
    """Routes that do not stand where the columns say: row, id, weight, expert's segment, forwarder, gaps on a way."""
    layout, wrong = BACKENDS[name].CAPABILITIES["layout"], []
    for rank, ids in enumerate(batch.topk_ids):
        send_row, receive_row, *via_rank = results[rank][2]
        if not ids.shape == send_row.shape == receive_row.shape or {send_row.dtype, receive_row.dtype} != {torch.int64}:
            wrong.append(f"rank {rank}: shape or dtype")
            continue
        ways: dict[int, set[int]] = {}
        for row, k in torch.ones_like(ids).nonzero().tolist():
            route = f"rank {rank}, row {row}, k {k}"
            expert, place, sent = (int(column[row, k]) for column in (ids, receive_row, send_row))
            if expert < 0:
                wrong += [f"{route}: a place for -1"] * (name not in EVERYWHERE and (place, sent) != (-1, -1))
                continue
            owner = int(placement.owner[expert])
            if name == "no_dp_ep" and owner != rank:
                continue  # nothing travels, the owner has its own copy
            there, rows_there, _ = results[owner]
            if identities(rows_there.flatten(0, -2)[place : place + 1]) != [[rank, row]]:
                wrong.append(f"{route}: another row")
            elif layout == "padded" and place // (placement.ep_size * 4) != int(placement.local[expert]):
                wrong.append(f"{route}: another expert's segment")
            elif layout != "padded" and int(there.topk_ids[place, 0 if layout == "routes" else k]) != expert:
                wrong.append(f"{route}: another id")
            elif layout == "rows" and float(there.topk_weights[place, k]) != float(batch.topk_weights[rank][row, k]):
                wrong.append(f"{route}: another weight")
            way = owner
            if via_rank:  # the forwarder is the rank itself, or sits in the owner's node
                way = int(via_rank[0][row, k])
                node = next(node for node in placement.nodes if owner in node)
                wrong += [f"{route}: forwarded by {way}"] * (way not in ([rank] if rank in node else node))
            ways.setdefault(way, set()).add(sent)
        for way, places in ways.items():  # all rows on a way are numbered without gaps
            if layout != "padded" and name not in EVERYWHERE and places != set(range(len(places))):
                wrong.append(f"rank {rank}: rows to {way} are numbered {sorted(places)}")
    return wrong


def hard_problem(nodes: tuple[int, ...], dtype: torch.dtype):
    ranks = sum(nodes)
    placement = make_placement(ranks, 10, "round_robin", ranks_per_node=nodes)
    counts = [(2 * rank + 3) % 5 for rank in range(ranks)]  # 3, 0, 2, 4, 1, …
    batch = make_batch(counts, make_config(10, 4, 64, 32), dtype, seed=4)
    for ids in batch.topk_ids:
        ids[:1, 2] = -1
        ids[1:2] = -1
    return placement, batch, numbered(counts, 64, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("nodes", [(1,), (2,), (2, 1), (3, 1), (1, 4, 3)], ids=str)
def test_slots_point_at_the_row(nodes, dtype):
    """By content: the row, its id and its weight stand at `receive_row` of the owner, whatever the shape."""
    placement, batch, rows = hard_problem(nodes, dtype)
    found = dispatch_everywhere(placement, batch, rows)
    wrong = {name: words for name in BACKENDS if (words := misplaced(name, found[name], batch, placement))}
    assert not wrong


@pytest.mark.parametrize("column", range(3))
def test_places_that_are_off_by_one_are_caught(column):
    placement, batch, rows = hard_problem((3, 1), torch.float32)
    for name, results in dispatch_everywhere(placement, batch, rows).items():
        shifted = [
            (
                dispatched,
                there,
                tuple((part + 1) % max(1, len(there)) if n == column else part for n, part in enumerate(c)),
            )
            for dispatched, there, c in results
        ]
        seen = misplaced(name, shifted, batch, placement)
        if column == 1 or (column == 0 and name not in EVERYWHERE) or (column == 2 and name == "two_hop"):
            assert seen, name
