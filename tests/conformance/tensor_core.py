"""How Hopper multiplies FP8 matrices, bit by bit: a model of its tensor cores, too slow for computation.

One step adds 32 products to a running sum. A product's exponent is the sum of its factors' exponents, although its
mantissa may be 2 or more. All addends are shifted to the largest exponent, and bits more than 13 places below it are
truncated. The sum of all addends is truncated again in the same way. (That about 14 bits remain is known from
DeepSeek-V3, arXiv:2412.19437, section 3.5.2. The rest was found by matching Transformer Engine's results on an H200.)

With fast accumulation, which is Transformer Engine's choice for fprop under tensorwise and delayed scaling, the running
sum stays there to the end. With the split accumulator, and always with block scales, an FP32 register takes over the
sum after every 128 products. Block scales are multiplied with each other in FP32, then in a fused multiply-add.

An H200's FP32 sums equal this bitwise (`record_products.py`, test_tensor_core.py). They do not determine whether a
subnormal factor has its own exponent or, as is assumed here, that of the smallest normal.
"""

from typing import Optional

import torch
from torch import Tensor

from megafp8.quantization.quantized_tensor import Quantized
from megafp8.quantization.rounding import decode
from megafp8.recipes.base import Gemm
from megafp8.recipes.formats import Format

STEP = 32
KEPT_BITS = 13
PROMOTED_AFTER = 128
NO_EXPONENT = -(2**14)  # of zero: below all others


def floor_log2(values: Tensor) -> Tensor:
    """Exponent of each magnitude, int32."""
    return torch.where(values == 0, NO_EXPONENT, torch.frexp(values).exponent - 1)


def exponents_of(values: Tensor, fmt: Format) -> Tensor:
    """Exponent fields of the codes' values without the bias. Subnormals have that of the smallest normal."""
    return torch.where(values == 0, NO_EXPONENT, floor_log2(values).clamp_(min=1 - fmt.exponent_bias))


def cut(values: Tensor, exponent: Tensor) -> Tensor:
    """Without the bits that are more than 13 places below 2^exponent."""
    unit = torch.exp2((exponent - KEPT_BITS).clamp(min=-1000).double())
    return (values / unit).trunc_() * unit


def unit_sum(running: Tensor, a: Tensor, b: Tensor, exponents: Tensor) -> Tensor:
    """One step: running [M, N] plus the products of a [M, 32] and b [N, 32], whose exponents are [M, N, 32]."""
    addends = torch.cat([a[:, None] * b[None], running[..., None]], dim=-1)
    largest = torch.maximum(exponents.amax(dim=-1), floor_log2(running))
    total = cut(addends, largest[..., None]).sum(dim=-1)
    return cut(total, floor_log2(total))


def hopper_product(
    a: Tensor, b: Tensor, formats: tuple[Format, Format], promoted_after: Optional[int],
    scales: Optional[tuple[Tensor, Tensor]] = None,
) -> Tensor:  # fmt: skip
    """a . b^T as the tensor cores sum it, FP32 [M, N].

    Args:
        a, b: values of codes, FP64 [M, K] and [N, K].
        formats: of their codes.
        promoted_after: products after which the sum goes to FP32; None: at the end.
        scales: with blocks, FP32 in the shapes of a and b, constant over every 128 of K.
    """
    exponents = [exponents_of(values, fmt) for values, fmt in zip((a, b), formats, strict=True)]
    total = torch.zeros(len(a), len(b), device=a.device)
    running = total.double()
    for start in range(0, a.shape[1], STEP):
        part, end = slice(start, start + STEP), min(start + STEP, a.shape[1])
        running = unit_sum(running, a[:, part], b[:, part], exponents[0][:, None, part] + exponents[1][None, :, part])
        if end == a.shape[1] or (promoted_after is not None and end % promoted_after == 0):
            if scales is not None:
                running *= scales[0][:, None, start] * scales[1][None, :, start]  # 14 and 24 bits: exact in FP64
            total = (total.double() + running).float()
            running = torch.zeros_like(running)
    return total


def hopper_gemm(gemm: Gemm, first: Quantized, second: Quantized, bias: Optional[Tensor] = None) -> Tensor:
    """A GEMM of quantized operands in the order of `OPERANDS_OF`, FP32, as Transformer Engine runs it on Hopper."""
    values, scales = zip(*(_values_and_scales(each) for each in (first, second)), strict=True)
    if gemm is not Gemm.FPROP:  # the sum is over rows
        values, scales = ((each[0], each[1].t()) for each in (values, scales))
    if gemm is Gemm.WGRAD:
        values, scales = ((each[0].t(), each[1]) for each in (values, scales))
    is_blockwise = first.rule.block is not None
    product = hopper_product(
        *values, (first.rule.format, second.rule.format),
        None if gemm is Gemm.FPROP and not is_blockwise else PROMOTED_AFTER, scales if is_blockwise else None,
    )  # fmt: skip
    if not is_blockwise:
        product *= first.factor * second.factor
    return product if bias is None else product + bias.float()


def _values_and_scales(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """Of each element. A per-tensor scale is applied after the sum."""
    values = decode(quantized.codes, quantized.rule.format, torch.float32)
    if quantized.rule.block is None:
        return values.double(), torch.ones_like(values)
    height, width = quantized.rule.block
    scales = quantized.dequant_scale.repeat_interleave(height, dim=0).repeat_interleave(width, dim=1)
    return values.double(), scales[: values.shape[0], : values.shape[1]]
