"""Reading a config.json: what silence means, which key wins, and that nothing unknown passes."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from moe_course.config import GLM_5_1, SIGMOID_FAMILIES, MoEConfig
from moe_course.errors import ConfigError
from moe_course.families import FAMILY_DEFAULTS, ROUTING_KEYS

BASE = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 6,
}
#: What a config of a family without known defaults has to say.
WRITTEN = {
    "scoring_func": "softmax",
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}


def read(**changes) -> MoEConfig:
    """BASE with changes; a value of None removes the key."""
    return MoEConfig.from_json({key: value for key, value in (BASE | changes).items() if value is not None})


# -- who scores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v3", "glm4_moe"])
def test_silent_sigmoid_families(family):
    """Without `scoring_func` and `topk_method` these choose by sigmoid + correction bias."""
    config = read(model_type=family)
    assert (config.scoring_func, config.has_correction_bias) == ("sigmoid", True)
    assert family in SIGMOID_FAMILIES


@pytest.mark.parametrize("model_type", ["deepseek_v2", "qwen3_moe", "mixtral"])
def test_silent_unknown_family_is_an_error(model_type):
    """Sigmoid or softmax cannot be guessed, nor anything of the routing; all that is missing is named at once."""
    with pytest.raises(ConfigError, match=f"{model_type}' without scoring_func, n_shared_experts, .*; add them to the"):
        read(model_type=model_type)
    for key in WRITTEN:
        with pytest.raises(ConfigError, match=f"{model_type}' without {key}: .*; add it to the config"):
            read(model_type=model_type, **(WRITTEN | {key: None}))
    pattern = {"first_k_dense_replace": None, "mlp_layer_types": ["sparse"] * 6}  # one says what the other would
    assert read(model_type=model_type, **(WRITTEN | pattern)) == read(model_type=model_type, **WRITTEN)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"scoring_func": "softmax"}, ("softmax", False)),
        ({"scoring_func": "softmax", "topk_method": "group_limited_greedy"}, ("softmax", False)),
        ({"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, ("sigmoid", True)),
        ({"scoring_func": "sigmoid"}, ("sigmoid", False)),
    ],
    ids=str,
)
def test_other_families_say_what_they_do(keys, expected):
    config = read(model_type="deepseek_v2", **(WRITTEN | keys))
    assert (config.scoring_func, config.has_correction_bias) == expected


def test_a_present_key_beats_the_family():
    config = read(model_type="deepseek_v3", scoring_func="softmax", topk_method="greedy")
    assert (config.scoring_func, config.has_correction_bias) == ("softmax", False)


# -- what an absent key stands for -----------------------------------------------------------------------------------


def hugging_face_reads(raw: dict) -> dict:
    """The fields of a config that transformers has under the same names, and which layers it makes sparse."""
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    names = [field.name for field in fields(MoEConfig) if hasattr(theirs, field.name)]
    found = {name: getattr(theirs, name) for name in names if name not in NOT_THEIRS}
    first = theirs.first_k_dense_replace
    return found | {"sparse_layers": tuple(i for i in range(theirs.num_hidden_layers) if i >= first)}


NOT_THEIRS = ("mlp_layer_types", "architecture")  # compared as `sparse_layers`; not a key of the file


@pytest.mark.parametrize("family", FAMILY_DEFAULTS)
def test_absent_keys_stand_for_what_transformers_takes(family):
    """Every key left out by itself, and all at once: the reading of the family's config class, or an error."""
    from transformers import CONFIG_MAPPING

    full = CONFIG_MAPPING[family](first_k_dense_replace=2, routed_scaling_factor=7.5, n_shared_experts=3).to_dict()
    full |= {"n_group": 4, "topk_group": 1, "norm_topk_prob": False, "intermediate_size": 96, "vocab_size": 99}
    full |= {"bos_token_id": 5, "eos_token_id": 6, "max_position_embeddings": 77}
    full.pop("mlp_layer_types", None)  # else it decides
    optional = [key for key in full if key not in BASE and key != "n_routed_experts"]
    for left_out in [[], *([key] for key in full), optional]:
        raw = {key: value for key, value in full.items() if key not in left_out}
        if set(left_out) & set(BASE):
            with pytest.raises(ConfigError, match=left_out[0]):
                MoEConfig.from_json(raw)
            continue
        ours = MoEConfig.from_json(raw)
        for name, value in hugging_face_reads(raw).items():
            if name in ("bos_token_id", "eos_token_id") and value is None:
                value = 0  # a family without one
            assert getattr(ours, name) == value, (left_out, name)
    for key in FAMILY_DEFAULTS[family].keys() - set(ROUTING_KEYS):  # null, where it changes no route, is absent
        silent = {name: value for name, value in full.items() if name != key}
        assert MoEConfig.from_json(full | {key: None}) == MoEConfig.from_json(silent), key
    for key in ROUTING_KEYS:
        with pytest.raises(ConfigError, match=f"null for {key}; write the value down"):
            MoEConfig.from_json(full | {key: None})


