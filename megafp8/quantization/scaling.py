"""Amaxes, and the scales that are computed from them.

`quant_scale` multiplies a value into the range of a format. `dequant_scale` is its reciprocal, in the form in which a
recipe stores it. The rules are Transformer Engine's in every corner case (`common/recipe/recipe_common.cuh`,
`common/cast/mxfp8` and `common/cast/nvfp4`, release 2.20):

    FP32           format max / amax, one IEEE FP32 division; 1 for amax 0 or infinity, the largest number on overflow
    power of two   the same with the mantissa bits cleared, which rounds down
    E8M0           dequant_scale is the smallest power of two >= amax / format max, stored as its biased exponent;
                   2^-127 for amax 0, 2^127 for an infinite amax
    E8M0 floor     dequant_scale is the largest power of two <= amax / the largest power of two of the format, as in the
                   OCP specification of microscaling formats; Transformer Engine has no such rule
    two-level      dequant_scale is E4M3, relative to an FP32 scale of the whole tensor that maps the tensor's amax to
                   448 x 6
    four-over-six  two-level with 256 x 6, which leaves room for the 1.5 times larger scale of a block whose amax is
                   mapped to 4; which of the two a block gets is decided in `nvfp4_variants.py`
    EDEN           two-level with 256 x 6.07, the scale before its correction (`nvfp4_variants.py`)

The power-of-two scale and E8M0 have the same exponent for every amax but 0 and infinity.

Adam's moments in FP16 and FP8 (E4M3) have one FP32 dequantization scale for each tensor. The stored numbers are the
moment divided by it, so that the amax maps to the largest number of the format. The scales are those of Transformer
Engine's Adam, with two differences:

- A scale has 20 significant bits. The amax is then stored as exactly the largest number of the format, and reading a
  moment in FP32, as for a checkpoint, and storing it again gives the same scale and codes. With 24 bits the quotient of
  the product may be an adjacent number.
- The scale of an all-zero moment is the smallest normal number, not zero, whose reciprocal would give NaN.

FP16 master weights have a power of two for each tensor, as in FP8-LM, so that no mantissa bit of a weight depends on
the scale.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.quantization.rounding import cast
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E2M1, E4M3, Format

FP32_MAX = torch.finfo(torch.float32).max
FP32_MANTISSA = (1 << 23) - 1
FP32_EXPONENT_BIAS = 127
LARGEST_E8M0 = 254
MIN_QUANT_SCALE_BITS = 1 << 22  # 2^-127 as FP32 bits, subnormal
# torch takes the maximum of rows shorter than a vector register element by element; short rows are folded first.
FOLD_WIDTH = 8
FOLD_BELOW = 64
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
NARROW = 14
"""Binades between the smallest and the largest amax of a tensor's blocks, within which no E4M3 scale is subnormal: the
largest scale is 448, and the smallest normal one 2^-6, 2^14.8 times less."""

# Largest stored magnitude by dtype; E4M3 codes are stored as uint8. FP16's is Transformer Engine's choice.
MOMENT_FORMAT_MAX = {torch.uint8: E4M3.max, torch.float16: torch.finfo(torch.float16).max / 2}
MIN_MOMENT_SCALE = torch.finfo(torch.float32).tiny  # the reciprocal of a smaller scale overflows
SPARE_BITS = 4  # of FP32's 24 significant bits
FP16_MASTER_EXPONENT = 15  # the largest FP16 number is nearly 2^16
INFINITY_BITS = 0x7F800000


# Scales of other rules come from the current amax, and saturate nothing without a margin below 0.
SATURATING_RULES = (ScaleRule.DELAYED, ScaleRule.E8M0_FLOOR)


def can_saturate(rule: OperandRule) -> bool:
    """Whether finite values can exceed the largest number that their scale expresses."""
    return rule.scale_rule.is_two_level or rule.scale_rule in SATURATING_RULES or rule.margin < 0


class Scales(NamedTuple):
    """Scales of a tensor or of its blocks.

    Attributes:
        quant: FP32, multiplies the values.
        dequant: multiplies the codes; FP32, E8M0 or E4M3.
        tensor: with two-level scaling, the FP32 scalar that multiplies the dequantized codes once more; else None.
    """

    quant: Tensor
    dequant: Tensor
    tensor: Optional[Tensor] = None


def compute_amax(tensor: Tensor) -> Tensor:
    """Largest magnitude of a tensor, an FP32 scalar on its device.

    Numerics: exact; NaN is ignored, as by the hardware's maximum; infinity is not; an empty tensor gives 0.
    """
    return inspect_amax(tensor)[0]


def inspect_amax(tensor: Tensor) -> tuple[Tensor, bool]:
    """`compute_amax`, and whether the tensor has non-finite values. On a GPU, where that would wait, it is False."""
    tensor = tensor.detach()
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float32, device=tensor.device), False
    if not tensor.is_cuda:  # one pass; NaN in the tensor makes both bounds NaN, and takes two more
        lowest, highest = (bound.item() for bound in torch.aminmax(tensor))
        if lowest <= highest:
            amax = max(abs(lowest), abs(highest))
            return torch.tensor(amax, dtype=torch.float32), amax == math.inf
    return tensor.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax().float(), not tensor.is_cuda


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block.

    Args:
        blocks: [R, rows of a block, C, columns of a block], FP32, BF16 or FP16.

    Returns:
        FP32 [R, C].

    Numerics: as `compute_amax`. Magnitudes are ordered as their bits are, and the maximum of integers is faster.
    """
    return inspect_block_amax(blocks)[0]


