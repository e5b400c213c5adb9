"""Newer scales of NVFP4: four-over-six, and MS-EDEN of Quartet II.

Four-over-six (arXiv:2512.02010). E2M1 has no value between 4 and 6, so values just below a block's amax have the
largest error. Each block maps its amax to 6 or to 4, whichever gives the smaller sum of squared errors; equal errors
take 6. The tensor scale maps the tensor's amax to 256 x 6 instead of 448 x 6: the 1.5 times larger scale of a block
with that amax is then 384, an E4M3 number.

MS-EDEN (arXiv:2601.22813) is an unbiased quantizer with less error than stochastic rounding of the values:

    1. y = H diag(signs) x for 128 consecutive values, with Sylvester's Hadamard matrix over sqrt(128) and random signs.
       Both operands of a GEMM are transformed along the summed dim with the same signs, and the transform cancels.
    2. Codes q are y over its block scale, rounded to nearest. The scale maps the block's amax to 6.07, slightly beyond
       the largest code, where the mean square error of normally distributed values is least.
    3. The scales of the 128 values are multiplied by s = <y, y> / <y, q>, which makes the projection of the result on y
       equal to y. Without it, rounding to nearest shrinks or stretches.
    4. s is between 0.97 and 1.06, finer than E4M3's steps, so the products are rounded stochastically: the scale, and
       with it the quantized tensor, has the right mean. The tensor scale maps the amax to 256 and not to 448 so that
       they have room.

The mean over scale roundings of <y, quantized y> is <y, y> for every choice of the signs. That the mean over signs is x
itself holds up to an error that falls with the length of the transform: it would be exact for a random rotation.

Numerics: all in FP32. The smallest scale is E4M3's smallest number, not zero, so that no block vanishes. Random numbers
have 24 bits. A correction over the 128 values, not over each block of 16, gives the published mean square error of
0.0098 on normally distributed values.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch
from torch import Tensor

from megafp8.quantization.nvfp4 import EXPONENT_FIELD, hadamard_transform, sylvester_matrix
from megafp8.quantization.rounding import cast, decode
from megafp8.quantization.scaling import FP32_MAX, Scales, two_level_scales
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E2M1, E4M3

ROTATION_SIZE = 128
TOP_SCALE = 256.0  # of the block with the tensor's amax
FOUR = 4.0
# Scales are off by up to 1/17 when they are rounded to E4M3. 16/17 of 6 never saturates; 0.93 has the least error.
EDEN_BLOCK_MAX = E2M1.max * 16 / 17 / 0.93
SMALLEST_SCALE = 2.0**-9
E4M3_STEPS = 8  # between two powers of two


# --- four-over-six ----------------------------------------------------------------------------------------------------


def four_over_six_scales(blocks: Tensor, amax: Tensor, tensor_amax: Tensor) -> Scales:
    """Scales that map the amax of each block to 4 or 6.

    Args:
        blocks: [R, rows of a block, C, columns of a block].
        amax: FP32 [R, C], their amaxes.
        tensor_amax: FP32 scalar, of the complete tensor over all its ranks.
    """
    six, four = (
        two_level_scales(amax, tensor_amax, top=TOP_SCALE * E2M1.max, block_max=block_max)
        for block_max in (E2M1.max, FOUR)
    )
    is_four = squared_errors(blocks, four) < squared_errors(blocks, six)  # false for NaN
    codes = torch.where(is_four, four.dequant.view(torch.uint8), six.dequant.view(torch.uint8))
    return Scales(torch.where(is_four, four.quant, six.quant), codes.view(torch.float8_e4m3fn), six.tensor)


def squared_errors(blocks: Tensor, scales: Scales) -> Tensor:
    """Sums of squared errors of blocks rounded to nearest, FP32 [R, C], in units of the tensor scale.

    Neighbours are added first, so that a GPU's kernel can add in the same order: of two nearly equal errors all devices
    take the same one.
    """
    assert scales.tensor is not None
    values = blocks.float()
    rounded = _nearest(values * scales.quant[:, None, :, None])[1]
    error = values.mul(scales.tensor.reciprocal()).sub_(rounded.mul_(scales.dequant.float()[:, None, :, None]))
    error.square_()
    while error.shape[3] > 1:
        error = error[..., 0::2] + error[..., 1::2]
    while error.shape[1] > 1:
        error = error[:, 0::2] + error[:, 1::2]
    return error[:, 0, :, 0]


def _nearest(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes [rows, columns / 2] of scaled blocks, and their values as blocks."""
    codes = cast(scaled.reshape(-1, scaled.shape[2] * scaled.shape[3]).clone(), E2M1)
    return codes, decode(codes, E2M1, torch.float32).view(scaled.shape)


