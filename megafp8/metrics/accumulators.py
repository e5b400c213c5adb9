"""Sums and maxima of a quantized tensor: in torch operations for a CPU, on a GPU by a Triton kernel in one pass.

The torch operations work on parts that fit a CPU's caches, and read results on the host between two of them.
"""

from __future__ import annotations

import math
from typing import Union

import torch
from torch import Tensor

from megafp8.metrics.quantization_error import ROUNDING, RUN_VALUES
from megafp8.metrics.tensor_table import (
    LOCAL_DB_LIMIT,
    MAX_EXPONENTS,
    OF_MAXIMA,
    OF_VALUES,
    TensorStatistics,
    build_statistics,
    compare,
    exponent_counts,
)
from megafp8.quantization.nvfp4 import unpack
from megafp8.quantization.quantize import Quantized, as_blocks
from megafp8.quantization.scaling import block_amax
from megafp8.recipes.base import ScaleRule
from megafp8.recipes.formats import E4M3

CHUNK_VALUES = 1 << 18
CAN_SATURATE = (ScaleRule.DELAYED, ScaleRule.TWO_LEVEL)  # other scales are made from the amax at hand


def accumulate(
    rows: Tensor, quantized: Quantized, is_known: bool, margin: int = 0, has_channels: bool = True
) -> TensorStatistics:
    """Sums and maxima of a tensor.

    Args:
        rows: FP32, BF16 or FP16 [rows, columns], after the Hadamard transform where the rule has one.
        quantized: codes and scales of `rows`.
        is_known: whether `rows` are what was quantized; else they are what the codes stand for, and not compared.
        margin: of delayed scaling.
        has_channels: whether the largest of each column is wanted.

    Numerics: differences and squares in FP32, in units of the amax.
    """
    rule = quantized.rule
    channel_amax, num_nonzero, num_bad = _magnitudes(rows)
    largest = channel_amax.amax()
    counts = _code_counts(quantized)
    dequant = _block_scales(quantized)
    sums: dict[str, Union[Tensor, int]] = {"values": rows.numel(), "non_finite": num_bad}
    if is_known:
        sums |= {
            "compared": rows.numel(),
            "nonzero": num_nonzero,
            "underflow": _num_zeros(quantized, counts) - (rows.numel() - num_nonzero - num_bad),
            "saturated": _num_saturated(rows, quantized, dequant),
        }
        sums |= _compared(rows, quantized, largest)
    used = dequant if rule.block is None else dequant[_used_blocks(quantized) & (dequant > 0)]
    maxima = {"amax": largest}
    if used.numel() and bool(largest > 0):
        maxima |= {"quant_scale": used.amin().double().reciprocal(), "dequant_scale": used.amax()}
        if rule.scale_rule is ScaleRule.DELAYED:
            maxima["staleness"] = largest.double() / (used.double() * rule.format.max * 2.0**-margin)
    exponents = exponent_counts(counts, rule.format.mantissa_bits, rule.format.first_special_code)
    return build_statistics(sums, maxima, exponents, channel_amax if has_channels else None)


