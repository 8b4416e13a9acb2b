"""Ranks as threads: every operation against plain torch, the ledger against a count by hand, and every fault named."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from exchange_cases import (
    DESCENDING,
    MISMATCHES,
    MOVED,
    SUMMED,
    bits,
    crossed,
    descending,
    every_operation,
    expected_in_message,
    expected_in_message_of_a_pair,
    expected_labels,
    gathered_counts,
    labels_in_a_pair,
    metadata_of,
    mismatch,
    mismatch_in_a_pair,
    pairs,
    rows_of,
    sent_counts,
    twice_the_same_group,
)

from moe_course.comm import sim
from moe_course.comm.ledger import Entry, Ledger
from moe_course.comm.sim import run_threads
from moe_course.errors import ConfigError, ExchangeMismatch, ExchangeTimeout, RankLost

RANKS = [1, 2, 3, 4, 8]


# -- operations ------------------------------------------------------------------------------------------------------


def expected_operations(ranks: int, dtype_name: str) -> list[dict]:
    """What `every_operation` must find on each rank, computed with one process and no communication."""
    dtype, counts = MOVED[dtype_name], gathered_counts(ranks)
    everybody = [rows_of(rank, ranks, counts[rank], dtype) for rank in range(ranks)]
    labels = [metadata_of(rank, counts[rank]) for rank in range(ranks)]
    sent = [sent_counts(ranks, source) for source in range(ranks)]
    sources = [rows_of(rank, ranks, sum(sent[rank]), dtype, seed=1) for rank in range(ranks)]
    source_labels = [metadata_of(rank, sum(sent[rank])) for rank in range(ranks)]

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        if dtype == torch.float8_e4m3fn:  # torch cannot join fp8 of every shape
            return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
        return torch.cat(parts)

    def delivered(tensors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        return [tensor.split(sent[source])[rank] for source, tensor in enumerate(tensors)]

    def summed(tensors: list[torch.Tensor]) -> torch.Tensor:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = total + tensor
        return total

    results = []
    for rank in range(ranks):
        found = {
            "all_gather": joined(everybody),
            "all_gather counts": counts,
            "all_gather with metadata": [
                joined(everybody),
                *(torch.cat(column) for column in zip(*labels, strict=True)),
            ],
            "all_to_all": joined(delivered(sources, rank)),
            "all_to_all counts": [sent[source][rank] for source in range(ranks)],
            "all_to_all with metadata": [
                joined(delivered(sources, rank)),
                *(torch.cat(delivered(list(column), rank)) for column in zip(*source_labels, strict=True)),
            ],
        }
        if dtype_name in SUMMED:
            partials = [rows_of(source, ranks, sum(counts), dtype, seed=2) for source in range(ranks)]
            found["reduce_scatter"] = summed(partials).split(counts)[rank]
            found["all_reduce"] = summed([rows_of(source, ranks, 5, dtype, seed=3) for source in range(ranks)])
            found["all_reduce of nothing"] = rows_of(rank, ranks, 0, dtype)
        results.append(found)
    return results


@pytest.mark.parametrize("dtype_name", MOVED)
@pytest.mark.parametrize("ranks", RANKS)
def test_operations_equal_plain_torch(ranks, dtype_name):
    """Ragged rows, zero rows, metadata of three shapes, sums in rank order: the same bits as without ranks."""
    results = run_threads(ranks, every_operation, dtype_name)
    for found in results:
        del found["ledger"]
    assert bits(results) == bits(expected_operations(ranks, dtype_name))


def test_a_sum_in_another_order_would_be_seen():
    """The inputs of the comparison above give other bits when they are added from the last rank to the first."""
    parts = [rows_of(rank, 8, 5, torch.float32, seed=3) for rank in range(8)]
    backwards = parts[7].clone()
    for part in reversed(parts[:7]):
        backwards += part
    assert not torch.equal(run_threads(8, every_operation, "float32")[0]["all_reduce"], backwards)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_all_reduce_has_the_same_bits_on_all_ranks(dtype):
    """Also with values whose sum depends on the order: 1, 2^-9 and -1 in bf16 give 0 or 0.001953125."""
    values = [1.0, 2.0**-9, -1.0]
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2]):
        mine = [torch.full((5, 2), values[i], dtype=dtype) for i in order]
        results = run_threads(3, lambda comm, mine=mine: comm.all_reduce(mine[comm.rank]))
        assert all(torch.equal(result, mine[0] + mine[1] + mine[2]) for result in results)


@pytest.mark.parametrize("shape", [(4,), (3, 2, 2), (0, 5), (1, 1)], ids=str)
def test_rows_of_any_rank_keep_their_shape(shape):
    def rank_function(comm):
        rows = torch.full(shape, float(comm.rank))
        return comm.all_gather_rows(rows).rows, comm.all_reduce(rows)

    for gathered, total in run_threads(3, rank_function):
        assert torch.equal(gathered, torch.cat([torch.full(shape, float(rank)) for rank in range(3)]))
        assert torch.equal(total, torch.full(shape, 3.0))


@pytest.mark.parametrize("counts", [[1, 0], [0, 1], [0, 0], [2, 3]], ids=str)
def test_metadata_behind_rows_of_odd_bytes(counts):
    """A single row whose ids start off their boundary in the packed buffer arrives like any other."""

    def rank_function(comm):
        n = counts[comm.rank]
        rows = torch.full((n, 3), comm.rank == 1)
        return comm.all_gather_rows(rows, torch.full((n, 2), 1 << 40), torch.full((n,), 0.5, dtype=torch.float64))

    for found in run_threads(2, rank_function):
        total = sum(counts)
        assert found.rows.tolist() == [[False] * 3] * counts[0] + [[True] * 3] * counts[1]
        assert found.metadata[0].tolist() == [[1 << 40] * 2] * total
        assert found.metadata[1].tolist() == [0.5] * total


@pytest.mark.parametrize("n", [0, 1, 4])
def test_non_contiguous_rows(n):
    """Every second column, a transposed view, and empty tensors with odd strides."""

    def rank_function(comm):
        base = torch.arange(8 * n, dtype=torch.float32).view(n, 8) + comm.rank
        strided = comm.all_gather_rows(base[:, ::2], base[:, ::4]).rows
        column = comm.all_gather_rows(base[:, 3:4]).rows
        turned = comm.all_to_all_rows(base.t().contiguous().t(), [n, 0]).rows
        return strided, column, turned

    for rank, (strided, column, turned) in enumerate(run_threads(2, rank_function)):
        base = torch.arange(8 * n, dtype=torch.float32).view(n, 8)
        assert torch.equal(strided, torch.cat([base, base + 1])[:, ::2])
        assert torch.equal(column, torch.cat([base, base + 1])[:, 3:4])
        assert torch.equal(turned, torch.cat([base, base + 1]) if rank == 0 else base[:0])


def test_rows_may_be_overwritten_after_the_call(monkeypatch):
    """A rank that is done may reuse its rows while a slower rank still reads what it received."""
    real, overwritten = torch.cat, threading.Event()

    def slow_cat(tensors):
        if threading.current_thread().name == "slow":
            overwritten.wait(5)
        return real(tensors)

    monkeypatch.setattr(sim, "torch", SimpleNamespace(cat=slow_cat, stack=torch.stack, Tensor=torch.Tensor))

    def rank_function(comm):
        rows = torch.full((2, 2), 1.0)
        if comm.rank == 1:
            threading.current_thread().name = "slow"
        total = comm.all_gather_rows(rows).rows.sum()
        if comm.rank == 0:
            rows.zero_()
            overwritten.set()
        return float(total)

    assert run_threads(2, rank_function) == [8.0, 8.0]


def test_results_do_not_share_memory_with_anybody():
    """What a rank receives it may change in place."""

    def rank_function(comm):
        rows = torch.ones(2, 2)
        found = comm.all_gather_rows(rows, torch.ones(2))
        comm.barrier()
        found.rows.fill_(comm.rank + 5)
        found.metadata[0].fill_(comm.rank + 5)
        comm.barrier()
        return float(rows.sum()), found.rows.unique().tolist(), found.metadata[0].unique().tolist()

    assert run_threads(3, rank_function) == [(4.0, [rank + 5], [rank + 5]) for rank in range(3)]


def test_256_threads_once():
    """The rank count of a large deployment: all-gather, all-to-all and reduce-scatter, ragged."""
    ranks = 256
    counts = [rank % 3 for rank in range(ranks)]

    def rank_function(comm):
        rank = comm.rank
        gathered = comm.all_gather_rows(torch.full((counts[rank], 1), float(rank))).rows
        to_the_next = [int(peer == (rank + 1) % ranks) for peer in range(ranks)]
        passed = comm.all_to_all_rows(torch.tensor([[rank]]), to_the_next).rows
        mine = comm.reduce_scatter_rows(torch.ones(sum(counts), 1), counts)
        return float(gathered.sum()), passed.tolist(), mine.tolist()

    total = float(sum(rank * n for rank, n in enumerate(counts)))
    for rank, found in enumerate(run_threads(ranks, rank_function, timeout=120)):
        assert found == (total, [[(rank - 1) % ranks]], [[float(ranks)]] * counts[rank])


def test_results_come_in_rank_order_and_arguments_are_passed():
    assert run_threads(3, lambda comm, a, b: (comm.rank, comm.world_size, a + b), 1, 2) == [
        (rank, 3, 3) for rank in range(3)
    ]


# -- ledger ----------------------------------------------------------------------------------------------------------


def header_bytes(ranks: int) -> int:
    """Nine fields, the row count, and for each rank one count sent and one expected; eight bytes each."""
    return 8 * (9 + 1 + 2 * ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_ledger_of_an_all_gather(ranks):
    """Every row goes to every other rank; ids and weights are metadata, and so is one header per peer."""
    counts = gathered_counts(ranks)

    def rank_function(comm):
        comm.layer = 7
        n = counts[comm.rank]
        comm.all_gather_rows(
            torch.zeros(n, 6, dtype=torch.bfloat16), torch.zeros(n, 2, dtype=torch.int32), torch.zeros(n)
        )
        return comm.ledger

    for rank, ledger in enumerate(run_threads(ranks, rank_function)):
        n = counts[rank]
        expected = {
            ("all_gather_rows", 7, rank, peer): Entry(
                payload=n * 12, metadata=header_bytes(ranks) + n * (8 + 4), rows=n, messages=1 + (n > 0)
            )
            for peer in range(ranks)
            if peer != rank
        }
        assert ledger.entries == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_ledger_of_an_all_to_all(ranks):
    """Only what leaves the rank is counted, by destination."""

    def rank_function(comm):
        counts = sent_counts(ranks, comm.rank)
        comm.all_to_all_rows(torch.zeros(sum(counts), 5), counts, torch.zeros(sum(counts), 2, dtype=torch.int64))
        return comm.ledger

    for rank, ledger in enumerate(run_threads(ranks, rank_function)):
        for peer, n in enumerate(sent_counts(ranks, rank)):
            entry = ledger.entries.get(("all_to_all_rows", -1, rank, peer))
            if peer == rank:
                assert entry is None
            else:
                metadata = header_bytes(ranks) + 16 * n
                assert entry == Entry(payload=20 * n, metadata=metadata, rows=n, messages=1 + (n > 0))


def test_ledger_of_sums_barrier_and_split():
    """Reduce-scatter sends the slice of each peer; all-reduce sends that and then its own sum; no payload elsewhere."""

    def rank_function(comm):
        comm.reduce_scatter_rows(torch.zeros(6, 2), [3, 1, 2])
        comm.all_reduce(torch.zeros(5, 2))  # slices of 2, 2 and 1 rows
        comm.barrier()
        comm.split([[0, 1, 2]])
        return comm.ledger

    header = header_bytes(3)
    for rank, ledger in enumerate(run_threads(3, rank_function)):
        for peer in {0, 1, 2} - {rank}:
            n, slices = [3, 1, 2][peer], [2, 2, 1]
            assert ledger.entries["reduce_scatter_rows", -1, rank, peer] == Entry(8 * n, 0, header, n, 2)
            rows = slices[peer] + slices[rank]
            assert ledger.entries["all_reduce", -1, rank, peer] == Entry(8 * rows, 0, 2 * header, rows, 4)
            assert ledger.entries["barrier", -1, rank, peer] == Entry(0, 0, header, 0, 1)
            assert ledger.entries["split", -1, rank, peer] == Entry(0, 0, header, 0, 1)
        assert len(ledger.entries) == 8


def test_totals_tables_and_merged_ledgers():
    first, second = Ledger(), Ledger()
    first.add("barrier", 1, 0, 1, Entry(metadata=5, messages=1))
    first.add("all_reduce", 2, 0, 1, Entry(payload=8, padding=2, rows=1, messages=1))
    second.add("all_reduce", 2, 0, 1, Entry(payload=4, rows=1, messages=1))
    second.add("all_reduce", 3, 1, 0, Entry(payload=1, rows=1, messages=1))
    merged = Ledger.merge([first, second])
    assert merged.total() == Entry(payload=13, padding=2, metadata=5, rows=3, messages=4)
    assert merged.total(op="all_reduce", layer=2) == Entry(payload=12, padding=2, rows=2, messages=2)
    assert merged.total(layer=1) == Entry(metadata=5, messages=1)
    assert merged.as_rows()[0] == {
        "op": "all_reduce", "layer": 2, "src": 0, "dst": 1,
        "payload": 12, "padding": 2, "metadata": 0, "rows": 2, "messages": 2,
    }  # fmt: skip
    assert first.total() == Entry(payload=8, padding=2, metadata=5, rows=1, messages=2)  # merging changes no source


# -- ranks that disagree ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_disagreement_is_the_same_error_on_all_ranks(kind, ranks):
    """One message for everybody, with the field and both values; the group can go on afterwards."""
    results = run_threads(ranks, mismatch, kind, timeout=10)
    messages = {result["message"] for result in results}
    assert len(messages) == 1
    message = messages.pop()
    assert message is not None, "nobody noticed"
    for words in expected_in_message(kind, ranks, results[0]["number"]):
        assert words in message
    after = torch.cat([torch.full((rank, 2), float(rank)) for rank in range(ranks)])
    assert all(torch.equal(result["after"], after) for result in results)


def test_groups_that_differ_are_named():
    """The message shows the groups of both ranks, as lists or as the group number of each rank."""
    message = run_threads(2, mismatch, "groups")[0]["message"]
    assert any(
        first in message and second in message for first, second in [("[[0, 1]]", "[[0], [1]]"), ("[0, 0]", "[0, 1]")]
    )


@pytest.mark.parametrize("ranks", [3, 4])
def test_groups_that_are_cut_in_another_place_are_caught(ranks):
    """[0], [1, 2] and [0, 1], [2] hold the same ranks in the same order."""

    def rank_function(comm):
        members, cut = list(range(ranks)), ranks - 1 if comm.rank == 1 else 1
        try:
            comm.split([members[:cut], members[cut:]]).barrier()
        except ExchangeMismatch:
            return True

    assert run_threads(ranks, rank_function, timeout=1) == [True] * ranks


def test_exchanged_order_of_operations_is_caught():
    """Two exchanges of one shape in opposite order, which plain transports swap without a word."""

    def rank_function(comm):
        rows = torch.zeros(2, 4)
        first, second = (comm.all_to_all_rows, comm.reduce_scatter_rows)[:: 1 if comm.rank else -1]
        first(rows, [1, 1])
        second(rows, [1, 1])

    with pytest.raises(ExchangeMismatch, match="op differ: rank 0 has reduce_scatter_rows, rank 1 has all_to_all_rows"):
        run_threads(2, rank_function)


@pytest.mark.parametrize("counts", [[1, 1, 1], [2], []], ids=str)
def test_one_count_per_rank(counts):
    with pytest.raises(ConfigError, match="rank 0.*one count for each of the 2 ranks"):
        run_threads(2, lambda comm: comm.all_to_all_rows(torch.zeros(sum(counts), 2), counts), timeout=5)


@pytest.mark.parametrize("op", ["all_gather_rows", "all_to_all_rows"])
def test_metadata_of_another_length_is_refused_before_anything_is_sent(op):
    """Otherwise the peers would wait for rows that never come."""

    def rank_function(comm):
        arguments = [torch.zeros(2, 4)] + ([[1, 1]] if op == "all_to_all_rows" else [])
        try:
            getattr(comm, op)(*arguments, torch.zeros(3))
        except ConfigError as error:
            return str(error), comm.ledger.total()

    for rank, (message, sent) in enumerate(run_threads(2, rank_function, timeout=5)):
        assert message == f"rank {rank}: metadata has 3 rows, the rows are 2"
        assert sent == Entry()


# -- ranks that are missing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_returned_early_is_named(ranks):
    """At once, not after the time-out."""
    started = time.monotonic()

    def rank_function(comm):
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(RankLost, match=r"rank 0: barrier #1 .*rank 1 has returned"):
        run_threads(ranks, rank_function, timeout=60)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_does_not_come_is_named(ranks):
    """After the time-out of the exchange; the others need not wait until it turns up."""
    released, seen = threading.Event(), {}

    def rank_function(comm):
        if comm.rank == 1:
            released.wait(30)
            return
        comm.layer = 4
        started = time.monotonic()
        try:
            comm.barrier()
        except (ExchangeTimeout, RankLost) as error:
            seen[comm.rank] = error, time.monotonic() - started
            if len(seen) == ranks - 1:
                released.set()
            raise

    with pytest.raises(
        ExchangeTimeout, match=r"barrier #1 \(layer 4, step 0\): after 0.4 s still waiting for ranks \[1\]"
    ):
        run_threads(ranks, rank_function, timeout=0.4)
    assert released.wait(10)
    assert all(waited < 10 for _, waited in seen.values())


def test_the_caller_does_not_wait_for_a_rank_that_never_comes():
    """`run_threads` raises although the missing rank is still busy with something else."""
    done = threading.Event()

    def rank_function(comm):
        if comm.rank == 1:
            time.sleep(3)
            done.set()
        else:
            comm.barrier()

    with pytest.raises(ExchangeTimeout):
        run_threads(2, rank_function, timeout=0.2)
    assert not done.is_set()


def test_a_rank_may_end_while_the_caller_looks_at_the_others():
    """Alive when the caller asks whether to wait, and gone when it picks whom to wait for."""
    answers = iter([True, False])
    sim._wait([SimpleNamespace(is_alive=lambda: next(answers, False), join=lambda timeout: None)], [None])


@pytest.mark.parametrize("failing", [0, 2])
def test_the_error_of_a_rank_comes_before_the_errors_it_caused(failing):
    """The package's own errors carry the rank in front."""

    def rank_function(comm):
        if comm.rank == failing:
            raise ConfigError("a bad shape")
        comm.barrier()

    with pytest.raises(ConfigError, match=f"^rank {failing}: a bad shape$"):
        run_threads(3, rank_function, timeout=20)


