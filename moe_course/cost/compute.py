"""FLOPs of a token, weights of a rank, and the least time that both take. Built in: notebook 11.

A multiplication with an addition counts as two FLOPs. Times are floors: bytes or FLOPs over what the hardware does at
best.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_course.config import MoEConfig


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token in one sparse layer: its K experts, the shared expert, the router."""

    routed: int
    shared: int
    router: int

    @property
    def total(self) -> int:
        return self.routed + self.shared + self.router


def flops_per_token(config: MoEConfig) -> Flops:
    """Three matrices of H x I in an expert, E x H in the router."""
    one = 6 * config.hidden_size * config.moe_intermediate_size
    router = 2 * config.n_routed_experts * config.hidden_size
    return Flops(config.num_experts_per_tok * one, config.n_shared_experts * one, router)


def expert_parameters(config: MoEConfig) -> int:
    """Parameters of one routed expert."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def routed_weights_per_rank(config: MoEConfig, num_local: int, bytes_per_parameter: float, layers: int | None = None):
    """Bytes of `num_local` experts in all sparse layers, or in `layers` of them; no scales of quantised ones."""
    layers = len(config.sparse_layers) if layers is None else layers
    return layers * num_local * expert_parameters(config) * bytes_per_parameter


def tokens_per_expert(tokens: int, ranks: int, config: MoEConfig) -> float:
    """Mean rows of an expert when each of R ranks brings T tokens: T R K / E."""
    return tokens * ranks * config.num_experts_per_tok / config.n_routed_experts


def floor_s(amount: float, per_second: float) -> float:
    """Seconds that bytes, or FLOPs, take at best."""
    return amount / per_second