# --- MS-EDEN ----------------------------------------------------------------------------------------------------------


def draw_signs(generator: torch.Generator) -> Tensor:
    """Random signs of the transform, FP32 [128]."""
    bits = torch.randint(0, 2, (ROTATION_SIZE,), generator=generator, device=generator.device)
    return bits.float().mul_(2).sub_(1)


def rotate(rows: Tensor, signs: Tensor, dim: int) -> Tensor:
    """Transform groups of 128 values of a matrix along rows (dim 0) or columns (dim 1), to FP32.

    Raises:
        ValueError: the size of the dim is not a multiple of 128.
    """
    if rows.shape[dim] % ROTATION_SIZE:
        raise ValueError(
            f"MS-EDEN transforms groups of {ROTATION_SIZE} values, here are {rows.shape[dim]}: choose --seq-length, "
            "--micro-batch-size and the layer's size so that each rank has a multiple"
        )
    matrix = _hadamard(rows.device) * signs
    num_rows, columns = rows.shape
    if dim == 0:
        groups = rows.float().reshape(num_rows // ROTATION_SIZE, ROTATION_SIZE, columns)
        return torch.matmul(matrix, groups).view(num_rows, columns)
    return torch.matmul(rows.float().reshape(-1, ROTATION_SIZE), matrix.t()).view(num_rows, columns)


@functools.lru_cache(maxsize=8)
def _hadamard(device: torch.device) -> Tensor:
    return (sylvester_matrix(ROTATION_SIZE) * ROTATION_SIZE**-0.5).to(device)


def transformed(rows: Tensor, rule: OperandRule, signs: Optional[Tensor]) -> Tensor:
    """What the codes of a matrix represent: the matrix, or its Hadamard transform where the rule has one."""
    if not rule.is_transformed:
        return rows
    if rule.scale_rule is not ScaleRule.EDEN:
        return hadamard_transform(rows)
    assert signs is not None and rule.block is not None
    return rotate(rows, signs, dim=1 if rule.block[0] == 1 else 0)


def eden_quantize(
    blocks: Tensor, amax: Tensor, tensor_amax: Tensor, generator: torch.Generator
) -> tuple[Tensor, Scales]:
    """Quantize transformed blocks: packed codes [rows, columns / 2], and scales, of which `dequant` is corrected and
    `quant` that of the cast.

    Args:
        blocks: FP32 [R, 1, C, 16] or [R, 16, C, 1]; 128 values along the blocks were transformed together.
        amax: FP32 [R, C], their amaxes.
        tensor_amax: FP32 scalar, of the complete transformed tensor over all its ranks.
        generator: of the rounding of the scales.
    """
    top = TOP_SCALE * EDEN_BLOCK_MAX
    nearest = two_level_scales(amax, tensor_amax, top=top, block_max=EDEN_BLOCK_MAX)
    assert nearest.tensor is not None
    dequant = nearest.dequant.float().clamp_(min=SMALLEST_SCALE)
    quant = dequant.mul(nearest.tensor).reciprocal_().clamp_(max=FP32_MAX)
    scaled = blocks * quant[:, None, :, None]
    codes, rounded = _nearest(scaled)
    dim = 1 if blocks.shape[1] == 1 else 0
    wanted = _group_sums(scaled.square().sum(dim=(1, 3)), dim)
    found = _group_sums(scaled.mul_(rounded).sum(dim=(1, 3)), dim)
    dequant.mul_(torch.where(found > 0, wanted / found, 1.0))
    return codes, nearest._replace(quant=quant, dequant=round_stochastically(dequant, generator))


def _group_sums(of_blocks: Tensor, dim: int) -> Tensor:
    """The sum over the blocks that were transformed together, for each of them."""
    count = ROTATION_SIZE // 16
    groups = of_blocks.unflatten(dim, (-1, count))
    return groups.sum(dim=dim + 1, keepdim=True).expand_as(groups).flatten(dim, dim + 1)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round FP32 values from 0 to an adjacent E4M3 number; the mean is the value, up to 448."""
    values = values.clamp(max=E4M3.max)
    power = values.view(torch.int32).bitwise_and(EXPONENT_FIELD).view(torch.float32)
    step = power.div_(E4M3_STEPS).clamp_(min=SMALLEST_SCALE)
    position = values / step  # exact
    below = position.floor()
    draws = torch.rand(values.shape, generator=generator, device=values.device)
    return below.add_(draws < position - below).mul_(step).to(torch.float8_e4m3fn)
