"""Train the course's model: a byte-level `GlmMoeDsaForCausalLM` with GLM-5.1's routing shape.

256 routed experts, 8 per token, sigmoid scores, a correction bias trained by the sign of the load, one shared
expert, first layer dense — and small everything else, so that the weights fit in a repository.

    python -m moe_course.glm.train_tiny --out runs/tiny            # about an hour on two cores
    python -m moe_course.glm.train_tiny --out runs/tiny --resume   # go on after Ctrl-C

The sparse-attention indexer is never trained: up to `index_topk` = 512 positions it selects everything, and the
model never sees more. Training therefore skips it. Built in: notebook 13.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AttentionInterface, AttentionMaskInterface, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_course.glm.corpus import HELD_OUT, held_out_bytes, training_bytes, windows
from moe_course.glm.export import save_checkpoint

CONTEXT = 512
CONFIG = dict(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.5,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,  # = nope + rope, as in GLM-5.1 (192 + 64 = 256)
    index_topk=CONTEXT,
    index_n_heads=2,
    index_head_dim=32,
    max_position_embeddings=CONTEXT,
    initializer_range=0.05,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


class _SortRows(torch.autograd.Function):
    """`rows[order // k]`: one copy of a row per route, sorted by expert.

    Autograd's own backward adds the copies up with `index_put`, one at a time on a CPU. Each row has exactly k
    copies, so un-sorting and summing over k gives the same sum several times faster.
    """

    @staticmethod
    def forward(ctx, rows, order, k):
        ctx.save_for_backward(order)
        ctx.k = k
        return rows[order // k]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad[order.argsort()].view(-1, ctx.k, grad.shape[-1]).sum(1), None, None


class _UnsortRows(torch.autograd.Function):
    """`rows[order.argsort()]`, with the gather it deserves as its backward."""

    @staticmethod
    def forward(ctx, rows, order):
        ctx.save_for_backward(order)
        return rows[order.argsort()]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0]], None


def grouped_mm_training(experts, hidden_states, top_k_index, top_k_weights):
    """Hugging Face's `grouped_mm` experts, with a backward that is fast on CPU. Shapes as theirs."""
    k = top_k_index.shape[1]
    ids, order = top_k_index.reshape(-1).sort()
    offsets = torch.bincount(ids, minlength=experts.num_experts).cumsum(0, dtype=torch.int32)
    rows = _SortRows.apply(hidden_states, order, k)  # [T*K, H]
    gate, up = F.grouped_mm(rows, experts.gate_up_proj.transpose(-2, -1), offs=offsets).chunk(2, dim=-1)
    out = F.grouped_mm(F.silu(gate) * up, experts.down_proj.transpose(-2, -1), offs=offsets)
    out = _UnsortRows.apply(out, order).view(-1, k, hidden_states.shape[-1])  # [T, K, H]
    return torch.bmm(top_k_weights.unsqueeze(1), out).squeeze(1)


def _causal_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling).transpose(1, 2), None


def build_model(seed: int) -> GlmMoeDsaForCausalLM:
    """The untrained model, wired for fast training: plain causal attention, indexer asleep."""
    AttentionInterface.register("causal_training", _causal_attention)
    AttentionMaskInterface.register("causal_training", lambda *args, **kwargs: torch.zeros(1, 1, 1, 1))
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm_training", grouped_mm_training)
    torch.manual_seed(seed)
    config = GlmMoeDsaConfig(**CONFIG)
    config._attn_implementation = "causal_training"
    config._experts_implementation = "grouped_mm_training"
    model = GlmMoeDsaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.indexer.forward = lambda *args, **kwargs: None
    return model


