"""FP8 weights in the two forms that others read: codes beside scales.

    recipe       config.json's quantization_config   scale beside `weight`                    read by
    blockwise    fp8, weight_block_size 128 x 128    `weight_scale_inv`, FP32, one a block    transformers, vLLM, SGLang
    tensorwise   compressed-tensors, float-quantized `weight_scale`, FP32, one                transformers, vLLM

In both a weight is its codes (E4M3) times its scale, `weight_scale_inv` notwithstanding: it is the inverse of what the
weight was multiplied by. Blockwise is DeepSeek-V3's form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor

from megafp8.config.schema import PrecisionConfig
from megafp8.fp8.formats import E4M3
from megafp8.fp8.quantize import Quantized, dequantize, quantize
from megafp8.fp8.recipes import Block, Gemm, Operand, OperandRule, build_recipe
from megafp8.huggingface.table import Row

RECIPES = ("blockwise", "tensorwise")
SCALE_NAMES = {"blockwise": "weight_scale_inv", "tensorwise": "weight_scale"}
IN_HIGH_PRECISION = ("lm_head",)


def recipe_of_run(precision: PrecisionConfig) -> str:
    """The form that is nearest to a run's own recipe."""
    is_per_tensor = precision.fp8_format is not None and precision.fp8_recipe in ("tensorwise", "delayed")
    return "tensorwise" if is_per_tensor else "blockwise"


def weight_rule(precision: PrecisionConfig, recipe: str) -> OperandRule:
    """How a weight is quantized: as the recipe does it in the run, with the run's choice of scales."""
    built = build_recipe(replace(precision, fp8_format="e4m3", fp8_recipe=recipe, fp4_format=None))
    assert built is not None
    rule = built.rule(Operand.WEIGHT, Gemm.FPROP)
    assert rule is not None
    return rule


def quantization_config(recipe: str, kept: Sequence[str]) -> dict[str, Any]:
    """What config.json says about the weights.

    Args:
        kept: modules in high precision, besides embedding and output layer.
    """
    kept = [*IN_HIGH_PRECISION, *kept]
    if recipe == "blockwise":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": kept,
        }
    numbers = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"dynamic": False},
        "input_activations": numbers | {"dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
    }


def quantized_parts(row: Row, whole: Tensor, rule: OperandRule) -> dict[str, Tensor]:
    """Codes and scales of a linear's weight under their names.

    A scale of a whole tensor is that of ours, which a layer's queries, keys and values share, as gate and up projection
    do. Blocks are those of each matrix there; they are the blocks of ours where no block of ours holds rows of two.
    """
    if rule.block is None:
        quantized = quantize(whole, rule)
        parts = row.layout.split(quantized.codes)
        scales: Sequence[Tensor] = [quantized.dequant_scale.reshape(1).clone() for _ in parts]
    else:
        each = [quantize(part, rule) for part in row.layout.split(whole)]
        parts, scales = [one.codes for one in each], [one.dequant_scale for one in each]
    named: dict[str, Tensor] = {}
    for name, codes, scale in zip(row.theirs, parts, scales, strict=True):
        named[name] = codes
        named[scale_name(name, rule)] = scale
    return named


def scale_name(name: str, rule: OperandRule) -> str:
    """What the scale of a weight is called."""
    return name.removesuffix("weight") + SCALE_NAMES["tensorwise" if rule.block is None else "blockwise"]


def scale_shape(shape: Sequence[int], rule: OperandRule) -> tuple[int, ...]:
    """The shape of a weight's scale."""
    if rule.block is None:
        return (1,)
    return tuple(math.ceil(size / length) for size, length in zip(shape, rule.block, strict=True))


def ragged(rows: Sequence[Row], block: Block) -> list[str]:
    """The weights there that end within a block, which is then mistaken: transformers divides a weight evenly."""
    return [
        f"{name} is {' x '.join(map(str, shape))}"
        for row in rows
        for name, shape in row.their_shapes().items()
        if any(size > length and size % length for size, length in zip(shape, block, strict=True))
    ]


def has_blocks_of_two(row: Row, block: Block) -> bool:
    """Whether a block of our weight holds rows of two blocks of theirs."""
    labels = [
        torch.arange(shape[0])[:, None] // block[0] + index * row.shape[0]
        for index, shape in enumerate(row.their_shapes().values())
    ]
    return any(len(part.unique()) > 1 for part in row.layout.join(labels).split(block[0]))


def dequantized(codes: Tensor, scale: Tensor, block: Optional[Block], dtype: torch.dtype) -> Tensor:
    """codes x scale in FP32, rounded to `dtype`.

    Args:
        block: that shares a scale; None is the whole tensor.
    """
    scale = scale.float()
    rule = OperandRule(format=E4M3, block=block)
    return dequantize(Quantized(codes, scale.reshape(()) if block is None else scale, None, rule), dtype)


def block_of(shape: Sequence[int], scale: Sequence[int], block_size: Any) -> Block | str | None:
    """What part of a weight shares a scale, from the shapes; None is all of it, and a text what is wrong.

    Args:
        block_size: of the quantization_config, where it has one.
    """
    if math.prod(scale) == 1:
        return None
    if tuple(scale) == (shape[0], 1):
        return (1, shape[1])
    if isinstance(block_size, list) and len(block_size) == 2 and all(isinstance(n, int) and n > 0 for n in block_size):
        block = (block_size[0], block_size[1])
        if tuple(scale) == tuple(math.ceil(size / length) for size, length in zip(shape, block, strict=True)):
            return block
    return f"scales {tuple(scale)} do not fit a weight {tuple(shape)} in blocks of {block_size}"
