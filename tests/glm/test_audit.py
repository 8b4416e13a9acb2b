"""What a rank holds is compared with the files and over all ranks; every kind of damage is told by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import EXTRA, edit_weights, shard, write_model

from moe_course.comm.sim import run_threads
from moe_course.config import MoEConfig
from moe_course.errors import CheckpointError
from moe_course.expert_map import make_placement
from moe_course.experts import grouped_swiglu
from moe_course.glm.checkpoint import Reader, expert_name, read_index
from moe_course.glm.model import load
from moe_course.guard.audit import audit
from moe_course.guard.raw_checkpoint import RawCheckpoint
from moe_course.parallel import ParallelConfig, make_plan

MODES = {
    "one": ParallelConfig(),
    "dp2": ParallelConfig(data_parallel_size=2),
    "dp3": ParallelConfig(data_parallel_size=3),
    "tp2": ParallelConfig(tensor_parallel_size=2),
    "tp2-sliced": ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=False),
    "dp2-sliced": ParallelConfig(data_parallel_size=2, enable_expert_parallel=False),
    "pcp2": ParallelConfig(prefill_context_parallel_size=2),
}
E = 10


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One folder for each architecture; tests that damage files write their own."""
    return {name: write_model(tmp_path_factory.mktemp(name), name) for name in EXTRA}


@pytest.fixture
def model_dir(written):
    return written["GlmMoeDsaForCausalLM"]


def audited(model_dir, parallel=MODES["dp2"], damage=None, read_from=None, **options):
    """Load on all ranks, let `damage(model, rank)` do its work, audit; returns what each rank got.

    `read_from`: another folder to load from, while the audit reads `model_dir`.
    """
    plan = make_plan(parallel, MoEConfig.from_pretrained(model_dir))

    def rank(comm):
        model = load(read_from or model_dir, comm, plan, **options)
        if damage is not None:
            damage(model, comm.rank)
        try:
            return audit(model, model_dir, plan, comm)
        except CheckpointError as error:
            return str(error)

    return run_threads(plan.world_size, rank)


def findings(*args, **more) -> str:
    """What all ranks raise alike, in one line."""
    said = audited(*args, **more)
    assert isinstance(said[0], str), f"nothing was found: {said[0]}"
    assert len(set(said)) == 1 and "\n" not in said[0]
    return said[0]


# -- nothing is wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [("GlmMoeDsaForCausalLM", mode) for mode in MODES if mode != "tp2"] + [(name, "tp2") for name in EXTRA],
)
def test_what_was_loaded_passes(written, architecture, mode):
    for said in audited(written[architecture], MODES[mode]):
        assert isinstance(said, dict), said
        assert said["buffers"] == 2 and said["seconds"] > 0


