"""Quantization on a GPU in as few passes over memory as its data flow allows.

A tensor is read once for all its uses, after one more read for its amax where the scale of the whole tensor comes from
it. Each use gets codes and scales, or the values that its GEMM multiplies, which then are the only thing written. Codes
and scales are byte for byte those of the torch operations in `quantize.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.kernels import rowwise
from megafp8.kernels.quantize import (
    amax_kernel,
    decode_blocks_kernel,
    decode_tensor_kernel,
    finish_product_kernel,
    quantize_blocks_kernel,
    quantize_tensor_kernel,
    transformed_amax_kernel,
)
from megafp8.kernels.rounding import grid_of
from megafp8.kernels.tiles import has_complete_tiles
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.nvfp4 import SIZE, check_groups, random_bytes, transform_matrix
from megafp8.quantization.quantize import Decoded, Quantized, Use, decode_operand, matrix_shape
from megafp8.quantization.rounding import CODE_DTYPES, codes_shape
from megafp8.quantization.scaling import FP32_MAX, reduce_amax
from megafp8.recipes.base import Block, OperandRule, ScaleRule
from megafp8.recipes.formats import E4M3

PART = 4096  # elements of a program, where there are no blocks
AMAX_PROGRAMS = 1024
TILINGS = {16: (4, 1), 32: (2, 1), 64: (1, 4), 128: (1, 16)}  # length of a block to squares of a tile and warps
SCALE_DTYPES = {ScaleRule.E8M0: torch.float8_e8m0fnu, ScaleRule.TWO_LEVEL: torch.float8_e4m3fn}
RULE_NAMES = {
    ScaleRule.FP32: "fp32",
    ScaleRule.POWER_OF_TWO: "power_of_two",
    ScaleRule.E8M0: "e8m0",
    ScaleRule.TWO_LEVEL: "two_level",
}


def can_quantize(tensor: Tensor, rule: OperandRule) -> bool:
    """Do the kernels have this rule for this tensor? If not, torch operations do."""
    if not tensor.numel():
        return False
    if rule.block is None:
        return rule.format.codes_per_byte == 1
    if has_whole_dimension(tensor, rule):
        return True
    if rule.is_transformed and (rule.block != (SIZE, 1) or tensor.dtype != torch.bfloat16):
        return False
    return _is_known(rule.block)


def can_decode(quantized: Quantized) -> bool:
    """Do the kernels decode this? If not, torch operations do."""
    rule = quantized.rule
    is_known = rule.format.codes_per_byte == 1 if rule.block is None else _is_known(rule.block)
    return is_known and quantized.codes.numel() > 0 and quantized.codes.is_contiguous()


def _is_known(block: Block) -> bool:
    """Rows, columns or squares of a length that is used?"""
    return max(block) in TILINGS and min(block) in (1, max(block))


@dataclass
class RuleOutputs:
    """What is made of a tensor by one rule; None is not wanted, or not there by this rule.

    Attributes:
        codes: uint8.
        scales: of the blocks, in the type in which they are kept.
        values: decoded codes.
        factor: FP32 scalar, of the whole tensor.
        noise: random bytes, one an element, ragged blocks filled up.
    """

    rule: OperandRule
    codes: Optional[Tensor] = None
    scales: Optional[Tensor] = None
    values: Optional[Tensor] = None
    factor: Optional[Tensor] = None
    noise: Optional[Tensor] = None

    def of_use(self, use: Use) -> Union[Quantized, Decoded]:
        """The result for one use."""
        if use.dtype is not None:
            return Decoded(self.values, self.factor, self.rule)
        codes = self.codes.view(CODE_DTYPES[self.rule.format.name])
        if self.rule.block is None:
            return Quantized(codes, self.factor, None, self.rule)
        return Quantized(codes, self.scales, self.factor, self.rule)


def quantize_for(
    tensor: Tensor,
    uses: Sequence[Use],
    group: Optional[dist.ProcessGroup] = None,
    delayed: Optional[DelayedScale] = None,
    generators: Sequence[Optional[torch.Generator]] = (),
) -> list[Union[Quantized, Decoded]]:
    """`quantize.quantize_for`, where `can_quantize` says so for every rule."""
    source = tensor.detach().contiguous()
    if all(has_whole_dimension(source, use.rule) for use in uses):
        return _quantize_dimensions(source, uses)
    parts: dict[OperandRule, RuleOutputs] = {}
    for index, use in enumerate(uses):
        part = parts.setdefault(use.rule, RuleOutputs(use.rule))
        _prepare(part, source, use, generators[index] if generators else None)
    for part in parts.values():
        if part.rule.block is None:
            _quantize_tensor(source, part, group, delayed)
    wanted = [part for part in parts.values() if part.rule.block is not None]
    if len(wanted) == 2 and _share_a_read(*wanted):
        _quantize_blocks(source, *sorted(wanted, key=lambda part: _is_tall(part.rule)), group)
    else:
        for part in wanted:
            _quantize_blocks(source, *((None, part) if _is_tall(part.rule) else (part, None)), group)
    return [parts[use.rule].of_use(use) for use in uses]


def has_whole_dimension(tensor: Tensor, rule: OperandRule) -> bool:
    """Does a scale belong to a whole row or column, in a tensor and by a rule that `row_kernels` have?"""
    shape = matrix_shape(tensor)
    is_known = rule.block in ((1, shape[1]), (shape[0], 1)) and has_complete_tiles(*shape)
    has_scale = rule.scale_rule in (ScaleRule.FP32, ScaleRule.POWER_OF_TWO)
    return is_known and has_scale and rule.format.codes_per_byte == 1 and not rule.is_stochastic


def _quantize_dimensions(source: Tensor, uses: Sequence[Use]) -> list[Union[Quantized, Decoded]]:
    """Codes by rows' and by columns' scales in two launches; those by columns lie by columns in memory."""
    shape = matrix_shape(source)
    found: dict[OperandRule, Quantized] = {}
    for kind in dict.fromkeys((use.rule.format, use.rule.scale_rule) for use in uses):
        rules = {use.rule.block: use.rule for use in uses if (use.rule.format, use.rule.scale_rule) == kind}
        by_row, by_column = rowwise.cast(
            source.view(shape), grid_of(kind[0]), rows=(1, shape[1]) in rules, columns=(shape[0], 1) in rules,
            is_power_of_two=kind[1] is ScaleRule.POWER_OF_TWO,
        )  # fmt: skip
        dtype = CODE_DTYPES[kind[0].name]
        if by_row is not None:
            codes = by_row.codes.view(dtype).view(source.shape)
            rule = rules[(1, shape[1])]
            found[rule] = Quantized(codes, by_row.scale_inv.view(-1, 1), None, rule)
        if by_column is not None:
            codes = by_column.codes.view(dtype).t().unflatten(0, source.shape[:-1])
            rule = rules[(shape[0], 1)]
            found[rule] = Quantized(codes, by_column.scale_inv.view(1, -1), None, rule)
    results = [found[use.rule] for use in uses]
    return [
        each if use.dtype is None else decode_operand(each, use.dtype) for use, each in zip(uses, results, strict=True)
    ]


def _prepare(part: RuleOutputs, source: Tensor, use: Use, generator: Optional[torch.Generator]) -> None:
    """Make room for what a use wants."""
    rule, device = part.rule, source.device
    if use.dtype is not None:
        assert part.values is None or part.values.dtype == use.dtype, "values of one rule in two types"
        part.values = torch.empty(source.shape, dtype=use.dtype, device=device) if part.values is None else part.values
    elif part.codes is None:
        part.codes = torch.empty(codes_shape(source.shape, rule.format), dtype=torch.uint8, device=device)
        if rule.block is not None:
            dtype = SCALE_DTYPES.get(rule.scale_rule, torch.float32)
            part.scales = torch.empty(_num_blocks(source, rule), dtype=dtype, device=device)
    if rule.block is None or rule.scale_rule is ScaleRule.TWO_LEVEL:
        part.factor = torch.empty((), device=device)
    if generator is not None:
        padded = [count * length for count, length in zip(_num_blocks(source, rule), rule.block, strict=True)]
        part.noise = random_bytes(math.prod(padded), generator)


# --- one scale --------------------------------------------------------------------------------------------------------


def _quantize_tensor(
    source: Tensor, part: RuleOutputs, group: Optional[dist.ProcessGroup], delayed: Optional[DelayedScale]
) -> None:
    rule, count, note = part.rule, source.numel(), None
    is_delayed = rule.scale_rule is ScaleRule.DELAYED
    if is_delayed:
        assert delayed is not None, "delayed scaling has its scale from before"
        scale = delayed.quant
        note = None if delayed.amax is None else delayed.amax.view(torch.int32)
    else:
        scale = reduce_amax(_amax(source), group)
    quantize_tensor_kernel[(_cdiv(count, PART),)](
        source, scale, part.codes, part.values, part.factor, note, count,
        POWER_OF_TWO=rule.scale_rule is ScaleRule.POWER_OF_TWO, IS_DELAYED=is_delayed, GRID=grid_of(rule.format),
        PART=PART, enable_fp_fusion=False,
    )  # fmt: skip


def _amax(source: Tensor) -> Tensor:
    """FP32 [1]."""
    largest = torch.zeros(1, device=source.device)
    programs = min(AMAX_PROGRAMS, _cdiv(source.numel(), PART))
    amax_kernel[(programs,)](source, largest.view(torch.int32), source.numel(), PART=PART)
    return largest


# --- blocks -----------------------------------------------------------------------------------------------------------


def _quantize_blocks(
    source: Tensor, row: Optional[RuleOutputs], column: Optional[RuleOutputs], group: Optional[dist.ProcessGroup]
) -> None:
    """Rows' or square blocks, and columns' blocks, from one read."""
    rule = (row or column).rule
    num_rows, num_columns = matrix_shape(source)
    side = max(rule.block)
    tiles, num_warps, programs = _tiling(num_rows, num_columns, side)
    is_transformed = column is not None and column.rule.is_transformed
    if is_transformed:
        check_groups(num_rows)
    matrix = transform_matrix(source.dtype, source.device) if is_transformed else None
    row_amax = column_amax = None
    if rule.scale_rule is ScaleRule.TWO_LEVEL:
        row_amax, column_amax = _two_amaxes(source, matrix, group)
    row, column = row or RuleOutputs(rule), column or RuleOutputs(rule)
    quantize_blocks_kernel[(programs,)](
        source, matrix, num_rows, num_columns, min(torch.finfo(source.dtype).max, FP32_MAX),
        row_amax, row.noise, row.codes, _raw(row.scales), row.values, row.factor,
        column_amax, column.noise, column.codes, _raw(column.scales), column.values, column.factor,
        IS_SQUARE=min(row.rule.block) > 1, RULE=RULE_NAMES[rule.scale_rule], GRID=grid_of(rule.format),
        SCALE_GRID=grid_of(E4M3), SIDE=side, TILES=tiles, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def _two_amaxes(source: Tensor, matrix: Optional[Tensor], group: Optional[dist.ProcessGroup]) -> tuple[Tensor, Tensor]:
    """Of a tensor and of its transform by `matrix`, or twice its own: FP32 scalars."""
    if matrix is None:
        (largest,) = reduce_amax(_amax(source), group)
        return largest, largest
    num_rows, num_columns = matrix_shape(source)
    tiles, num_warps, programs = _tiling(num_rows, num_columns, SIZE)
    largest = torch.zeros(2, device=source.device)
    transformed_amax_kernel[(programs,)](
        source, matrix, largest.view(torch.int32), num_rows, num_columns, SIDE=SIZE, TILES=tiles, num_warps=num_warps
    )
    of_rows, of_columns = reduce_amax(largest, group)
    return of_rows, of_columns


def decode(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """`Quantized.operand`, where `can_decode` says so: codes times the scales of their blocks, without `factor`."""
    rule, codes = quantized.rule, quantized.codes.contiguous()
    shape = (*codes.shape[:-1], codes.shape[-1] * rule.format.codes_per_byte)
    values = torch.empty(shape, dtype=dtype, device=codes.device)
    if rule.block is None:
        count, grid = values.numel(), grid_of(rule.format)
        decode_tensor_kernel[(_cdiv(count, PART),)](codes.view(torch.uint8), values, count, GRID=grid, PART=PART)
        return values
    num_rows, num_columns = matrix_shape(values)
    side = max(rule.block)
    tiles, num_warps, programs = _tiling(num_rows, num_columns, side)
    decode_blocks_kernel[(programs,)](
        codes.view(torch.uint8), _raw(quantized.dequant_scale.contiguous()), values, num_rows, num_columns,
        IS_TALL=rule.block[0] > 1, IS_WIDE=rule.block[1] > 1, RULE=RULE_NAMES[rule.scale_rule],
        GRID=grid_of(rule.format), SCALE_GRID=grid_of(E4M3), SIDE=side, TILES=tiles, num_warps=num_warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return values


# --- after a GEMM -----------------------------------------------------------------------------------------------------


def finish_product(product: Tensor, factor: Optional[Tensor], bias: Optional[Tensor], dtype: torch.dtype) -> Tensor:
    """factor x product + bias in FP32, rounded once to `dtype`.

    Args:
        product: FP32 or BF16 [..., N], contiguous.
        factor: FP32 scalar; None is 1.
        bias: [N] or None.
    """
    out = torch.empty(product.shape, dtype=dtype, device=product.device)
    if count := product.numel():
        finish_product_kernel[(_cdiv(count, PART),)](
            product, factor, bias, out, count, product.shape[-1], PART=PART, enable_fp_fusion=False
        )
    return out


# --- shapes -----------------------------------------------------------------------------------------------------------


def _num_blocks(tensor: Tensor, rule: OperandRule) -> list[int]:
    return [_cdiv(size, length) for size, length in zip(matrix_shape(tensor), rule.block, strict=True)]


def _tiling(num_rows: int, num_columns: int, side: int) -> tuple[int, int, int]:
    """Squares of a tile, warps of a program, and programs."""
    tiles, num_warps = TILINGS[side]
    return tiles, num_warps, _cdiv(num_rows, side) * _cdiv(num_columns, side * tiles)


def _is_tall(rule: OperandRule) -> bool:
    """Blocks of columns?"""
    return rule.block[0] > 1 and rule.block[1] == 1


def _share_a_read(a: RuleOutputs, b: RuleOutputs) -> bool:
    """Do two rules go into one kernel? Blocks of rows, or squares, and blocks of columns, alike otherwise."""
    kinds = [(part.rule.format, part.rule.scale_rule, max(part.rule.block)) for part in (a, b)]
    return kinds[0] == kinds[1] and _is_tall(a.rule) != _is_tall(b.rule)


def _raw(scales: Optional[Tensor]) -> Optional[Tensor]:
    """Scales as a kernel knows them: FP32, or bytes."""
    return scales if scales is None or scales.dtype == torch.float32 else scales.view(torch.uint8)


def _cdiv(size: int, length: int) -> int:
    return -(-size // length)
