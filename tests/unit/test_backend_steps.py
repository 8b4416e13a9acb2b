"""Many calls in one group: buffers used again, layers and steps, capacity, ranks without rows, ranks that disagree."""

from __future__ import annotations

import pytest
import torch
from backend_cases import FIXED, SHAPES, backend, poison, run_batch
from layer_cases import Batch, differences, make_batch, make_config, make_layer, make_weights, oracle

from moe_course.comm.sim import run_threads
from moe_course.comm.window import Window
from moe_course.errors import CapacityExceeded, ExchangeMismatch
from moe_course.expert_map import make_placement
from moe_course.rows import RowInvariance, row_invariance

CONFIG = make_config(10, 4, 64, 32)
OPERATIONS = (
    "all_gather_rows", "reduce_scatter_rows", "all_to_all_rows", "all_to_all_views", "all_to_all_padded", "all_reduce",
    "barrier", "split",
    "window", "open", "put", "flush", "wait",
)  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    return make_weights(CONFIG, torch.float32)


@pytest.fixture(scope="module")
def verdict() -> RowInvariance:
    return row_invariance([(64, 64), (32, 64)], torch.float32, torch.device("cpu"))


def fixed(name: str, capacity: int, **options):
    return backend(name, max_num_tokens=capacity if name in FIXED else None, **options)


def part(batch: Batch, rank: int) -> list[torch.Tensor]:
    return [parts[rank] for parts in (batch.hidden_states, batch.topk_weights, batch.topk_ids)]


# -- buffers that are used again -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_the_call_before_do_not_leak(name, weights, verdict):
    """Full buffers of NaN, twice, so that both halves of a window have seen them; then fewer rows, then none."""
    placement = make_placement(3, 10, ranks_per_node=(2, 1))
    full = make_batch([6, 6, 6], CONFIG, torch.float32, seed=1)
    full = Batch([torch.full_like(rows, float("nan")) for rows in full.hidden_states], full.topk_weights, full.topk_ids)
    few = [make_batch(counts, CONFIG, torch.float32, seed=2) for counts in ([2, 0, 3], [0, 1, 0], [0, 0, 0], [6, 5, 6])]

    def rank_function(comm):
        found = [run_batch(comm, weights, placement, batch, module, shared=False) for batch in [full, full, *few, full]]
        return [seen.output for seen in found[2:-1]]

    module = fixed(name, 6)
    results = run_threads(3, rank_function)
    for place, batch in enumerate(few):
        outputs = [found[place] for found in results]
        assert not differences(outputs, oracle(batch, weights, placement, shared=False), verdict)


@pytest.mark.parametrize("fmt", ["fp8_group", "fp8_tensor"])
@pytest.mark.parametrize("name", SHAPES)
def test_scales_of_the_call_before_do_not_leak(name, fmt):
    """Rows quantised where they arrive, after calls with rows a thousand times as large."""
    config = make_config(8, 2, 128, 32)
    wide, placement = make_weights(config, torch.float32), make_placement(2, 8)
    small, large = (make_batch(counts, config, torch.float32, seed=1) for counts in ([2, 3], [4, 4]))
    large = Batch([rows * 1000 for rows in large.hidden_states], large.topk_weights, large.topk_ids)
    module = fixed(name, 4, format=fmt, before=False)

    def rank_function(comm):
        batches = (small, large, large, small, small)
        first, _, _, *again = [run_batch(comm, wide, placement, b, module, shared=False).output for b in batches]
        return all(torch.equal(first, rows) for rows in again)

    assert all(run_threads(2, rank_function))


def holds(turns: int) -> bool:
    """Do rows that were read in place still hold after so many more turns?"""
    placement = make_placement(2, 4)
    module = fixed("one_sided", 2)

    def rank_function(comm):
        views = []
        for turn in range(turns + 1):
            rows, ids = torch.full((2, 4), float(turn)), torch.tensor([[0, 3]] * 2, dtype=torch.int32)
            views.append(module.dispatch(rows, torch.ones(2, 2), ids, comm=comm, placement=placement).hidden_states)
        return views[0].unique().tolist() == [0.0]

    return all(run_threads(2, rank_function))


