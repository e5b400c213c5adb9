"""Statistics of a quantized tensor as sums and maxima, in torch operations on a CPU or by one Triton kernel on a GPU.

The torch operations work on chunks that fit a CPU's caches, and read intermediate results on the host.
"""

from __future__ import annotations

import math
from typing import Union

import torch
from torch import Tensor

from megafp8.metrics import tensor_table
from megafp8.metrics.quantization_error import ROUNDING, RUN_VALUES
from megafp8.metrics.tensor_table import PartialStats
from megafp8.quantization.nvfp4 import unpack
from megafp8.quantization.quantize import as_blocks, decode_values
from megafp8.quantization.quantized_tensor import Quantized, sized_block
from megafp8.quantization.scaling import block_amax, can_saturate
from megafp8.recipes.base import ScaleRule
from megafp8.recipes.formats import E4M3

CHUNK_VALUES = 1 << 18


def accumulate(
    rows: Tensor,
    quantized: Quantized,
    is_known: bool,
    margin: int = 0,
    has_channels: bool = True,
    has_exponents: bool = True,
) -> PartialStats:
    """Sums and maxima of a tensor.

    Args:
        rows: FP32, BF16 or FP16 [rows, columns], after the Hadamard transform where the rule has one.
        quantized: codes and scales of `rows`.
        is_known: whether `rows` are the original values. Else they are the dequantized codes, and no error is measured.
        margin: of delayed scaling.
        has_channels: whether the amax of each column is wanted.
        has_exponents: whether the number of codes by exponent is wanted.

    Numerics: differences and squares in FP32, in units of the amax.
    """
    rule = quantized.rule
    channel_amax, num_nonzero, num_non_finite = _magnitudes(rows)
    amax = channel_amax.amax()
    counts = _code_counts(quantized)
    dequant_scale = quantized.dequant_scale.float()
    if quantized.tensor_scale is not None:
        dequant_scale = dequant_scale * quantized.tensor_scale
    sums: dict[str, Union[Tensor, int]] = {"values": rows.numel(), "non_finite": num_non_finite}
    if is_known:
        sums |= {
            "compared": rows.numel(),
            "nonzero": num_nonzero,
            "underflow": _num_zeros(quantized, counts) - (rows.numel() - num_nonzero - num_non_finite),
            "saturated": _num_saturated(rows, quantized, dequant_scale),
        }
        sums |= _signal_and_noise(rows, quantized, amax)
    used = dequant_scale if rule.block is None else dequant_scale[_used_blocks(quantized) & (dequant_scale > 0)]
    maxima = {"amax": amax}
    if used.numel() and bool(amax > 0):
        maxima |= {"quant_scale": used.amin().double().reciprocal(), "dequant_scale": used.amax()}
        if rule.scale_rule is ScaleRule.DELAYED:
            maxima["staleness"] = amax.double() / (used.double() * rule.format.max * 2.0**-margin)
    exponents = counts[:0]
    if has_exponents:
        exponents = tensor_table.exponent_counts(counts, rule.format.mantissa_bits, rule.format.first_special_code)
    return tensor_table.build_partial_stats(sums, maxima, exponents, channel_amax if has_channels else None)


