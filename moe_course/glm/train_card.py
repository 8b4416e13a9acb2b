"""What the trained model is worth: figures on text it has not seen, and the card that states them.

Built in: notebook 13.
"""

from __future__ import annotations

import argparse
import lzma
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GlmMoeDsaForCausalLM

from moe_course.glm.corpus import HELD_OUT, held_out_bytes, windows
from moe_course.glm.train_balance import LoadBalancer


@torch.no_grad()
def evaluate(directory: Path, lengths: tuple[int, ...] = (128, 512), every: int = 1) -> dict:
    """Held-out loss (nats per byte), routing load and the `xz -9` yardstick, of the stored file loaded as fp32.

    `lengths` are those of the windows, in bytes; the load is that of the last one. `every` takes every n-th window.
    """
    model = GlmMoeDsaForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="grouped_mm"
    ).eval()
    text = held_out_bytes()
    balancer = LoadBalancer(model, 0.0, 0.0)
    result: dict = {"held_out_bytes": len(text), "max_over_mean_load": None}
    for length in lengths:
        balancer.reset()
        losses = []
        for chunk in windows(text, length)[::every].split(8192 // length):
            logits = model(chunk, use_cache=False).logits[:, :-1]
            losses.append(F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="none"))
        result[f"loss_{length}"] = round(torch.cat(losses).mean().item(), 4)
        result["max_over_mean_load"] = [round(x, 2) for x in balancer.imbalance()]
    packed = len(lzma.compress(text.numpy().tobytes(), preset=9))
    result["xz_9_nats_per_byte"] = round(packed * 8 * math.log(2) / len(text), 4)
    return result


def model_card(args: argparse.Namespace, figures: dict, log: list[dict]) -> str:
    """The README of the checkpoint: data, licence, command, seed, loss curve and routing load."""
    curve = log[:: max(1, len(log) // 16)]
    if log[-1] not in curve:
        curve.append(log[-1])
    rows = "\n".join(
        f"| {r['step']} | {r['seconds'] / 60:.1f} | {r['loss']:.3f} | {' / '.join(f'{x:.2f}' for x in r['load'])} |"
        for r in curve
    )
    load = ", ".join(f"{x:.2f}" for x in figures["max_over_mean_load"])
    data = f"the `.py` files of the standard library of CPython {figures['python']}, without tests and data tables"
    command = (
        f"python -m moe_course.glm.train_tiny --out DIR --steps {args.steps} "
        f"--batch-tokens {args.batch_tokens} --lr {args.lr} --seed {args.seed}"
    )
    return f"""# tiny: a byte-level GLM-MoE-DSA model for the course

A `GlmMoeDsaForCausalLM` in Hugging Face format with GLM-5.1's routing shape: 256 routed experts, 8 per token,
sigmoid scores with a correction bias, `n_group` 1, scale 2.5, one shared expert, first layer dense. Everything
else is small. It continues Python source code, byte by byte, within 512 bytes. It is a model to look into, not
one to rely on.

| | |
|---|---|
| data | {data}: {figures["training_bytes"]:,} bytes |
| held out | {", ".join(f"`{name}`" for name in HELD_OUT)}: {figures["held_out_bytes"]:,} bytes |
| licence | weights: Apache-2.0. The training text is under the PSF License 2.0 |
| command | `{command}` |
| time | {log[-1]["seconds"] / 60:.0f} minutes on {figures["threads"]} threads |
| parameters | {figures["parameters"]:,} |
| dtype | bf16; `gate.weight` and `e_score_correction_bias` in fp32 |
| held-out loss, windows of 512 bytes | **{figures["loss_512"]:.3f} nats per byte** |
| the same, every tenth window | {figures["loss_tenth"]:.3f} nats per byte |
| held-out loss, windows of 128 bytes | {figures["loss_128"]:.3f} nats per byte |
| `xz -9` on the same text | {figures["xz_9_nats_per_byte"]:.3f} nats per byte |
| largest over mean expert load, held-out text, per sparse layer | {load} |

Losses are those of the stored file loaded as fp32:
`python -m moe_course.glm.train_tiny --evaluate moe_course/glm/tiny` prints them again.

## Loss curve

Training loss (smoothed, nats per byte) and largest over mean expert load per sparse layer, in the batch of that step.

| step | minutes | loss | load |
|---|---|---|---|
{rows}
"""