def test_a_window_has_two_halves(monkeypatch):
    """Rows are read in place, and hold for one more turn. With one half, the next turn writes over them."""
    assert holds(0) and holds(1) and not holds(2)
    monkeypatch.setattr(Window, "of", lambda self, rank: self.memories[rank][0])
    assert holds(0) and not holds(1)


@pytest.mark.parametrize("name", SHAPES)
def test_three_layers_and_steps_with_other_numbers_of_rows(name, weights, verdict):
    """Outputs of a layer are the rows of the next; every rank is empty in some step; one group, one set of buffers."""
    placement = make_placement(4, 10, ranks_per_node=(3, 1))
    steps = [[5, 0, 2, 1], [1, 1, 1, 1], [0, 0, 0, 4], [0, 5, 0, 0], [0, 0, 0, 0], [2, 3, 5, 0]]
    batches = [
        [make_batch(counts, CONFIG, torch.float32, seed=10 * step + layer) for layer in range(3)]
        for step, counts in enumerate(steps)
    ]

    def rank_function(comm):
        outputs = []
        for comm.step, layers in enumerate(batches):
            rows = layers[0].hidden_states[comm.rank]
            for number, batch in enumerate(layers):
                layer = make_layer(weights, placement, comm, fixed(name, 5), shared=False, layer=number)
                _, *routing = part(batch, comm.rank)
                rows = layer.routed(rows, *routing)
            outputs.append(rows)
        return outputs

    results = run_threads(4, rank_function)
    for step, layers in enumerate(batches):
        rows = layers[0].hidden_states
        for batch in layers:
            rows = oracle(Batch(rows, batch.topk_weights, batch.topk_ids), weights, placement, shared=False)
        assert not differences([outputs[step] for outputs in results], rows, verdict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_shape_reads_what_nobody_wrote(monkeypatch, dtype):
    """Fresh memory is NaN: the same bits. vllm-project/vllm-ascend#9992: rows without experts, and vice versa."""
    weights, placement = make_weights(make_config(4, 2, 64, 32), dtype), make_placement(2, 4)
    batch = make_batch([5, 3], weights.config, dtype, seed=1)
    for ids in batch.topk_ids:
        ids[:] = torch.tensor([0, 3])
    batch.topk_ids[0][3] = torch.tensor([1, 0])

    def rank_function(comm):
        return {n: run_batch(comm, weights, placement, batch, fixed(n, 6), shared=False).output for n in SHAPES}

    clean = run_threads(2, rank_function)
    poison(monkeypatch)
    assert torch.empty(2).isnan().all() and torch.empty(8, dtype=torch.uint8).view(torch.bfloat16).isnan().all()
    for ours, theirs in zip(run_threads(2, rank_function), clean, strict=True):
        for name in SHAPES:
            assert torch.equal(ours[name], theirs[name]), name


# -- capacity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", FIXED)
def test_one_row_too_many_is_told_to_all_ranks(name, ranks, weights, verdict):
    """T_max rows fit; one more is the same error everywhere, also on ranks without rows, and the group goes on."""
    placement = make_placement(ranks, 10)
    fits = make_batch([4] + [0] * (ranks - 2) + [4] * (ranks > 1), CONFIG, torch.float32, seed=1)
    over = make_batch([0] * (ranks - 1) + [5], CONFIG, torch.float32, seed=2)

    def rank_function(comm):
        layer = make_layer(weights, placement, comm, fixed(name, 4), layer=2, shared=False)
        found = [layer.routed(*part(fits, comm.rank))]
        for comm.step in (1, 2):
            with pytest.raises(CapacityExceeded) as caught:
                layer.routed(*part(over, comm.rank))
            found += [str(caught.value), layer.routed(*part(fits, comm.rank))]
        return found

    results = run_threads(ranks, rank_function)
    for step in (1, 2):
        begins = f"rank {ranks - 1} has 5 rows, T_max is 4 (layer 2, step {step}): "
        assert all(found[2 * step - 1].startswith(begins) for found in results)
        assert all("raise --max-num-batched-tokens on all ranks" in found[2 * step - 1] for found in results)
    expected = oracle(fits, weights, placement, shared=False)
    for place in (0, 2, 4):
        assert not differences([found[place] for found in results], expected, verdict)


def test_too_many_rows_are_told_before_too_many_routes(weights):
    """Rank 0 names an expert twice in a row, and rank 1 has a row too many: it is rank 1 that everybody hears of."""
    placement, batch = make_placement(2, 10), make_batch([3, 5], CONFIG, torch.float32, seed=1)
    batch.topk_ids[0][:] = 7  # 12 routes

    def rank_function(comm):
        with pytest.raises(CapacityExceeded, match=r"^rank 1 has 5 rows, T_max is 4 .*or send fewer rows$"):
            run_batch(comm, weights, placement, batch, fixed("low_latency", 4), shared=False)

    run_threads(2, rank_function)


@pytest.mark.parametrize("name", FIXED)
def test_another_capacity_in_the_same_group(name, weights, verdict):
    """On all ranks at once: larger and smaller buffers, each call with the one that fits."""
    placement = make_placement(3, 10)
    batches = [make_batch(counts, CONFIG, torch.float32, seed=1) for counts in ([2, 0, 1], [5, 9, 0], [2, 1, 0])]

    def rank_function(comm):
        both = zip(batches, (2, 9, 2), strict=True)
        return [run_batch(comm, weights, placement, batch, fixed(name, n), shared=False).output for batch, n in both]

    results = run_threads(3, rank_function)
    for place, batch in enumerate(batches):
        expected = oracle(batch, weights, placement, shared=False)
        assert not differences([found[place] for found in results], expected, verdict)


@pytest.mark.parametrize("name", FIXED)
def test_a_group_of_ranks_names_them_as_the_world_does(name, weights):
    def rank_function(comm):
        group = comm.split([[0, 2], [1, 3]])
        layer = make_layer(weights, make_placement(2, 10), group, fixed(name, 2), shared=False)
        batch = make_batch([1, 3 if comm.rank % 2 else 2], CONFIG, torch.float32, seed=1)
        try:
            layer.routed(*part(batch, group.rank))
        except CapacityExceeded as error:
            return str(error)[:27]
        return ""

    assert run_threads(4, rank_function) == ["", "rank 3 has 3 rows, T_max is", "", "rank 3 has 3 rows, T_max is"]


def test_an_expert_twice_in_a_row_takes_two_places(weights, verdict):
    """Routers give distinct experts. If one comes twice, both routes count; a segment of T_max may then overflow."""
    placement = make_placement(2, 10)
    batch = make_batch([3, 2], CONFIG, torch.float32, seed=1)
    for ids in batch.topk_ids:
        ids[:] = 7

    def rank_function(comm):
        outputs = [run_batch(comm, weights, placement, batch, fixed(n, 12), shared=False).output for n in SHAPES]
        with pytest.raises(CapacityExceeded, match="rank 0 has 12 routes to one expert, T_max is 11 .*names .* twice"):
            run_batch(comm, weights, placement, batch, fixed("low_latency", 11), shared=False)
        return outputs

    results = run_threads(2, rank_function)
    for place in range(len(SHAPES)):
        expected = oracle(batch, weights, placement, shared=False)
        assert not differences([found[place] for found in results], expected, verdict)


# -- ranks without rows, and who calls what --------------------------------------------------------------------------


def watched(comm, calls: list):
    """Write down every operation of a group, with its layer and step."""

    def counted(operation):
        call = getattr(comm, operation)

        def wrapper(*args, **more):
            calls.append((comm.step, comm.layer, operation))
            return call(*args, **more)

        return wrapper

    for operation in OPERATIONS:
        setattr(comm, operation, counted(operation))


@pytest.mark.parametrize("name", SHAPES)
def test_all_ranks_make_the_same_calls(name, weights, verdict):
    """Three layers, some ranks empty; then one rank grows. vllm-project/vllm#51984, deepseek-ai/DeepEP#604."""
    counts = [[3, 0], [0, 3], [0, 0], [4, 4], [4, 9]]
    placement, alone = make_placement(2, 10), make_placement(1, 10)
    batches = [make_batch(n, CONFIG, torch.float32, seed=step) for step, n in enumerate(counts)]

    def rank_function(comm):
        calls, outputs = [], []
        watched(comm, calls)
        for comm.step, batch in enumerate(batches):
            rows, *routing = part(batch, comm.rank)
            for number in range(3):
                layer = make_layer(weights, placement, comm, fixed(name, 9), shared=False, layer=number)
                rows = layer.routed(rows, *routing)
            outputs.append(rows)
        return calls, outputs

    (first_calls, first), (second_calls, second) = run_threads(2, rank_function, timeout=30)
    assert first_calls == second_calls and len(first_calls) >= 5 * 3 * 2
    for step, batch in enumerate(batches):
        whole = Batch(*([torch.cat(parts)] for parts in (batch.hidden_states, batch.topk_weights, batch.topk_ids)))
        rows = whole.hidden_states
        for _ in range(3):
            rows = oracle(Batch(rows, whole.topk_weights, whole.topk_ids), weights, alone, shared=False)
        both = torch.cat([first[step], second[step]])
        assert first[step].shape == (counts[step][0], 64) and second[step].dtype == torch.float32
        limit = 1e-5 * max([1.0, *rows[0].abs().flatten().tolist()])  # one owner adds up in another order
        torch.testing.assert_close(both, rows[0], rtol=0, atol=limit)


@pytest.mark.parametrize("counts", [[5, 5], [0, 1]], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_rank_that_gets_no_row(name, counts, verdict):
    """All rows go to experts 0 and 1, both on rank 0. NVIDIA/Megatron-LM#3626 died in a view of an empty buffer."""
    weights, placement = make_weights(make_config(4, 2, 64, 32), torch.float32), make_placement(2, 4)
    batch = make_batch(counts, weights.config, torch.float32, seed=1)
    for ids in batch.topk_ids:
        ids[:] = torch.tensor([1, 0])

    def rank_function(comm):
        computed = []

        def on_event(stage, layer, **tensors):
            if stage == "dispatch":
                dispatched = tensors["dispatched"]
                padded = dispatched.layout == "padded"
                live = dispatched.expert_num_tokens.sum() if padded else (dispatched.topk_ids >= 0).sum()
                computed.append(int(live))

        more = {"shared": False, "on_event": on_event}
        return run_batch(comm, weights, placement, batch, fixed(name, 5), **more).output, computed

    results = run_threads(2, rank_function)
    assert [computed for _, computed in results] == [[2 * sum(counts)], [0]]
    assert not differences([rows for rows, _ in results], oracle(batch, weights, placement, shared=False), verdict)


# -- ranks that disagree ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("what", ["T_max", "T_max by own need", "dtype", "width"])
def test_other_buffers_on_one_rank_are_the_same_error_on_all(name, what, weights):
    """A size that each rank takes from its own rows (deepseek-ai/DeepEP#604) among them; the group goes on."""
    placement = make_placement(3, 10)
    batch = make_batch([2, 5, 0], CONFIG, torch.float32, seed=1)

    def rank_function(comm):
        rows, *routing = part(batch, comm.rank)
        odd = comm.rank == 1
        capacity = {"T_max": 6 if odd else 5, "T_max by own need": max(1, len(rows))}.get(what, 5)
        rows = rows.double() if odd and what == "dtype" else rows[:, :48] if odd and what == "width" else rows
        with pytest.raises(ExchangeMismatch) as caught:
            fixed(name, capacity).dispatch(rows, *routing, comm=comm, placement=placement)
        layer = make_layer(weights, placement, comm, fixed(name, 5))
        layer.routed(*part(batch, comm.rank))
        return str(caught.value)

    said = run_threads(3, rank_function)
    assert len(set(said)) == 1 and "rank 0 has" in said[0] and "rank 1 has" in said[0]