def inspect_block_amax(blocks: Tensor) -> tuple[Tensor, bool, bool]:
    """`block_amax`, whether the blocks have non-finite values, and whether the amaxes are within a factor of 2^14.

    On a GPU, where these would wait, both are False.
    """
    integer = torch.int16 if blocks.dtype.itemsize == 2 else torch.int32
    bits = blocks.view(integer).bitwise_and(torch.iinfo(integer).max)
    infinity = torch.tensor(torch.inf, dtype=blocks.dtype).view(integer).item()  # the bits of NaN are larger
    if blocks.is_cuda:  # unconditionally: reading the data would synchronize with the device
        return _largest_of_blocks(bits.masked_fill_(bits > infinity, 0)).view(blocks.dtype).float(), False, False
    amax = _largest_of_blocks(bits)
    smallest, largest = (int(bound.item()) for bound in torch.aminmax(amax)) if amax.numel() else (0, 0)
    if largest > infinity:
        amax = _largest_of_blocks(bits.masked_fill_(bits > infinity, 0))
    # Bits of normal numbers are logarithms in units of a step of the mantissa, at most 0.09 too small.
    smallest_normal = 1 << MANTISSA_BITS[blocks.dtype]
    is_narrow = smallest >= smallest_normal and largest - smallest <= NARROW * smallest_normal
    return amax.view(blocks.dtype).float(), largest >= infinity, is_narrow


def _largest_of_blocks(blocks: Tensor) -> Tensor:
    """Maximum over dims 1 and 3."""
    rows = blocks.amax(dim=1) if blocks.shape[1] > 1 else blocks.squeeze(1)
    width = rows.shape[-1]
    if width < FOLD_BELOW:
        while width > FOLD_WIDTH and width % 2 == 0:
            width //= 2
            rows = torch.maximum(rows[..., :width], rows[..., width:])
    return rows.amax(dim=-1) if width > 1 else rows.squeeze(-1)


