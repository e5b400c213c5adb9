"""FP8 weights in the forms that others read (`recipes.base.ExportForm`): codes beside scales.

    recipe       config.json's quantization_config   scale beside `weight`                    read by
    blockwise    fp8, weight_block_size 128 x 128    `weight_scale_inv`, FP32, one a block    transformers, vLLM, SGLang
    rowwise      compressed-tensors, channel         `weight_scale`, FP32, one a row          transformers, vLLM
    tensorwise   compressed-tensors, tensor          `weight_scale`, FP32, one                transformers, vLLM

In all of them a weight is its codes (E4M3) times its scale, `weight_scale_inv` notwithstanding: it is the inverse of
what the weight was multiplied by. Blockwise is DeepSeek-V3's form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from megafp8.config.schema import PrecisionConfig
from megafp8.fp8.quantize import Quantized, dequantize, quantize
from megafp8.huggingface.table import Row
from megafp8.recipes import registry
from megafp8.recipes.base import WHOLE, Block, BlockShape, Gemm, Operand, OperandRule
from megafp8.recipes.formats import E4M3

IN_HIGH_PRECISION = ("lm_head",)


def scale_suffixes() -> tuple[str, ...]:
    """What can stand for `weight` in the names of scales."""
    forms = (recipe.export_form for recipe in registry.recipes())
    return tuple(dict.fromkeys(form.scale_suffix for form in forms if form is not None))


def recipes_without_blocks() -> tuple[str, ...]:
    """Recipes with a form that no weight is too uneven for."""
    return tuple(name for name in registry.with_export_form() if registry.get(name).block_length is None)


def recipe_of_run(precision: PrecisionConfig) -> str:
    """The form that is nearest to a run's own recipe."""
    if precision.fp8_format is None:
        return registry.DEFAULT_EXPORT
    recipe = registry.get(precision.fp8_recipe)
    return recipe.name if recipe.export_form is not None else recipe.exported_as or registry.DEFAULT_EXPORT


class WeightForm(NamedTuple):
    """How weights are written.

    Attributes:
        rule: quantizes them, as the recipe does it in the run, with the run's choice of scales.
        scale_suffix: follows a weight's name without `weight`.
    """

    rule: OperandRule
    scale_suffix: str

    def scale_name(self, name: str) -> str:
        """What the scale of a weight is called."""
        return name.removesuffix("weight") + self.scale_suffix

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a weight's scale."""
        block = self.rule.for_shape((shape[0], shape[1])).block
        if block is None:
            return (1,)
        return tuple(math.ceil(size / length) for size, length in zip(shape, block, strict=True))


def weight_form(precision: PrecisionConfig, recipe: str) -> WeightForm:
    """The form of a recipe of `registry.with_export_form`."""
    known = registry.get(recipe)
    rule = known.rules("e4m3", vars(precision)).rule(Operand.WEIGHT, Gemm.FPROP)
    assert rule is not None and known.export_form is not None
    return WeightForm(rule, known.export_form.scale_suffix)


def quantization_config(recipe: str, kept: Sequence[str]) -> dict[str, Any]:
    """What config.json says about the weights.

    Args:
        kept: modules in high precision, besides embedding and output layer.
    """
    form = registry.get(recipe).export_form
    assert form is not None, f"{recipe} has no form that others read"
    return {**form.quantization_config, form.excluded_key: [*IN_HIGH_PRECISION, *kept]}


def quantized_parts(row: Row, whole: Tensor, form: WeightForm) -> dict[str, Tensor]:
    """Codes and scales of a linear's weight under their names.

    A scale of a whole tensor is that of ours, which a layer's queries, keys and values share, as gate and up projection
    do. Blocks are those of each matrix there; they are the blocks of ours where no block of ours holds rows of two.
    """
    if form.rule.block is None:
        quantized = quantize(whole, form.rule)
        parts = row.layout.split(quantized.codes)
        scales: Sequence[Tensor] = [quantized.dequant_scale.reshape(1).clone() for _ in parts]
    else:
        each = [quantize(part, form.rule) for part in row.layout.split(whole)]
        parts, scales = [one.codes for one in each], [one.dequant_scale for one in each]
    named: dict[str, Tensor] = {}
    for name, codes, scale in zip(row.theirs, parts, scales, strict=True):
        named[name] = codes
        named[form.scale_name(name)] = scale
    return named


def ragged(rows: Sequence[Row], block: BlockShape) -> list[str]:
    """The weights there that end within a block, which is then mistaken: transformers divides a weight evenly."""

    def is_uneven(shape: Sequence[int]) -> bool:
        lengths = [(size, length) for size, length in zip(shape, block, strict=True) if length is not WHOLE]
        return any(size > length and size % length for size, length in lengths)

    return [
        f"{name} is {' x '.join(map(str, shape))}"
        for row in rows
        for name, shape in row.their_shapes().items()
        if is_uneven(shape)
    ]


def has_blocks_of_two(row: Row, block: BlockShape) -> bool:
    """Whether a block of our weight holds rows of two blocks of theirs."""
    height = row.shape[0] if block[0] is WHOLE else block[0]
    labels = [
        torch.arange(shape[0])[:, None] // height + index * row.shape[0]
        for index, shape in enumerate(row.their_shapes().values())
    ]
    return any(len(part.unique()) > 1 for part in row.layout.join(labels).split(height))


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
