"""A model keeps its family, special tokens and settings of generation on the way to a checkpoint and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_folders import FAMILY_MODELS, GPT2, LLAMA, random_weights, settings_of, write_hf_folder

from megafp8.checkpoint.convert.families import MODEL_TYPES, family_of_hf_config
from megafp8.checkpoint.convert.from_huggingface import plan_import
from megafp8.checkpoint.convert.origin import Origin, special_tokens
from megafp8.checkpoint.convert.to_huggingface import ExportOptions, choose_family, plan_export
from megafp8.config.settings import with_values
from megafp8.errors import CheckpointError

MODELS = {"llama": LLAMA, "gpt2": GPT2} | FAMILY_MODELS
TOKENS = {"bos_token_id": 3, "eos_token_id": [5, 7], "pad_token_id": 9}
GENERATION = {"do_sample": True, "temperature": 0.6, "eos_token_id": [5, 7, 8], "_from_model_config": False}
LLAMA_ORIGIN = Origin("llama", 131, TOKENS, GENERATION, 5)


def there_and_back(
    folder: Path, fields: dict[str, Any], generation: object = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and generation_config.json (None: no file) that `to-hf` makes of what `from-hf` made."""
    theirs, ours, back = (folder / name for name in ("theirs", "ours", "back"))
    write_hf_folder(theirs, fields, random_weights(fields, torch.bfloat16))
    if generation is not None:
        (theirs / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    plan_import(theirs).write(ours, ours, lambda done: None)
    back.mkdir()
    export = plan_export(ours, ExportOptions())
    assert not any("came from" in note for note in export.notes)
    export.write(back, 1 << 30, lambda done: None)
    files = (back / "config.json", back / "generation_config.json")
    config, written = (json.loads(file.read_text(encoding="utf-8")) if file.exists() else None for file in files)
    assert config is not None
    return config, written


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_every_family_comes_back_as_itself(name: str, tmp_path: Path) -> None:
    fields = MODELS[name] | TOKENS | {"architectures": [family_of_hf_config(MODELS[name]).architecture]}
    config, generation = there_and_back(tmp_path, fields, GENERATION)
    selected = ("model_type", "architectures", *TOKENS)
    assert {field: config[field] for field in selected} == {field: fields[field] for field in selected}
    assert generation == GENERATION


def test_what_a_folder_lacks_is_not_added(tmp_path: Path) -> None:
    """transformers then takes the defaults of the family, as before."""
    config, generation = there_and_back(tmp_path, LLAMA | {"eos_token_id": None})
    assert config["eos_token_id"] is None and config.keys().isdisjoint({"bos_token_id", "pad_token_id"})
    assert generation is None


def test_changed_settings_change_the_family() -> None:
    origin = replace(LLAMA_ORIGIN, model_type="phi3")
    config = with_values(settings_of(MODELS["phi3"]), {"model.rotary_percent": 1.0, "model.qk_layernorm": True})
    family, problems, (note,) = choose_family(config.model, None, origin)
    assert (family.model_type, problems) == ("qwen3", [])
    assert note.startswith("the model came from a phi3 and is a qwen3 now") and "--qk-layernorm: a Phi3" in note
    family, _, notes = choose_family(settings_of(MODELS["phi3"]).model, "mistral", origin)
    assert family.model_type == "mistral" and notes == []


@pytest.mark.parametrize("eod", [None, 5, 8])
def test_the_end_of_document_may_be_any_end_of_the_model(eod: int | None) -> None:
    tokenizer: Any = None if eod is None else SimpleNamespace(eod=eod)
    assert special_tokens(LLAMA_ORIGIN, tokenizer, 131) == (TOKENS, GENERATION, [])


@pytest.mark.parametrize("eod", [None, 7])
def test_a_model_without_settings_of_generation_keeps_its_ids(eod: int | None) -> None:
    tokenizer: Any = None if eod is None else SimpleNamespace(eod=eod)
    assert special_tokens(replace(LLAMA_ORIGIN, generation=None), tokenizer, 131) == (TOKENS, TOKENS, [])
    assert special_tokens(replace(LLAMA_ORIGIN, generation={}), tokenizer, 131) == (TOKENS, {}, [])


@pytest.mark.parametrize(
    ("known", "written"),
    [
        ({}, {"bos_token_id": 5, "eos_token_id": 5}),
        ({"bos_token_id": 3, "eos_token_id": None, "pad_token_id": None}, {"bos_token_id": 3, "eos_token_id": 5}),
    ],
)
def test_a_model_without_eos_ends_with_the_end_of_document(known: dict[str, Any], written: dict[str, Any]) -> None:
    tokenizer: Any = SimpleNamespace(eod=5)
    origin = replace(LLAMA_ORIGIN, generation=None, token_ids=known)
    assert special_tokens(origin, tokenizer, 131) == (known, written, [])


@pytest.mark.parametrize(("eod", "num_tokens"), [(6, 131), (5, 140)])
def test_other_tokens_are_not_those_of_the_model(eod: int, num_tokens: int) -> None:
    tokenizer: Any = SimpleNamespace(eod=eod)
    ids, generation, (note,) = special_tokens(LLAMA_ORIGIN, tokenizer, num_tokens)
    assert ids == {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": None}
    assert generation == {"bos_token_id": eod, "eos_token_id": eod}
    assert f"131 tokens with EOS [5, 7]; now {num_tokens} with {eod}" in note


@pytest.mark.parametrize(
    ("fields", "generation", "message"),
    [
        ({"eos_token_id": "</s>"}, None, "config.json: eos_token_id is '</s>' and no id"),
        ({"pad_token_id": True}, None, "pad_token_id is True and no id"),
        ({"bos_token_id": [1, None]}, None, r"bos_token_id is \[1, None\] and no id"),
        ({}, [1], "generation_config.json holds no JSON object"),
        ({}, {"temperature": float("inf")}, "generation_config.json cannot be read as JSON"),
    ],
)
def test_damaged_tokens_are_refused(fields: dict[str, Any], generation: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        there_and_back(tmp_path, LLAMA | fields, generation)
