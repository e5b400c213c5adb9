"""Quantization and dequantization of tensors by the rules of any recipe.

`quantize_for` quantizes a tensor for several uses at once. On a GPU with Triton it runs the kernels that
`triton_quantize.py` launches; elsewhere it runs torch operations, with the same results to the bit.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from typing import Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.quantization.counters import count_non_finite_on_device, count_saturated_on_device, count_values
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.nvfp4 import random_bytes
from megafp8.quantization.nvfp4_variants import draw_signs, eden_quantize, four_over_six_scales, transformed
from megafp8.quantization.quantized_tensor import Decoded, Quantized, Use, matrix_shape, sized_block
from megafp8.quantization.rounding import CODE_DTYPES, cast, codes_shape, decode
from megafp8.quantization.scaling import (
    FP32_MAX,
    Scales,
    current_scale_of,
    e8m0_scales,
    inspect_amax,
    inspect_block_amax,
    quant_scale_of,
    reduce_amax,
    tensor_scales,
    two_level_scales,
)
from megafp8.recipes.base import Block, OperandRule, ScaleRule
from megafp8.recipes.formats import Format

CHUNK_ELEMENTS = 1 << 18  # FP32 buffer of 1 MiB, about the L2 cache of a CPU core
VECTOR_ELEMENTS = 32  # BF16 elements of a CPU vector register; torch does not vectorize over shorter rows


@functools.lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels can replace torch operations on this tensor's device, with the same results."""
    return tensor.is_cuda and _has_triton()


# --- quantization -----------------------------------------------------------------------------------------------------


def quantize(
    tensor: Tensor,
    rule: OperandRule,
    group: Optional[dist.ProcessGroup] = None,
    delayed: Optional[DelayedScale] = None,
    generator: Optional[torch.Generator] = None,
) -> Quantized:
    """Quantize a tensor by one rule.

    Args:
        tensor: FP32, BF16 or FP16. Blocks divide it as [rows, columns], where all dims but the last are rows.
        rule: format, granularity and scale.
        group: ranks whose shards share the tensor's scale (MAX all-reduce of the amax); None is this rank alone. Block
            scales are never reduced, but the tensor scale of two-level scaling is.
        delayed: with delayed scaling, the scale to use; the tensor's amax is recorded in it.
        generator: with stochastic rounding, the generator of its random numbers, on the tensor's device.

    Numerics: codes = round(float32(x) * quant_scale), one FP32 product and one rounding (`rounding.cast`). A block at
    a ragged edge consists of the elements that exist.
    """
    (quantized,) = quantize_for(tensor, [Use(rule)], group, delayed, [generator])
    assert isinstance(quantized, Quantized)
    return quantized


def quantize_for(
    tensor: Tensor,
    uses: Sequence[Use],
    group: Optional[dist.ProcessGroup] = None,
    delayed: Optional[DelayedScale] = None,
    generators: Sequence[Optional[torch.Generator]] = (),
    signs: Optional[Tensor] = None,
    counts: Sequence[Tensor] = (),
) -> list[Union[Quantized, Decoded]]:
    """Quantize a tensor for all its uses at once; uses under one rule share the codes.

    Args:
        generators: one for each use, as for `quantize`; may be left out if no rule is stochastic.
        signs: of a Hadamard transform with random signs, shared by the operands of a GEMM; None draws them.
        counts: for each use, counts to which its non-finite and saturated values are added (`counters.py`); may be left
            out.

    Returns:
        for each use codes and scales, or decoded values.
    """
    generators = generators or (None,) * len(uses)
    for use, generator in zip(uses, generators, strict=True):
        assert use.rule.is_stochastic == (generator is not None), "stochastic rounding, and it alone, needs a generator"
    uses = [use._replace(rule=use.rule.for_shape(matrix_shape(tensor))) for use in uses]
    quantized: dict[OperandRule, Quantized] = {}
    if has_kernels(tensor):
        from megafp8.quantization import triton_quantize  # needs Triton

        if all(triton_quantize.has_row_scales(tensor, use.rule) for use in uses):
            quantized = triton_quantize.quantize_rowwise(tensor, [use.rule for use in uses], counts)
        elif all(triton_quantize.can_quantize(tensor, use.rule) for use in uses):
            return triton_quantize.quantize_for(tensor, uses, group, delayed, generators, counts)
        elif counts:
            count_non_finite_on_device(tensor, counts)
    results: dict[Use, Union[Quantized, Decoded]] = {}
    for use, generator in zip(uses, generators, strict=True):
        if use.rule not in quantized:
            of_rule = [count for other, count in zip(uses, counts, strict=False) if other.rule == use.rule]
            quantized[use.rule] = quantize_by_torch(tensor, use.rule, group, delayed, generator, signs, of_rule)
        if use not in results:
            codes = quantized[use.rule]
            results[use] = codes if use.dtype is None else decode_operand(codes, use.dtype)
    return [results[use] for use in uses]