class LoadBalancer:
    """Moves each correction bias by the sign of its expert's load error, with a step that shrinks.

    Source: DeepSeek-V3 report (auxiliary-loss-free balancing). With 256 experts the first steps are close to
    collapse, so the step starts ten times larger than it ends.
    """

    def __init__(self, model: GlmMoeDsaForCausalLM, first: float, last: float):
        self.first, self.last = first, last
        self.gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self.loads = [torch.zeros(gate.num_experts) for gate in self.gates]
        for index, gate in enumerate(self.gates):
            gate.register_forward_hook(lambda module, args, out, index=index: self._count(index, out[2]))

    def _count(self, index: int, topk_ids: torch.Tensor) -> None:
        self.loads[index] += torch.bincount(topk_ids.reshape(-1), minlength=len(self.loads[index]))

    def imbalance(self) -> list[float]:
        """Largest load over mean load, per sparse layer, since the last call of `reset`."""
        return [float(load.max() / load.mean()) for load in self.loads]

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """`progress` runs from 0 to 1 over the training."""
        step = self.last + (self.first - self.last) * 0.5 * (1 + math.cos(math.pi * progress))
        for gate, load in zip(self.gates, self.loads, strict=True):
            gate.e_score_correction_bias += step * torch.sign(load.mean() - load)
        self.reset()

    def reset(self) -> None:
        for load in self.loads:
            load.zero_()


def learning_rate(step: int, steps: int, peak: float, warmup: int = 150) -> float:
    """Linear warm-up, then half a cosine down to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def batch(text: torch.Tensor, step: int, steps: int, tokens: int, seed: int) -> torch.Tensor:
    """Random windows `[n, length + 1]`: of 256 bytes in the first 40 % of the training, of 512 after it."""
    length = CONTEXT // 2 if step < 0.4 * steps else CONTEXT
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)  # a resumed run draws the same windows
    starts = torch.randint(0, len(text) - length - 1, (tokens // length,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts]).long()


def train(args: argparse.Namespace) -> GlmMoeDsaForCausalLM:
    """Run (or finish) the training; state is saved every `--save-every` steps."""
    args.out.mkdir(parents=True, exist_ok=True)
    state_file, log_file = args.out / "train_state.pt", args.out / "loss.jsonl"
    text = training_bytes()
    model = build_model(args.seed)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    balancer = LoadBalancer(model, first=args.bias_step, last=args.bias_step / 20)
    start, seconds = 0, 0.0
    if args.resume and state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, seconds = state["step"], state["seconds"]
    elif not args.resume:
        log_file.unlink(missing_ok=True)

    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps · {task.fields[info]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("train", total=args.steps, completed=start, info="")
        smooth = None
        for step in range(start, args.steps):
            began = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.lr)
            tokens = batch(text, step, args.steps, args.batch_tokens, args.seed)  # [n, length + 1]
            logits = model(tokens[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            imbalance = balancer.imbalance()
            balancer.update(step / args.steps)
            seconds += time.monotonic() - began
            smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
            info = f"loss {smooth:.3f} · load {max(imbalance):.1f}"
            progress.update(task, completed=step + 1, info=info)
            if (step + 1) % 50 == 0:
                record = {"step": step + 1, "loss": round(smooth, 4), "load": [round(x, 2) for x in imbalance]}
                with log_file.open("a") as log:
                    log.write(json.dumps(record | {"seconds": round(seconds, 1)}) + "\n")
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step + 1, "seconds": seconds}, state_file.with_suffix(".tmp"))
                state_file.with_suffix(".tmp").replace(state_file)
    return model


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


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the course's tiny GLM model on the standard library's source.")
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"), help="folder for state, log and checkpoint")
    parser.add_argument("--steps", type=int, default=7000, help="optimiser steps (default 7000)")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="bytes per step (default 4096)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default 4e-3)")
    parser.add_argument("--bias-step", type=float, default=4e-3, help="first step of the correction bias")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=250, help="steps between saved states")
    parser.add_argument("--resume", action="store_true", help="go on from the last saved state")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only print the figures of a stored checkpoint")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.evaluate:
        print(json.dumps(evaluate(args.evaluate), indent=2))
        return
    model = train(args)
    save_checkpoint(model, args.out / "checkpoint")
    figures = evaluate(args.out / "checkpoint") | {
        "loss_tenth": evaluate(args.out / "checkpoint", (512,), every=10)["loss_512"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_bytes": len(training_bytes()),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    log = [json.loads(line) for line in (args.out / "loss.jsonl").read_text().splitlines()]
    (args.out / "checkpoint" / "README.md").write_text(model_card(args, figures, log))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
