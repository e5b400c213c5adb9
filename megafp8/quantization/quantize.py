"""High precision to codes and scales, and back: the one path that all recipes take."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.nvfp4 import random_bytes, transform_columns
from megafp8.quantization.rounding import CODE_DTYPES, cast, codes_shape, decode
from megafp8.quantization.scaling import (
    FP32_MAX,
    Scales,
    amax,
    block_amax,
    e8m0_scales,
    quant_scale_of,
    reduce_amax,
    tensor_scales,
    two_level_scales,
)
from megafp8.recipes.base import Block, OperandRule, ScaleRule
from megafp8.recipes.formats import Format

CHUNK_ELEMENTS = 1 << 18  # an FP32 buffer of 1 MiB: about a core's own cache, whatever the size of the tensor

VECTOR_ELEMENTS = 32  # of BF16 in a CPU's register; shorter rows, torch multiplies one element at a time


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor: value = codes x dequant_scale of their block x tensor_scale.

    Attributes:
        codes: the payload, in the shape of the tensor it came from; `.view(torch.uint8)` is its bytes.
        dequant_scale: FP32 scalar, or with blocks FP32, E8M0 or E4M3 [ceil(rows / block rows), ceil(columns / block
            columns)].
        tensor_scale: with two levels of scales, the FP32 scalar above those of the blocks; else None, which is 1.
        rule: by which it was quantized, its block in numbers.
    """

    codes: Tensor
    dequant_scale: Tensor
    tensor_scale: Optional[Tensor]
    rule: OperandRule

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """All but the rule, in order: what is saved for the backward pass."""
        return self.codes, self.dequant_scale, self.tensor_scale

    def operand(self, dtype: torch.dtype) -> Tensor:
        """What a GEMM multiplies: the codes as numbers, with the scales of their blocks but without `factor`.

        Args:
            dtype: FP32, or BF16 where `rule.is_bf16_exact`; either holds the numbers exactly, unless scales are FP32
                and blocks share them: then FP32 rounds the product.
        """
        if has_kernels(self.codes):
            from megafp8.quantization import triton_quantize  # needs Triton

            if triton_quantize.can_decode(self):
                return triton_quantize.decode(self, dtype)
        return self.operand_by_torch(dtype)

    def operand_by_torch(self, dtype: torch.dtype) -> Tensor:
        """`operand` in torch operations, on any device."""
        values = decode(self.codes, self.rule.format, dtype)
        if self.rule.block is not None:
            _multiply_blocks(values, self.dequant_scale.to(dtype), self.rule.block)
        return values

    @property
    def factor(self) -> Optional[Tensor]:
        """The FP32 scalar that is left to multiply a GEMM's result with; None is 1."""
        return self.dequant_scale if self.rule.block is None else self.tensor_scale


class Decoded(NamedTuple):
    """A quantized operand as numbers: `values` times `factor`, by the rule.

    Attributes:
        values: codes with the scales of their blocks, in the type that a GEMM multiplies.
        factor: FP32 scalar that is left to multiply the GEMM's result with; None is 1.
    """

    values: Tensor
    factor: Optional[Tensor]
    rule: OperandRule


class Use(NamedTuple):
    """What a tensor is quantized for.

    Attributes:
        dtype: of the numbers that a GEMM multiplies at once (see `Quantized.operand`); None keeps codes and scales.
    """

    rule: OperandRule
    dtype: Optional[torch.dtype] = None


def decode_operand(quantized: Quantized, dtype: torch.dtype) -> Decoded:
    """The numbers that a GEMM multiplies, from what was kept."""
    return Decoded(quantized.operand(dtype), quantized.factor, quantized.rule)


