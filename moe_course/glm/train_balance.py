"""Experts that share the load without a loss for it: a bias, trained by the sign of the load. Built in: notebook 13."""

from __future__ import annotations

import math

import torch
from transformers import GlmMoeDsaForCausalLM


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
