"""Weights that are kept as codes: one byte an element instead of two, and no other copy beside them.

The high-precision truth is the optimizer's FP32 master weights, of which each data-parallel rank has a part. After an
update a rank rounds its part to BF16, as it would to send it in BF16, and quantizes that; then the codes are gathered,
which are half the bytes. The codes must be those of the whole weight, quantized after a gather in BF16:

    1. each rank takes the amaxes of its part: one of the tensor, or of each block that the part reaches into
    2. the largest over the data-parallel ranks are those of the whole weight: one MAX all-reduce for all weights
    3. amaxes become scales, on every rank the same; nobody has to send a scale
    4. each rank quantizes its part, in place in the buffer that is gathered

A part is a flat piece of a weight: it begins and ends within a row, and blocks are cut by it. Delayed scaling has its
scales from before; the amaxes are noted when the codes are first used, as they are without this.

Both GEMMs that read a weight have to read the same codes: recipes whose blocks lie along the sum (MXFP8, NVFP4 without
square blocks) need two copies, which together are no smaller than BF16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafp8.quantization.delayed_scaling import OPERANDS, DelayedState
from megafp8.quantization.quantize import Quantized, as_blocks, block_scales, dequantize, scale_and_cast
from megafp8.quantization.rounding import CODE_DTYPES
from megafp8.quantization.scaling import Scales, amax, block_amax, quant_scale_of, reduce_amax, tensor_scales
from megafp8.recipes.base import Operand, OperandRule, ScaleRule

WEIGHT = OPERANDS.index(Operand.WEIGHT)

Exchange = Callable[[Tensor, Optional[dist.ProcessGroup]], Tensor]


class WeightCodes:
    """What a quantized parameter holds.

    Args:
        high_precision: [N, K], BF16 or FP16: what to quantize.
        rule: how, for both its GEMMs.
        scale_group: ranks besides the data-parallel ones whose shards share the scale of a whole tensor.
        delayed: with delayed scaling, where the scale comes from.

    Attributes:
        raw: uint8 [N, K], the codes' bytes; a view into the buffer that is gathered, once there is one.
        dequant_scale: FP32, scalar or [ceil(N / block rows), ceil(K / block columns)].
        amax: FP32, largest magnitudes by which the weight was last quantized, in the shape of `dequant_scale`.
        high_precision: what the weight was set to, until `settle` has quantized it; else None.
        exchange: reduces amaxes over a group of ranks, as `reduce_amax` does.
    """

    def __init__(
        self,
        high_precision: Tensor,
        rule: OperandRule,
        scale_group: Optional[dist.ProcessGroup] = None,
        delayed: Optional[DelayedState] = None,
    ):
        assert rule.format.codes_per_byte == 1 and not rule.is_transformed and not rule.is_stochastic
        self.shape, self.dtype, self.device = high_precision.shape, high_precision.dtype, high_precision.device
        self.rule, self.delayed = rule.for_shape(tuple(high_precision.shape)), delayed
        self.scale_group = scale_group if rule.block is None and delayed is None else None
        self.raw = torch.zeros(self.shape, dtype=torch.uint8, device=self.device)
        self.dequant_scale = self.amax = torch.zeros(self.scales_shape, device=self.device)
        self.high_precision: Optional[Tensor] = high_precision
        self.exchange: Exchange = reduce_amax

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that are quantized together; with one scale for all, a row."""
        return self.rule.block or (1, self.shape[1])

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the scales."""
        if self.rule.block is None:
            return ()
        return tuple(-(-size // length) for size, length in zip(self.shape, self.rule.block, strict=True))

    def quantized(self) -> Quantized:
        """Codes and scales, for either GEMM."""
        assert self.high_precision is None, "a weight was set and not quantized: settle() does it"
        return Quantized(self.raw.view(CODE_DTYPES[self.rule.format.name]), self.dequant_scale, None, self.rule)

    def values(self) -> Tensor:
        """[N, K] in `dtype`: what the weight was set to, or the codes times their scales."""
        return dequantize(self.quantized(), self.dtype) if self.high_precision is None else self.high_precision

    def move_to(self, buffer: Tensor) -> None:
        """Keep the codes in uint8 [N, K] of somebody else's memory from now on."""
        buffer.copy_(self.raw)
        # Autograd counts writes to a buffer, and would take the gather of another weight for a change of this one.
        self.raw = buffer.data