def quantize_for(
    tensor: Tensor,
    uses: Sequence[Use],
    group: Optional[dist.ProcessGroup] = None,
    delayed: Optional[DelayedScale] = None,
    generators: Sequence[Optional[torch.Generator]] = (),
) -> list[Union[Quantized, Decoded]]:
    """Quantize a tensor for all its uses at once; uses under one rule share the codes.

    Args:
        uses: rules, and whether codes or numbers are wanted.
        generators: one a use, as for `quantize`; none at all if no rule is stochastic.

    Returns:
        for each use its codes and scales, or its numbers.
    """
    generators = generators or (None,) * len(uses)
    for use, generator in zip(uses, generators, strict=True):
        assert use.rule.is_stochastic == (generator is not None), "stochastic rounding, and it alone, needs a generator"
    uses = [use._replace(rule=use.rule.for_shape(matrix_shape(tensor))) for use in uses]
    if has_kernels(tensor):
        from megafp8.quantization import triton_quantize  # needs Triton

        if all(triton_quantize.can_quantize(tensor, use.rule) for use in uses):
            return triton_quantize.quantize_for(tensor, uses, group, delayed, generators)
    known: dict[OperandRule, Quantized] = {}
    results: dict[Use, Union[Quantized, Decoded]] = {}
    for use, generator in zip(uses, generators, strict=True):
        if use.rule not in known:
            known[use.rule] = quantize_by_torch(tensor, use.rule, group, delayed, generator)
        if use not in results:
            quantized = known[use.rule]
            results[use] = quantized if use.dtype is None else decode_operand(quantized, use.dtype)
    return [results[use] for use in uses]


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """(rows, columns) of a tensor whose dims but the last are rows."""
    columns = tensor.shape[-1] if tensor.ndim else 1
    return math.prod(tensor.shape[:-1]), columns


@functools.lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_kernels(tensor: Tensor) -> bool:
    """Is there a faster way than torch operations, with the same results?"""
    return tensor.is_cuda and _has_triton()


def quantize(
    tensor: Tensor,
    rule: OperandRule,
    group: Optional[dist.ProcessGroup] = None,
    delayed: Optional[DelayedScale] = None,
    generator: Optional[torch.Generator] = None,
) -> Quantized:
    """Quantize a tensor by one rule.

    Args:
        tensor: FP32, BF16 or FP16. Blocks divide it as [rows, columns], all dims but the last being rows.
        rule: format, granularity and scale.
        group: ranks whose shards share the tensor's scale (MAX all-reduce of the amax); None: this rank's own. Blocks
            have scales of their own, which in the two-level rule are relative to the tensor's.
        delayed: with delayed scaling, the scale to use; it takes note of the tensor's amax.
        generator: with stochastic rounding, where its random numbers come from; on the tensor's device.

    Returns:
        codes of the same shape and their scales.

    Numerics: codes = round(float32(x) * quant_scale), one FP32 product, then one rounding as in `rounding.cast`. Blocks
    at a ragged edge are what is there of them.
    """
    (quantized,) = quantize_for(tensor, [Use(rule)], group, delayed, [generator])
    return quantized


def quantize_by_torch(
    tensor: Tensor,
    rule: OperandRule,
    group: Optional[dist.ProcessGroup] = None,
    delayed: Optional[DelayedScale] = None,
    generator: Optional[torch.Generator] = None,
) -> Quantized:
    """`quantize` in torch operations, on any device."""
    source = tensor.detach()
    rows = source.reshape(matrix_shape(source))
    if rule.block is None:
        scales = _tensor_scales(source, rule, group, delayed)
        blocks, quant_scale = rows[:, None, None, :], scales.quant
    else:
        blocks = as_blocks(transform_columns(rows) if rule.is_transformed else rows, rule.block)
        scales = block_scales(block_amax(blocks), rule, source.dtype, group)
        quant_scale = scales.quant[:, None, :, None]
    codes = scale_and_cast(blocks, quant_scale, rule.format, generator)
    codes = codes[: rows.shape[0], : codes_shape(rows.shape, rule.format)[-1]]  # without what was padded
    return Quantized(codes.reshape(codes_shape(source.shape, rule.format)), scales.dequant, scales.tensor, rule)


def _tensor_scales(
    tensor: Tensor, rule: OperandRule, group: Optional[dist.ProcessGroup], delayed: Optional[DelayedScale]
) -> Scales:
    """The one scale of a whole tensor."""
    largest = amax(tensor)
    if rule.scale_rule is ScaleRule.DELAYED:
        assert delayed is not None, "delayed scaling has its scale from before"
        delayed.note(largest)
        return tensor_scales(delayed.quant)
    return tensor_scales(quant_scale_of(reduce_amax(largest, group), rule.format, rule.scale_rule))


