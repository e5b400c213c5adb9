"""Multi-latent attention without Transformer Engine: its linears, their recipes, their weights on every layout."""

from __future__ import annotations

import hashlib

import pytest
from ranks import run_ranks
from small_run import build_run, small_config, unwrap_model

from megafp8.config import flags, precision_map
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.mcore.latent_attention import DOWN_PROJECTION_EVIDENCE, NORMS_EVIDENCE
from megafp8.mcore.modules import named_linears
from megafp8.mcore.patches import core_folder, is_installed
from megafp8.models.initialization import sharded_parameters
from megafp8.models.layer_specs import EmulatedDownProjection

LATENT = (
    "--num-layers 2 --multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 16"
)
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
LINEARS = (
    "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1",
    "linear_fc2",
)  # fmt: skip


def latent_config(extra: str, world_size: int = 1) -> RunConfig:
    return small_config("latent", f"{LATENT} {extra}", world_size)


def recipe_names(config: RunConfig) -> dict[str, str]:
    chunk = build_run(config).training_state.chunks[0]
    linears = dict(named_linears(chunk))
    assert isinstance(linears["layers.0.linear_kv_down_proj"], EmulatedDownProjection)
    return {name: linear.recipe.name for name, linear in linears.items() if getattr(linear, "recipe", None)}


def test_every_linear_has_its_recipe() -> None:
    config = latent_config(f"{FP8} --precision layers.1.linear_kv_*=blockwise layers.1.linear_q_up_proj=bf16")
    expected = {f"layers.{layer}.{linear}": "tensorwise" for layer in range(2) for linear in LINEARS}
    expected |= dict.fromkeys(("layers.1.linear_kv_down_proj", "layers.1.linear_kv_up_proj"), "blockwise")
    del expected["layers.1.linear_q_up_proj"]
    assert run_ranks(1, recipe_names, config)[0] == expected
    assert precision_map.attention_linears(config.model) == LINEARS[:5]


def hashes(config: RunConfig) -> dict[str, str]:
    """The hash of every block of the weights, by key, offset and layer."""
    run = build_run(config)
    return {
        f"{block.key} {block.global_offset}": hashlib.sha256(block.data.detach().float().numpy().tobytes()).hexdigest()
        for chunk in unwrap_model(run.training_state.chunks)
        for block in sharded_parameters(chunk)
    }


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, TENSOR), (2, "--pipeline-model-parallel-size 2")], ids=["tp2", "pp2"]
)
def test_initial_weights_are_those_of_one_rank(world_size: int, layout: str) -> None:
    one = run_ranks(1, hashes, latent_config("--transformer-impl local --qk-layernorm"))[0]
    config = latent_config(f"--transformer-impl local --qk-layernorm {layout}", world_size)
    ranks = run_ranks(world_size, hashes, config)
    whole = [key for key in one if "down_proj" in key or "layer_norm" in key]
    assert len(whole) == 2 * 2 + 2 * 3, "down projections, and norms of compressed tensors and of the MLP"
    for key in whole:
        assert {rank[key] for rank in ranks if key in rank} == {one[key]}
    if "pipeline" in layout:
        assert {key: value for rank in ranks for key, value in rank.items()} == one


def test_norms_have_the_keys_of_transformer_engine() -> None:
    keys = run_ranks(1, hashes, latent_config("--transformer-impl local --qk-layernorm"))[0]
    names = {key.split(" ")[0].removeprefix("decoder.layers.") for key in keys}
    assert {"self_attention.linear_q_up_proj.layer_norm_weight", "input_layernorm.weight"} <= names
    assert "self_attention.linear_kv_up_proj.layer_norm_weight" in names


def test_queries_need_no_compression() -> None:
    model = flags.parse(["--multi-latent-attention"]).config.model
    assert precision_map.attention_linears(model) == (
        "linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"
    )  # fmt: skip


@pytest.mark.parametrize(("file", "text"), DOWN_PROJECTION_EVIDENCE)
def test_megatron_core_still_needs_the_class(file: str, text: str) -> None:
    assert text in (core_folder() / file).read_text(encoding="utf-8")


@pytest.mark.skipif(is_installed("<0.19"), reason="megatron-core 0.16 has no such file")
@pytest.mark.parametrize(("file", "text"), NORMS_EVIDENCE)
def test_megatron_core_still_replaces_norms(file: str, text: str) -> None:
    assert text in (core_folder() / file).read_text(encoding="utf-8")


def test_queries_that_are_not_compressed_have_no_norm() -> None:
    config = latent_config("--transformer-impl local --qk-layernorm")
    keys = run_ranks(1, hashes, with_values(config, {"model.q_lora_rank": None}))[0]
    norms = {key.split(" ")[0].rpartition("self_attention.")[2] for key in keys if "layer_norm" in key}
    assert norms & {"linear_q_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight"} == {
        "linear_kv_up_proj.layer_norm_weight"
    }
