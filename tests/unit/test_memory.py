"""Bytes of a plan: against the facts, a real checkpoint, tensors of a real exchange, and the whole model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_course.backends import allgather_reducescatter
from moe_course.comm.sim import run_threads
from moe_course.config import GLM_5_1, MoEConfig
from moe_course.cost.memory import expert_bytes, model_bytes, rank_memory, rows_gathered, shared_bytes
from moe_course.modes import make_mode
from moe_course.options import TINY
from moe_course.parallel import ParallelConfig, make_plan

GIB = 2**30
SMALL = MoEConfig(16, 24, 12, 3, ("dense", "sparse", "sparse", "dense", "sparse"), n_shared_experts=2)


def plan(config: MoEConfig = GLM_5_1, **flags):
    return make_plan(ParallelConfig(**flags), config, strict=False)


def test_glm_on_eight_ranks():
    """32 experts of GLM-5 in bfloat16 are 2.25 GiB a layer: 3 matrices of 2048 * 6144."""
    memory = rank_memory(plan(data_parallel_size=8), 3)
    assert expert_bytes(GLM_5_1) == 3 * 2048 * 6144 * 2 == 72 * 2**20
    assert memory.routed == 75 * 32 * 72 * 2**20 and memory.routed / memory.sparse_layers == 2.25 * GIB
    assert memory.shared == 75 * 72 * 2**20
    assert memory.router == 75 * (256 * 6144 + 256) * 4
    assert memory.weights == memory.routed + memory.shared + memory.router


def test_sizes_are_those_of_the_tensors_in_a_checkpoint():
    """The tiny model's file says how many bytes each of its tensors has. Its router is stored in bfloat16."""
    with (TINY / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    stored = {"experts.": 0, "shared_experts.": 0, "gate.": 0}
    elements = {"BF16": 2, "F32": 4}
    router_elements = 0
    for name, entry in header.items():
        for part in stored:
            if f".mlp.{part}" in name:
                count = entry["data_offsets"][1] - entry["data_offsets"][0]
                stored[part] += count
                router_elements += count // elements[entry["dtype"]] * (part == "gate.")
    config = MoEConfig.from_pretrained(TINY)
    assert model_bytes(config) == {
        "routed": stored["experts."],
        "shared": stored["shared_experts."],
        "router": router_elements * 4,
    }


def check_sums(config: MoEConfig, parallel: ParallelConfig, memory_of=rank_memory) -> None:
    """Raise AssertionError unless the ranks of each copy together hold the model: experts once, the rest on each."""
    made = make_plan(parallel, config, strict=False)
    flat = made.world_size // (parallel.external_data_parallel_size * parallel.pipeline_parallel_size)
    total = {"routed": 0, "shared": 0, "router": 0}
    for rank in range(made.world_size):
        memory = memory_of(made, rank)
        for name in total:
            total[name] += getattr(memory, name)
    copies = parallel.external_data_parallel_size
    whole = model_bytes(config)
    assert total["routed"] == copies * whole["routed"], "routed"
    assert total["shared"] == copies * flat * whole["shared"], "shared"
    assert total["router"] == copies * flat * whole["router"], "router"


sizes = st.builds(
    ParallelConfig,
    tensor_parallel_size=st.integers(1, 3),
    data_parallel_size=st.integers(1, 2),
    prefill_context_parallel_size=st.integers(1, 2),
    pipeline_parallel_size=st.integers(1, 6),
    external_data_parallel_size=st.integers(1, 2),
    enable_expert_parallel=st.booleans(),
    expert_placement_strategy=st.sampled_from(["linear", "round_robin"]),
)


@settings(max_examples=80, deadline=None)
@given(sizes)
def test_ranks_together_hold_the_whole_model(parallel):
    check_sums(SMALL, parallel)


def cut_although_whole(plan, rank):
    """The slice of TP, although expert parallelism keeps experts whole."""
    memory = rank_memory(plan, rank)
    return replace(memory, routed=memory.routed // plan.parallel.tensor_parallel_size)


def all_layers_on_each_stage(plan, rank):
    memory = rank_memory(plan, rank)
    return replace(memory, routed=memory.routed * plan.parallel.pipeline_parallel_size)


def shared_cut_over_tp(plan, rank):
    memory = rank_memory(plan, rank)
    return replace(memory, shared=memory.shared_upstream)


@pytest.mark.parametrize("wrong", [cut_although_whole, all_layers_on_each_stage, shared_cut_over_tp])
def test_wrong_sizes_are_caught(wrong):
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    check_sums(SMALL, parallel)
    with pytest.raises(AssertionError):
        check_sums(SMALL, parallel, wrong)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"data_parallel_size": 4}, 1),
        ({"tensor_parallel_size": 4}, 4),
        ({"tensor_parallel_size": 4, "data_parallel_size": 2}, 1),  # sequence parallel
        ({"tensor_parallel_size": 4, "data_parallel_size": 2, "sequence_parallel_moe": False}, 4),
        ({"tensor_parallel_size": 4, "data_parallel_size": 2, "enable_expert_parallel": False}, 4),  # over TP alone
    ],
)
def test_upstream_cuts_the_shared_expert_over_tp_unless_rows_are_sliced(flags, parts):
    memory = rank_memory(plan(**flags), 0)
    assert memory.shared == 75 * shared_bytes(GLM_5_1)
    assert memory.shared_upstream * parts == memory.shared


