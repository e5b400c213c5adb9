"""Counters of the values that quantization hides: non-finite and saturated ones, at every quantizer, in every step.

A tensor core sees codes. Under per-tensor and block scales an infinite value becomes the largest number of the format,
and under NVFP4 a NaN becomes 6: the results stay finite, so that no check of loss and gradients notices. The counters
see the values before they are rounded:

    non-finite   NaN or infinity in the tensor that is quantized
    saturated    finite, but at least half a step above the largest number that the scale expresses, so that a larger
                 number of the format would be nearer. `TensorStats.saturated_fraction` also counts the values of NVFP4
                 that lie less than that above, because E4M3 scales are rounded.

Finite values saturate under delayed scaling, with a margin below 0, under E8M0 scales that are rounded down, where a
two-level scale is subnormal, and beside a non-finite value of their block or tensor, whose scale is 1.

On a CPU the amax that a quantizer needs anyway shows whether there is anything to count. Only then the tensor is read
again. On a GPU the counts are sums on the device, without a wait. The Triton kernels that cast count, too, in tiles
that have anything to count. Torch operations, which cast there with a margin, E8M0 scales that are rounded down, four-
over-six scales and EDEN, take passes of their own. Not counted are values beside a non-finite one under the rowwise
recipe and with a margin above 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megafp8.quantization.scaling import FP32_MAX, Scales, can_saturate
from megafp8.recipes.base import OPERANDS_OF, Gemm, Operand, OperandRule, ScaleRule
from megafp8.recipes.formats import E4M3, Format

NON_FINITE, SATURATED = 0, 1  # of a quantizer's two counts
SMALLEST_NORMAL_CODE = 2**E4M3.mantissa_bits  # of E4M3
QUANTIZERS = tuple((operand, gemm) for gemm, operands in OPERANDS_OF for operand in operands)
"""The uses of a linear's operands, each of which is one quantizer."""
LinearCounts = Mapping[tuple[Operand, Gemm], Tensor]
"""The counts of a linear's quantizers, int64 [2] each."""


def saturation_threshold(fmt: Format) -> float:
    """The smallest magnitude that rounds beyond the largest number of a format, if the format went on."""
    step = 2.0 ** (math.floor(math.log2(fmt.max)) - fmt.mantissa_bits)
    return fmt.max + step / 2


def count_amaxes(amax: Tensor, scale: Tensor, threshold: float, counts: Tensor) -> None:
    """Count tensors by their amaxes: the infinite ones, and those that saturate.

    Args:
        amax, scale: of any shape, the scales that were used.
        threshold: of the format (`saturation_threshold`).
        counts: int64 [2, ...], non-finite and saturated tensors.
    """
    is_finite = torch.isfinite(amax)
    counts[NON_FINITE] += ~is_finite
    counts[SATURATED] += (amax * scale >= threshold) & is_finite


def count_values(
    source: Tensor,
    blocks: Tensor,
    amax: Tensor,
    scales: Scales,
    is_suspect: bool,
    is_narrow: bool,
    rule: OperandRule,
    counts: Sequence[Tensor],
) -> None:
    """Add the non-finite and saturated values of a tensor to counts.

    Args:
        source: the tensor.
        blocks: its blocks [R, r, C, c], after the Hadamard transform where the rule has one.
        amax: FP32 scalar or [R, C].
        scales: of the same shape; `quant` has those of the cast.
        is_suspect: whether there are non-finite values in the blocks.
        is_narrow: whether the amaxes are that close that no E4M3 scale of a block is subnormal; False if unknown.
        counts: int64 [2] each.
    """
    is_counted = is_suspect or can_saturate(rule)  # other scales fit the amax, unless it is infinite
    if is_counted and not is_suspect and rule.scale_rule is ScaleRule.EDEN:
        is_counted = not is_narrow
    if is_counted and not is_suspect and rule.scale_rule is ScaleRule.TWO_LEVEL:
        is_counted = not (is_narrow or has_exact_block_scales(scales.dequant))
    num_saturated = _num_saturated(blocks, amax, scales.quant, rule) if is_counted else 0
    if not num_saturated and not is_suspect:
        return
    num_non_finite = source.numel() - int(torch.count_nonzero(torch.isfinite(source))) if is_suspect else 0
    for count in counts:
        count[NON_FINITE] += num_non_finite
        count[SATURATED] += num_saturated