def quantize_by_torch(
    tensor: Tensor,
    rule: OperandRule,
    group: Optional[dist.ProcessGroup] = None,
    delayed: Optional[DelayedScale] = None,
    generator: Optional[torch.Generator] = None,
    signs: Optional[Tensor] = None,
    counts: Sequence[Tensor] = (),
) -> Quantized:
    """`quantize` in torch operations, on any device; the rule's block is in numbers.

    Args:
        signs: as for `quantize_for`.
        counts: to which non-finite and saturated values are added; where there are Triton kernels, saturated ones only.
    """
    source = tensor.detach()
    rows = source.reshape(matrix_shape(source))
    if rule.scale_rule is ScaleRule.EDEN and signs is None:
        assert generator is not None
        signs = draw_signs(generator)
    if rule.block is None:
        (amax, is_suspect), is_narrow = inspect_amax(source), False
        scales = _tensor_scales(amax, rule, group, delayed)
        blocks = rows[:, None, None, :]
        codes = scale_and_cast(blocks, scales.quant, rule.format, generator)
    else:
        blocks = as_blocks(transformed(rows, rule, signs), sized_block(rule))
        amax, is_suspect, is_narrow = inspect_block_amax(blocks)
        codes, scales = _quantize_blocks(blocks, amax, rule, source.dtype, group, generator)
    if counts and has_kernels(source):
        count_saturated_on_device(blocks, scales.quant, rule, counts)
    elif counts:
        is_narrow &= group is None or group.size() == 1  # else the tensor's amax is that of other ranks too
        is_suspect |= rule.block is None and amax.item() == math.inf  # perhaps another rank's
        count_values(source, blocks, amax, scales, is_suspect, is_narrow, rule, counts)
    codes = codes[: rows.shape[0], : codes_shape(rows.shape, rule.format)[-1]]  # drop the padding of ragged edges
    codes = codes.reshape(codes_shape(source.shape, rule.format))
    return Quantized(codes, scales.dequant, scales.tensor, rule, signs if rule.scale_rule is ScaleRule.EDEN else None)


def _quantize_blocks(
    blocks: Tensor, amax: Tensor, rule: OperandRule, dtype: torch.dtype, group: Optional[dist.ProcessGroup],
    generator: Optional[torch.Generator],
) -> tuple[Tensor, Scales]:  # fmt: skip
    """Codes [rows, columns] and scales of blocks; `amax` and `dtype` as for `block_scales`."""
    if rule.scale_rule is ScaleRule.EDEN:
        assert generator is not None
        return eden_quantize(blocks, amax, _tensor_amax(amax, group), generator)
    if rule.scale_rule is ScaleRule.FOUR_OVER_SIX:
        scales = four_over_six_scales(blocks, amax, _tensor_amax(amax, group))
    else:
        scales = block_scales(amax, rule, dtype, group)
    return scale_and_cast(blocks, scales.quant[:, None, :, None], rule.format, generator), scales