def _magnitudes(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finite amax of each column in FP32, number of finite nonzero values, number of non-finite values.

    Works on the bits of the magnitudes, which are ordered like the magnitudes: integer operations are faster.
    """
    integer = torch.int16 if rows.dtype.itemsize == 2 else torch.int32
    bits = rows.contiguous().view(integer).bitwise_and(torch.iinfo(integer).max)
    infinity = torch.tensor(torch.inf, dtype=rows.dtype).view(integer).item()
    num_non_finite = torch.zeros((), dtype=torch.int64, device=rows.device)
    columns = bits.amax(0)
    if bool(columns.amax() >= infinity):
        is_non_finite = bits >= infinity
        num_non_finite = is_non_finite.sum()
        columns = bits.masked_fill_(is_non_finite, 0).amax(0)
    return columns.view(rows.dtype).float(), torch.count_nonzero(bits), num_non_finite


def _code_counts(quantized: Quantized) -> Tensor:
    """How often each code occurs: int64 [256] for FP8, [16] for FP4."""
    counts = torch.bincount(quantized.codes.view(torch.uint8).flatten(), minlength=256)
    if quantized.rule.format.codes_per_byte == 2:
        pairs = counts.view(16, 16)
        return pairs.sum(0) + pairs.sum(1)
    return counts


def _num_zeros(quantized: Quantized, counts: Tensor) -> Tensor:
    """Number of values that dequantize to zero. With two-level scales that includes blocks whose scale is zero."""
    if not quantized.rule.scale_rule.is_two_level:
        return counts[0] + counts[len(counts) // 2]
    values = decode_values(quantized, torch.bfloat16)
    return values.numel() - torch.count_nonzero(values)


def _used_blocks(quantized: Quantized) -> Tensor:
    """Whether each block has a nonzero code."""
    codes = quantized.codes
    raw = unpack(codes) if quantized.rule.format.codes_per_byte == 2 else codes.view(torch.uint8)
    magnitudes = raw.view(-1, raw.shape[-1]).bitwise_and(0x7F).to(torch.bfloat16)  # exact: integers below 2^8
    return block_amax(as_blocks(magnitudes, sized_block(quantized.rule))) > 0


def _num_saturated(rows: Tensor, quantized: Quantized, dequant_scale: Tensor) -> Tensor:
    """Number of finite values beyond the largest number that their scale expresses.

    A block scale may be zero with two-level scales. The values of such a block count as underflow only.
    """
    rule = quantized.rule
    if not can_saturate(rule):
        return torch.zeros((), dtype=torch.int64, device=rows.device)
    limit = dequant_scale * (rule.format.max * (1 + ROUNDING))
    if rule.block is None:
        magnitudes = rows.abs()
        is_beyond = magnitudes > limit[None, None]  # with a 0-dim tensor torch would compare in the dtype of `rows`
        return torch.count_nonzero(is_beyond & (magnitudes < torch.inf))
    magnitudes = as_blocks(rows, sized_block(rule)).abs()
    limit = limit.where(limit > 0, torch.inf)
    return torch.count_nonzero((magnitudes > limit[:, None, :, None]) & (magnitudes < torch.inf))


def _signal_and_noise(rows: Tensor, quantized: Quantized, amax: Tensor) -> dict[str, Tensor]:
    """`error_sums` of the tensor, in chunks of complete rows."""
    dtype = torch.bfloat16 if quantized.rule.is_bf16_exact else torch.float32
    decoded = decode_values(quantized, dtype).reshape(rows.shape)
    factor, step = quantized.factor, max(1, CHUNK_VALUES // rows.shape[1])
    totals: dict[str, Tensor] = {}
    for start in range(0, len(rows), step):
        values, dequantized = rows[start : start + step].float(), decoded[start : start + step].float()
        dequantized = dequantized if factor is None else dequantized * factor
        if not bool(torch.isfinite(values.sum())):
            is_finite = values.isfinite()
            values, dequantized = values.where(is_finite, 0.0), dequantized.where(is_finite, 0.0)
        for name, value in tensor_table.error_sums(values, dequantized, amax).items():
            totals[name] = totals[name] + value if name in totals else value
    square = amax.double().square()
    return totals | {"signal": totals["signal"] * square, "noise": totals["noise"] * square}


def accumulate_with_triton(
    rows: Tensor,
    quantized: Quantized,
    is_known: bool,
    margin: int = 0,
    has_channels: bool = True,
    has_exponents: bool = True,
) -> PartialStats:
    """`accumulate` on a GPU: three operations, four with channels, without synchronization.

    Numerics: differences in FP32, their squares in FP64.
    """
    from megafp8.kernels.rounding import format_spec  # needs Triton
    from megafp8.kernels.statistics import NUM_WARPS, PROGRAMS, ROWS, RUNS, statistics_kernel
    from megafp8.quantization.triton_quantize import storage_of

    rule, (num_rows, num_columns) = quantized.rule, rows.shape
    strips = math.ceil(num_columns / (RUNS * RUN_VALUES))
    parts = min(math.ceil(num_rows / ROWS), math.ceil(PROGRAMS / strips))
    num_counts = tensor_table.num_exponents(rule.format) if has_exponents else 0
    sums, maxima = (
        torch.empty(strips * parts, width, dtype=torch.float64, device=rows.device)
        for width in (len(tensor_table.QUANTIZATION_SUMS) + num_counts, len(tensor_table.QUANTIZATION_MAXIMA))
    )
    channel_amax = torch.zeros(num_columns, device=rows.device) if has_channels else None
    scales, block = quantized.dequant_scale, rule.block or (0, 0)
    scales = scales.view(torch.uint8) if scales.itemsize == 1 else scales
    statistics_kernel[(strips, parts)](
        rows.contiguous(), quantized.codes.contiguous().view(torch.uint8), scales.contiguous(), quantized.factor,
        None if channel_amax is None else channel_amax.view(torch.int32), sums, maxima, num_rows, num_columns,
        rule.format.max * (1 + ROUNDING), rule.format.max * 2.0**-margin,
        BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1], RULE=storage_of(rule), IS_KNOWN=is_known,
        CAN_SATURATE=can_saturate(rule), IS_DELAYED=rule.scale_rule is ScaleRule.DELAYED,
        FORMAT=format_spec(rule.format), SCALE_FORMAT=format_spec(E4M3), NUM_EXPONENTS=num_counts,
        BINS=1 << num_counts.bit_length(), LIMIT=tensor_table.LOCAL_DB_LIMIT, ROWS=ROWS, RUNS=RUNS,
        RUN_VALUES=RUN_VALUES, enable_fp_fusion=False, num_warps=NUM_WARPS,
    )  # fmt: skip
    return PartialStats(sums.sum(0), maxima.amax(0), channel_amax)