def reduce_amax(amax: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
    """Maximum over the ranks of a group, in place; `group` None is this rank alone."""
    if group is not None and group.size() > 1:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def quant_scale_of(amax: Tensor, fmt: Format, rule: ScaleRule, *, on_overflow: float = FP32_MAX) -> Tensor:
    """The scale that maps an amax to the largest value of a format.

    Args:
        amax: FP32, any shape; never NaN.
        rule: POWER_OF_TWO rounds the quotient down to a power of two; others keep it.
        on_overflow: the scale where the quotient exceeds FP32 (amax below about 1e-36).

    Returns:
        FP32, same shape.
    """
    if rule is ScaleRule.POWER_OF_TWO:
        quant_scale = _power_of_two(2 * FP32_EXPONENT_BIAS - power_of_two_exponent(amax, fmt))
    else:
        quant_scale = torch.full_like(amax, fmt.max).div_(amax)
        quant_scale.masked_fill_(quant_scale == torch.inf, on_overflow)
    return torch.where((amax > 0) & (amax < torch.inf), quant_scale, 1.0)


def power_of_two_exponent(amax: Tensor, fmt: Format) -> Tensor:
    """Biased exponent e of the smallest power of two with amax <= fmt.max 2^(e - 127), as int32.

    Numerics: exact, on the bits: the exponent of amax / fmt.max rounds up if amax has the larger mantissa. For an amax
    of 0 and below about 1e-36 it leaves E8M0's range: clamp it to 0. It is meaningless for an infinite amax.
    """
    bits_of_max = torch.tensor(fmt.max).view(torch.int32).item()
    mantissa, exponent = bits_of_max & FP32_MANTISSA, (bits_of_max >> 23) - FP32_EXPONENT_BIAS
    return amax.view(torch.int32).add(FP32_MANTISSA - mantissa).bitwise_right_shift_(23).sub_(exponent)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) as FP32, for normal numbers; larger exponents give 2^127."""
    return exponent.clamp(max=LARGEST_E8M0).bitwise_left_shift_(23).view(torch.float32)


def e8m0_scales(amax: Tensor, fmt: Format, *, is_floor: bool = False) -> Scales:
    """MXFP8's scales: powers of two, rounded up (the conversion cvt.rp.satfinite.ue8m0x2.f32).

    Args:
        amax: FP32 amaxes of the blocks.
        fmt: E4M3 or E5M2.
        is_floor: round down instead, which saturates the values of a block between the format's maximum and the next
            power of two.

    Numerics: Transformer Engine multiplies amax by 1 / max in FP32 and rounds that up. An exhaustive test of all FP32
    amaxes found one that differs from rounding the exact quotient up: the next one above max x 2^-127, whose product
    rounds down to 2^-127 first.
    """
    if is_floor:
        exponent = amax.view(torch.int32).bitwise_right_shift(23).sub_(math.frexp(fmt.max)[1] - 1)
        return _e8m0_scales(exponent.clamp_(min=0).masked_fill_(amax == torch.inf, LARGEST_E8M0))
    exponent = power_of_two_exponent(amax, fmt)
    rounds_down = amax.view(torch.int32) == torch.tensor(fmt.max * 2.0**-127).view(torch.int32).item() + 1
    exponent = exponent.clamp_(min=0).masked_fill_(amax == torch.inf, LARGEST_E8M0).sub_(rounds_down.int())
    return _e8m0_scales(exponent)


def _e8m0_scales(exponent: Tensor) -> Scales:
    """Scales from the biased exponents of the dequantization scales, int32 from 0 to 254."""
    quant = torch.where(exponent == LARGEST_E8M0, MIN_QUANT_SCALE_BITS, (LARGEST_E8M0 - exponent) << 23)
    return Scales(quant.view(torch.float32), exponent.to(torch.uint8).view(torch.float8_e8m0fnu))


def two_level_scales(
    amax: Tensor, tensor_amax: Tensor, *, top: float = E4M3.max * E2M1.max, block_max: float = E2M1.max
) -> Scales:
    """NVFP4's scales: E4M3 for a block, relative to one FP32 number for the tensor.

    Args:
        amax: FP32 amaxes of the blocks.
        tensor_amax: FP32 scalar, of the complete tensor over all its ranks.
        top: what the tensor scale maps `tensor_amax` to.
        block_max: what a block's scale maps its amax to, up to the rounding of the scale.

    Numerics: in the order of Transformer Engine's kernel, each step one FP32 operation.
    """
    # Tensors on both sides: torch computes `number / tensor`, and on a GPU `tensor / number`, as a product with the
    # reciprocal, which rounds twice.
    largest = torch.full_like(tensor_amax, top)
    encode = (largest / tensor_amax).clamp_(max=FP32_MAX)
    encode.masked_fill_((encode == 0) | (tensor_amax == 0), 1.0)
    per_block = encode * torch.tensor(1 / block_max, dtype=torch.float32)
    dequant = cast(amax.mul(per_block).clamp_(max=FP32_MAX), E4M3)
    quant = dequant.float().mul_(encode.reciprocal()).reciprocal_().clamp_(max=FP32_MAX)
    return Scales(quant, dequant, tensor_amax / largest)


def tensor_scales(quant_scale: Tensor) -> Scales:
    """FP32 scales and their reciprocals."""
    return Scales(quant_scale, quant_scale.reciprocal())


def current_scale_of(amax: Tensor, rule: OperandRule) -> Tensor:
    """`quant_scale_of` for a full tensor under a rule, with its margin."""
    quant_scale = quant_scale_of(amax, rule.format, rule.scale_rule)
    return (quant_scale * 2.0**-rule.margin).clamp_(max=FP32_MAX) if rule.margin else quant_scale


def moment_dequant_scale(amax: Tensor, format_max: Tensor | float) -> Tensor:
    """Dequantization scales of moments.

    Args:
        amax: FP32 of any shape, largest magnitudes of moments.
        format_max: of `MOMENT_FORMAT_MAX`, in the shape of `amax` or one number.

    Returns:
        FP32, at least `MIN_MOMENT_SCALE`, with a finite reciprocal; infinity where `amax` is not finite.
    """
    # The bits of a GPU's NaN are the largest int32: rounded up, they would become those of -0.
    bits = (amax / format_max).clamp(min=MIN_MOMENT_SCALE).view(torch.int32).clamp(max=INFINITY_BITS)
    return ((bits + (1 << (SPARE_BITS - 1))) & -(1 << SPARE_BITS)).view(torch.float32)


def master_dequant_scale(amax: Tensor) -> Tensor:
    """Dequantization scales of FP16 master weights: powers of two with which the largest weight is at most 2^15.

    Args:
        amax: FP32 of any shape, largest magnitudes of master weights.

    Returns:
        FP32, at least 2^-126, with a finite reciprocal. Weights that were rounded to FP16 get the scale that they had.
    """
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent + (mantissa.half() >= 1)  # where FP16 rounds the largest weight up to a power of two
    exponent = (exponent - FP16_MASTER_EXPONENT).clamp(-FP32_EXPONENT_BIAS + 1, FP32_EXPONENT_BIAS - 1)
    return torch.ldexp(torch.ones_like(amax), exponent)
