"""The loader reads this rank's share, accounts for every tensor, and names what is wrong."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from tiny_models import edit_config, edit_weights, shard, write_model

from moe_course.comm.sim import run_threads
from moe_course.config import MoEConfig
from moe_course.errors import CheckpointError, ConfigError, MoECourseError
from moe_course.glm.checkpoint import Reader, expert_name, read_index
from moe_course.glm.model import load
from moe_course.parallel import ParallelConfig, make_plan


@pytest.fixture
def model_dir(tmp_path):
    return write_model(tmp_path / "model")


def load_all(model_dir, world_size=1, **options):
    plan = make_plan(ParallelConfig(data_parallel_size=world_size), MoEConfig.from_pretrained(model_dir))
    return run_threads(world_size, lambda comm: load(model_dir, comm, plan, **options))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_holds_its_share_and_all_shares_are_the_model(model_dir, world_size):
    """Expert e is filled with its own values: which ids a rank holds can be read off its weights."""
    edit_weights(
        model_dir, lambda t: [t[n].fill_(int(n.split(".")[5]) + 1) for n in t if ".experts." in n and "shared" not in n]
    )
    config = MoEConfig.from_pretrained(model_dir)
    held = []
    for model in load_all(model_dir, world_size):
        for block in model.blocks:
            w13, w2 = block.layer.w13, block.layer.w2
            ids = [int(weight[0, 0]) - 1 for weight in w13]
            assert all(
                torch.equal(weight, torch.full_like(weight, e + 1.0)) for weight, e in zip(w13, ids, strict=True)
            )
            assert [int(weight[0, 0]) - 1 for weight in w2] == ids
            held += [(block.layer.layer, e) for e in ids]
        per_expert = 3 * config.hidden_size * config.moe_intermediate_size * 4
        assert model.expert_bytes == len(ids) * per_expert * len(config.sparse_layers)
        assert model.report.expert_bytes_read == model.expert_bytes  # stored as fp32 here
    assert sorted(held) == [(layer, e) for layer in config.sparse_layers for e in range(config.n_routed_experts)]


def test_read_and_skipped_add_up_to_the_file(model_dir):
    index = read_index(model_dir)
    for model in load_all(model_dir, 3):
        report = model.report
        assert report.tensors_read + report.tensors_skipped == len(index)
        assert report.bytes_read + report.bytes_skipped == sum(info.nbytes for info in index.values())
        assert report.bytes_skipped > 0


def test_gate_rows_come_first(model_dir):
    """Gate and up are told apart: swapped halves would go unseen with equal values."""
    edit_weights(model_dir, lambda t: (t[expert_name(1, 7, "gate")].fill_(1), t[expert_name(1, 7, "up")].fill_(2)))
    w13, _ = Reader(read_index(model_dir)).read_experts(MoEConfig.from_pretrained(model_dir), 1, [7], torch.float32)
    assert w13[0, :32].unique().tolist() == [1] and w13[0, 32:].unique().tolist() == [2]


def test_shards_load_like_one_file(model_dir, tmp_path):
    other = write_model(tmp_path / "other")
    shard(other)
    (one,), (many,) = load_all(model_dir), load_all(other)
    for a, b in zip(one.blocks, many.blocks, strict=True):
        assert torch.equal(a.layer.w13, b.layer.w13) and torch.equal(a.layer.w2, b.layer.w2)
    assert one.report.tensors_read == many.report.tensors_read


def test_layers_the_model_does_not_build_are_skipped_and_reported(model_dir):
    edit_weights(model_dir, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(2, 2)}))
    (model,) = load_all(model_dir)
    assert model.report.ignored == ["model.layers.3.eh_proj.weight"]


def missing(t):
    del t[expert_name(1, 7, "up")]


def wrong_shape(t):
    t[expert_name(2, 3, "down")] = torch.ones(5, 5)


def unknown(t):
    t["model.layers.1.mlp.experts.10.up_proj.weight"] = torch.ones(32, 64)


def missing_norm(t):
    del t["model.norm.weight"]


def missing_bias(t):
    del t["model.layers.1.mlp.gate.e_score_correction_bias"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (missing, "model.layers.1.mlp.experts.7.up_proj.weight"),
        (wrong_shape, "model.layers.2.mlp.experts.3.down_proj.weight has shape [5, 5], config.json needs [64, 32]"),
        (unknown, "model.layers.1.mlp.experts.10.up_proj.weight"),
        (missing_norm, "model.norm.weight"),
        (missing_bias, "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_damaged_checkpoint_is_named_on_every_rank(model_dir, change, names):
    """Also on the ranks that would not read the tensor: the headers are checked as a whole."""
    edit_weights(model_dir, change)
    plan = make_plan(ParallelConfig(data_parallel_size=2), MoEConfig.from_pretrained(model_dir))

    def attempt(comm):
        with pytest.raises(CheckpointError) as caught:
            load(model_dir, comm, plan)
        return str(caught.value)

    for message in run_threads(2, attempt):
        assert names in message and "\n" not in message


def test_many_missing_names_are_counted(model_dir):
    edit_weights(model_dir, lambda t: [t.pop(n) for n in list(t) if ".experts.4." in n])
    with pytest.raises(CheckpointError, match=r"and 2 more"):
        load_all(model_dir)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_truncated_files(model_dir, keep):
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        load_all(model_dir)


def test_a_file_short_of_its_last_bytes_is_called_truncated(model_dir):
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        load_all(model_dir)


def test_a_name_twice_in_one_header(tmp_path):
    """Python's and Rust's JSON readers keep the last one silently."""
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    header = f'{{"a.weight": {entry}, "a.weight": {entry}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match="a.weight occurs twice"):
        read_index(tmp_path)


def test_a_tensor_in_two_shards(model_dir):
    shard(model_dir, 2)
    first, second = sorted(model_dir.glob("model-*.safetensors"))
    from safetensors.torch import load_file, save_file

    tensors, others = load_file(first), load_file(second)
    name = next(n for n in others if ".experts." in n)
    save_file(tensors | {name: others[name]}, first)
    with pytest.raises(CheckpointError, match="occurs twice"):
        load_all(model_dir)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"hidden_size": 32}, CheckpointError, "wrong shapes"),
        ({"n_routed_experts": 12}, CheckpointError, "experts.10."),
        ({"n_routed_experts": 8}, CheckpointError, "has shape [10, 64], config.json needs [8, 64]"),
        (
            {"num_hidden_layers": 4, "mlp_layer_types": None, "indexer_types": None, "layer_types": None},
            CheckpointError,
            "model.layers.3.",
        ),
        ({"mlp_layer_types": ["dense", "sparse"]}, ConfigError, "2 entries"),
        ({"architectures": ["LlamaForCausalLM"]}, ConfigError, "LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "fp8"}}, CheckpointError, "quantised checkpoint (fp8)"),
        ({"scoring_func": "relu"}, ConfigError, "relu"),
        ({"hidden_act": "gelu"}, ConfigError, "gelu"),
        ({"model_type": "glm4_moe", "routed_scaling_factor": None}, ConfigError, "open; it is 1.0 here and 2.5"),
        ({"moe_layer_freq": 2, "mlp_layer_types": None}, ConfigError, "open; they are [2] here and [1, 2]"),
        ({"hidden_size": "64"}, ConfigError, "hidden_size is '64'"),
        ({"kv_lora_rank": "many"}, ConfigError, "transformers cannot build"),
    ],
)
def test_a_config_that_does_not_fit(model_dir, changes, error, says):
    edit_config(model_dir, **changes)
    with pytest.raises(error) as caught:
        load_all(model_dir)
    assert says in str(caught.value)


def test_more_ranks_than_experts(model_dir):
    with pytest.raises(ConfigError, match="10 experts cannot be spread over 11"):
        load_all(model_dir, 11)


def test_no_weights_at_all(tmp_path, model_dir):
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(MoECourseError, match="does not exist"):
        load_all(model_dir)
