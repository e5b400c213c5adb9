"""Largest magnitudes, and the scales that follow from them.

`quant_scale` multiplies a value into the range of a format; `dequant_scale` is its reciprocal, in the form in which a
recipe stores it. The rules are Transformer Engine's, corner by corner (`common/recipe/recipe_common.cuh`,
`common/cast/mxfp8`, `common/cast/nvfp4`, read at 2.20):

    FP32           format max / amax, one IEEE FP32 division; amax 0 or infinite gives 1, overflow the largest number
    power of two   the same with the mantissa bits cleared, that is rounded down
    E8M0           dequant_scale is the smallest power of two that amax / format max does not exceed, as its exponent's
                   byte; amax 0 gives the smallest power, 2^-127, and an infinite amax the one before last, 2^127
    two-level      dequant_scale is E4M3, relative to an FP32 scale of the whole tensor that brings the tensor's amax to
                   448 x 6

The power-of-two scale and E8M0 have the same exponent for every amax but 0 and infinity.

Scales of Adam's moments in FP16 and FP8 (E4M3): one FP32 number for a tensor.

What is stored is the moment divided by its dequant scale, which brings the largest magnitude to the format's: those of
Transformer Engine's Adam, except that

- a scale has 20 significant bits. So the largest magnitude is stored as the format's to the bit, and whoever reads the
  moment in FP32, as a checkpoint has it, and stores it again finds the same scale and the same codes. (With 24 bits the
  quotient of the product may be the number beside it.)
- a moment that is all zero has the smallest normal number for a scale, not zero, whose inverse makes NaN of it."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.quantization.rounding import cast
from megafp8.recipes.base import ScaleRule
from megafp8.recipes.formats import E2M1, E4M3, Format

# Largest magnitude that is stored; codes of E4M3 are kept as uint8. FP16's is Transformer Engine's choice.
FORMAT_MAX = {torch.uint8: E4M3.max, torch.float16: torch.finfo(torch.float16).max / 2}
FP32_MAX = torch.finfo(torch.float32).max
FP32_MANTISSA = (1 << 23) - 1
FP32_EXPONENT_BIAS = 127
LARGEST_E8M0 = 254
SMALLEST_MULTIPLIER = 1 << 22  # 2^-127 as FP32 bits, subnormal
FOLD_WIDTH = 8  # shorter than a vector register: torch then takes the maximum element by element
FOLD_BELOW = 64


class Scales(NamedTuple):
    """Scales of a tensor or of its blocks.

    Attributes:
        quant: FP32, multiplies the values.
        dequant: multiplies the codes; FP32, E8M0 or E4M3.
        tensor: with two levels, FP32 scalar that multiplies the dequantized codes once more; else None.
    """

    quant: Tensor
    dequant: Tensor
    tensor: Optional[Tensor] = None


def amax(tensor: Tensor) -> Tensor:
    """Largest magnitude of a tensor, an FP32 scalar on its device.

    Numerics: exact; NaN is ignored, as the hardware's maximum ignores it; infinity counts; no element gives 0.
    """
    tensor = tensor.detach()
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    if not tensor.is_cuda:  # one pass, and two more only if a NaN came out of it
        lowest, highest = (bound.item() for bound in torch.aminmax(tensor))
        if lowest <= highest:
            return torch.tensor(max(abs(lowest), abs(highest)), dtype=torch.float32)
    return tensor.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax().float()


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block.

    Args:
        blocks: [R, rows of a block, C, columns of a block], FP32, BF16 or FP16.

    Returns:
        FP32 [R, C].

    Numerics: as `amax`. Magnitudes of one sign are ordered as their bits are, and integers have the faster maximum.
    """
    integer = torch.int16 if blocks.dtype.itemsize == 2 else torch.int32
    bits = blocks.view(integer).bitwise_and(torch.iinfo(integer).max)
    infinity = torch.tensor(torch.inf, dtype=blocks.dtype).view(integer).item()  # NaNs are above it
    if blocks.is_cuda:  # no look at the data: that would stop the device
        return _largest_of_blocks(bits.masked_fill_(bits > infinity, 0)).view(blocks.dtype).float()
    largest = _largest_of_blocks(bits)
    if largest.numel() and largest.amax().item() > infinity:
        largest = _largest_of_blocks(bits.masked_fill_(bits > infinity, 0))
    return largest.view(blocks.dtype).float()


def _largest_of_blocks(blocks: Tensor) -> Tensor:
    """Maximum over dims 1 and 3."""
    rows = blocks.amax(dim=1) if blocks.shape[1] > 1 else blocks.squeeze(1)
    width = rows.shape[-1]
    if width < FOLD_BELOW:
        while width > FOLD_WIDTH and width % 2 == 0:
            width //= 2
            rows = torch.maximum(rows[..., :width], rows[..., width:])
    return rows.amax(dim=-1) if width > 1 else rows.squeeze(-1)


