"""The shape of a mixture-of-experts model, read from a Hugging Face `config.json`.

Field names are Hugging Face's. What differs between model families is settled here and in `families.py`, and nowhere
else: what an absent key stands for, who scores by sigmoid when the file is silent, and which layers are sparse.

Built in: notebook 01.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_course.errors import ConfigError
from moe_course.families import SIGMOID_FAMILIES, require, with_defaults

SCORING_FUNCS = ("sigmoid", "softmax")
TOPK_METHODS = ("noaux_tc", "greedy", "group_limited_greedy")
LAYER_TYPES = ("dense", "sparse")


@dataclass(frozen=True)
class MoEConfig:
    """What the five stages and the loader must know about a model.

    Sizes are in elements: `hidden_size` H, `moe_intermediate_size` I, `n_routed_experts` E,
    `num_experts_per_tok` K. `mlp_layer_types` has one entry, "dense" or "sparse", per decoder layer.
    `has_correction_bias` is True when the router chooses by score + `e_score_correction_bias`.

    Raises ConfigError when a value is missing, unknown or contradicts another.
    Source: `GlmMoeDsaConfig` (transformers); read in vLLM by `deepseek_v2.py : DeepseekV2MoE`.
    """

    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    mlp_layer_types: tuple[str, ...]
    n_shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    has_correction_bias: bool = True
    intermediate_size: int = 0
    vocab_size: int = 0
    max_position_embeddings: int = 0
    hidden_act: str = "silu"
    model_type: str = "glm_moe_dsa"
    architecture: str = "GlmMoeDsaForCausalLM"
    quantization: str | None = None
    bos_token_id: int = 0
    eos_token_id: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"):
            _whole(name, getattr(self, name), 1)
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds n_routed_experts {self.n_routed_experts}"
            )
        for name in ("n_group", "topk_group", "n_shared_experts", "intermediate_size", "vocab_size"):
            _whole(name, getattr(self, name))
        for name, least in (("max_position_embeddings", 0), ("bos_token_id", -1), ("eos_token_id", -1)):
            _whole(name, getattr(self, name), least)
        if not isinstance(self.norm_topk_prob, bool):
            raise ConfigError(f"norm_topk_prob is {self.norm_topk_prob!r}, needs to be true or false")
        if self.n_group < 1 or self.n_routed_experts % self.n_group:
            raise ConfigError(f"n_group {self.n_group} does not divide n_routed_experts {self.n_routed_experts}")
        if not 1 <= self.topk_group <= self.n_group:
            raise ConfigError(f"topk_group {self.topk_group} is not between 1 and n_group {self.n_group}")
        kept = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > kept:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds the {kept} experts in {self.topk_group} groups"
            )
        _known("scoring_func", self.scoring_func, SCORING_FUNCS)
        _known("hidden_act", self.hidden_act, ("silu",))
        for layer, kind in enumerate(self.mlp_layer_types):
            _known(f"mlp_layer_types[{layer}]", kind, LAYER_TYPES)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.mlp_layer_types)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "sparse")

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> MoEConfig:
        """Read `model_dir/config.json`."""
        return cls.from_json(Path(model_dir) / "config.json")

    @classmethod
    def from_json(cls, source: str | Path | dict[str, Any]) -> MoEConfig:
        """Read a GLM / DeepSeek-V3 style config: a path to a JSON file, or the parsed dictionary.

        A key that is absent has its family's default (`families.FAMILY_DEFAULTS`). Raises ConfigError for an absent
        routing key of another `model_type`, for one that is null, and for an unknown or contradicting value.
        """
        raw = with_defaults(source if isinstance(source, dict) else _read(Path(source)))
        layers = require(raw, "num_hidden_layers")
        _whole("num_hidden_layers", layers, 1)
        scoring_func, bias = _routing(raw)
        return cls(
            hidden_size=require(raw, "hidden_size"),
            moe_intermediate_size=require(raw, "moe_intermediate_size"),
            n_routed_experts=require(raw, "n_routed_experts", "num_local_experts", "num_experts"),
            num_experts_per_tok=require(raw, "num_experts_per_tok"),
            mlp_layer_types=_layer_types(raw, layers),
            n_shared_experts=raw["n_shared_experts"],
            n_group=raw["n_group"],
            topk_group=raw["topk_group"],
            norm_topk_prob=raw["norm_topk_prob"],
            routed_scaling_factor=_number(raw, "routed_scaling_factor"),
            scoring_func=scoring_func,
            has_correction_bias=bias,
            intermediate_size=_optional(raw, "intermediate_size", 0),
            vocab_size=_optional(raw, "vocab_size", 0),
            max_position_embeddings=_optional(raw, "max_position_embeddings", 0),
            hidden_act=_optional(raw, "hidden_act", "silu"),
            model_type=require(raw, "model_type"),
            architecture=_architecture(raw.get("architectures", [])),
            quantization=_quantization(raw.get("quantization_config", {})),
            bos_token_id=_first(_optional(raw, "bos_token_id", 0)),
            eos_token_id=_first(_optional(raw, "eos_token_id", 0)),
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a folder with a Hugging Face config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, expected an object")
    return raw


def _known(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, known values: {', '.join(allowed)}")


def _optional(raw: dict[str, Any], name: str, default: Any) -> Any:
    return default if raw.get(name) is None else raw[name]


def _whole(name: str, value: Any, least: int = 0) -> None:
    if type(value) is not int or value < least:  # True is an int, and no number here
        raise ConfigError(f"{name} is {value!r}, needs to be a whole number of at least {least}")


def _number(raw: dict[str, Any], name: str) -> float:
    value = raw[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}, needs to be a number")
    return float(value)


def _first(value: int | list[int]) -> int:
    return value[0] if isinstance(value, list) and value else value


def _architecture(names: Any) -> str:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"architectures is {names!r}, needs to be a list of names")
    return names[0] if names else "unknown"


def _quantization(found: Any) -> str | None:
    if not isinstance(found, dict) or not isinstance(found.get("quant_method", ""), str):
        raise ConfigError(f"quantization_config is {found!r}, needs to be an object with a quant_method")
    return found.get("quant_method", "unnamed") if found else None


def _routing(raw: dict[str, Any]) -> tuple[str, bool]:
    """(scoring_func, has_correction_bias). vLLM takes softmax without bias when the keys are absent; so do not we."""
    model_type = require(raw, "model_type")
    scoring_func, method = raw.get("scoring_func"), raw.get("topk_method")
    if method is not None:
        _known("topk_method", method, TOPK_METHODS)
    bias = method == "noaux_tc" if method is not None else model_type in SIGMOID_FAMILIES
    return "sigmoid" if scoring_func is None else scoring_func, bias


def _layer_types(raw: dict[str, Any], layers: int) -> tuple[str, ...]:
    """`mlp_layer_types` wins over `first_k_dense_replace` / `moe_layer_freq` (a plain modulus of the layer index)."""
    explicit = raw.get("mlp_layer_types")
    if explicit is not None:
        if not isinstance(explicit, list | tuple):
            raise ConfigError(f"mlp_layer_types is {explicit!r}, needs to be a list with a kind for each layer")
        if len(explicit) != layers:
            raise ConfigError(f"mlp_layer_types has {len(explicit)} entries, num_hidden_layers is {layers}")
        return tuple(explicit)
    first_dense, every = raw["first_k_dense_replace"], _optional(raw, "moe_layer_freq", 1)
    _whole("first_k_dense_replace", first_dense)
    _whole("moe_layer_freq", every, 1)
    return tuple("sparse" if i >= first_dense and i % every == 0 else "dense" for i in range(layers))


#: GLM-5.1 (Hugging Face `GlmMoeDsaConfig` defaults and published config.json): 78 layers, 75 of them sparse.
GLM_5_1 = MoEConfig(
    hidden_size=6144,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
    intermediate_size=12288,
    vocab_size=154880,
    max_position_embeddings=202752,
)
