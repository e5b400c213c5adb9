"""High precision to codes and scales, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.fp8.formats import Format
from megafp8.fp8.recipes import OperandRule
from megafp8.fp8.rounding import cast, decode
from megafp8.fp8.scaling import quant_scale_of, reduced_amax

BLOCK_ELEMENTS = 1 << 18  # an FP32 buffer of 1 MiB: about a core's own cache, whatever the size of the tensor


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor: value = codes x dequant_scale.

    Attributes:
        codes: the FP8 payload, in the shape of the tensor it came from; `.view(torch.uint8)` is its bytes.
        dequant_scale: FP32 scalar.
        format: the format of the codes.
    """

    codes: Tensor
    dequant_scale: Tensor
    format: Format

    def unscaled(self, dtype: torch.dtype) -> Tensor:
        """The codes as exact numbers of `dtype` (BF16 or FP32), still to be multiplied by dequant_scale."""
        return decode(self.codes, self.format, dtype)


def quantize(tensor: Tensor, rule: OperandRule, group: Optional[dist.ProcessGroup] = None) -> Quantized:
    """Quantize a tensor by one rule.

    Args:
        tensor: FP32, BF16 or FP16, any shape.
        rule: format, granularity and scale.
        group: ranks whose shards share one scale (MAX all-reduce of the amax); None: this rank's own.

    Returns:
        codes of the same shape and an FP32 dequant_scale = 1 / quant_scale.

    Numerics: codes = round(float32(x) * quant_scale), one FP32 product, then one rounding as in `rounding.cast`.
    """
    quant_scale = quant_scale_of(reduced_amax(tensor, group), rule.format, rule.scale_rule)
    codes = _scale_and_cast(tensor.detach(), quant_scale, rule.format)
    return Quantized(codes, quant_scale.reciprocal(), rule.format)


def _scale_and_cast(tensor: Tensor, quant_scale: Tensor, fmt: Format) -> Tensor:
    """round(float32(x) * quant_scale); a large tensor on a CPU goes block by block through one small FP32 buffer."""
    if tensor.is_cuda or tensor.numel() <= BLOCK_ELEMENTS:
        return cast(tensor.to(torch.float32, copy=True).mul_(quant_scale), fmt)
    tensor = tensor.contiguous()
    codes = torch.empty(tensor.shape, dtype=fmt.dtype)
    buffer = torch.empty(BLOCK_ELEMENTS)
    sources, targets = (whole.view(-1).split(BLOCK_ELEMENTS) for whole in (tensor, codes))
    for source, target in zip(sources, targets, strict=True):
        scaled = buffer[: source.numel()]
        cast(scaled.copy_(source).mul_(quant_scale), fmt, out=target)
    return codes


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes x dequant_scale: one FP32 product, rounded to `dtype`."""
    return quantized.unscaled(torch.float32).mul_(quantized.dequant_scale).to(dtype)
