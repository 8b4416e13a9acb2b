"""Bytes of a plan: against the facts, a real checkpoint, tensors of a real exchange, and the whole model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_course.backends import BACKENDS
from moe_course.backends.capabilities import SHAPES
from moe_course.backends.two_hop import forwarders
from moe_course.comm.sim import run_threads
from moe_course.config import GLM_5_1, MoEConfig
from moe_course.cost.memory import expert_bytes, model_bytes, rank_memory, rows_gathered, shared_bytes
from moe_course.expert_map import determine_expert_map
from moe_course.experts import local_experts
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


@dataclass(frozen=True)
class Held:
    """What one rank of a real exchange held: rows of the experts' input, bytes of rows, routes and results."""

    rows: int
    row_bytes: int
    route_bytes: int
    result_bytes: int


def worst_ids(config: MoEConfig, tokens: int, aim: int, placement) -> torch.Tensor:
    """Every row of every rank has as many experts as it can on EP rank `aim`."""
    mine = placement.experts_of(aim)
    others = [expert for expert in range(config.n_routed_experts) if expert not in mine]
    return torch.tensor([(mine + others)[: config.num_experts_per_tok]] * tokens, dtype=torch.int32).view(tokens, -1)


def held(comm, made, tokens: int) -> Held:
    mode, backend = make_mode(made, comm), BACKENDS[made.shape]
    rows = torch.zeros(tokens, made.config.hidden_size)[mode.own_rows(tokens)]
    ids = worst_ids(made.config, len(rows), made.moe.ep_size - 1, made.placement)
    fixed = {"max_num_tokens": tokens} if SHAPES[made.shape].fixed else {}
    found = backend.dispatch(rows, torch.ones(ids.shape), ids, comm=mode.dispatch, placement=mode.placement, **fixed)
    hidden, inter = made.config.hidden_size, made.config.moe_intermediate_size // mode.moe_tp_size
    num_local = len(made.rank(comm.rank).experts)
    w13, w2 = torch.zeros(num_local, 2 * inter, hidden), torch.zeros(num_local, hidden, inter)
    _, expert_map = determine_expert_map(mode.ep_size, mode.ep_rank, made.config.n_routed_experts)
    results = local_experts(found, w13, w2, expert_map)
    backend.combine(results, found, comm=mode.dispatch)
    kept = [found.topk_ids, found.topk_weights, found.expert_num_tokens if found.layout == "padded" else None]
    routes = sum(tensor.nbytes for tensor in kept if tensor is not None)
    count = found.hidden_states.shape[:-1].numel()
    return Held(count, found.hidden_states.nbytes, routes, results.nbytes)


def check_held(made, tokens: int, memory_of=rank_memory) -> None:
    """Raise AssertionError unless the sizes of a plan are those of an exchange where all rows go to the last rank."""
    for rank, found in enumerate(run_threads(made.world_size, held, made, tokens)):
        memory, shape = memory_of(made, rank, "float32", tokens), SHAPES[made.shape]
        if (
            rank == made.world_size - 1 or shape.fixed or not shape.over_ep
        ):  # otherwise the others get less than the most
            assert (memory.rows_gathered, memory.gathered_routes) == (found.rows, found.route_bytes), rank
            assert (memory.gathered_rows, memory.partial_sums) == (found.row_bytes, found.result_bytes), rank
            assert memory.buffers == found.row_bytes + found.route_bytes + found.result_bytes