class QuantizedParameter(torch.Tensor):
    """A weight [N, K] whose memory is codes and scales, and which to everybody else is a BF16 (or FP16) tensor.

    The emulated linears read `codes`. Whatever torch does with it otherwise is done with its values, dequantized for
    the purpose. It can be set (`copy_`) to high-precision values, which it then holds until `settle`; nothing else
    writes to it but the optimizer, by `quantize_parts`.
    """

    codes: WeightCodes
    __torch_function__ = torch._C._disabled_torch_function_impl  # results of operations are plain tensors

    @staticmethod
    def __new__(cls, codes: WeightCodes) -> QuantizedParameter:
        tensor = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=codes.dtype, device=codes.device)
        tensor.codes = codes
        return tensor

    def __repr__(self, **options: Any) -> str:
        return f"QuantizedParameter({tuple(self.shape)}, {self.codes.rule})"

    def dequantize(self) -> Tensor:
        """The values as a plain tensor."""
        return self.codes.values()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if function is aten.detach.default:  # also behind `.data`: another name for the same codes
            return cls(args[0].codes)
        if function is aten.copy_.default and isinstance(args[0], cls):
            target, source = args[0].codes, args[1]
            target.high_precision = source.to(target.device, target.dtype, copy=True)
            return args[0]
        if function is aten.empty_like.default:  # takes the place of a gradient: no reason to look at values
            like = {"dtype": args[0].dtype, "device": args[0].device} | kwargs
            return torch.empty(args[0].shape, dtype=like["dtype"], device=like["device"])
        for described, argument in zip(function._schema.arguments, args, strict=False):
            if isinstance(argument, cls) and described.alias_info is not None and described.alias_info.is_write:
                raise TypeError(f"{function}: a quantized weight is not computed upon in place; copy_() sets it")
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.dequantize, (args, kwargs))
        return function(*args, **kwargs)


def quantized_parameters(modules: Iterable[nn.Module]) -> list[QuantizedParameter]:
    """All of them in some modules, in the modules' order, which all ranks that share a module have in common."""
    return [weight for module in modules for weight in module.parameters() if isinstance(weight, QuantizedParameter)]


def settle(modules: Iterable[nn.Module]) -> None:
    """Quantize the weights that were set, and let go of what they were set to.

    For after initialization and after loading, when the optimizer has its master weights. Ranks that share scales call
    it together.
    """
    waiting = [weight for weight in quantized_parameters(modules) if weight.codes.high_precision is not None]
    quantize_parts(waiting, [weight.codes.values().flatten() for weight in waiting], [0] * len(waiting), None)
    for weight in waiting:
        weight.codes.high_precision = None


# --- quantizing by parts ----------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize_parts(
    parameters: Sequence[QuantizedParameter],
    parts: Sequence[Optional[Tensor]],
    starts: Sequence[Optional[int]],
    group: Optional[dist.ProcessGroup],
) -> None:
    """Quantize weights of which each rank of a group has a flat part, each rank its part; all ranks call it.

    Args:
        parameters: the same on all ranks.
        parts: FP32 [n], or the weight's own type; None where this rank has none of a weight.
        starts: the first element of the part in the flattened weight.
        group: ranks that together have all parts; None: this rank has them all.

    Numerics: parts are rounded to the weight's type first. Codes and scales are then those of `quantize` for the whole
    weight. Rounding keeps the order of magnitudes, so that the amax of the rounded part is the rounded amax.
    """
    rules = {parameter.codes.rule: None for parameter in parameters}
    for rule in rules:
        chosen = [index for index, parameter in enumerate(parameters) if parameter.codes.rule == rule]
        _quantize_alike(*([items[index] for index in chosen] for items in (parameters, parts, starts)), group)