# -- which layers are sparse -----------------------------------------------------------------------------------------


def test_mlp_layer_types_win():
    types = ["sparse", "dense", "sparse", "sparse", "dense", "sparse"]
    config = read(mlp_layer_types=types, first_k_dense_replace=3, moe_layer_freq=2)
    assert config.mlp_layer_types == tuple(types)
    assert config.sparse_layers == (0, 2, 3, 5)


@pytest.mark.parametrize(
    ("first", "every", "sparse"),
    [(3, 1, (3, 4, 5)), (0, 1, (0, 1, 2, 3, 4, 5)), (1, 2, (2, 4)), (2, 3, (3,)), (0, 2, (0, 2, 4)), (9, 1, ())],
)
def test_moe_layer_freq_is_a_plain_modulus(first, every, sparse):
    """Of the layer index, not of the distance to the first sparse layer (that would give 1, 3, 5 for 1 and 2)."""
    config = read(first_k_dense_replace=first, moe_layer_freq=every)
    assert config.sparse_layers == sparse
    assert config.num_hidden_layers == 6


# -- values ----------------------------------------------------------------------------------------------------------


def test_fields_are_read_by_their_hugging_face_names():
    config = read(
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=3,
        intermediate_size=128,
        vocab_size=99,
        max_position_embeddings=512,
        architectures=["DeepseekV3ForCausalLM"],
        quantization_config={"quant_method": "fp8"},
    )
    assert (config.hidden_size, config.moe_intermediate_size) == (64, 32)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (16, 4, 2)
    assert (config.n_group, config.topk_group, config.norm_topk_prob) == (4, 2, False)
    assert config.routed_scaling_factor == 3.0 and isinstance(config.routed_scaling_factor, float)
    assert (config.intermediate_size, config.vocab_size, config.max_position_embeddings) == (128, 99, 512)
    assert (config.architecture, config.quantization) == ("DeepseekV3ForCausalLM", "fp8")


@pytest.mark.parametrize("name", ["n_routed_experts", "num_local_experts", "num_experts"])
def test_number_of_experts_has_three_names(name):
    assert read(**{"n_routed_experts": None} | {name: 12}).n_routed_experts == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scoring_func": "sqrtsoftplus"}, "scoring_func is 'sqrtsoftplus', known values: sigmoid, softmax"),
        ({"topk_method": "lottery"}, "topk_method is 'lottery'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_layer_types": ["dense"] * 5 + ["moe"]}, r"mlp_layer_types\[5\] is 'moe'"),
        ({"mlp_layer_types": ["dense"] * 5}, "5 entries, num_hidden_layers is 6"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({"moe_layer_freq": [0, 1, 1]}, r"moe_layer_freq is \[0, 1, 1\], needs to be a whole number"),
        ({"first_k_dense_replace": "3"}, "first_k_dense_replace is '3', needs to be a whole number"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1, needs to be a whole number of at least 0"),
        ({"first_k_dense_replace": True}, "first_k_dense_replace is True, needs to be a whole number"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob is 'false', needs to be true or false"),
        ({"norm_topk_prob": 0}, "norm_topk_prob is 0, needs to be true or false"),
        ({"routed_scaling_factor": True}, "routed_scaling_factor is True, needs to be a number"),
        ({"model_type": ["deepseek_v3"]}, r"model_type is \['deepseek_v3'\], needs to be text"),
        ({"eos_token_id": []}, r"eos_token_id is \[\], needs to be a whole number"),
        ({"num_experts_per_tok": 17}, "17 exceeds n_routed_experts 16"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"n_group": 3}, "n_group 3 does not divide n_routed_experts 16"),
        ({"n_group": 4, "topk_group": 5}, "topk_group 5 is not between 1 and n_group 4"),
        ({"n_group": 8, "topk_group": 1}, "num_experts_per_tok 4 exceeds the 2 experts in 1 groups"),
        *(({name: None}, name) for name in BASE),
    ],
    ids=str,
)
def test_unknown_contradicting_and_missing_values_are_errors(changes, words):
    with pytest.raises(ConfigError, match=words):
        read(**changes)


