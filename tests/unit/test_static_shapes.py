"""Static experts against the slow reference, whatever lies in unused slots; and: compiled once, never again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from layer_cases import TOLERANCE, batches, make_config, make_layer, make_weights, oracle
from static_cases import (
    CASES,
    DATA_DEPENDENT,
    DTYPES,
    GARBAGE,
    WRONG_RESULT,
    H,
    I,
    branch_on_a_count,
    faults,
    make,
    padded,
    unloaded,
)
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from moe_course.backends import low_latency
from moe_course.comm.sim import run_threads
from moe_course.errors import BackendUnavailable, CapacityExceeded, ConfigError
from moe_course.expert_map import resolve_placement
from moe_course.stages import Stages
from moe_course.static_shapes import CapturedExperts, missing_for_inductor, static_experts

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def inference():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_row_is_what_the_slow_reference_computes(case, dtype):
    for garbage in GARBAGE.values():
        assert faults(static_experts, make(*CASES[case], dtype, garbage)) == []


def test_an_expert_without_rows_may_have_any_weights():
    assert faults(static_experts, unloaded()) == []


@pytest.mark.parametrize("wrong", WRONG_RESULT, ids=lambda f: f.__name__)
def test_wrong_masks_are_caught(wrong):
    assert faults(wrong, make(7, [3, 0, 7, 1])) or faults(wrong, unloaded())


@pytest.mark.parametrize("wrong", DATA_DEPENDENT, ids=lambda f: f.__name__)
def test_shapes_that_depend_on_data_are_refused(wrong):
    inputs = make(7, [3, 0, 7, 1])
    assert faults(wrong, inputs) == []  # the result is right: it takes a capture to find them
    stage, before = CapturedExperts([7, 9], rank=1, experts=wrong), graphs()
    with pytest.raises(ConfigError, match=f"rank 1: {wrong.__name__} .*[Mm]eta.*mask"):
        stage(padded(*inputs[:2]), *inputs[2:])
    assert graphs() == before


def test_torch_compile_by_itself_refuses_a_branch_only():
    inputs = make(7, [3, 0, 7, 1])
    with pytest.raises(Unsupported, match="[Dd]ata-dependent branching"):
        torch.compile(branch_on_a_count, fullgraph=True, dynamic=False, backend="aot_eager")(*inputs)


def test_no_value_is_needed_to_know_every_shape():
    outputs = static_experts(*(tensor.to("meta") for tensor in make(7, [3, 0, 7, 1])))  # meta tensors have no values
    assert outputs.shape == (4, 7, H) and outputs.is_meta


# ---- captured sizes ------------------------------------------------------------------------------------------------


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_twenty_steps_compile_each_size_once(torch_threads):
    sizes = [8, 3, 3, 12]
    stage, before = CapturedExperts(sizes), graphs()
    with torch.enable_grad():
        stage.capture(*map(torch.nn.Parameter, make(1, [0] * 4)[2:]))
    assert graphs() - before == 3
    for step in range(20):
        capacity = 1 + step % 12
        counts = [step % (capacity + 1), 0, capacity, (3 * step) % (capacity + 1)]
        rows, counts, w13, w2 = make(capacity, counts)  # other weights too: layers share the graphs
        if step % 3 == 1:
            rows = torch.stack([rows, -rows], dim=3)[..., 0]
        if step % 3 == 2:
            w13, w2, counts = torch.nn.Parameter(w13), torch.nn.Parameter(w2), counts.long()
        torch.set_num_threads(1 + step % 2)
        with torch.inference_mode(step % 4 == 0), torch.set_grad_enabled(step % 3 == 2):
            outputs = stage(padded(rows, counts), w13, w2)
        size = stage.capacity_for(capacity)
        same = static_experts(F.pad(rows, (0, 0, 0, size - capacity)), counts, w13, w2)[:, :capacity]
        assert torch.equal(outputs, same) and not outputs.requires_grad
        assert faults(lambda *_, outputs=outputs: outputs, (rows, counts, w13, w2)) == []
    assert graphs() - before == 3


def test_quantised_rows_are_computed_as_what_they_stand_for():
    rows, counts, w13, w2 = make(7, [3, 0, 7, 1])
    q, scales = rows.to(torch.float8_e4m3fn), torch.full((4, 7, 2), 0.5)
    outputs = CapturedExperts([8])(replace(padded(q, counts), scales=scales), w13, w2)
    assert faults(lambda *_: outputs, (q.float() * 0.5, counts, w13, w2)) == []


def test_a_compiler_may_rely_on_strides_and_integer_types():
    def strict(graph, examples):
        def run(*inputs):
            for found, example in zip(inputs, examples, strict=True):
                assert (found.stride(), found.dtype) == (example.stride(), example.dtype)
            return graph(*inputs)

        return run

    stage = CapturedExperts([7], backend=strict)
    rows, counts, w13, w2 = make(7, [3, 0, 7, 1])
    strided = rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert faults(lambda *_: stage(padded(strided, counts.long()), w13, w2), (rows, counts, w13, w2)) == []


def test_the_counter_sees_what_torch_compile_does_by_itself():
    naive, before = torch.compile(static_experts, fullgraph=True, dynamic=False, backend="aot_eager"), graphs()
    for capacity in (2, 3, 4):
        naive(*make(capacity, [1, 2]))
    assert graphs() - before == 3


def test_the_first_step_captures_all_sizes_and_more_than_torch_allows_per_function():
    stage, before = CapturedExperts(range(1, 10)), graphs()
    for capacity in range(9, 0, -1):
        inputs = make(capacity, [capacity, 1])
        assert faults(lambda rows, counts, w13, w2: stage(padded(rows, counts), w13, w2), inputs) == []
        assert graphs() - before == 9
    assert stage(padded(torch.empty(2, 0, H), torch.zeros(2, dtype=torch.int32)), *inputs[2:]).shape == (2, 0, H)


def test_a_step_gets_the_smallest_size_that_holds_it():
    stage = CapturedExperts([16, 4, 8])
    assert stage.capture_sizes == (4, 8, 16)
    assert [stage.capacity_for(slots) for slots in (0, 1, 4, 5, 8, 9, 16)] == [4, 4, 4, 8, 8, 16, 16]


def test_a_size_rounded_down_is_caught():
    class RoundedDown(CapturedExperts):
        def capacity_for(self, slots):
            return max(size for size in self.capture_sizes if size <= slots)

    stage = RoundedDown([4, 8])
    assert faults(lambda rows, counts, w13, w2: stage(padded(rows, counts), w13, w2), make(7, [3, 0, 7, 1]))


def test_more_slots_than_captured_are_refused_by_name():
    stage, before = CapturedExperts([4, 8], rank=3), graphs()
    rows, counts, w13, w2 = make(9, [1, 0])
    with pytest.raises(CapacityExceeded, match=r"rank 3: 9 slots .*\(4, 8\).*at least 9.*--max-num-batched-tokens"):
        stage(padded(rows, counts), w13, w2)
    assert graphs() == before


def test_what_was_not_captured_is_refused_by_name():
    rows, counts, w13, w2 = make(4, [1, 2])
    good, stage = padded(rows, counts), CapturedExperts([4], rank=2)
    stage(good, w13, w2)
    before = graphs()
    for what, dispatched, weights in (
        ("layout is 'rows'", replace(good, layout="rows"), (w13, w2)),
        ("expert_num_tokens is 'None'", replace(good, expert_num_tokens=None), (w13, w2)),
        ("topk_weights", replace(good, topk_weights=torch.ones(0, 2)), (w13, w2)),
        ("rows of", replace(good, hidden_states=rows.double()), (w13, w2)),
        ("rows of", replace(good, hidden_states=rows[:1]), (w13, w2)),
        ("expert_num_tokens of", replace(good, expert_num_tokens=counts[:1]), (w13, w2)),
        ("weights of", good, (w13[:, : 2 * I - 2].contiguous(), w2[:, :, : I - 1].contiguous())),
        ("weights of", good, (w13.transpose(1, 2).contiguous().transpose(1, 2), w2)),
    ):
        with pytest.raises(ConfigError, match=f"rank 2: .*{what}"):
            stage(dispatched, *weights)
    assert graphs() == before
    narrow = w13[:, : 2 * I - 2].contiguous(), w2[:, :, : I - 1].contiguous()
    stage.capture(*narrow)  # a second model, asked for
    assert graphs() == before + 1
    for weights in (narrow, (w13, w2)):
        assert faults(lambda *_, weights=weights: stage(good, *weights), (rows, counts, *weights)) == []
    assert graphs() == before + 1
    for sizes in ([], [0, 4], [-1]):
        with pytest.raises(ConfigError, match="capture_sizes"):
            CapturedExperts(sizes)


def test_inductor_says_what_it_lacks(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert "no-such-compiler" in missing_for_inductor(torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match="rank 1: .*no-such-compiler.*aot_eager"):
        CapturedExperts([4], rank=1, backend="inductor").capture(*make(4, [1])[2:])


# ---- in a layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_a_layer_every_rank_captures_once_and_gets_the_oracle_s_rows(dtype):
    ranks, config = 3, make_config(7, 2, 32, 16)
    weights, placement = make_weights(config, dtype), resolve_placement("linear", ep_size=ranks, num_experts=7)
    steps, before = batches(ranks, placement, config, dtype), graphs()

    def run(comm):
        stage = CapturedExperts([ranks * low_latency.MAX_NUM_TOKENS], rank=comm.rank)
        layer = make_layer(weights, placement, comm, low_latency, stages=Stages(experts=stage))
        mine = [(b.hidden_states[comm.rank], b.topk_weights[comm.rank], b.topk_ids[comm.rank]) for b in steps.values()]
        return [layer.routed(*step) for step in mine]

    found = run_threads(ranks, run)
    assert graphs() - before == ranks
    for number, (name, batch) in enumerate(steps.items()):
        for rank, expected in enumerate(oracle(batch, weights, placement, shared=False)):
            limit = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
            torch.testing.assert_close(
                found[rank][number], expected, rtol=0, atol=limit, msg=lambda m, name=name: f"{name}: {m}"
            )
