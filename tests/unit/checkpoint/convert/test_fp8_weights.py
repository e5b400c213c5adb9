"""Exported FP8 weights have the codes and scales of the emulated layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_folders import FAMILY_MODELS, LLAMA, random_weights, settings_of, weights_in, write_hf_folder

from megafp8.checkpoint.convert import safetensors_files
from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.from_huggingface import plan_import
from megafp8.checkpoint.convert.tensor_mapping import TensorMapping
from megafp8.checkpoint.convert.to_huggingface import ExportOptions, plan_export
from megafp8.checkpoint.standalone import CheckpointTensors
from megafp8.config.precision_map import build_recipe
from megafp8.config.schema import PrecisionConfig
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.recipes.base import Gemm, Operand

# Heads of 128 channels and an MLP of 128: our blocks equal those of transformers.
ALIGNED = LLAMA | {
    "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128,
    "num_hidden_layers": 1,
}  # fmt: skip
RAGGED = LLAMA | {"num_hidden_layers": 1}
OF_RUN = {
    "tensorwise": PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="tensorwise"),
    "blockwise": PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="blockwise"),
}


def linears(fields: dict) -> list[TensorMapping]:
    model = replace(settings_of(fields).model, vocab_size=131)
    return [row for row in llama.LLAMA.tensor_table(model, 131, 256) if row.is_linear]


def weight_of(row: TensorMapping) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(row.name))
    rows = torch.exp2(torch.randint(-12, 4, (row.shape[0], 1), generator=generator).float())
    return (rows * torch.randn(row.shape, generator=generator)).bfloat16()


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("fields", [ALIGNED, RAGGED], ids=["aligned", "ragged"])
def test_exported_weights_equal_the_emulated_operands(recipe: str, fields: dict) -> None:
    built = build_recipe(OF_RUN[recipe])
    form = safetensors_files.weight_form(OF_RUN[recipe], recipe)
    for row in linears(fields):
        whole = weight_of(row)
        emulated = dequantize(quantize(whole, built.rule(Operand.WEIGHT, Gemm.FPROP)), torch.bfloat16)
        parts = safetensors_files.quantize_weight(row, whole, form)
        joined = []
        for name, shape in row.hf_shapes().items():
            codes, scale = parts.pop(name), parts.pop(form.scale_name(name))
            assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert tuple(codes.shape) == shape and tuple(scale.shape) == form.scale_shape(shape)
            block = safetensors_files.scale_block(codes.shape, scale.shape, [128, 128])
            joined.append(safetensors_files.dequantize_weight(codes, scale, block, torch.bfloat16))
        assert parts == {}
        is_same = torch.equal(row.layout.join(joined), emulated)
        has_other_blocks = form.rule.block is not None and safetensors_files.has_blocks_across_matrices(
            row, form.rule.block
        )
        assert is_same or has_other_blocks
        assert not (fields is ALIGNED and has_other_blocks)


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_each_expert_has_scales_of_its_own(recipe: str, tmp_path: Path) -> None:
    fields = FAMILY_MODELS["mixtral"] | {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    weights = random_weights(fields, torch.bfloat16)
    plan_import(write_hf_folder(tmp_path / "theirs", fields, weights)).write(
        tmp_path / "ours", tmp_path / "ours", lambda done: None
    )
    (tmp_path / "fp8").mkdir()
    export = plan_export(tmp_path / "ours", ExportOptions(quantizes=True, fp8_recipe=recipe))
    export.write(tmp_path / "fp8", 1 << 30, lambda done: None)
    found, rule = weights_in(tmp_path / "fp8"), build_recipe(OF_RUN[recipe]).rule(Operand.WEIGHT, Gemm.FPROP)
    block = "model.layers.0.block_sparse_moe"
    assert found[f"{block}.gate.weight"].dtype == torch.bfloat16
    assert any(f"{block}.gate" in excluded for excluded in export.fields["quantization_config"].values() if excluded)
    plan_import(tmp_path / "fp8").write(tmp_path / "back", tmp_path / "back", lambda done: None)
    stacked = {path: CheckpointTensors(tmp_path / path / "iter_0000000") for path in ("ours", "back")}
    for linear in ("linear_fc1", "linear_fc2"):
        name = f"decoder.layers.0.mlp.experts.experts.{linear}.weight"
        for expert, back in zip(*(stacked[path].load(name) for path in ("ours", "back")), strict=True):
            assert torch.equal(dequantize(quantize(expert, rule), torch.bfloat16), back)


def test_blocks_with_rows_of_two_matrices_are_found() -> None:
    found = {
        row.name.split(".", 3)[3]: safetensors_files.has_blocks_across_matrices(row, (128, 128))
        for row in linears(RAGGED)
    }
    assert found == {
        "self_attention.linear_qkv.weight": True,
        "self_attention.linear_proj.weight": False,
        "mlp.linear_fc1.weight": True,
        "mlp.linear_fc2.weight": False,
    }


def test_weights_that_end_within_a_block_are_found() -> None:
    assert safetensors_files.uneven_weights(linears(ALIGNED), (128, 128)) == []
    assert safetensors_files.uneven_weights(linears(ALIGNED | {"intermediate_size": 192}), (128, 128)) == [
        "model.layers.0.mlp.gate_proj.weight is 192 x 256",
        "model.layers.0.mlp.up_proj.weight is 192 x 256",
        "model.layers.0.mlp.down_proj.weight is 256 x 192",
    ]
    assert safetensors_files.uneven_weights(linears(RAGGED), (128, 128)) == []  # less than a block is one block


@pytest.mark.parametrize("block", [None, (1, 300), (128, 128)])
def test_scales_multiply_their_part(block: tuple[int, int] | None) -> None:
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    shape = {None: (1,), (1, 300): (200, 1), (128, 128): (2, 3)}[block]
    scale = torch.rand(shape) + 0.5
    assert safetensors_files.scale_block(codes.shape, shape, [128, 128]) == block
    plain = torch.empty(200, 300)
    for row in range(200):
        for first in range(0, 300, 128):
            one = scale[0] if block is None else scale[row, 0] if block[0] == 1 else scale[row // 128, first // 128]
            plain[row, first : first + 128] = codes[row, first : first + 128].float() * one
    assert torch.equal(safetensors_files.dequantize_weight(codes, scale, block, torch.float32), plain)
    assert torch.equal(safetensors_files.dequantize_weight(codes, scale, block, torch.bfloat16), plain.bfloat16())


@pytest.mark.parametrize("block_size", [None, [64, 64], "128", [128], [128, 0]])
def test_scales_of_a_wrong_shape_are_refused(block_size: object) -> None:
    assert "do not fit" in safetensors_files.scale_block((200, 300), (2, 3), block_size)


def test_the_export_form_follows_the_recipe() -> None:
    assert safetensors_files.default_export_recipe(PrecisionConfig()) == "blockwise"
    assert (
        safetensors_files.default_export_recipe(PrecisionConfig(fp8_format="hybrid", fp8_recipe="delayed"))
        == "tensorwise"
    )
    assert (
        safetensors_files.default_export_recipe(PrecisionConfig(fp8_format="hybrid", fp8_recipe="mxfp8")) == "blockwise"
    )


def test_scales_follow_the_settings_of_the_run() -> None:
    weight = weight_of(linears(ALIGNED)[0])
    for recipe, choice in (("tensorwise", "fp8_power_2_scale"), ("blockwise", "fp8_block_scaling_fp32_scales")):
        settings = [replace(OF_RUN[recipe], **{choice: value}) for value in (False, True)]
        rules = [safetensors_files.weight_form(each, recipe).rule for each in settings]
        scales = [quantize(weight, rule).dequant_scale for rule in rules]
        is_power = [bool((scale.log2() % 1 == 0).all()) for scale in scales]
        assert is_power == ([False, True] if recipe == "tensorwise" else [True, False])
