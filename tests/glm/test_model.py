"""The shell with our sparse layers is Hugging Face's model: logits, experts, buffers, generated text."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import EXTRA, shard, write_model

from moe_course.comm.sim import run_threads
from moe_course.config import MoEConfig
from moe_course.errors import ExchangeMismatch
from moe_course.glm import generate, load
from moe_course.glm.generate import agree_on_tokens
from moe_course.parallel import ParallelConfig, make_plan

PROMPTS = [[0, 100, 101, 102], [0], [0, 7, 7, 7, 7, 7, 7, 9, 200], [0, 1, 2], [0, *range(40)]]


@pytest.fixture(scope="module", params=list(EXTRA))
def model_dir(request, tmp_path_factory):
    directory = write_model(tmp_path_factory.mktemp(request.param), request.param)
    if request.param == "DeepseekV3ForCausalLM":
        shard(directory)
    return directory


def hf_model(model_dir):
    architecture = MoEConfig.from_pretrained(model_dir).architecture
    return getattr(transformers, architecture).from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def hf_text(model, prompt, n):
    """Greedy, no cache, one forward pass a token: slow and obvious."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def ours(model_dir, world_size, prompts=PROMPTS, n=6, **options):
    plan = make_plan(ParallelConfig(data_parallel_size=world_size), MoEConfig.from_pretrained(model_dir))

    def rank(comm):
        model = load(model_dir, comm, plan)
        mine = {i: tokens for i, tokens in enumerate(prompts) if i % world_size == comm.rank}
        return generate(model, mine, n, keep_logits=True, **options)[0]

    return {g.index: g for part in run_threads(world_size, rank, timeout=60) for g in part}


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_text_and_logits_equal_hugging_face(model_dir, world_size):
    """Fewer and more prompts than ranks, very different lengths, an empty prompt."""
    reference = hf_model(model_dir)
    for index, generation in ours(model_dir, world_size).items():
        expected = hf_text(reference, PROMPTS[index], 6)
        assert generation.tokens == expected
        with torch.inference_mode():
            logits = reference(torch.tensor([PROMPTS[index] + expected]), use_cache=False).logits[0]
        start = len(PROMPTS[index]) - 1
        assert (torch.stack(generation.logits) - logits[start : start + 6]).abs().max() < 1e-4


def test_sampling_does_not_depend_on_the_number_of_ranks(model_dir):
    texts = [{i: g.tokens for i, g in ours(model_dir, r, temperature=1.5, seed=3).items()} for r in (1, 2, 3)]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != {i: g.tokens for i, g in ours(model_dir, 1, temperature=1.5, seed=4).items()}


def test_stop_at_eos_ends_a_prompt_and_nobody_hangs(model_dir):
    """The token most often generated plays the end of text, so some prompts end early."""
    free = ours(model_dir, 2, n=12)
    eos = max(range(256), key=lambda token: sum(g.tokens.count(token) > 0 for g in free.values()))
    stopped = ours(model_dir, 2, n=12, stop_at_eos=True, eos_token_id=eos)
    for index, generation in free.items():
        expected = generation.tokens
        if eos in expected:
            expected = expected[: expected.index(eos) + 1]
        assert stopped[index].tokens == expected
    assert any(len(g.tokens) < 12 for g in stopped.values())


def test_no_buffer_stays_uninitialised(model_dir, monkeypatch):
    """Fresh memory is poisoned: a buffer nobody computed again would show it."""
    plain = torch.empty
    plan = make_plan(ParallelConfig(), MoEConfig.from_pretrained(model_dir))

    def poisoned(*args, **kwargs):
        tensor = plain(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    (model,) = run_threads(1, lambda comm: load(model_dir, comm, plan))
    monkeypatch.undo()
    theirs = {name: buffer for name, buffer in hf_model(model_dir).named_buffers() if "rotary" in name}
    mine = {name: buffer for name, buffer in model.shell.named_buffers() if "rotary" in name}
    assert theirs.keys() == mine.keys() and theirs
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs)
    assert not any(tensor.isnan().any() for tensor in model.shell.parameters())


def test_pad_rows_reach_no_expert(model_dir):
    """Two prompts of 9 and 1 tokens in one batch: 10 live rows are routed, not 18."""
    plan = make_plan(ParallelConfig(), MoEConfig.from_pretrained(model_dir))
    seen = []

    def rank(comm):
        def on_event(stage, layer, **tensors):
            if stage == "route":
                seen.append(len(tensors["topk_ids"]))

        model = load(model_dir, comm, plan, on_event=on_event)
        generate(model, {0: PROMPTS[2], 1: PROMPTS[1]}, 2)
        return len(model.blocks)

    (layers,) = run_threads(1, rank)
    assert seen == [10] * layers + [2] * layers


@pytest.mark.parametrize("odd", [None, 1])
def test_ranks_that_share_rows_choose_the_same_tokens(odd):
    """Or all of them end: rows of two texts would be added up otherwise."""

    def rank(comm):
        comm.step = 3
        try:
            agree_on_tokens([5, 6 + (comm.rank == odd)], comm, torch.device("cpu"))
        except ExchangeMismatch as error:
            return str(error)
        agree_on_tokens([], comm, torch.device("cpu"))  # a data-parallel rank without prompts
        assert comm.ledger.total().payload == 0
        return None

    found = run_threads(3, rank)
    if odd is None:
        assert found == [None] * 3
    else:
        assert len(set(found)) == 1 and "step 3: rank 0 chose tokens [5, 6], rank 1 [5, 7]" in found[0]
