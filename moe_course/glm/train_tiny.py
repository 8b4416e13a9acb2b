"""Train the course's model: a byte-level `GlmMoeDsaForCausalLM` with GLM-5.1's routing shape.

256 routed experts, 8 per token, sigmoid scores, a correction bias trained by the sign of the load, one shared
expert, first layer dense — and small everything else, so that the weights fit in a repository.

    python -m moe_course.glm.train_tiny --out runs/tiny            # about an hour on two cores
    python -m moe_course.glm.train_tiny --out runs/tiny --resume   # go on after Ctrl-C

What is trained is in `train_model.py`, how its experts share the load in `train_balance.py`, and what it is worth in
the end in `train_card.py`. Built in: notebook 13.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import GlmMoeDsaForCausalLM

from moe_course.glm.corpus import training_bytes
from moe_course.glm.export import save_checkpoint
from moe_course.glm.train_balance import LoadBalancer
from moe_course.glm.train_card import evaluate, model_card
from moe_course.glm.train_model import CONTEXT, build_model


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