def block_scales(largest: Tensor, rule: OperandRule, dtype: torch.dtype, group: Optional[dist.ProcessGroup]) -> Scales:
    """Scales of blocks with these amaxes; where one overflows, it becomes the largest number of the input's type."""
    if rule.scale_rule is ScaleRule.TWO_LEVEL:
        of_tensor = largest.amax() if largest.numel() else largest.new_zeros(())
        return two_level_scales(largest, reduce_amax(of_tensor, group))
    if rule.scale_rule is ScaleRule.E8M0:
        return e8m0_scales(largest, rule.format)
    on_overflow = min(torch.finfo(dtype).max, FP32_MAX)
    return tensor_scales(quant_scale_of(largest, rule.format, rule.scale_rule, on_overflow=on_overflow))


def as_blocks(rows: Tensor, block: Block) -> Tensor:
    """[rows, columns] as [R, rows of a block, C, columns of a block], filled up with zeros at ragged edges."""
    padding = [-size % length for size, length in zip(rows.shape, block, strict=True)]
    if any(padding):
        rows = torch.nn.functional.pad(rows, (0, padding[1], 0, padding[0]))
    num_blocks = [size // length for size, length in zip(rows.shape, block, strict=True)]
    return rows.contiguous().view(num_blocks[0], block[0], num_blocks[1], block[1])


def scale_and_cast(blocks: Tensor, quant_scale: Tensor, fmt: Format, generator: Optional[torch.Generator]) -> Tensor:
    """round(float32(x) * quant_scale) as [rows, columns]; on a CPU part by part through one small FP32 buffer.

    Args:
        blocks: [R, r, C, c].
        quant_scale: FP32, scalar or [R, 1, C, 1].
        generator: for stochastic rounding; None rounds to nearest.
    """
    height, width = blocks.shape[1], blocks.shape[2] * blocks.shape[3]
    shape = codes_shape(torch.Size((blocks.shape[0] * height, width)), fmt)
    codes = torch.empty(shape, dtype=CODE_DTYPES[fmt.name], device=blocks.device)
    if not blocks.numel():
        return codes
    step = len(blocks) if blocks.is_cuda else min(len(blocks), max(1, CHUNK_ELEMENTS // (height * width)))
    buffer = torch.empty(step * height * width, device=blocks.device)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        scale = quant_scale[start : start + step] if quant_scale.ndim else quant_scale
        scaled = buffer[: part.numel()].view(part.shape).copy_(part).mul_(scale)
        noise = None if generator is None else random_bytes(part.numel(), generator).view(-1, width)
        cast(scaled.view(-1, width), fmt, codes[start * height : (start + len(part)) * height], noise)
    return codes


def _multiply_blocks(values: Tensor, scale: Tensor, block: Block) -> None:
    """Multiply each block of `values` [..., columns] by its scale, in place."""
    rows = values.view(-1, values.shape[-1])
    if rows.shape[0] % block[0] or rows.shape[1] % block[1]:
        whole = scale.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
        rows.mul_(whole[: rows.shape[0], : rows.shape[1]])
        return
    if 1 < block[1] < VECTOR_ELEMENTS:
        scale, block = scale.repeat_interleave(block[1], dim=1), (block[0], 1)
    rows.view(scale.shape[0], block[0], scale.shape[1], block[1]).mul_(scale[:, None, :, None])


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes x scales in FP32, rounded to `dtype`."""
    is_short = dtype == torch.bfloat16 and quantized.rule.is_bf16_exact
    values, factor = quantized.operand(torch.bfloat16 if is_short else torch.float32), quantized.factor
    if factor is None:
        return values.to(dtype)
    if has_kernels(values):
        from megafp8.quantization import triton_quantize  # needs Triton

        return triton_quantize.finish_product(values, factor, None, dtype)
    if values.is_cuda:
        return values.float().mul_(factor).to(dtype)
    return values.mul_(factor.item()).to(dtype)  # torch multiplies BF16 by a number in FP32, and rounds that
