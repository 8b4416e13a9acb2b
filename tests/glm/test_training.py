"""The trainer's own parts: what it adds to Hugging Face must change speed and never results."""

from __future__ import annotations

import pytest
import torch
from transformers import GlmMoeDsaForCausalLM
from transformers.integrations.moe import grouped_mm_experts_forward

from moe_course.glm import corpus, train_tiny
from moe_course.glm.export import per_expert_tensors, save_checkpoint
from moe_course.glm.train_balance import LoadBalancer
from moe_course.glm.train_model import build_model, grouped_mm_training


@pytest.fixture(scope="module")
def model():
    return build_model(seed=1)


def test_fast_experts_have_hugging_faces_output_and_gradients(model):
    experts = model.model.layers[1].mlp.experts
    results = []
    for forward in (grouped_mm_training, grouped_mm_experts_forward):
        torch.manual_seed(0)
        rows = torch.randn(50, 128, requires_grad=True)
        weights = torch.rand(50, 8, requires_grad=True)
        ids = torch.stack([torch.randperm(256)[:8] for _ in range(50)])
        experts.zero_grad()
        output = forward(experts, rows, ids, weights)
        (output * torch.randn(50, 128)).sum().backward()
        results.append([output, rows.grad, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_fast_attention_and_sleeping_indexer_change_nothing(model, tmp_path):
    """Up to 512 positions the stored model gives the logits the trained one had."""
    save_checkpoint(model, tmp_path, torch.float32)
    stored = GlmMoeDsaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 256, (2, 512), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, stored(tokens).logits, atol=1e-4)


def test_the_bias_moves_against_the_load(model):
    balancer = LoadBalancer(model, first=0.1, last=0.01)
    gate = model.model.layers[1].mlp.gate
    before = gate.e_score_correction_bias.clone()
    balancer.loads[0] += torch.arange(256.0)
    balancer.update(progress=0.0)
    moved = gate.e_score_correction_bias - before
    assert torch.allclose(moved[:127], torch.tensor(0.1)) and torch.allclose(moved[129:], torch.tensor(-0.1))
    assert balancer.loads[0].sum() == 0


def test_a_resumed_run_draws_the_same_windows():
    text = torch.arange(5000, dtype=torch.uint8)
    first, again = (train_tiny.batch(text, 7, 100, 1024, seed=0) for _ in range(2))
    assert torch.equal(first, again) and first.shape == (4, 257)
    assert train_tiny.batch(text, 60, 100, 1024, seed=0).shape == (2, 513)
    assert not torch.equal(first, train_tiny.batch(text, 8, 100, 1024, seed=0))


def test_learning_rate_rises_and_falls():
    rates = [train_tiny.learning_rate(step, 1000, 1.0) for step in range(1000)]
    assert max(rates) == pytest.approx(1.0) and rates[0] < 0.01 and rates[-1] < 0.03


def test_held_out_modules_are_not_trained_on():
    held_out = {corpus.stdlib_root() / name for name in corpus.HELD_OUT}
    assert all(path.exists() for path in held_out)
    assert not held_out & set(corpus.training_files())
    text = corpus.training_bytes()
    assert len(text) > 5_000_000 and text[0] == 0


def test_expert_tensors_are_split_by_name():
    fused = {
        "m.mlp.experts.gate_up_proj": torch.arange(12.0).view(2, 2, 3),
        "m.mlp.experts.down_proj": torch.ones(2, 3, 1),
    }
    names = per_expert_tensors(fused | {"other": torch.zeros(1)})
    assert torch.equal(names["m.mlp.experts.1.up_proj.weight"], torch.tensor([[9.0, 10.0, 11.0]]))
    assert names["m.mlp.experts.0.down_proj.weight"].shape == (3, 1) and len(names) == 7
