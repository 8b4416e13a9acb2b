"""What a key stands for that a config.json leaves out, family by family.

Hugging Face fills absent keys from the config class of the `model_type`, and vLLM reads through the same classes. So
another default here would be another model, without a word. Built in: notebook 01.
"""

from __future__ import annotations

from typing import Any

from moe_course.errors import ConfigError

_ONE_GROUP = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_EIGHT_GROUPS = _ONE_GROUP | {"n_group": 8, "topk_group": 4}
#: `model_type` -> what its absent keys stand for (transformers: `GlmMoeDsaConfig`, `DeepseekV3Config`,
#: `Glm4MoeConfig`).
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": _ONE_GROUP
    | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "intermediate_size": 12288, "vocab_size": 154880}
    | {"max_position_embeddings": 202752, "bos_token_id": 0, "eos_token_id": 1},
    "deepseek_v3": _EIGHT_GROUPS
    | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "intermediate_size": 18432, "vocab_size": 129280}
    | {"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1},
    "glm4_moe": _ONE_GROUP
    | {"routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "intermediate_size": 10944, "vocab_size": 151552}
    | {"max_position_embeddings": 131072},
}
#: Families whose router is a sigmoid with a correction bias, although their config.json may not say so
#: (transformers: `GlmMoeDsaTopkRouter`, `DeepseekV3TopkRouter`, `Glm4MoeTopkRouter`).
SIGMOID_FAMILIES = frozenset(FAMILY_DEFAULTS)
#: Keys that decide where a row goes and what comes back: nothing is guessed about them.
ROUTING_KEYS = (
    "n_shared_experts",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "first_k_dense_replace",
)


def with_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """A parsed config.json with its family's defaults in the place of absent keys, and without nulls.

    Raises ConfigError for a routing key that is null (transformers refuses it, or computes with None), and for one that
    is absent from a `model_type` whose defaults are not known; and where the model is a part of a larger one.
    """
    for part in ("text_config", "language_config"):
        if isinstance(raw.get(part), dict) and "num_hidden_layers" not in raw:
            raise ConfigError(f"the language model is in {part} here; write that part into a config.json of its own")
    family = require(raw, "model_type")
    if not isinstance(family, str):
        raise ConfigError(f"model_type is {family!r}, needs to be text")
    # mlp_layer_types says all that first_k_dense_replace would
    needed = [key for key in ROUTING_KEYS if key != "first_k_dense_replace" or raw.get("mlp_layer_types") is None]
    null = [key for key in needed if key in raw and raw[key] is None]
    if null:
        raise ConfigError(f"config has null for {', '.join(null)}; write the value down, or leave the key out")
    if family not in FAMILY_DEFAULTS:
        absent = [key for key in ("scoring_func", *needed) if raw.get(key) is None]
        if absent:
            raise ConfigError(
                f"model_type {family!r} without {', '.join(absent)}: what an absent key stands for is known of "
                f"{', '.join(FAMILY_DEFAULTS)} only; add {'it' if len(absent) == 1 else 'them'} to the config"
            )
    return FAMILY_DEFAULTS.get(family, {}) | {key: value for key, value in raw.items() if value is not None}


def require(raw: dict[str, Any], *names: str) -> Any:
    """The value under the first of these names that the config has. Raises ConfigError when it has none."""
    for name in names:
        if raw.get(name) is not None:
            return raw[name]
    raise ConfigError(f"config has no {' or '.join(names)}")
