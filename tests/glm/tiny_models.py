"""Small random checkpoints of every architecture the package runs, and ways to damage them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_course.glm.export import save_checkpoint

COMMON = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=10,
    num_experts_per_tok=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    first_k_dense_replace=1,
    max_position_embeddings=128,
    initializer_range=0.1,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
MLA = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32)
EXTRA = {
    "GlmMoeDsaForCausalLM": MLA | dict(index_topk=128, index_n_heads=2, index_head_dim=32),
    "DeepseekV3ForCausalLM": MLA,
    "Glm4MoeForCausalLM": dict(head_dim=16),
}


def write_model(directory: Path, architecture: str = "GlmMoeDsaForCausalLM", seed: int = 0, **changes) -> Path:
    """A random fp32 checkpoint with a lively correction bias."""
    model_class = getattr(transformers, architecture)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**(COMMON | EXTRA[architecture] | changes)))
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.weight.data.normal_(std=0.5)
            layer.mlp.gate.e_score_correction_bias.normal_(std=0.2)
    save_checkpoint(model, directory, torch.float32)
    return directory


def edit_weights(directory: Path, change) -> None:
    """Apply `change(tensors)` to the dictionary of a checkpoint's tensors and write it back."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def shard(directory: Path, parts: int = 3) -> None:
    """Split `model.safetensors` into shards with an index, as large checkpoints are."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        mine = names[part::parts]
        save_file({name: tensors[name] for name in mine}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    path.unlink()