def test_a_foreign_error_keeps_its_type_and_gets_its_rank():
    def rank_function(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("by hand")
        comm.barrier()

    with pytest.raises(ZeroDivisionError, match="by hand") as caught:
        run_threads(3, rank_function, timeout=20)
    assert caught.value.__notes__ == ["raised on rank 1"]


def test_survivors_see_how_a_rank_failed():
    seen = {}

    def rank_function(comm):
        if comm.rank == 1:
            raise ConfigError("a bad shape")
        try:
            comm.barrier()
        except RankLost as error:
            seen[comm.rank] = str(error)

    with pytest.raises(ConfigError):
        run_threads(3, rank_function, timeout=20)
    assert sorted(seen) == [0, 2]
    assert all("rank 1 has failed (ConfigError: a bad shape)" in message for message in seen.values())


# -- groups ----------------------------------------------------------------------------------------------------------


def test_groups_are_separate():
    """All ranks create both pairs, in one order: sums 3, 3, 7, 7."""
    for _ in range(10):
        results = run_threads(4, pairs)
        assert [float(result["sum"]) for result in results] == [3, 3, 7, 7]
        assert [(result["rank"], result["size"]) for result in results] == [(0, 2), (1, 2), (0, 2), (1, 2)]
        assert [result["rows"].flatten().tolist() for result in results] == [
            [1],
            [1],
            [2] * 2 + [3] * 3,
            [2] * 2 + [3] * 3,
        ]
        assert all(result["same ledger"] for result in results)


def test_groups_that_cross():
    assert run_threads(4, crossed) == [
        [11, 101, 1111, 0],
        [11, 1010, 1111, 1],
        [1100, 101, 1111, 0],
        [1100, 1010, 1111, 1],
    ]


def test_members_in_an_order_of_their_own():
    """Kept, or refused on all ranks; never mixed up."""
    assert run_threads(4, descending) in (DESCENDING, ["refused"] * 4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_groups_of_the_same_ranks_do_not_mix(ranks):
    expected = [ranks * (10.0 * number + which) for number in range(20) for which in range(2)]
    for _ in range(5):
        assert run_threads(ranks, twice_the_same_group, timeout=10) == [expected] * ranks


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 1], [1, 2]], [[0], [1]]], ids=str)
def test_a_rank_must_be_in_exactly_one_group(groups):
    with pytest.raises(ConfigError, match="needs to be in one"):
        run_threads(3, lambda comm: comm.split(groups), timeout=5)


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 1], [1, 2]], [[0], [1]]], ids=str)
def test_groups_that_leave_out_a_rank_are_refused_on_all_ranks(groups):
    """Otherwise the ranks that are in one group would go on and wait for the one that is not."""

    def rank_function(comm):
        try:
            comm.split(groups)
        except ConfigError:
            return True

    assert run_threads(3, rank_function, timeout=5) == [True, True, True]


