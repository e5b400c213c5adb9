"""The config.json of released models is read completely, or refused by the name of a field."""

from __future__ import annotations

from math import prod

import pytest
from hf_folders import settings_of
from hub_configs import GEMMA3, HUB_CONFIGS, MILLIONS, PHI3

from megafp8.checkpoint.convert.families import family_of_hf_config
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.checkpoint.convert.model_tensors import model_tensors
from megafp8.config import attention_layers
from megafp8.errors import CheckpointError


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_a_released_model_has_its_number_of_parameters(name: str) -> None:
    fields = HUB_CONFIGS[name]
    model = settings_of(fields).model
    count = sum(prod(tensor.shape) for tensor in model_tensors(model, fields["vocab_size"]))
    assert round(count / 1e6) == MILLIONS[name]


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_its_settings_survive_a_round_trip(name: str) -> None:
    fields = HUB_CONFIGS[name]
    config, family = settings_of(fields), family_of_hf_config(fields)
    assert family.unsupported_features(config.model) == []
    again = {"model_type": family.model_type, "vocab_size": fields["vocab_size"]}
    again |= family.to_hf_config(config.model, config.precision)
    assert settings_of(again) == config


def test_values_that_are_easily_misread() -> None:
    models = {name: settings_of(fields).model for name, fields in HUB_CONFIGS.items()}
    assert models["StarCoder2-3B"].rotary_base == 999999.4420358813
    assert models["Llama-3.2-1B"].use_rope_scaling and models["Llama-3.2-1B"].share_embeddings_and_output_weights
    assert models["Qwen2.5-0.5B"].window_size is None and models["Mistral-7B-v0.3"].window_size is None
    assert models["Mistral-7B-v0.1"].window_size == "4095,0" and models["Phi-3-mini-4k"].window_size == "2046,0"
    assert models["Qwen3-0.6B"].kv_channels == 128 and models["Gemma 2 27B"].softmax_scale == 144**-0.5
    assert models["Gemma 3 1B"].rotary_base_local == 10_000 and models["Granite 3.1 2B"].softmax_scale == 2**-6
    for name, every in (("Gemma 3 1B", 6), ("Gemma 3 270M", 6), ("Gemma 2 2B", 2)):
        windowed = attention_layers.windowed_layers(models[name])
        assert windowed == tuple((layer + 1) % every != 0 for layer in range(len(windowed)))


def test_models_that_cannot_be_expressed_are_refused_by_a_field() -> None:
    scaling = {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"}
    theirs = HFConfig(HUB_CONFIGS["Phi-4"] | {"partial_rotary_factor": 0.75, "rope_scaling": scaling})
    family_of_hf_config(PHI3).from_hf_config(theirs)
    assert theirs.problems == ["config.json: rope_scaling: type is 'longrope'; megafp8's models have 'default'"]
    with pytest.raises(CheckpointError, match="of a model of type 'gemma3'; .*gemma3_text"):
        family_of_hf_config({"model_type": "gemma3", "text_config": GEMMA3})
    with pytest.raises(CheckpointError, match="code of its own"):
        family_of_hf_config(PHI3 | {"architectures": ["Phi3SmallForCausalLM"]})