def has_exact_block_scales(dequant_scale: Tensor) -> bool:
    """Whether no E4M3 scale of a block is subnormal or zero, so that none is rounded by more than a sixteenth.

    The amax of a block then becomes at most 6 x 17 / 16 = 6.4, nearer to 6 than to 8. One pass over the scales'
    bytes tells this, many times faster than the products of amaxes and scales.
    """
    return not dequant_scale.numel() or int(dequant_scale.view(torch.uint8).amin()) >= SMALLEST_NORMAL_CODE


def _num_saturated(blocks: Tensor, amax: Tensor, quant_scale: Tensor, rule: OperandRule) -> int:
    """The number of saturated values. Only blocks whose amax saturates are read.

    Values of a block whose two-level scale underflowed to zero become zero, and do not count.
    """
    threshold = saturation_threshold(rule.format)
    if not quant_scale.ndim:
        if amax.item() * quant_scale.item() < threshold:
            return 0
        return _count_from(blocks, _smallest_beyond(quant_scale, threshold, blocks.dtype))
    peaks = amax * quant_scale
    if not peaks.numel() or peaks.amax().item() < threshold:
        return 0
    is_beyond = (peaks >= threshold) & (quant_scale < FP32_MAX)  # FP32_MAX: a two-level scale underflowed
    chosen, scales = blocks.permute(0, 2, 1, 3)[is_beyond], quant_scale[is_beyond][:, None, None]
    return int(torch.count_nonzero(((chosen.float() * scales).abs() >= threshold) & torch.isfinite(chosen)))


def _smallest_beyond(quant_scale: Tensor, threshold: float, dtype: torch.dtype) -> int:
    """The bits of the smallest number of a dtype whose FP32 product with the scale reaches the threshold."""
    integer = torch.int16 if dtype.itemsize == 2 else torch.int32
    infinity = torch.tensor(torch.inf, dtype=dtype).view(integer).item()
    near = (threshold / quant_scale).to(dtype).view(integer).item()
    bits = torch.arange(max(0, near - 2), min(infinity, near + 2) + 1, dtype=integer)
    return int(bits[torch.nonzero(bits.view(dtype).float() * quant_scale >= threshold)[0]].item())


def _count_from(tensor: Tensor, smallest: int) -> int:
    """The number of finite magnitudes from one on, which is given by its bits. Magnitudes are ordered as their bits.

    Only rows with such a magnitude are counted: a maximum is several times faster than a comparison.
    """
    integer = torch.int16 if tensor.dtype.itemsize == 2 else torch.int32
    infinity = torch.tensor(torch.inf, dtype=tensor.dtype).view(integer).item()
    bits = tensor.reshape(-1, tensor.shape[-1]).view(integer).bitwise_and(torch.iinfo(integer).max)
    largest = bits.amax(dim=1)
    bits, has_infinity = bits[largest >= smallest], largest.amax().item() >= infinity
    num_infinite = int(torch.count_nonzero(bits >= infinity)) if has_infinity else 0
    return int(torch.count_nonzero(bits >= smallest)) - num_infinite


def count_non_finite_on_device(tensor: Tensor, counts: Sequence[Tensor]) -> None:
    """Add the non-finite values of a tensor that torch operations quantize on a GPU, without a wait of the host.

    Args:
        counts: int64 [2] each.
    """
    num_non_finite = tensor.numel() - torch.count_nonzero(torch.isfinite(tensor))
    for count in counts:
        count[NON_FINITE] += num_non_finite


def count_saturated_on_device(blocks: Tensor, quant_scale: Tensor, rule: OperandRule, counts: Sequence[Tensor]) -> None:
    """Add the saturated values of a tensor that torch operations quantize on a GPU, without a wait of the host.

    Args:
        blocks: [R, r, C, c].
        quant_scale: of the cast, FP32 scalar or [R, C].
        counts: int64 [2] each.
    """
    if not can_saturate(rule):
        return
    is_counted = torch.isfinite(blocks)
    if quant_scale.ndim:
        quant_scale = quant_scale[:, None, :, None]
        is_counted &= quant_scale < FP32_MAX  # a two-level scale underflowed
    is_counted &= (blocks.float() * quant_scale).abs() >= saturation_threshold(rule.format)
    num_saturated = torch.count_nonzero(is_counted)
    for count in counts:
        count[SATURATED] += num_saturated