def test_losing_a_member_is_noticed_in_its_group():
    def rank_function(comm):
        group = comm.split([[0, 1], [2, 3]])
        if comm.rank != 3:
            group.barrier()

    with pytest.raises(RankLost, match="rank 2: barrier.*rank 3 has returned"):
        run_threads(4, rank_function, timeout=20)


@pytest.mark.parametrize("kind", MISMATCHES)
def test_disagreement_in_a_group_names_ranks_of_the_world(kind):
    """Ranks 2 and 3 are 0 and 1 in their group; nobody could find them by those numbers."""
    results = run_threads(4, mismatch_in_a_pair, kind, timeout=10)
    assert [result["message"] for result in results[:2]] == [None, None]
    message = results[2]["message"]
    assert message is not None and message == results[3]["message"]
    for words in expected_in_message_of_a_pair(kind, results[2]["number"]):
        assert words in message
    assert "rank 0" not in message and "rank 1" not in message


def test_ledger_and_labels_are_shared_with_groups():
    """World ranks as source and destination; layer and step set on the world are those of its groups, and back."""
    assert run_threads(4, labels_in_a_pair) == [expected_labels(rank) for rank in range(4)]


def test_a_rank_that_does_not_come_to_its_group_is_named():
    def rank_function(comm):
        comm.layer, comm.step = 6, 2
        group = comm.split([[0, 1], [2, 3]])
        if comm.rank == 3:
            time.sleep(1)
        group.barrier()

    with pytest.raises(ExchangeTimeout, match=r"rank 2: barrier #1 \(layer 6, step 2\): .* for ranks \[3\]"):
        run_threads(4, rank_function, timeout=0.3)


def test_segments_that_meet_another_call_say_so():
    """No header comes before padded segments; what stands in front of them names the call all the same."""

    def fn(comm):
        if comm.rank:
            sections = torch.ones(2, 2, dtype=torch.int64)
            comm.all_to_all_padded(torch.zeros(2, 4), torch.tensor([1, 1]), sections, 1, 2)
        else:
            comm.all_to_all_rows(torch.zeros(2, 4), [1, 1])

    with pytest.raises(ExchangeMismatch, match="op differ: rank 0 has all_to_all_rows, rank 1 has all_to_all_padded"):
        run_threads(2, fn)
