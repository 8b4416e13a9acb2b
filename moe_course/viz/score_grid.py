"""ScoreGrid: router scores of a few tokens, the chosen experts, and a bias that the viewer moves.

Built in: notebook 02.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from moe_course.errors import ConfigError
from moe_course.router import grouped_topk
from moe_course.viz.flow_data import printable
from moe_course.viz.given import finite, flag, floats, whole
from moe_course.viz.picture import Picture

#: More rows than this are no picture.
MOST_TOKENS = 64


class ScoreGrid(Picture):
    """A row per token, a column per expert, heat for the score, plus the bias where there is one.

    `state` is `{"expert", "bias", "token"}`; its bias is added to that of its expert: set it and the choices move, in
    the browser, in `chosen()`, in the line of text and in the still image.
    """

    module = "score_grid"

    @classmethod
    def of(
        cls,
        router_logits: torch.Tensor,
        top_k: int,
        *,
        n_group: int = 1,
        topk_group: int = 1,
        scoring_func: str = "sigmoid",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        tokens: list[str] | None = None,
    ) -> ScoreGrid:
        """A picture of `grouped_topk` with the same arguments.

        Args:
            router_logits: `[T, E]`, any float dtype, 1 to 64 tokens.
            top_k, n_group, topk_group, scoring_func, norm_topk_prob, routed_scaling_factor,
                e_score_correction_bias: see `moe_course.router.grouped_topk`.
            tokens: T texts; by default the numbers of the rows.

        Raises:
            ConfigError: what `grouped_topk` refuses, a value of another type, a shape that is no picture, or numbers
                that are not finite.
        """
        _check(floats("router_logits", router_logits, "[T, E]"), e_score_correction_bias)
        texts = _texts(tokens, len(router_logits))
        top_k = whole("top_k", top_k, "8")
        rules = {"n_group": whole("n_group", n_group, "1"), "topk_group": whole("topk_group", topk_group, "1")}
        rules["norm_topk_prob"] = flag("norm_topk_prob", norm_topk_prob)
        rules["routed_scaling_factor"] = finite("routed_scaling_factor", routed_scaling_factor)
        scores = all_scores(router_logits, scoring_func)
        bias = e_score_correction_bias
        data = {
            "schema": "moe_course.score_grid/1",
            "tokens": texts,
            "scores": [_exact(row) for row in scores],
            "bias": None if bias is None else _exact(bias.float()),
            "top_k": top_k,
            **rules,
        }
        picture = cls(data=data)
        picture._logits, picture._bias = router_logits.detach().cpu(), bias
        picture._rules = {"top_k": top_k, "scoring_func": scoring_func, **rules}
        picture.state = {"expert": picture.most_wanted()[0], "bias": 0.0, "token": 0}
        return picture

    def bias(self) -> torch.Tensor | None:
        """`[E]` fp32: the model's bias with the viewer's on top, or None while there is neither."""
        extra = float(self.state.get("bias", 0.0))
        if self._bias is None and extra == 0:
            return None
        bias = torch.zeros(self._logits.shape[1]) if self._bias is None else self._bias.detach().float().cpu().clone()
        bias[int(self.state.get("expert", 0))] += extra
        return bias

    def chosen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`topk_weights [T, K]` fp32 and `topk_ids [T, K]` int32 as the router gives them for what is shown now."""
        return grouped_topk(self._logits, e_score_correction_bias=self.bias(), **self._rules)

    def most_wanted(self) -> tuple[int, int]:
        """The expert that most tokens chose, the lowest of equals, and how many they are."""
        count = Counter(self.chosen()[1].flatten().tolist())
        return min(count.items(), key=lambda entry: (-entry[1], entry[0]))

    def kept(self) -> torch.Tensor:
        """`[T, E]` bool: is the expert in one of the groups that the row kept?"""
        experts = self._logits.shape[1]
        rules = self._rules | {"top_k": experts // self._rules["n_group"] * self._rules["topk_group"]}
        ids = grouped_topk(self._logits, e_score_correction_bias=self.bias(), **rules)[1].long()
        return torch.zeros(self._logits.shape, dtype=torch.bool).scatter_(1, ids, True)

    def choice(self) -> torch.Tensor:
        """`[T, E]` fp32: score + bias, what the router chooses by."""
        scores, bias = all_scores(self._logits, self._rules["scoring_func"]), self.bias()
        return scores if bias is None else scores + bias

    def text(self) -> str:
        (tokens, experts), sums = self._logits.shape, self.chosen()[0].sum(dim=1)
        low, high = f"{sums.min().item():.3f}", f"{sums.max().item():.3f}"
        most, takers = self.most_wanted()
        wanted = f"most wanted: expert {most} ({takers} tokens)" if takers > 1 else "no expert is wanted twice"
        line = (
            f"ScoreGrid: {_count(tokens, 'token')} × {experts} experts, {self._rules['top_k']} chosen each, "
            f"weights of each token add up to {low if low == high else f'{low} to {high}'}; {wanted}"
        )
        extra = float(self.state.get("bias", 0.0))
        return f"{line}; expert {self.state['expert']} with {extra:+.2f} of bias" if extra else line

    def still(self) -> bytes:
        from moe_course.viz.score_grid_still import draw

        return draw(self)


def all_scores(router_logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """`[T, E]` fp32, the router's own scores of all experts: a choice of all E that is not normalised."""
    scores, ids = grouped_topk(router_logits, router_logits.shape[1], scoring_func=scoring_func, norm_topk_prob=False)
    return torch.zeros_like(scores).scatter_(1, ids.long(), scores)


def _exact(row: torch.Tensor) -> list[float]:
    """fp32 values in nine digits: as short as can be read back without loss."""
    return [float(f"{value:.9g}") for value in row.tolist()]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _texts(tokens: Any, rows: int) -> list[str]:
    """A printable text for each row."""
    if tokens is None:
        return [f"row {row}" for row in range(rows)]
    if not isinstance(tokens, Iterable):
        raise ConfigError(f"tokens is {tokens!r}, needs to be {rows} texts, one for each row")
    texts = list(tokens)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(f"tokens[{place}] is {text!r}, needs to be text: tokens=[str(token) for token in tokens]")
    if len(texts) != rows:
        raise ConfigError(f"{len(texts)} tokens for the {rows} rows of router_logits; pass one text a row")
    return [printable(text) for text in texts]


def _check(router_logits: torch.Tensor, bias: Any) -> None:
    shape = tuple(router_logits.shape)
    if len(shape) != 2 or not 1 <= shape[0] <= MOST_TOKENS:
        raise ConfigError(
            f"router_logits has shape {shape}; a picture shows [T, E] with 1 to {MOST_TOKENS} tokens: pass some rows"
        )
    if bias is not None:
        floats("e_score_correction_bias", bias, "[E]")
    for name, tensor in (("router_logits", router_logits), ("e_score_correction_bias", bias)):
        if tensor is not None and not torch.isfinite(tensor).all():
            place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
            value = tensor[tuple(place)].item()
            raise ConfigError(f"{name}{place} is {value}; a picture needs finite numbers")