def _magnitudes(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest finite magnitude of each column in FP32, values that are neither zero nor not finite, and those that are
    not finite. Magnitudes of one sign are ordered as their bits are, and integers are counted faster."""
    integer = torch.int16 if rows.dtype.itemsize == 2 else torch.int32
    bits = rows.contiguous().view(integer).bitwise_and(torch.iinfo(integer).max)
    infinity = torch.tensor(torch.inf, dtype=rows.dtype).view(integer).item()
    num_bad = torch.zeros((), dtype=torch.int64, device=rows.device)
    columns = bits.amax(0)
    if bool(columns.amax() >= infinity):
        is_bad = bits >= infinity
        num_bad = is_bad.sum()
        columns = bits.masked_fill_(is_bad, 0).amax(0)
    return columns.view(rows.dtype).float(), torch.count_nonzero(bits), num_bad


def _code_counts(quantized: Quantized) -> Tensor:
    """How often each code occurs: 256 of FP8, 16 of FP4."""
    counts = torch.bincount(quantized.codes.view(torch.uint8).flatten(), minlength=256)
    if quantized.rule.format.codes_per_byte == 2:
        pairs = counts.view(16, 16)
        return pairs.sum(0) + pairs.sum(1)
    return counts


def _num_zeros(quantized: Quantized, counts: Tensor) -> Tensor:
    """Codes that stand for zero: of two-level scales one may be zero itself, and then all of its block is."""
    if quantized.rule.scale_rule is not ScaleRule.TWO_LEVEL:
        return counts[0] + counts[len(counts) // 2]
    values = quantized.operand(torch.bfloat16)
    return values.numel() - torch.count_nonzero(values)


def _block_scales(quantized: Quantized) -> Tensor:
    """Dequantization scales in FP32, that of the tensor included: scalar or [blocks of rows, blocks of columns]."""
    scales = quantized.dequant_scale.float()
    return scales if quantized.tensor_scale is None else scales * quantized.tensor_scale


def _used_blocks(quantized: Quantized) -> Tensor:
    """Which blocks have a code that is not zero."""
    codes = quantized.codes
    raw = unpack(codes) if quantized.rule.format.codes_per_byte == 2 else codes.view(torch.uint8)
    magnitudes = raw.view(-1, raw.shape[-1]).bitwise_and(0x7F).to(torch.bfloat16)  # whole numbers below 2^8: exact
    return block_amax(as_blocks(magnitudes, quantized.rule.block)) > 0


def _num_saturated(rows: Tensor, quantized: Quantized, dequant: Tensor) -> Tensor:
    """Finite values beyond the largest number that their scale expresses. One of two levels may be zero: what has such
    a scale is not cut off but lost, and counts as underflow alone."""
    rule = quantized.rule
    if rule.scale_rule not in CAN_SATURATE:
        return torch.zeros((), dtype=torch.int64, device=rows.device)
    limit = dequant * (rule.format.max * (1 + ROUNDING))
    if rule.block is None:
        magnitudes = rows.abs()
        is_beyond = magnitudes > limit[None, None]  # beside a scalar torch would compare in the type of `rows`
        return torch.count_nonzero(is_beyond & (magnitudes < torch.inf))
    magnitudes = as_blocks(rows, rule.block).abs()
    limit = limit.where(limit > 0, torch.inf)
    return torch.count_nonzero((magnitudes > limit[:, None, :, None]) & (magnitudes < torch.inf))


def _compared(rows: Tensor, quantized: Quantized, largest: Tensor) -> dict[str, Tensor]:
    """Signal and noise, some whole rows at a time."""
    is_short = quantized.rule.is_bf16_exact
    decoded = quantized.operand(torch.bfloat16 if is_short else torch.float32).reshape(rows.shape)
    factor, step = quantized.factor, max(1, CHUNK_VALUES // rows.shape[1])
    totals: dict[str, Tensor] = {}
    for start in range(0, len(rows), step):
        values, others = rows[start : start + step].float(), decoded[start : start + step].float()
        others = others if factor is None else others * factor
        if not bool(torch.isfinite(values.sum())):
            is_finite = values.isfinite()
            values, others = values.where(is_finite, 0.0), others.where(is_finite, 0.0)
        for name, value in compare(values, others, largest).items():
            totals[name] = totals[name] + value if name in totals else value
    square = largest.double().square()
    return totals | {"signal": totals["signal"] * square, "noise": totals["noise"] * square}


def accumulate_with_triton(
    rows: Tensor, quantized: Quantized, is_known: bool, margin: int = 0, has_channels: bool = True
) -> TensorStatistics:
    """Sums and maxima of a tensor, as `accumulate`, on a GPU; three operations, four with channels, and no wait.

    Numerics: differences in FP32, their squares in FP64.
    """
    from megafp8.kernels.rounding import grid_of  # needs Triton
    from megafp8.kernels.statistics import PROGRAMS, ROWS, RUNS, statistics_kernel
    from megafp8.quantization.triton_quantize import RULE_NAMES

    rule, (num_rows, num_columns) = quantized.rule, rows.shape
    strips = math.ceil(num_columns / (RUNS * RUN_VALUES))
    parts = min(math.ceil(num_rows / ROWS), math.ceil(PROGRAMS / strips))
    sums, maxima = (
        torch.empty(strips * parts, width, dtype=torch.float64, device=rows.device)
        for width in (len(OF_VALUES) + MAX_EXPONENTS, len(OF_MAXIMA))
    )
    channel_amax = torch.zeros(num_columns, device=rows.device) if has_channels else None
    scales, block = quantized.dequant_scale, rule.block or (0, 0)
    scales = scales.view(torch.uint8) if scales.itemsize == 1 else scales
    statistics_kernel[(strips, parts)](
        rows.contiguous(), quantized.codes.contiguous().view(torch.uint8), scales.contiguous(), quantized.factor,
        None if channel_amax is None else channel_amax.view(torch.int32), sums, maxima, num_rows, num_columns,
        rule.format.max * (1 + ROUNDING), rule.format.max * 2.0**-margin,
        BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1], RULE=RULE_NAMES.get(rule.scale_rule, "fp32"), IS_KNOWN=is_known,
        CAN_SATURATE=rule.scale_rule in CAN_SATURATE, IS_DELAYED=rule.scale_rule is ScaleRule.DELAYED,
        GRID=grid_of(rule.format), SCALE_GRID=grid_of(E4M3), MAX_EXPONENTS=MAX_EXPONENTS, LIMIT=LOCAL_DB_LIMIT,
        ROWS=ROWS, RUNS=RUNS, RUN_VALUES=RUN_VALUES, enable_fp_fusion=False,
    )  # fmt: skip
    return TensorStatistics(sums.sum(0), maxima.amax(0), channel_amax)