def _quantize_alike(
    parameters: Sequence[QuantizedParameter],
    parts: Sequence[Optional[Tensor]],
    starts: Sequence[Optional[int]],
    group: Optional[dist.ProcessGroup],
) -> None:
    """The same for weights under one rule."""
    weights = [parameter.codes for parameter in parameters]
    sizes = [math.prod(codes.scales_shape) for codes in weights]
    largest = torch.zeros(sum(sizes), device=weights[0].device)
    for codes, part, start, of_weight in zip(weights, parts, starts, largest.split(sizes), strict=True):
        if part is not None:
            _enter_amaxes(of_weight.view(codes.scales_shape), codes, part, start)
    largest = largest.to(weights[0].dtype).float()
    for ranks in (group, weights[0].scale_group):
        weights[0].exchange(largest, ranks)
    scales = _scales(weights, largest)
    split = zip(*(tensor.split(sizes) for tensor in (largest, scales.quant, scales.dequant)), strict=True)
    for codes, part, start, of_weight in zip(weights, parts, starts, split, strict=True):
        codes.amax, quant_scale, codes.dequant_scale = (tensor.view(codes.scales_shape) for tensor in of_weight)
        if part is not None:
            _write_codes(codes, part, start, quant_scale)


def _enter_amaxes(largest: Tensor, codes: WeightCodes, part: Tensor, start: int) -> None:
    """Write a part's amaxes to their places among the weight's."""
    if codes.rule.block is None:
        largest.copy_(amax(part))
        return
    rows, first = _complete_rows(codes, part, start)
    of_blocks = block_amax(as_blocks(rows, codes.block))
    largest.narrow(0, first // codes.block[0], len(of_blocks)).copy_(of_blocks)


def _write_codes(codes: WeightCodes, part: Tensor, start: int, quant_scale: Tensor) -> None:
    """Quantize a part to its place in the weight's codes."""
    rows, first = _complete_rows(codes, part, start)
    blocks = as_blocks(rows, codes.block)
    if quant_scale.ndim:
        quant_scale = quant_scale.narrow(0, first // codes.block[0], len(blocks))[:, None, :, None]
    encoded = scale_and_cast(blocks, quant_scale, codes.rule.format, None)[: len(rows), : codes.shape[1]]
    offset = start - first * codes.shape[1]
    codes.raw.view(-1).narrow(0, start, len(part)).copy_(
        encoded.reshape(-1).view(torch.uint8).narrow(0, offset, len(part))
    )


def _complete_rows(codes: WeightCodes, part: Tensor, start: int) -> tuple[Tensor, int]:
    """The rows that a part reaches into, from a block's first row on, zero where they are not the part's; and which
    row of the weight the first one is.

    Returns:
        [rows, K] in the weight's type.
    """
    columns, height = codes.shape[1], codes.block[0]
    first = start // columns // height * height
    last = -(-(start + len(part)) // columns)
    rows = torch.zeros((last - first) * columns, dtype=codes.dtype, device=codes.device)
    rows.narrow(0, start - first * columns, len(part)).copy_(part)
    return rows.view(-1, columns), first


def _scales(weights: Sequence[WeightCodes], largest: Tensor) -> Scales:
    """Scales of all weights, one after the other, from their amaxes or from before."""
    rule = weights[0].rule
    if rule.scale_rule is ScaleRule.DELAYED:
        return tensor_scales(torch.stack([codes.delayed.quant_scale[WEIGHT] for codes in weights]))
    if rule.block is None:
        return tensor_scales(quant_scale_of(largest, rule.format, rule.scale_rule))
    return block_scales(largest, rule, weights[0].dtype, None)