def reduce_amax(largest: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
    """Maximum over the ranks of a group, in place; `group` None is this rank alone."""
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def quant_scale_of(largest: Tensor, fmt: Format, rule: ScaleRule, *, on_overflow: float = FP32_MAX) -> Tensor:
    """The factor that brings values of magnitude `largest` to the top of a format's range.

    Args:
        largest: FP32 amaxes, any shape; never NaN, which no amax is.
        fmt: the format to scale into.
        rule: leave the quotient as it is, or round it down to a power of two.
        on_overflow: the scale where the quotient exceeds FP32 (amax below about 1e-36).

    Returns:
        FP32, same shape.
    """
    if rule is ScaleRule.POWER_OF_TWO:
        scale = _power_of_two(2 * FP32_EXPONENT_BIAS - power_of_two_exponent(largest, fmt))
    else:
        scale = torch.full_like(largest, fmt.max).div_(largest)
        scale.masked_fill_(scale == torch.inf, on_overflow)
    return torch.where((largest > 0) & (largest < torch.inf), scale, 1.0)


def power_of_two_exponent(largest: Tensor, fmt: Format) -> Tensor:
    """The exponent e of the smallest power of two 2^(e - 127) with largest <= fmt.max 2^(e - 127), as int32.

    Numerics: exact, on the bits: amax / max rounds up if amax has the larger mantissa. For amax 0 and below about 1e-36
    the exponent leaves E8M0's range: clamp it to 0. It says nothing about an infinite amax.
    """
    bits_of_max = torch.tensor(fmt.max).view(torch.int32).item()
    mantissa, exponent = bits_of_max & FP32_MANTISSA, (bits_of_max >> 23) - FP32_EXPONENT_BIAS
    return largest.view(torch.int32).add(FP32_MANTISSA - mantissa).bitwise_right_shift_(23).sub_(exponent)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) as FP32, for normal numbers; larger exponents give 2^127."""
    return exponent.clamp(max=LARGEST_E8M0).bitwise_left_shift_(23).view(torch.float32)


def e8m0_scales(largest: Tensor, fmt: Format) -> Scales:
    """MXFP8's scales: powers of two, rounded up (the conversion cvt.rp.satfinite.ue8m0x2.f32).

    Args:
        largest: FP32 amaxes of the blocks.
        fmt: E4M3 or E5M2.

    Numerics: Transformer Engine multiplies amax by 1 / max in FP32 and rounds that up. Of all FP32 numbers one makes a
    difference (found by trying them all): the next one above max x 2^-127, whose product rounds down to 2^-127 first.
    """
    exponent = power_of_two_exponent(largest, fmt)
    rounds_down = largest.view(torch.int32) == torch.tensor(fmt.max * 2.0**-127).view(torch.int32).item() + 1
    exponent = exponent.clamp_(min=0).masked_fill_(largest == torch.inf, LARGEST_E8M0).sub_(rounds_down.int())
    quant = torch.where(exponent == LARGEST_E8M0, SMALLEST_MULTIPLIER, (LARGEST_E8M0 - exponent) << 23)
    return Scales(quant.view(torch.float32), exponent.to(torch.uint8).view(torch.float8_e8m0fnu))


def two_level_scales(largest: Tensor, tensor_largest: Tensor) -> Scales:
    """NVFP4's scales: E4M3 for a block, relative to one FP32 number for the tensor.

    Args:
        largest: FP32 amaxes of the blocks.
        tensor_largest: FP32 scalar, of the whole tensor over all its ranks.

    Numerics: in the order of Transformer Engine's kernel, each step one FP32 operation.
    """
    # Tensors on both sides: torch makes of `number / tensor`, and on a GPU of `tensor / number`, a product with the
    # reciprocal, which rounds twice.
    top = torch.full_like(tensor_largest, E4M3.max * E2M1.max)
    encode = (top / tensor_largest).clamp_(max=FP32_MAX)
    encode.masked_fill_((encode == 0) | (tensor_largest == 0), 1.0)
    per_block = encode * torch.tensor(1 / E2M1.max, dtype=torch.float32)
    dequant = cast(largest.mul(per_block).clamp_(max=FP32_MAX), E4M3)
    quant = dequant.float().mul_(encode.reciprocal()).reciprocal_().clamp_(max=FP32_MAX)
    return Scales(quant, dequant, tensor_largest / top)


def tensor_scales(quant_scale: Tensor) -> Scales:
    """Scales that are FP32 both ways."""
    return Scales(quant_scale, quant_scale.reciprocal())


# Below it the inverse of a scale overflows.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
SPARE_BITS = 4  # of FP32's 24
INFINITY = 0x7F800000  # in bits


def dequant_scale_of(largest: Tensor, format_max: Tensor | float) -> Tensor:
    """What stored numbers of moments are multiplied with.

    Args:
        largest: largest magnitudes of moments, FP32 of any shape.
        format_max: of `FORMAT_MAX`, alike or one number.

    Returns:
        FP32, at least `SMALLEST_SCALE`, its inverse finite; infinity where `largest` is not finite.
    """
    # The bits of a GPU's NaN are the largest integer there is: rounded up, they would be those of -0.
    bits = (largest / format_max).clamp(min=SMALLEST_SCALE).view(torch.int32).clamp(max=INFINITY)
    return ((bits + (1 << (SPARE_BITS - 1))) & -(1 << SPARE_BITS)).view(torch.float32)
