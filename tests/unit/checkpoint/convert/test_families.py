"""Settings to and from config.json. Unsupported ones are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hf_folders import GPT2, LLAMA, MODELS, settings_of

from megafp8.checkpoint.convert import gpt2, llama
from megafp8.checkpoint.convert.families import family_of_hf_config, family_of_run
from megafp8.checkpoint.convert.tensor_mapping import HFConfig
from megafp8.config import flags
from megafp8.config.model_shapes import PRESETS
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import CheckpointError

LLAMA_FLAGS = "--model-preset tiny --vocab-size 128"
GPT2_FLAGS = "--model-preset tiny-gpt2 --vocab-size 128"


def config_of(text: str) -> RunConfig:
    return flags.parse_with_problems(f"{text} --seq-length 32".split())[0].config


def problems_of(fields: dict[str, Any]) -> list[str]:
    theirs = HFConfig(fields)
    family_of_hf_config(fields).from_hf_config(theirs)
    return theirs.problems


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_a_round_trip(preset: str) -> None:
    config = with_values(RunConfig(), PRESETS[preset])
    if config.model.max_position_embeddings is None:
        config = replace(config, model=replace(config.model, max_position_embeddings=2048))
    family, problems = family_of_run(config)
    assert problems == [] and family.model_type == ("gpt2" if "gpt2" in preset else "llama")
    theirs = HFConfig({"model_type": family.model_type} | family.to_hf_config(config))
    back = with_values(RunConfig(), family.from_hf_config(theirs))
    assert theirs.problems == []
    expected = replace(config.model, vocab_size=None)
    if expected.num_query_groups == 1:
        expected = replace(expected, group_query_attention=False)
    assert back.model == expected


@pytest.mark.parametrize("name", MODELS)
def test_hf_fields_survive_a_round_trip(name: str) -> None:
    fields = MODELS[name]
    back = family_of_hf_config(fields).to_hf_config(settings_of(fields))
    assert {field: back[field] for field in fields.keys() & back.keys()} == {
        field: value for field, value in fields.items() if field in back
    }


def test_rotary_settings_as_transformers_5_has_them() -> None:
    fields = LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}
    model = settings_of(fields).model
    assert (model.rotary_base, model.rotary_seq_len_interpolation_factor, model.use_rope_scaling) == (5000, 4, False)


@pytest.mark.parametrize(("name", "is_tanh"), [("gelu_new", True), ("gelu_pytorch_tanh", True), ("gelu", False)])
def test_gelu_variants(name: str, is_tanh: bool) -> None:
    config = settings_of(GPT2 | {"activation_function": name})
    assert config.precision.bias_gelu_fusion is is_tanh
    assert (gpt2.to_hf_config(config)["activation_function"] == "gelu") is not is_tanh


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--squared-relu", "--squared-relu"),
        ("--qk-layernorm", "--qk-layernorm"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p"),
        ("--window-size 8", "--window-size 8"),
        ("--rotary-interleaved", "--rotary-interleaved"),
        ("--rotary-percent 0.5", "--rotary-percent 0.5"),
        ("--add-qkv-bias", "--add-qkv-bias"),
        ("--normalization LayerNorm", "--normalization LayerNorm"),
        ("--use-rope-scaling --rotary-seq-len-interpolation-factor 2", "--use-rope-scaling with"),
    ],
)
def test_settings_without_a_llama_equivalent_are_refused(flag: str, named: str) -> None:
    assert llama.unsupported_features(config_of(LLAMA_FLAGS)) == []
    (problem,) = llama.unsupported_features(config_of(f"{LLAMA_FLAGS} {flag}"))
    assert problem.startswith(named)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--disable-bias-linear", "--disable-bias-linear"),
        ("--normalization RMSNorm", "--normalization RMSNorm"),
        ("--swiglu", "--swiglu"),
        ("--position-embedding-type rope", "--position-embedding-type rope"),
        ("--group-query-attention --num-query-groups 2", "--num-query-groups 2"),
        ("--kv-channels 64", "--kv-channels 64"),
    ],
)
def test_settings_without_a_gpt2_equivalent_are_refused(flag: str, named: str) -> None:
    assert gpt2.unsupported_features(config_of(GPT2_FLAGS)) == []
    (problem,) = gpt2.unsupported_features(config_of(f"{GPT2_FLAGS} {flag}"))
    assert problem.startswith(named)


def test_a_model_of_neither_family_is_refused_for_the_nearer_one() -> None:
    family, problems = family_of_run(config_of(f"{LLAMA_FLAGS} --qk-layernorm --window-size 8"))
    assert family.model_type == "llama" and len(problems) == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA | {"attention_bias": True}, "attention_bias True and mlp_bias False"),
        (LLAMA | {"num_key_value_heads": 3}, "8 heads cannot share 3"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: type is 'dynamic'"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 1.5}}, "factor is 1.5"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA | {"rope_theta": 10000.5}, "rope_theta is 10000.5"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size is '64' and no number"),
        (LLAMA | {"hidden_size": -64}, "hidden_size is -64"),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers is None"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        (LLAMA | {"rope_scaling": [2]}, "rope_scaling is [2] and no object"),
        (GPT2 | {"activation_function": "relu"}, "activation_function is 'relu'"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights is False"),
        (GPT2 | {"embd_pdrop": 0.3}, "embd_pdrop is 0.3"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention is True"),
    ],
)
def test_hf_settings_without_an_equivalent_are_refused(fields: dict[str, Any], named: str) -> None:
    assert any(named in problem for problem in problems_of(fields)), problems_of(fields)


def test_problems_are_reported_together() -> None:
    assert len(problems_of(LLAMA | {"hidden_act": "gelu", "attention_bias": True, "rope_theta": 0.5})) == 3


@pytest.mark.parametrize("fields", [{}, {"model_type": "mistral"}, LLAMA | {"auto_map": {"AutoModel": "code.Model"}}])
def test_other_models_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="llama and gpt2 can be converted"):
        family_of_hf_config(fields)
