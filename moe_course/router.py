"""Stage 1: which experts does each row want? Ids are global; nothing here knows about ranks.

Source: vLLM `grouped_topk_router.py : grouped_topk` and its fused kernel; Hugging Face `GlmMoeDsaTopkRouter`.
Built in: notebook 02.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_course.config import MoEConfig
from moe_course.errors import ConfigError
from moe_course.rows import padded_linear


def route(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, bias: torch.Tensor | None, config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score every row against all experts and keep the best K.

    Args:
        hidden_states: `[T, H]`, model dtype.
        gate_weight: `[E, H]`. Both operands are widened to fp32, as Hugging Face does.
        bias: `e_score_correction_bias` `[E]` fp32, or None.
        config: routing fields of the model.

    Returns:
        `topk_weights [T, K]` fp32 and `topk_ids [T, K]` int32, global expert ids.

    Raises:
        ConfigError: as `grouped_topk`; rows that are not `[T, H]`, or as wide as the gate is not.
    """
    router_logits = padded_linear(hidden_states.float(), gate_weight.float())  # [T, E] fp32
    return grouped_topk(
        router_logits,
        config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        scoring_func=config.scoring_func,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
        e_score_correction_bias=bias,
    )


def grouped_topk(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "sigmoid",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose K experts per row, first among groups of experts, then among the experts of the kept groups.

    The bias chooses and never weighs: ids come from score + bias, weights from the score alone. A group counts
    by the sum of its two best choice scores with a bias, by its best score without. Ties go to the lowest index,
    and columns stand in descending order of the choice score.

    Args:
        router_logits: `[T, E]`, any float dtype; scored in fp32.
        top_k: K, experts per row.
        norm_topk_prob: divide the K weights by their sum + 1e-20 (so underflown scores give 0, not NaN).
        routed_scaling_factor: multiplies the weights at the end.

    Returns:
        `topk_weights [T, K]` fp32, `topk_ids [T, K]` int32.

    Raises:
        ConfigError: logits or a bias of another shape, unknown `scoring_func`, or groups that do not fit E and K.
    """
    _check(router_logits, top_k, n_group, topk_group, e_score_correction_bias)
    scores = _scores(router_logits.float(), scoring_func)  # [T, E]
    choice = scores if e_score_correction_bias is None else scores + e_score_correction_bias.float()
    if n_group > 1:
        choice = _mask_groups(choice, n_group, topk_group, with_bias=e_score_correction_bias is not None)
    topk_ids = best_first(choice, top_k)  # [T, K]
    topk_weights = scores.gather(1, topk_ids)  # [T, K]: the unbiased score
    if norm_topk_prob:
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
    return topk_weights * routed_scaling_factor, topk_ids.to(torch.int32)


def _scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    if scoring_func == "sigmoid":
        # whole vectors only: the incomplete last one of a batch is computed by other code, with other last bits
        return F.pad(logits, (0, -logits.shape[-1] % 32)).sigmoid()[:, : logits.shape[-1]]
    if scoring_func == "softmax":
        return logits.softmax(dim=-1)
    raise ConfigError(f"scoring_func is {scoring_func!r}, known values: sigmoid, softmax")


def _mask_groups(choice: torch.Tensor, n_group: int, topk_group: int, with_bias: bool) -> torch.Tensor:
    """Choice scores with -inf outside the best `topk_group` groups; 0 would beat a kept but negative score."""
    grouped = choice.view(len(choice), n_group, choice.shape[1] // n_group)  # [T, G, E/G]
    group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1) if with_bias else grouped.amax(dim=-1)  # [T, G]
    dropped = torch.ones_like(group_scores, dtype=torch.bool)
    dropped.scatter_(1, best_first(group_scores, topk_group), False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).view_as(choice)


def best_first(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices `[T, k]` of the k largest, descending; ties to the lowest id, unlike `torch.topk`."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _check(logits: torch.Tensor, top_k: int, n_group: int, topk_group: int, bias: torch.Tensor | None) -> None:
    if logits.ndim != 2:
        raise ConfigError(
            f"router_logits are {list(logits.shape)}, expected [T, E]; flatten them, as in logits.flatten(0, -2)"
        )
    num_experts = logits.shape[1]
    if n_group < 1 or num_experts % n_group:
        raise ConfigError(f"n_group {n_group} does not divide the {num_experts} experts of the logits")
    if not 1 <= topk_group <= n_group:
        raise ConfigError(f"topk_group {topk_group} is not between 1 and n_group {n_group}")
    if not 1 <= top_k <= num_experts // n_group * topk_group:
        raise ConfigError(f"top_k {top_k} does not fit {topk_group} groups of {num_experts // n_group} experts")
    if bias is not None and bias.shape != (num_experts,):
        raise ConfigError(f"e_score_correction_bias has shape {tuple(bias.shape)}, expected ({num_experts},)")
    if bias is not None and bias.device != logits.device:
        raise ConfigError(f"e_score_correction_bias is on {bias.device}, router_logits on {logits.device}; move one")
    if bias is not None and n_group > 1 and num_experts // n_group < 2:
        raise ConfigError(f"groups of {num_experts // n_group} expert: with a bias a group needs two to be scored")