def test_a_cut_that_does_not_come_out_even_has_no_size():
    memory = rank_memory(plan(data_parallel_size=3, enable_expert_parallel=False), 0)
    assert memory.routed is memory.weights is None and memory.buffers > 0
    assert rank_memory(plan(tensor_parallel_size=3), 0).shared_upstream is None


@pytest.mark.parametrize(
    ("dtype", "row", "partial"), [("bfloat16", 2, 4), ("float16", 2, 4), ("float32", 4, 4), ("float64", 8, 8)]
)
def test_dtypes(dtype, row, partial):
    """Weights and rows have the model's dtype, partial sums the accumulator's, the router float32."""
    memory = rank_memory(plan(data_parallel_size=2), 0, dtype, 10)
    assert memory.routed == 75 * 128 * 3 * 2048 * 6144 * row
    assert memory.router == rank_memory(plan(data_parallel_size=2), 0).router
    assert memory.gathered_rows == 20 * 6144 * row
    assert memory.gathered_routes == 20 * 8 * (4 + 4)
    assert memory.partial_sums == 20 * 6144 * partial


def received(comm, made, tokens: int) -> tuple[int, int, int, int]:
    """Rows, their bytes, bytes of their routes and of partial sums on one rank, of a real exchange."""
    mode = make_mode(made, comm)
    rows = torch.zeros(tokens, made.config.hidden_size)[mode.own_rows(tokens)]
    weights = torch.zeros(len(rows), made.config.num_experts_per_tok)
    ids = weights.to(torch.int32)
    found = allgather_reducescatter.dispatch(rows, weights, ids, comm=mode.dispatch, placement=mode.placement)
    routes = found.topk_weights.nbytes + found.topk_ids.nbytes
    partial = torch.zeros_like(found.hidden_states)
    allgather_reducescatter.combine(partial, found, comm=mode.dispatch)
    return len(found.hidden_states), found.hidden_states.nbytes, routes, partial.nbytes


@pytest.mark.parametrize(
    "flags",
    [
        {"data_parallel_size": 3},
        {"tensor_parallel_size": 2, "data_parallel_size": 2},  # sequence parallel
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "sequence_parallel_moe": False},
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": False},
        {"tensor_parallel_size": 2, "prefill_context_parallel_size": 3},
        {"prefill_context_parallel_size": 2, "enable_expert_parallel": False},
    ],
    ids=str,
)
def test_buffers_are_those_of_a_real_exchange(flags):
    """7 rows split over 2 or 3 ranks: the last shares are shorter, and all of them arrive."""
    made = plan(SMALL, **flags)
    for rank, found in enumerate(run_threads(made.world_size, received, made, 7)):
        memory = rank_memory(made, rank, "float32", 7)
        expected = (memory.rows_gathered, memory.gathered_rows, memory.gathered_routes, memory.partial_sums)
        assert found == expected, rank
        assert memory.buffers == sum(expected[1:])


def test_without_dispatch_there_are_no_gathered_rows():
    """TP ranks hold their rows already, and owe a sum of them; a rank alone owes nothing."""
    together, alone = rank_memory(plan(tensor_parallel_size=2), 0), rank_memory(plan(), 0)
    assert together.gathered_rows == together.gathered_routes == 0
    assert together.partial_sums == together.buffers == 256 * 6144 * 4
    assert alone.buffers == 0 and alone.rows_gathered == rows_gathered(plan(), 256) == 256


def test_a_stage_without_sparse_layers_needs_nothing():
    """Stage 0 of 5 holds only the dense layer 0."""
    memory = rank_memory(plan(SMALL, data_parallel_size=2, pipeline_parallel_size=5), 0)
    assert memory.sparse_layers == memory.weights == memory.shared == memory.buffers == 0


def test_buffers_of_other_backends_are_not_guessed():
    memory = rank_memory(plan(data_parallel_size=2, all2all_backend="deepep_low_latency"), 0)
    assert memory.buffers is memory.gathered_rows is memory.partial_sums is None
    assert memory.weights > 0
