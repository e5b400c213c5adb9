"""Every family: its table against transformers' own model, both ways."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hf_folders import FAMILY_MODELS, GPT2, LLAMA, random_weights, same, settings_of, weights_in, write_hf_folder
from model_logits import cached_logits, in_a_rank, our_logits, their_logits
from tolerances import TRANSFORMERS_LOGITS

from megafp8.checkpoint.convert.families import FAMILIES, MODEL_TYPES, family_of_hf_config
from megafp8.checkpoint.convert.family import HF_EXPERT_BIAS
from megafp8.checkpoint.convert.from_huggingface import plan_import
from megafp8.checkpoint.convert.model_tensors import EXPERT_BIAS
from megafp8.checkpoint.convert.to_huggingface import ExportOptions, plan_export
from megafp8.config.model_shapes import count_parameters
from megafp8.errors import CheckpointError

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
ALL_MODELS = {"llama": LLAMA, "gpt2": GPT2} | FAMILY_MODELS


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """The library, with everything imported that forked ranks need."""
    library = importlib.import_module("transformers")
    assert all(getattr(library, family.architecture) for family in FAMILIES) and library.AutoModelForCausalLM
    return library


def test_every_family_has_a_model_here() -> None:
    assert {fields["model_type"] for fields in ALL_MODELS.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_an_import_and_its_export_are_bit_equal(name: str, tmp_path: Path) -> None:
    fields = FAMILY_MODELS[name]
    weights = random_weights(fields, torch.bfloat16)
    folder = write_hf_folder(tmp_path / "theirs", fields, weights)
    plan_import(folder).write(tmp_path / "ours", tmp_path / "ours", lambda done: None)
    (tmp_path / "back").mkdir()
    export = plan_export(tmp_path / "ours", ExportOptions(model_type=fields["model_type"]))
    export.write(tmp_path / "back", 1 << 30, lambda done: None)
    assert same(weights_in(tmp_path / "back"), weights)
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert back["model_type"] == fields["model_type"] and settings_of(back) == settings_of(fields)


@pytest.mark.parametrize(
    ("name", "layer", "parts"),
    [
        ("mixtral", 1, ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3")),
        ("qwen3_moe", 3, ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")),
    ],
)
def test_stacked_experts_are_read(name: str, layer: int, parts: tuple[str, str], tmp_path: Path) -> None:
    """Files with one tensor for all experts are those of transformers 5 with save_original_format=False."""
    weights = random_weights(FAMILY_MODELS[name], torch.bfloat16, is_stacked=True)
    folder = write_hf_folder(tmp_path / "theirs", FAMILY_MODELS[name], weights)
    plan_import(folder).write(tmp_path / "ours", tmp_path / "ours", lambda done: None)
    (tmp_path / "back").mkdir()
    plan_export(tmp_path / "ours", ExportOptions()).write(tmp_path / "back", 1 << 30, lambda done: None)
    back = weights_in(tmp_path / "back")
    for expert, both in enumerate(weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"]):
        for part, half in zip(parts, both.chunk(2), strict=True):
            assert torch.equal(back[f"model.layers.{layer}.{part.format(expert)}.weight"], half)


def test_layers_of_multi_token_prediction_are_dropped_only_on_request(tmp_path: Path) -> None:
    fields = FAMILY_MODELS["deepseek_v3"] | {"num_nextn_predict_layers": 1}
    weights = random_weights(fields, torch.bfloat16)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(4, 8), "model.layers.3.shared_head.norm.weight": torch.ones(4)}
    folder = write_hf_folder(tmp_path / "theirs", fields, weights | extra)
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers: 2 tensors .*layers\.3\.eh_proj"):
        plan_import(folder)
    plan = plan_import(folder, drops_prediction_layers=True)
    assert any("2 tensors of multi-token prediction are left out" in note for note in plan.notes)
    assert plan.sources.keys() == {row.name for row in plan.table}
    plain = write_hf_folder(tmp_path / "plain", fields, weights)
    with pytest.raises(CheckpointError, match="--drop-mtp-layers: there are no layers"):
        plan_import(plain, drops_prediction_layers=True)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_shared_experts_are_quantized_and_the_bias_is_not(name: str, tmp_path: Path) -> None:
    fields = FAMILY_MODELS[name]
    folder = write_hf_folder(tmp_path / "theirs", fields, random_weights(fields, torch.bfloat16))
    plan_import(folder).write(tmp_path / "ours", tmp_path / "ours", lambda done: None)
    export = plan_export(tmp_path / "ours", ExportOptions(quantizes=True, fp8_recipe="rowwise"))
    made = [batch.make() for batch in export.batches]
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in made]
    assert sizes == [batch.num_bytes for batch in export.batches]
    dtypes = {name: tensor.dtype for tensors in made for name, tensor in tensors.items()}
    layer = "model.layers.1."
    for linear in ("self_attn.kv_b_proj", "mlp.shared_experts.up_proj", "mlp.experts.7.down_proj"):
        assert dtypes[f"{layer}{linear}.weight"] == torch.float8_e4m3fn
    assert dtypes[f"{layer}mlp.gate.weight"] == torch.bfloat16
    assert dtypes.get(f"{layer}mlp.gate.e_score_correction_bias", torch.float32) == torch.float32


@pytest.mark.parametrize("name", ALL_MODELS)
def test_parameters_are_counted(name: str) -> None:
    model = settings_of(ALL_MODELS[name]).model
    table = family_of_hf_config(ALL_MODELS[name]).tensor_table(model, 131, 131)
    parameters = [row for row in table if not row.name.endswith(EXPERT_BIAS)]
    assert count_parameters(model, 131).total == sum(math.prod(row.shape) for row in parameters)


@needs_transformers
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_logits_equal_transformers(transformers: ModuleType, name: str, tmp_path: Path) -> None:
    fields = FAMILY_MODELS[name]
    folder = write_hf_folder(tmp_path / "theirs", fields, random_weights(fields, torch.float32))
    plan_import(folder).write(tmp_path / "ours", tmp_path / "ours", lambda done: None)
    theirs, ours = in_a_rank(their_logits, transformers, folder), in_a_rank(our_logits, tmp_path / "ours")
    assert theirs.std() > 0.1
    difference = (theirs - ours[..., : theirs.shape[-1]]).abs().max() / theirs.abs().max()
    assert difference < TRANSFORMERS_LOGITS, difference


@needs_transformers
@pytest.mark.parametrize("name", ALL_MODELS)
def test_names_and_shapes_equal_transformers(transformers: ModuleType, name: str) -> None:
    fields = ALL_MODELS[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**deepcopy(fields)))
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(HF_EXPERT_BIAS)]
    tensors = [*model.named_parameters(), *biases]
    theirs = {name.replace("embed_out.", "lm_head."): tuple(p.shape) for name, p in tensors}
    weights = random_weights(fields, torch.float32, is_stacked=True)
    assert {name.replace("embed_out.", "lm_head."): tuple(weight.shape) for name, weight in weights.items()} == theirs


@needs_transformers
@pytest.mark.parametrize("name", ALL_MODELS)
def test_absent_fields_have_the_defaults_of_transformers(transformers: ModuleType, name: str) -> None:
    """Files of transformers 5 have all fields, partly under other names. They give the same settings."""
    fields = ALL_MODELS[name]
    complete: dict[str, Any] = json.loads(transformers.AutoConfig.for_model(**deepcopy(fields)).to_json_string(False))
    assert "rope_theta" not in complete
    assert settings_of(complete) == settings_of(fields)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_neox", "olmo2", "qwen3_moe"])
def test_a_key_value_cache_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """Also with layers that have rotary embeddings, residual connections or norms of their own."""
    fields = FAMILY_MODELS[name]
    folder = write_hf_folder(tmp_path / "theirs", fields, random_weights(fields, torch.float32))
    plan_import(folder).write(tmp_path / "ours", tmp_path / "ours", lambda done: None)
    complete, cached = in_a_rank(our_logits, tmp_path / "ours"), in_a_rank(cached_logits, tmp_path / "ours")
    difference = (complete[0] - cached).abs().max() / complete.abs().max()
    assert difference < TRANSFORMERS_LOGITS, difference
