"""Quantization on a GPU by Triton kernels, in as few passes over memory as the data flow allows.

A tensor is read once for all its uses, and once more before that where its amax is needed first (current scaling, and
the tensor scale of two-level scaling). Each use gets codes and scales, or decoded values, which then are the only
result that is written. Codes and scales are byte for byte those of the torch operations in `quantize.py`.
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
from megafp8.kernels.rounding import format_spec
from megafp8.kernels.tiles import has_complete_tiles
from megafp8.quantization.counters import NON_FINITE, saturation_threshold
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.nvfp4 import HADAMARD_SIZE, check_hadamard_rows, hadamard_matrix, random_bytes
from megafp8.quantization.quantized_tensor import Decoded, Quantized, Use, matrix_shape, sized_block
from megafp8.quantization.rounding import CODE_DTYPES, codes_shape
from megafp8.quantization.scaling import FP32_MAX, reduce_amax
from megafp8.recipes.base import Block, OperandRule, ScaleRule
from megafp8.recipes.formats import E4M3

CHUNK_ELEMENTS = 4096  # of a program of an elementwise kernel
AMAX_PROGRAMS = 1024
TILINGS = {16: (4, 1), 32: (2, 1), 64: (1, 4), 128: (1, 16)}  # block length: (squares of a tile, warps)
SCALE_DTYPES = {
    ScaleRule.E8M0: torch.float8_e8m0fnu,
    ScaleRule.E8M0_FLOOR: torch.float8_e8m0fnu,
    ScaleRule.TWO_LEVEL: torch.float8_e4m3fn,
    ScaleRule.FOUR_OVER_SIX: torch.float8_e4m3fn,
}
RULE_NAMES = {
    ScaleRule.FP32: "fp32",
    ScaleRule.POWER_OF_TWO: "power_of_two",
    ScaleRule.E8M0: "e8m0",
    ScaleRule.E8M0_FLOOR: "e8m0_floor",
    ScaleRule.TWO_LEVEL: "two_level",
    ScaleRule.FOUR_OVER_SIX: "four_over_six",
}


def storage_of(rule: OperandRule) -> str:
    """How kernels read the scales of a rule: "two_level", "e8m0" or "fp32"."""
    dtype = SCALE_DTYPES.get(rule.scale_rule)
    return "two_level" if rule.scale_rule.is_two_level else "e8m0" if dtype == torch.float8_e8m0fnu else "fp32"


def can_quantize(tensor: Tensor, rule: OperandRule) -> bool:
    """Whether `quantize_for` supports this rule for this tensor; otherwise torch operations quantize it."""
    if not tensor.numel() or rule.margin or rule.scale_rule is ScaleRule.EDEN:
        return False
    if rule.block is None:
        return rule.format.codes_per_byte == 1
    if rule.is_transformed and (rule.block != (HADAMARD_SIZE, 1) or tensor.dtype != torch.bfloat16):
        return False
    return _is_supported_block(sized_block(rule))


def can_decode(quantized: Quantized) -> bool:
    """Whether `decode` supports this tensor; otherwise torch operations decode it."""
    rule = quantized.rule
    if rule.scale_rule is ScaleRule.EDEN:
        return False
    is_supported = rule.format.codes_per_byte == 1 if rule.block is None else _is_supported_block(sized_block(rule))
    return is_supported and quantized.codes.numel() > 0 and quantized.codes.is_contiguous()


def has_row_scales(tensor: Tensor, rule: OperandRule) -> bool:
    """Whether a rule gives each row or each column a scale, and `kernels/rowwise.py` supports it for this tensor."""
    shape = matrix_shape(tensor)
    is_supported = rule.block in ((1, shape[1]), (shape[0], 1)) and has_complete_tiles(*shape)
    has_scale = rule.scale_rule in (ScaleRule.FP32, ScaleRule.POWER_OF_TWO)
    return is_supported and has_scale and rule.format.codes_per_byte == 1 and not rule.is_stochastic


def _is_supported_block(block: Block) -> bool:
    """Whether a block is a row, a column or a square of a supported length."""
    return max(block) in TILINGS and min(block) in (1, max(block))


@dataclass
class RuleOutputs:
    """The outputs of a kernel for one rule; None is not written.

    Attributes:
        codes: uint8.
        scales: block scales, in the dtype in which they are stored.
        values: decoded codes.
        factor: FP32 scalar: the dequantization scale of the tensor, or the tensor scale of two-level scaling.
        noise: random bytes, one an element, with ragged blocks padded.
        counts: for each use int64 [2], to which the numbers of non-finite and saturated values are added.
    """

    rule: OperandRule
    codes: Optional[Tensor] = None
    scales: Optional[Tensor] = None
    values: Optional[Tensor] = None
    factor: Optional[Tensor] = None
    noise: Optional[Tensor] = None
    counts: tuple[Tensor, ...] = ()

    @property
    def pair_of_counts(self) -> tuple[Optional[Tensor], Optional[Tensor]]:
        """The counts as arguments of a kernel: an operand has two uses."""
        assert len(self.counts) <= 2, self.counts
        first, second = (*self.counts, None, None)[:2]
        return first, second

    def of_use(self, use: Use) -> Union[Quantized, Decoded]:
        """The result for one use."""
        if use.dtype is not None:
            assert self.values is not None
            return Decoded(self.values, self.factor, self.rule)
        assert self.codes is not None
        dequant_scale, tensor_scale = (self.factor, None) if self.scales is None else (self.scales, self.factor)
        assert dequant_scale is not None
        return Quantized(self.codes.view(CODE_DTYPES[self.rule.format.name]), dequant_scale, tensor_scale, self.rule)


def quantize_for(
    tensor: Tensor,
    uses: Sequence[Use],
    group: Optional[dist.ProcessGroup] = None,
    delayed: Optional[DelayedScale] = None,
    generators: Sequence[Optional[torch.Generator]] = (),
    counts: Sequence[Tensor] = (),
) -> list[Union[Quantized, Decoded]]:
    """`quantize.quantize_for`, for rules that all `can_quantize`."""
    source = tensor.detach().contiguous()
    outputs: dict[OperandRule, RuleOutputs] = {}
    for index, use in enumerate(uses):
        of_rule = outputs.setdefault(use.rule, RuleOutputs(use.rule))
        _allocate(of_rule, source, use, generators[index] if generators else None)
        of_rule.counts += tuple(counts[index : index + 1])
    for of_rule in outputs.values():
        if of_rule.rule.block is None:
            _quantize_tensor(source, of_rule, group, delayed)
    with_blocks = [of_rule for of_rule in outputs.values() if of_rule.rule.block is not None]
    if len(with_blocks) == 2 and _share_a_read(*with_blocks):
        row, column = sorted(with_blocks, key=lambda of_rule: _has_column_blocks(of_rule.rule))
        _quantize_blocks(source, row, column, group)
    else:
        for of_rule in with_blocks:
            is_column = _has_column_blocks(of_rule.rule)
            _quantize_blocks(source, None if is_column else of_rule, of_rule if is_column else None, group)
    return [outputs[use.rule].of_use(use) for use in uses]


def _allocate(outputs: RuleOutputs, source: Tensor, use: Use, generator: Optional[torch.Generator]) -> None:
    """Allocate the outputs that a use needs."""
    rule, device = outputs.rule, source.device
    if use.dtype is not None:
        assert outputs.values is None or outputs.values.dtype == use.dtype, "values of one rule in two types"
        if outputs.values is None:
            outputs.values = torch.empty(source.shape, dtype=use.dtype, device=device)
    elif outputs.codes is None:
        outputs.codes = torch.empty(codes_shape(source.shape, rule.format), dtype=torch.uint8, device=device)
        if rule.block is not None:
            dtype = SCALE_DTYPES.get(rule.scale_rule, torch.float32)
            outputs.scales = torch.empty(_num_blocks(source, rule), dtype=dtype, device=device)
    if rule.block is None or rule.scale_rule.is_two_level:
        outputs.factor = torch.empty((), device=device)
    if generator is not None:
        num_padded = math.prod(_num_blocks(source, rule)) * math.prod(sized_block(rule))
        outputs.noise = random_bytes(num_padded, generator)


# --- one scale for each row or column ---------------------------------------------------------------------------------


def quantize_rowwise(
    tensor: Tensor, rules: Sequence[OperandRule], counts: Sequence[Tensor] = ()
) -> dict[OperandRule, Quantized]:
    """Quantize a tensor by rules of which each `has_row_scales`: two launches for each pair of format and scale rule.

    Column-scaled codes are laid out by columns in memory, as Hopper's FP8 GEMMs need them. Non-finite values are added
    to all counts; saturated ones are not counted.
    """
    source = tensor.detach().contiguous()
    shape = matrix_shape(source)
    quantized: dict[OperandRule, Quantized] = {}
    num_non_finite = torch.zeros((), dtype=torch.int64, device=source.device) if counts else None
    for fmt, scale_rule in dict.fromkeys((rule.format, rule.scale_rule) for rule in rules):
        of_block = {rule.block: rule for rule in rules if (rule.format, rule.scale_rule) == (fmt, scale_rule)}
        row_rule, column_rule = of_block.get((1, shape[1])), of_block.get((shape[0], 1))
        by_row, by_column = rowwise.cast(
            source.view(shape), format_spec(fmt), rows=row_rule is not None, columns=column_rule is not None,
            is_power_of_two=scale_rule is ScaleRule.POWER_OF_TWO,
            num_non_finite=None if quantized else num_non_finite,  # one cast counts
        )  # fmt: skip
        dtype = CODE_DTYPES[fmt.name]
        if by_row is not None and row_rule is not None:
            codes = by_row.codes.view(dtype).view(source.shape)
            quantized[row_rule] = Quantized(codes, by_row.scale_inv.view(-1, 1), None, row_rule)
        if by_column is not None and column_rule is not None:
            codes = by_column.codes.view(dtype).t().unflatten(0, source.shape[:-1])
            quantized[column_rule] = Quantized(codes, by_column.scale_inv.view(1, -1), None, column_rule)
    for count in counts:
        count[NON_FINITE] += num_non_finite
    return quantized


# --- one scale for the tensor -----------------------------------------------------------------------------------------


def _quantize_tensor(
    source: Tensor, outputs: RuleOutputs, group: Optional[dist.ProcessGroup], delayed: Optional[DelayedScale]
) -> None:
    rule, count, recorded_amax, has_non_finite = outputs.rule, source.numel(), None, None
    is_delayed = rule.scale_rule is ScaleRule.DELAYED
    if is_delayed:
        assert delayed is not None, "delayed scaling has its scale from before"
        scale_or_amax = delayed.quant_scale
        recorded_amax = None if delayed.amax is None else delayed.amax.view(torch.int32)
    else:
        amax, has_non_finite = _amax(source)
        scale_or_amax = reduce_amax(amax, group)
    quantize_tensor_kernel[(_cdiv(count, CHUNK_ELEMENTS),)](
        source, scale_or_amax, has_non_finite, outputs.codes, outputs.values, outputs.factor, recorded_amax,
        *outputs.pair_of_counts, count,
        POWER_OF_TWO=rule.scale_rule is ScaleRule.POWER_OF_TWO, IS_DELAYED=is_delayed, FORMAT=format_spec(rule.format),
        SATURATES_FROM=saturation_threshold(rule.format), BLOCK_SIZE=CHUNK_ELEMENTS, enable_fp_fusion=False,
    )  # fmt: skip


def _amax(source: Tensor) -> tuple[Tensor, Tensor]:
    """The amax, FP32 [1], and whether any value is not finite, int32 [1]."""
    found = torch.zeros(2, dtype=torch.int32, device=source.device)
    num_programs = min(AMAX_PROGRAMS, _cdiv(source.numel(), CHUNK_ELEMENTS))
    amax_kernel[(num_programs,)](source, found[:1], found[1:], source.numel(), BLOCK_SIZE=CHUNK_ELEMENTS)
    return found[:1].view(torch.float32), found[1:]


# --- blocks -----------------------------------------------------------------------------------------------------------


def _quantize_blocks(
    source: Tensor, row: Optional[RuleOutputs], column: Optional[RuleOutputs], group: Optional[dist.ProcessGroup]
) -> None:
    """Quantize in row or square blocks, in column blocks, or in both from one read."""
    given = row or column
    assert given is not None
    rule = given.rule
    num_rows, num_columns = matrix_shape(source)
    block_size = max(sized_block(rule))
    tiles, num_warps, num_programs = _tiling(num_rows, num_columns, block_size)
    matrix = None
    if column is not None and column.rule.is_transformed:
        check_hadamard_rows(num_rows)
        matrix = hadamard_matrix(source.dtype, source.device)
    row_amax = column_amax = None
    if rule.scale_rule.is_two_level:
        row_amax, column_amax = _tensor_amaxes(source, matrix, group)
    row, column = row or RuleOutputs(rule), column or RuleOutputs(rule)
    quantize_blocks_kernel[(num_programs,)](
        source, matrix, num_rows, num_columns, min(torch.finfo(source.dtype).max, FP32_MAX),
        row_amax, row.noise, row.codes, _raw(row.scales), row.values, row.factor, *row.pair_of_counts,
        column_amax, column.noise, column.codes, _raw(column.scales), column.values, column.factor,
        *column.pair_of_counts,
        IS_SQUARE=min(sized_block(row.rule)) > 1, RULE=RULE_NAMES[rule.scale_rule], FORMAT=format_spec(rule.format),
        SCALE_FORMAT=format_spec(E4M3), SATURATES_FROM=saturation_threshold(rule.format), BLOCK_SIZE=block_size,
        TILES=tiles, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def _tensor_amaxes(
    source: Tensor, matrix: Optional[Tensor], group: Optional[dist.ProcessGroup]
) -> tuple[Tensor, Tensor]:
    """FP32 scalars: the amax of a tensor, and that of its transform by `matrix`; without a matrix the same twice."""
    if matrix is None:
        (amax,) = reduce_amax(_amax(source)[0], group)
        return amax, amax
    num_rows, num_columns = matrix_shape(source)
    tiles, num_warps, num_programs = _tiling(num_rows, num_columns, HADAMARD_SIZE)
    amaxes = torch.zeros(2, device=source.device)
    transformed_amax_kernel[(num_programs,)](
        source, matrix, amaxes.view(torch.int32), num_rows, num_columns, BLOCK_SIZE=HADAMARD_SIZE, TILES=tiles,
        num_warps=num_warps,
    )  # fmt: skip
    row_amax, column_amax = reduce_amax(amaxes, group)
    return row_amax, column_amax


def decode(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """`quantize.decode_values`, for a tensor that `can_decode`."""
    rule, codes = quantized.rule, quantized.codes.contiguous()
    shape = (*codes.shape[:-1], codes.shape[-1] * rule.format.codes_per_byte)
    values = torch.empty(shape, dtype=dtype, device=codes.device)
    if rule.block is None:
        count, spec = values.numel(), format_spec(rule.format)
        decode_tensor_kernel[(_cdiv(count, CHUNK_ELEMENTS),)](
            codes.view(torch.uint8), values, count, FORMAT=spec, BLOCK_SIZE=CHUNK_ELEMENTS
        )
        return values
    num_rows, num_columns = matrix_shape(values)
    block = sized_block(rule)
    tiles, num_warps, num_programs = _tiling(num_rows, num_columns, max(block))
    decode_blocks_kernel[(num_programs,)](
        codes.view(torch.uint8), _raw(quantized.dequant_scale.contiguous()), values, num_rows, num_columns,
        IS_TALL=block[0] > 1, IS_WIDE=block[1] > 1, RULE=storage_of(rule),
        FORMAT=format_spec(rule.format), SCALE_FORMAT=format_spec(E4M3), BLOCK_SIZE=max(block), TILES=tiles,
        num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return values


# --- GEMM epilogue ----------------------------------------------------------------------------------------------------


def finish_product(product: Tensor, factor: Optional[Tensor], bias: Optional[Tensor], dtype: torch.dtype) -> Tensor:
    """factor x product + bias in FP32, rounded once to `dtype`.

    Args:
        product: FP32 or BF16 [..., N], contiguous.
        factor: FP32 scalar; None is 1.
        bias: [N] or None.
    """
    out = torch.empty(product.shape, dtype=dtype, device=product.device)
    if count := product.numel():
        finish_product_kernel[(_cdiv(count, CHUNK_ELEMENTS),)](
            product, factor, bias, out, count, product.shape[-1], BLOCK_SIZE=CHUNK_ELEMENTS, enable_fp_fusion=False
        )
    return out


# --- shapes -----------------------------------------------------------------------------------------------------------


def _num_blocks(tensor: Tensor, rule: OperandRule) -> list[int]:
    return [_cdiv(size, length) for size, length in zip(matrix_shape(tensor), sized_block(rule), strict=True)]


def _tiling(num_rows: int, num_columns: int, block_size: int) -> tuple[int, int, int]:
    """Squares of a tile, warps of a program, and number of programs."""
    tiles, num_warps = TILINGS[block_size]
    return tiles, num_warps, _cdiv(num_rows, block_size) * _cdiv(num_columns, block_size * tiles)


def _has_column_blocks(rule: OperandRule) -> bool:
    num_rows, num_columns = sized_block(rule)
    return num_rows > 1 and num_columns == 1


def _share_a_read(a: RuleOutputs, b: RuleOutputs) -> bool:
    """Whether one kernel can serve two rules: row or square blocks, and column blocks, otherwise alike."""
    kinds = [(outputs.rule.format, outputs.rule.scale_rule, max(sized_block(outputs.rule))) for outputs in (a, b)]
    return kinds[0] == kinds[1] and _has_column_blocks(a.rule) != _has_column_blocks(b.rule)


def _raw(scales: Optional[Tensor]) -> Optional[Tensor]:
    """Block scales in the dtypes of the kernels: FP32, or bytes."""
    return scales if scales is None or scales.dtype == torch.float32 else scales.view(torch.uint8)


def _cdiv(size: int, length: int) -> int:
    return -(-size // length)
