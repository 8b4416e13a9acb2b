"""The comparison with the reference finds every kind of difference, and excuses near ties only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from moe_course import verify
from moe_course.verify import compare

PROMPT, TOKENS, LAYERS = [0, 5, 6], [7, 8], (1, 2)
ROWS = len(PROMPT) + len(TOKENS) - 1  # the last token is never fed in


def answer(gap=1.0):
    ids = torch.arange(4, dtype=torch.int32).repeat(ROWS + 1, 1)
    out = {"tokens.0": torch.tensor(TOKENS), "logits.0": torch.zeros(2, 9)}
    for layer in LAYERS:
        out[f"topk_ids.0.{layer}"], out[f"gap.0.{layer}"] = ids.clone(), torch.full((ROWS + 1,), gap)
    return out


def run(change=None, gap=1.0):
    tokens, logits = list(TOKENS), torch.zeros(2, 9)
    routed = {(0, layer): {p: torch.arange(4) for p in range(ROWS)} for layer in LAYERS}
    if change:
        change(tokens, logits, routed)
    return compare(answer(gap), [PROMPT], [tokens], [logits], routed, LAYERS)


def test_equal():
    found = run()
    assert found.equal and found.matches == [True] and found.rows_compared == ROWS * len(LAYERS)


def other_token(tokens, logits, routed):
    tokens[1] = 3


def missing_token(tokens, logits, routed):
    tokens.pop()


def other_logits(tokens, logits, routed):
    logits[1, 4] = 2e-4


def nan_logits(tokens, logits, routed):
    logits[0, 0] = float("nan")


def other_expert(tokens, logits, routed):
    routed[0, 2][1] = torch.tensor([0, 1, 2, 9])


def missing_row(tokens, logits, routed):
    del routed[0, 1][3]


@pytest.mark.parametrize("change", [other_token, missing_token, other_logits, nan_logits, other_expert, missing_row])
def test_every_difference_is_found(change):
    found = run(change)
    assert not found.equal and len(found.failures[0]) > 20


def test_a_near_tie_is_listed_and_excuses_what_follows():
    def change(tokens, logits, routed):
        other_expert(tokens, logits, routed)
        routed[0, 1][3] = torch.tensor([4, 5, 6, 7])
        other_token(tokens, logits, routed)

    found = run(change, gap=1e-6)
    assert found.equal and found.rows_compared == len(LAYERS) * ROWS
    assert found.near_ties[0] == {"prompt": 0, "position": 1, "layer": 2, "gap": pytest.approx(1e-6)}
    assert not run(change, gap=1e-4).equal


def test_a_near_tie_does_not_excuse_what_came_before():
    def change(tokens, logits, routed):
        routed[0, 2][3] = torch.tensor([0, 1, 2, 9])  # while position 3 produced the last token
        logits[0, 0] = 1.0

    assert not run(change, gap=1e-6).equal


def test_the_reference_shares_no_code_with_us():
    """It imports torch, transformers and the standard library, so none of our faults can hide in it."""
    source = (Path(verify.__file__).parent / "glm" / "hf_reference.py").read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "transformers"}


def test_a_reference_that_cannot_run_says_why(tmp_path):
    reference = verify.Reference({"model": str(tmp_path), "architecture": "GlmMoeDsaForCausalLM", "dtype": "float32"})
    with pytest.raises(verify.VerificationFailed, match="reference process ended with 1"):
        reference.finish()