EXCHANGES = [
    {"data_parallel_size": 3},
    {"tensor_parallel_size": 2, "data_parallel_size": 2},  # sequence parallel
    {"tensor_parallel_size": 2, "data_parallel_size": 2, "sequence_parallel_moe": False},
    {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": False},
    {"tensor_parallel_size": 2, "prefill_context_parallel_size": 3},
    {"prefill_context_parallel_size": 2, "enable_expert_parallel": False},
]


@pytest.mark.parametrize("flags", EXCHANGES, ids=str)
def test_buffers_are_those_of_a_real_exchange(flags):
    """7 rows split over 2 or 3 ranks: the last shares are shorter, and all of them arrive."""
    check_held(plan(SMALL, **flags), 7)


LIBRARIES = ["all_to_all", "deepep_high_throughput", "deepep_low_latency", "flashinfer_nvlink_one_sided"]


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("flags", [*EXCHANGES[:4], {"data_parallel_size": 5}], ids=str)
def test_buffers_of_other_shapes_are_those_of_a_real_exchange(backend, flags):
    """Also for 12 experts on 5 ranks: of a token's 3 routes 2 fit on the last one, the third goes elsewhere."""
    check_held(plan(SMALL, all2all_backend=backend, **flags), 7)


def fewer_rows(by):
    def memory_of(made, *arguments):
        memory = rank_memory(made, *arguments)
        return replace(
            memory, rows_gathered=memory.rows_gathered // by(made), gathered_rows=memory.gathered_rows // by(made)
        )

    return memory_of


@pytest.mark.parametrize("backend", LIBRARIES)
def test_buffers_without_the_ranks_or_the_experts_are_caught(backend):
    made = plan(SMALL, data_parallel_size=3, all2all_backend=backend)
    for by in (lambda made: made.moe.ep_size, lambda made: 2):
        with pytest.raises(AssertionError):
            check_held(made, 7, fewer_rows(by))


def glm_buffers(backend: str, ranks: int, tokens: int, **more):
    made = plan(GLM_5_1, data_parallel_size=ranks, all2all_backend=backend, **more)
    return rank_memory(made, ranks - 1, "bfloat16", tokens)


@pytest.mark.parametrize("ranks", [2, 8, 32, 256])
def test_low_latency_needs_the_same_whatever_the_number_of_ranks(ranks):
    """E * T_max * row = 402.7 MB for GLM-5.1 at T_max = 128 (ep_peers B2), and as much for what goes home."""
    memory = glm_buffers("deepep_low_latency", ranks, 128)
    assert memory.gathered_rows == memory.partial_sums == 256 * 128 * 6144 * 2 == 402_653_184
    assert memory.rows_gathered == 256 * 128


@pytest.mark.parametrize(
    ("backend", "rows"),
    [  # 8 ranks with 32 experts, 128 rows each, K = 8
        ("allgather_reducescatter", 8 * 128),
        ("mori_low_latency", 8 * 128),
        ("flashinfer_all2allv", 8 * 128),
        ("flashinfer_nvlink_one_sided", 8 * 128),
        ("all_to_all", 8 * 128 * 8),
        ("nixl_ep", 32 * 8 * 128),
    ],
)
def test_rows_of_each_shape(backend, rows):
    assert glm_buffers(backend, 8, 128).rows_gathered == rows


def test_an_owner_of_few_experts_gets_few_rows_of_a_token():
    """256 ranks own one expert each: one route of a token at most."""
    assert glm_buffers("all_to_all", 256, 128).rows_gathered == 256 * 128


@pytest.mark.parametrize("nodes", [0, 4, 3, (1, 3, 2, 2), (5, 1, 2)], ids=str)
def test_two_hops_forward_for_partners_on_other_nodes(nodes):
    """As many ranks as `forwarders` sends through this one; with equal nodes one on each."""
    made = plan(GLM_5_1, data_parallel_size=8, all2all_backend="deepep_v2")
    made = replace(made, placement=replace(made.placement, ranks_per_node=nodes))
    via, row = forwarders(made.placement), 6144 * 2
    for rank in range(8):
        memory, forwards = rank_memory(made, rank, "bfloat16", 128), int((via[:, rank] == rank).sum())
        assert memory.gathered_rows == (8 + forwards) * 128 * row
        assert memory.gathered_routes == (8 + forwards) * 128 * 8 * 8
        assert forwards == {0: 1, 4: 2}.get(nodes, forwards)
        assert memory.rows_gathered == 8 * 128 and memory.partial_sums == 8 * 128 * 6144 * 4


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


def test_buffers_of_a_backend_that_nobody_knows_are_not_guessed():
    memory = rank_memory(plan(data_parallel_size=2, all2all_backend="teleport"), 0)
    assert memory.buffers is memory.gathered_rows is memory.partial_sums is None
    assert memory.weights > 0