@pytest.mark.parametrize("mode", ["dp3", "tp2-sliced"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_any_stored_dtype_and_shards_pass(tmp_path, mode, stored):
    """Loaded in bf16: rounded once, the same way."""
    directory = write_model(tmp_path / "model")
    edit_weights(directory, lambda t: t.update({name: tensor.to(stored) for name, tensor in t.items()}))
    shard(directory)
    for dtype in (torch.float32, torch.bfloat16):
        assert all(isinstance(said, dict) for said in audited(directory, MODES[mode], dtype=dtype))


def test_every_tensor_of_the_file_is_compared_once(model_dir):
    """Counted against the index: what one rank alone reads, and experts once over several ranks."""
    index = read_index(model_dir)
    (alone,) = audited(model_dir, MODES["one"])
    assert alone["tensors"] == len(index) and alone["bytes"] == sum(info.nbytes for info in index.values())
    experts = [info for name, info in index.items() if ".mlp.experts." in name]
    rest = alone["bytes"] - sum(info.nbytes for info in experts)
    for mode in ("dp3", "tp2-sliced"):
        said = audited(model_dir, MODES[mode])
        assert sum(part["bytes"] - rest for part in said) == alone["bytes"] - rest
    assert [part["experts"] for part in audited(model_dir, MODES["dp3"])] == [8, 6, 6]


def test_the_ledger_of_the_run_stays_empty(model_dir):
    plan = make_plan(MODES["dp2"], MoEConfig.from_pretrained(model_dir))

    def rank(comm):
        model = load(model_dir, comm, plan)
        before, ledger = comm.ledger.as_rows(), comm.ledger
        audit(model, model_dir, plan, comm)
        return comm.ledger is ledger and ledger.as_rows() == before and ledger.rows_received == 0

    assert run_threads(2, rank) == [True, True]


def test_scaled_rotary_frequencies_pass_and_are_compared(tmp_path):
    """Not the plain formula: these are computed as transformers does."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    directory = write_model(tmp_path / "model", "DeepseekV3ForCausalLM", rope_parameters=yarn)
    assert all(isinstance(said, dict) for said in audited(directory))
    assert "rank 1: model.rotary_emb.inv_freq is " in findings(directory, damage=other_inv_freq)


def test_the_second_way_reads_what_safetensors_reads(tmp_path):
    """Every dtype, at every alignment, whole and in parts."""
    from safetensors.torch import load_file

    directory = write_model(tmp_path / "model")
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

    def change(tensors):
        for n, (name, tensor) in enumerate(tensors.items()):
            tensors[name] = tensor.to(dtypes[n % 4])
        tensors["odd"] = torch.ones(3, dtype=torch.bfloat16)

    edit_weights(directory, change)
    raw, tensors = RawCheckpoint(directory), load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        assert name in raw and raw.read(name).dtype == tensor.dtype and torch.equal(raw.read(name), tensor)
        if tensor.ndim == 2:
            part = raw.read(name, rows=slice(1, 5), columns=slice(2, 7))
            assert torch.equal(part, tensor[1:5, 2:7])


# -- experts -----------------------------------------------------------------------------------------------------------


def layer_1(model):
    return model.blocks[0].layer  # the model's layer 0 is dense


def one_number(model, rank):
    if rank == 1:
        layer_1(model).w13[2, 40, 5] += 1


def one_number_of_w2(model, rank):
    if rank == 1:
        layer_1(model).w2[0, 3, 31] = 7


def up_before_gate(model, rank):
    if rank == 0:
        w13 = layer_1(model).w13
        w13[3] = torch.cat([*reversed(w13[3].chunk(2))])


def two_experts_swapped(model, rank):
    if rank == 0:
        for weight in (layer_1(model).w13, layer_1(model).w2):
            weight[[1, 2]] = weight[[2, 1]]


def w2_rows_swapped(model, rank):
    if rank == 1:
        weight = layer_1(model).w2
        weight[[0, 4]] = weight[[4, 0]]


def expert_of_another_layer(model, rank):
    if rank == 1:
        layer_1(model).w13[0] = model.blocks[1].layer.w13[0]


def not_a_number(model, rank):
    if rank == 1:
        layer_1(model).w13[4, 0, 0] = float("nan")


def infinite(model, rank):
    if rank == 0:
        layer_1(model).w2[1, 0, 0] = float("inf")


def one_expert_less(model, rank):
    if rank == 1:
        layer_1(model).w13, layer_1(model).w2 = layer_1(model).w13[:4], layer_1(model).w2[:4]


def one_expert_more(model, rank):
    """Expert 0 once more, at the end of rank 0's rows."""
    if rank == 0:
        layer = layer_1(model)
        layer.w13, layer.w2 = torch.cat([layer.w13, layer.w13[:1]]), torch.cat([layer.w2, layer.w2[:1]])


def another_dtype(model, rank):
    if rank == 0:
        layer_1(model).w2 = layer_1(model).w2.double()


def no_memory(model, rank):
    if rank == 0:
        layer_1(model).w2 = layer_1(model).w2.to("meta")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (one_number, "rank 1, layer 1: row 2 of w13 should be expert 7 and differs from the file in 1 of 4096 numbers"),
        (one_number_of_w2, "rank 1, layer 1: row 0 of w2 should be expert 5 and differs from the file in 1 of 2048"),
        (up_before_gate, "row 3 of w13 should be expert 3 and is expert 3 with up rows before gate rows"),
        (two_experts_swapped, "rank 0, layer 1: row 1 of w13 should be expert 1 and is expert 2"),
        (w2_rows_swapped, "rank 1, layer 1: row 0 of w2 should be expert 5 and is expert 9"),
        (expert_of_another_layer, "rank 1, layer 1: row 0 of w13 should be expert 5 and is expert 5 of layer 2"),
        (not_a_number, "rank 1, layer 1: row 4 of w13 should be expert 9 and holds nan at [0, 0], the file has "),
        (infinite, "rank 0, layer 1: row 1 of w2 should be expert 1 and holds inf at [0, 0], the file has "),
        (one_expert_less, "layer 1: expert 9 is held by no rank, should be held by rank 1; rank 1, layer 1: w13 has 4"),
        (one_expert_more, "layer 1: expert 0 is held by rank 0 (2 times), should be held by rank 0; rank 0, layer 1"),
        (another_dtype, "row 0 of w2 should be expert 0 and is [64, 32] torch.float64, should be [64, 32] torch.flo"),
        (no_memory, "row 0 of w2 should be expert 0 and has no values: it is still on the meta device"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_experts_are_named(model_dir, damage, words):
    assert words in findings(model_dir, damage=damage)


def test_both_values_are_told(model_dir):
    loaded = RawCheckpoint(model_dir).read(expert_name(1, 7, "up"))[8, 5]
    assert f"first at [40, 5]: {loaded + 1:g}, should be {loaded:g}" in findings(model_dir, damage=one_number)


def test_swapped_experts_are_told_for_both_matrices_and_stay_owned(model_dir):
    said = findings(model_dir, damage=two_experts_swapped)
    assert said.count("should be expert") == 4 and "is held by" not in said


def test_many_findings_are_counted(model_dir):
    def shift(model, rank):
        layer_1(model).w13.copy_(layer_1(model).w13.roll(1, 0))

    assert findings(model_dir, damage=shift).endswith("; and 6 more")


# -- who holds what ----------------------------------------------------------------------------------------------------


def ownership(said: str) -> list[str]:
    return [part for part in said.split("; ") if "is held by" in part]


def test_round_robin_experts_under_a_linear_plan(model_dir):
    """Every expert is held once, only not where rows are sent for it."""
    said = findings(model_dir, held=make_placement(2, E, "round_robin"))
    assert ownership(said)[0] == "layer 1: expert 1 is held by rank 1, should be held by rank 0"
    assert said.count("held by") == 8 and "more" in said


def test_one_rank_loads_by_another_placement(model_dir):
    """Some experts are then on two ranks, others on none."""
    plan = make_plan(MODES["dp2"], MoEConfig.from_pretrained(model_dir))
    other = make_placement(2, E, "round_robin")

    def rank(comm):
        model = load(model_dir, comm, plan, held=other if comm.rank == 1 else None)
        with pytest.raises(CheckpointError) as caught:
            audit(model, model_dir, plan, comm)
        return str(caught.value)

    said = run_threads(2, rank)
    assert said[0] == said[1]
    assert ownership(said[0])[:4] == [
        "layer 1: expert 1 is held by ranks 0, 1, should be held by rank 0",
        "layer 1: expert 3 is held by ranks 0, 1, should be held by rank 0",
        "layer 1: expert 6 is held by no rank, should be held by rank 1",
        "layer 1: expert 8 is held by no rank, should be held by rank 1",
    ]


def test_every_rank_takes_its_local_numbers_for_global_ones(tmp_path, monkeypatch):
    """E = 6, R = 2, expert e filled with e + 1: the sums are 1+2+3 and 4+5+6. deepspeedai/DeepSpeed#6589."""
    directory = write_model(tmp_path / "model", n_routed_experts=6)
    edit_weights(directory, lambda t: [t[n].fill_(int(n.split(".")[5]) + 1) for n in t if ".mlp.experts." in n])
    sums = []

    def add(model, rank):
        sums.append((rank, float(layer_1(model).w13[:, 0, 0].sum())))

    assert all(isinstance(said, dict) for said in audited(directory, damage=add))
    assert sorted(sums) == [(0, 6.0), (1, 15.0)]

    right = Reader.read_experts
    local = lambda self, config, layer, experts, *args: right(self, config, layer, range(len(experts)), *args)  # noqa
    monkeypatch.setattr(Reader, "read_experts", local)
    said = findings(directory)
    assert ownership(said)[0] == "layer 1: expert 0 is held by ranks 0, 1, should be held by rank 0"
    assert ownership(said)[3] == "layer 1: expert 3 is held by no rank, should be held by rank 1"


def test_ranges_of_experts(tmp_path):
    """Six experts on two ranks: 0 to 2, and 3 to 5. vllm-project/vllm#51130 read an empty range."""
    directory = write_model(tmp_path / "model", n_routed_experts=6)
    edit_weights(directory, lambda t: [t[n].fill_(int(n.split(".")[5])) for n in t if ".mlp.experts." in n])
    plan = make_plan(MODES["dp2"], MoEConfig.from_pretrained(directory))
    held = run_threads(2, lambda comm: layer_1(load(directory, comm, plan)).w13[:, 0, 0].tolist())
    assert held == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(CheckpointError, match="is empty"):
        Reader(read_index(directory)).read(expert_name(1, 0, "gate"), (0, slice(3, 0)))


def test_gate_comes_first_in_what_was_loaded(tmp_path):
    """gate 1, up 2, down 1, input 1: silu(1) * 2, not silu(2) * 1. sgl-project/sglang#32430."""
    directory = write_model(tmp_path / "model")

    def change(tensors):
        for part, value in (("gate", 1), ("up", 2), ("down", 1)):
            tensor = tensors[expert_name(1, 0, part)]
            tensor.zero_()
            tensor[0, 0] = value

    edit_weights(directory, change)
    plan = make_plan(MODES["one"], MoEConfig.from_pretrained(directory))
    (model,) = run_threads(1, lambda comm: load(directory, comm, plan))
    row = F.one_hot(torch.tensor([0]), 64).float()
    output = grouped_swiglu(row, torch.tensor([1] + [0] * 9), layer_1(model).w13, layer_1(model).w2)
    assert output[0, 0].item() == pytest.approx(1.4621, abs=1e-4)


# -- slices, where expert parallelism is off ---------------------------------------------------------------------------


def test_a_wrong_slice(model_dir, monkeypatch):
    """Rank 1 reads slice 0 of every expert: slice 0 is then there twice, slice 1 nowhere."""
    right = Reader.read_experts

    def first_slice(self, config, layer, experts, dtype, shard=(0, 1)):
        return right(self, config, layer, experts, dtype, (0, shard[1]))

    monkeypatch.setattr(Reader, "read_experts", first_slice)
    said = findings(model_dir, MODES["tp2-sliced"])
    assert ownership(said)[:2] == [
        "layer 1: slice 0 of 2 of expert 0 is held by ranks 0, 1, should be held by rank 0",
        "layer 1: slice 1 of 2 of expert 0 is held by no rank, should be held by rank 1",
    ]


def test_slices_of_two_ranks_swapped(model_dir, monkeypatch):
    right = Reader.read_experts

    def mirrored(self, config, layer, experts, dtype, shard=(0, 1)):
        return right(self, config, layer, experts, dtype, (shard[1] - 1 - shard[0], shard[1]))

    monkeypatch.setattr(Reader, "read_experts", mirrored)
    said = findings(model_dir, MODES["dp2-sliced"])
    assert ownership(said)[0] == "layer 1: slice 0 of 2 of expert 0 is held by rank 1, should be held by rank 0"


def test_columns_of_one_slice_with_rows_of_another(model_dir):
    def damage(model, rank):
        if rank == 1:
            whole = RawCheckpoint(model_dir).read(expert_name(1, 4, "down"))
            layer_1(model).w2[4] = whole[:, :16]

    said = findings(model_dir, MODES["tp2-sliced"], damage=damage)
    assert said == ("rank 1, layer 1: row 4 of w2 should be expert 4 (slice 1 of 2) and is expert 4 (slice 0 of 2)")


# -- what every rank holds ---------------------------------------------------------------------------------------------


def shared_of_another_layer(model, rank):
    if rank == 1:
        layer_1(model).shared = model.blocks[1].layer.shared


def shared_up_first(model, rank):
    w13, w2 = layer_1(model).shared
    layer_1(model).shared = torch.cat([*reversed(w13.chunk(2))]), w2


def no_shared(model, rank):
    layer_1(model).shared = None


def bias_of_another_layer(model, rank):
    if rank == 0:
        layer_1(model).bias = model.blocks[1].layer.bias


def gate_rounded(model, rank):
    if rank == 1:
        layer_1(model).gate_weight = layer_1(model).gate_weight.bfloat16().float()


def norm_changed(model, rank):
    if rank == 1:
        model.shell.model.norm.weight.data[9] = 3


def dense_of_another_layer(model, rank):
    if rank == 0:
        layers = model.shell.model.layers
        layers[0].self_attn.o_proj.weight.data = layers[2].self_attn.o_proj.weight.data


def poisoned_inv_freq(model, rank):
    if rank == 1:
        model.shell.model.rotary_emb.inv_freq[3] = float("nan")


def other_inv_freq(model, rank):
    if rank == 1:
        model.shell.model.rotary_emb.inv_freq *= 1.001


def empty_inv_freq(model, rank):
    if rank == 0:
        model.shell.model.rotary_emb.to("meta")


def unknown_buffer(model, rank):
    if rank == 1:
        model.shell.model.layers[2].register_buffer("scale", torch.empty(4), persistent=False)


def unknown_parameter(model, rank):
    if rank == 1:
        model.blocks[1].layer.extra = torch.nn.Parameter(torch.empty(4))


def never_initialised(model, rank):
    if rank == 0:
        model.shell.lm_head.to("meta")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shared_of_another_layer, "rank 1, layer 1: shared w13 is not that of the file, it is that of layer 2"),
        (shared_up_first, "rank 0, layer 1: shared w13 is not that of the file, it is its parts in the wrong order"),
        (no_shared, "rank 0, layer 1: shared w13 is not loaded, the checkpoint has model.layers.1.mlp.shared_experts"),
        (bias_of_another_layer, "rank 0, layer 1: bias is not that of the file, it is that of layer 2"),
        (gate_rounded, "rank 1, layer 1: gate_weight differs from the file in "),
        (norm_changed, "rank 1: model.norm.weight differs from the file in 1 of 64 numbers, first at [9]: 3, should"),
        (dense_of_another_layer, "rank 0: model.layers.0.self_attn.o_proj.weight is not that of the file, it is that"),
        (poisoned_inv_freq, "rank 1: model.rotary_emb.inv_freq is nan at [3], should be 0.0316228"),
        (other_inv_freq, "rank 1: model.rotary_emb.inv_freq is 1.001 at [0], should be 1"),
        (empty_inv_freq, "rank 0: model.rotary_emb.inv_freq has no values"),
        (unknown_buffer, "rank 1: model.layers.2.scale is in no checkpoint, and how to compute it is not known"),
        (unknown_parameter, "rank 1: model.layers.2.mlp.layer.extra comes from nowhere: the checkpoint has no"),
        (never_initialised, "rank 0: lm_head.weight has no values: it is still on the meta device"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_outside_the_experts_is_named(model_dir, damage, words):
    assert words in findings(model_dir, damage=damage)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_the_file_itself_cannot_mean(tmp_path, value):
    """The loader is right and the model is not."""
    directory = write_model(tmp_path / "model")
    edit_weights(directory, lambda t: t["model.norm.weight"].__setitem__(2, float(value)))
    assert f"rank 0: model.norm.weight holds {value} at [2], the file has {value}" in findings(directory)


def test_a_checkpoint_that_lacks_an_expert(tmp_path):
    """Loaded without its own check, as vLLM does: the memory of that row was never written."""
    directory = write_model(tmp_path / "model")
    edit_weights(directory, lambda t: t.pop(expert_name(1, 7, "up")))
    said = findings(directory, check=False)
    assert "layer 1: expert 7 is held by no rank, should be held by rank 1" in said
    assert f"row 2 of w13 and w2 should be expert 7, the checkpoint has no {expert_name(1, 7, 'up')}" in said


def test_another_checkpoint_of_the_same_shape(tmp_path, model_dir):
    said = findings(model_dir, read_from=write_model(tmp_path / "other", seed=1))
    assert "rank 0, layer 1: row 0 of w13 should be expert 0 and differs from the file in 4096 of 4096" in said


def test_files_that_went_away_end_all_ranks_alike(tmp_path):
    """One rank cannot read them again; the other does not wait for ever."""
    directory = write_model(tmp_path / "model")
    plan = make_plan(MODES["dp2"], MoEConfig.from_pretrained(directory))

    def rank(comm):
        model = load(directory, comm, plan)
        with pytest.raises(CheckpointError) as caught:
            audit(model, directory if comm.rank else directory / "gone", plan, comm)
        return str(caught.value)

    said = run_threads(2, rank)
    assert said[0] == said[1] and said[0].startswith("rank 0: ") and "cannot read the weights again" in said[0]


def test_no_topology_in_the_state_dict_of_a_loaded_model(model_dir):
    """Zeroed, and loaded from another rank: maps and owners stay. vllm-project/vllm#47206."""
    plan = make_plan(MODES["dp2"], MoEConfig.from_pretrained(model_dir))
    models = run_threads(2, lambda comm: load(model_dir, comm, plan))
    state = models[1].shell.state_dict()
    assert not [name for name in state if any(word in name for word in ("map", "owner", "placement", "local"))]
    before = layer_1(models[1]).expert_map.clone()
    for tensor in state.values():
        tensor.zero_()
    models[1].shell.load_state_dict(models[0].shell.state_dict())
    assert torch.equal(layer_1(models[1]).expert_map, before)
    assert layer_1(models[1]).placement.owner.tolist() == [0] * 5 + [1] * 5
