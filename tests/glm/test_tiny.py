"""The committed model is what its card says: GLM-5.1's routing shape, small, trained, balanced."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch

from moe_course.config import GLM_5_1, MoEConfig
from moe_course.glm.checkpoint import read_index
from moe_course.options import TINY


def test_routing_shape_is_that_of_glm_5_1():
    config = MoEConfig.from_pretrained(TINY)
    for name in (
        "n_routed_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "scoring_func",
        "has_correction_bias",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_shared_experts",
        "architecture",
    ):
        assert getattr(config, name) == getattr(GLM_5_1, name), name
    assert config.mlp_layer_types[0] == "dense" and len(config.sparse_layers) >= 2
    assert config.max_position_embeddings == 512 and config.vocab_size == 256


def test_config_tells_vllm_how_to_route():
    """Hugging Face's class drops these keys; without them vLLM would take softmax without a bias."""
    raw = json.loads((TINY / "config.json").read_text())
    assert raw["scoring_func"] == "sigmoid" and raw["topk_method"] == "noaux_tc"
    assert raw["index_topk"] >= raw["max_position_embeddings"]  # the indexer is not trained


def test_file_is_small_and_the_router_is_fp32():
    index = read_index(TINY)
    assert (TINY / "model.safetensors").stat().st_size <= 14_000_000
    for info in index.values():
        fp32 = info.name.endswith(("mlp.gate.weight", "e_score_correction_bias"))
        assert info.dtype == ("F32" if fp32 else "BF16"), info.name
    assert "model.layers.2.mlp.experts.255.down_proj.weight" in index


@pytest.mark.slow
def test_held_out_loss_and_load_are_those_of_the_card():
    """Of the stored file, loaded as fp32, on every tenth window of modules that were never trained on.

    The card names the command that takes all of them; it needs minutes.
    """
    from moe_course.glm.corpus import held_out_bytes
    from moe_course.glm.train_card import evaluate

    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)  # minutes on one thread
    try:
        figures, card = evaluate(TINY, (512,), every=10), (TINY / "README.md").read_text()
    finally:
        torch.set_num_threads(before)
    assert figures["loss_512"] <= 1.15 and figures["loss_512"] < figures["xz_9_nats_per_byte"]
    assert max(figures["max_over_mean_load"]) <= 2.0
    same_text = f"{len(held_out_bytes()):,} bytes" in card  # another Python version has other files
    printed = float(re.search(r"every tenth window \| ([\d.]+)", card)[1])
    assert figures["loss_512"] == pytest.approx(printed, abs=0.002 if same_text else 0.05)