def _tensor_amax(amax: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
    """The largest of the amaxes of a tensor's blocks on all ranks."""
    return reduce_amax(amax.amax() if amax.numel() else amax.new_zeros(()), group)


def _tensor_scales(
    amax: Tensor, rule: OperandRule, group: Optional[dist.ProcessGroup], delayed: Optional[DelayedScale]
) -> Scales:
    """The per-tensor scale, by current scaling or delayed scaling."""
    if rule.scale_rule is ScaleRule.DELAYED:
        assert delayed is not None, "delayed scaling has its scale from before"
        delayed.record(amax)
        return tensor_scales(delayed.quant_scale)
    return tensor_scales(current_scale_of(reduce_amax(amax, group), rule))


def block_scales(amax: Tensor, rule: OperandRule, dtype: torch.dtype, group: Optional[dist.ProcessGroup]) -> Scales:
    """Scales of blocks.

    Args:
        amax: FP32 [R, C], amaxes of the blocks.
        dtype: of the source tensor; an FP32 scale that overflows becomes the largest number of this type.
        group: ranks that share the tensor scale of two-level scaling.
    """
    if rule.scale_rule is ScaleRule.TWO_LEVEL:
        return two_level_scales(amax, _tensor_amax(amax, group))
    if rule.scale_rule is ScaleRule.E8M0:
        return e8m0_scales(amax, rule.format)
    if rule.scale_rule is ScaleRule.E8M0_FLOOR:
        return e8m0_scales(amax, rule.format, is_floor=True)
    on_overflow = min(torch.finfo(dtype).max, FP32_MAX)
    return tensor_scales(quant_scale_of(amax, rule.format, rule.scale_rule, on_overflow=on_overflow))


def as_blocks(rows: Tensor, block: Block) -> Tensor:
    """[rows, columns] as [R, rows of a block, C, columns of a block], padded with zeros at ragged edges."""
    padding = [-size % length for size, length in zip(rows.shape, block, strict=True)]
    if any(padding):
        rows = torch.nn.functional.pad(rows, (0, padding[1], 0, padding[0]))
    num_rows, num_columns = rows.shape
    return rows.contiguous().view(num_rows // block[0], block[0], num_columns // block[1], block[1])


def scale_and_cast(blocks: Tensor, quant_scale: Tensor, fmt: Format, generator: Optional[torch.Generator]) -> Tensor:
    """round(float32(x) * quant_scale) as [rows, columns].

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
    # A CPU works through one small FP32 buffer that stays in its cache; a GPU takes all blocks at once.
    step = len(blocks) if blocks.is_cuda else min(len(blocks), max(1, CHUNK_ELEMENTS // (height * width)))
    buffer = torch.empty(step * height * width, device=blocks.device)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        part_scale = quant_scale[start : start + step] if quant_scale.ndim else quant_scale
        scaled = buffer[: part.numel()].view(part.shape).copy_(part).mul_(part_scale)
        noise = None if generator is None else random_bytes(part.numel(), generator).view(-1, width)
        cast(scaled.view(-1, width), fmt, codes[start * height : (start + len(part)) * height], noise)
    return codes


# --- dequantization ---------------------------------------------------------------------------------------------------


def decode_operand(quantized: Quantized, dtype: torch.dtype) -> Decoded:
    """Decode a quantized tensor for a GEMM.

    Args:
        dtype: FP32, or BF16 where `rule.is_bf16_exact`. Both hold the values exactly, except that FP32 rounds the
            product of a code with an FP32 block scale.
    """
    return Decoded(decode_values(quantized, dtype), quantized.factor, quantized.rule)


def decode_values(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Codes times the scales of their blocks, without `factor`; as `decode_operand`."""
    if has_kernels(quantized.codes):
        from megafp8.quantization import triton_quantize  # needs Triton

        if triton_quantize.can_decode(quantized):
            return triton_quantize.decode(quantized, dtype)
    return decode_values_by_torch(quantized, dtype)


def decode_values_by_torch(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """`decode_values` in torch operations, on any device."""
    values = decode(quantized.codes, quantized.rule.format, dtype)
    if quantized.rule.block is not None:
        _multiply_blocks(values, quantized.dequant_scale.to(dtype), sized_block(quantized.rule))
    return values


def _multiply_blocks(values: Tensor, dequant_scale: Tensor, block: Block) -> None:
    """Multiply each block of `values` [..., columns] by its scale, in place."""
    rows = values.view(-1, values.shape[-1])
    if rows.shape[0] % block[0] or rows.shape[1] % block[1]:
        expanded = dequant_scale.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
        rows.mul_(expanded[: rows.shape[0], : rows.shape[1]])
        return
    if 1 < block[1] < VECTOR_ELEMENTS:
        dequant_scale, block = dequant_scale.repeat_interleave(block[1], dim=1), (block[0], 1)
    num_block_rows, num_block_columns = dequant_scale.shape
    rows.view(num_block_rows, block[0], num_block_columns, block[1]).mul_(dequant_scale[:, None, :, None])


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes x scales in FP32, rounded once to `dtype`."""
    use_bf16 = dtype == torch.bfloat16 and quantized.rule.is_bf16_exact
    values, factor = decode_values(quantized, torch.bfloat16 if use_bf16 else torch.float32), quantized.factor
    if factor is None:
        return values.to(dtype)
    if has_kernels(values):
        from megafp8.quantization import triton_quantize  # needs Triton

        return triton_quantize.finish_product(values, factor, None, dtype)
    if values.is_cuda:
        return values.float().mul_(factor).to(dtype)
    # torch multiplies BF16 by a Python number in FP32 and rounds the product once.
    return values.mul_(factor.item()).to(dtype)