OTHERS = ("scoring_func", "topk_method", "moe_layer_freq", "mlp_layer_types", "hidden_act", "architectures")


@pytest.mark.parametrize("odd", [True, "3", "", 1.5, float("nan"), -1, [1], [], {}, {"a": 1}], ids=repr)
def test_every_key_with_a_value_of_every_kind(odd):
    """Refused by its name, or each field is of its type: True is no number, and text is not true."""
    for name in (*BASE, *FAMILY_DEFAULTS["deepseek_v3"], *OTHERS, "quantization_config"):
        try:
            config = read(**{name: odd})
        except ConfigError as refusal:
            assert name in str(refusal)
            continue
        for field in fields(config):
            kind = type(getattr(config, field.name)).__name__.removesuffix("Type")
            assert kind in field.type, (name, field.name)


@pytest.mark.parametrize("part", ["text_config", "language_config"])
def test_a_model_inside_a_larger_one_is_named(part):
    """Kimi K2.5 and other models that see: what is asked for stands in the file, one level down."""
    inner = {key: value for key, value in BASE.items() if key != "model_type"} | WRITTEN
    for kind in ("kimi_k25", "deepseek_v3"):
        with pytest.raises(ConfigError, match=f"the language model is in {part} here; write that part into a"):
            MoEConfig.from_json({"model_type": kind, part: inner | {"model_type": "kimi_k2"}})
    assert MoEConfig.from_json(BASE | {part: inner}) == read()


def test_usage_errors_end_with_exit_code_2():
    with pytest.raises(ConfigError) as caught:
        read(num_experts_per_tok=17)
    assert caught.value.exit_code == 2


# -- files -----------------------------------------------------------------------------------------------------------


def test_reading_a_file_and_a_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BASE))
    assert MoEConfig.from_json(file) == MoEConfig.from_json(str(file)) == MoEConfig.from_pretrained(tmp_path) == read()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"hidden_size": 64', "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe\x00\x80", "is not JSON"),
        (b"[1, 2]", "holds a list, expected an object"),
    ],
    ids=["cut off", "empty", "not text", "a list"],
)
def test_broken_files_are_named(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.json {words}"):
        MoEConfig.from_pretrained(tmp_path)


def test_missing_file_and_folder_instead_of_a_file(tmp_path):
    with pytest.raises(ConfigError, match="config.json does not exist"):
        MoEConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        MoEConfig.from_json(tmp_path)


# -- GLM-5.1 ---------------------------------------------------------------------------------------------------------


def test_glm_5_1_is_the_default_of_transformers():
    """Field by field, through the dictionary that Hugging Face would write."""
    from transformers import GlmMoeDsaConfig

    theirs = MoEConfig.from_json(GlmMoeDsaConfig().to_dict())
    ours = replace(GLM_5_1, architecture="unknown", eos_token_id=theirs.eos_token_id)  # not of the shape
    assert theirs == ours


def test_glm_5_1_shape():
    assert GLM_5_1.num_hidden_layers == 78
    assert GLM_5_1.sparse_layers == tuple(range(3, 78))
    assert (GLM_5_1.n_routed_experts, GLM_5_1.num_experts_per_tok, GLM_5_1.n_shared_experts) == (256, 8, 1)
    assert (GLM_5_1.n_group, GLM_5_1.topk_group, GLM_5_1.routed_scaling_factor) == (1, 1, 2.5)
