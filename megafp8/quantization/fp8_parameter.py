"""FP8 parameters: weights that are stored as codes, one byte an element, without a BF16 copy.

The high-precision values are the optimizer's FP32 master weights, of which each data-parallel rank has a shard. After
an update a rank rounds its shard to BF16, as if it were sent in BF16, and quantizes that. Then the codes are
all-gathered, which are half the bytes. The codes must equal those of the complete weight quantized after a gather in
BF16:

    1. each rank computes the amaxes of its shard: one of the tensor, or one of each block that the shard overlaps
    2. their maxima over the data-parallel ranks are those of the complete weight: one MAX all-reduce for all weights
    3. every rank computes the same scales from them; no scale is communicated
    4. each rank quantizes its shard, in place in the buffer that is gathered

A shard is a flat piece of a weight: it begins and ends within a row and cuts blocks. Delayed scaling already has its
scales; the amaxes are recorded when the codes are first used, as for a BF16 parameter.

fprop and dgrad must read the same codes of a weight. Recipes whose weight blocks lie along the summed dim (MXFP8, NVFP4
without square blocks) need two copies, which together are no smaller than BF16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafp8.quantization.delayed_scaling import OPERANDS, DelayedState
from megafp8.quantization.quantize import as_blocks, block_scales, dequantize, scale_and_cast
from megafp8.quantization.quantized_tensor import Quantized, sized_block
from megafp8.quantization.rounding import CODE_DTYPES
from megafp8.quantization.scaling import Scales, block_amax, compute_amax, current_scale_of, reduce_amax, tensor_scales
from megafp8.recipes.base import Block, Operand, OperandRule, ScaleRule

WEIGHT = OPERANDS.index(Operand.WEIGHT)

Exchange = Callable[[Tensor, Optional[dist.ProcessGroup]], Tensor]


class WeightCodes:
    """The contents of a quantized parameter.

    Args:
        high_precision: [N, K], BF16 or FP16: the values to quantize.
        rule: the rule of fprop and dgrad.
        scale_group: ranks besides the data-parallel ones whose shards share the scale of a tensor.
        delayed: with delayed scaling, the state that has the scale.

    Attributes:
        raw: uint8 [N, K], the bytes of the codes; a view into the gather buffer once there is one.
        dequant_scale: FP32, scalar or [ceil(N / block rows), ceil(K / block columns)].
        amax: FP32, amaxes of the last quantization, in the shape of `dequant_scale`.
        high_precision: values assigned since, until `quantize_assigned_weights` has quantized them; else None.
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
        num_rows, num_columns = high_precision.shape
        self.shape, self.dtype, self.device = high_precision.shape, high_precision.dtype, high_precision.device
        self.rule, self.delayed = rule.for_shape((num_rows, num_columns)), delayed
        self.scale_group = scale_group if rule.block is None and delayed is None else None
        # With one scale for all elements, a shard is quantized row by row.
        self.block: Block = (1, num_columns) if rule.block is None else sized_block(self.rule)
        self.scales_shape: tuple[int, ...] = ()
        if rule.block is not None:
            self.scales_shape = tuple(-(-size // length) for size, length in zip(self.shape, self.block, strict=True))
        self.raw = torch.zeros(self.shape, dtype=torch.uint8, device=self.device)
        self.dequant_scale, self.amax = self.new_scales(), self.new_scales()
        self.high_precision: Optional[Tensor] = high_precision
        self.exchange: Exchange = reduce_amax

    def new_scales(self) -> Tensor:
        """FP32 zeros in the shape of the scales; each update writes into them, since a CUDA graph reads them."""
        return torch.zeros(self.scales_shape, device=self.device)

    def quantized(self) -> Quantized:
        """Codes and scales, for fprop and dgrad."""
        assert self.high_precision is None, "a weight was assigned, not quantized: call quantize_assigned_weights()"
        return Quantized(self.raw.view(CODE_DTYPES[self.rule.format.name]), self.dequant_scale, None, self.rule)

    def values(self) -> Tensor:
        """[N, K] in `dtype`: the assigned values, or the dequantized codes."""
        return dequantize(self.quantized(), self.dtype) if self.high_precision is None else self.high_precision

    def write_amax(self, shard: Tensor, start: int, amax: Tensor) -> None:
        """Write the amaxes of a shard [n], from element `start` on, to their places among those of the weight."""
        if self.rule.block is None:
            amax.copy_(compute_amax(shard))
            return
        rows, first_row = _complete_rows(self, shard, start)
        shard_amax = block_amax(as_blocks(rows, self.block))
        amax.narrow(0, first_row // self.block[0], len(shard_amax)).copy_(shard_amax)

    def quantize(self, shard: Tensor, start: int, quant_scale: Tensor) -> None:
        """Quantize a shard [n], from element `start` on, to its place in the codes; scales are those of the weight."""
        rows, first_row = _complete_rows(self, shard, start)
        blocks = as_blocks(rows, self.block)
        if quant_scale.ndim:
            quant_scale = quant_scale.narrow(0, first_row // self.block[0], len(blocks))[:, None, :, None]
        encoded = scale_and_cast(blocks, quant_scale, self.rule.format, None)[: len(rows), : self.shape[1]]
        offset = start - first_row * self.shape[1]
        self.store(start, encoded.reshape(-1).view(torch.uint8).narrow(0, offset, len(shard)))

    def store(self, start: int, encoded: Tensor) -> None:
        """Store the codes of a shard, uint8 [n], from element `start` of the flattened weight."""
        self.raw.view(-1).narrow(0, start, len(encoded)).copy_(encoded)

    def move_to(self, buffer: Tensor) -> None:
        """Store the codes in a uint8 [N, K] buffer from now on."""
        buffer.copy_(self.raw)
        # `.data`: weights share the buffer, and with its version counter a write to one would count for all of them.
        self.raw = buffer.data


class GatheredCodes(WeightCodes):
    """Codes of a weight of which this rank quantizes its rows, and gathers all.

    Args:
        rows: [n, K], the rows of this rank, in high precision.
        shape: (N, K) of the weight.

    Attributes:
        own: uint8 [n, K], the codes that this rank sends.
        raw: uint8 [N, K], the gathered codes. Their storage is freed between uses.
    """

    own: Tensor

    def __init__(self, rows: Tensor, shape: Sequence[int], *options: Any):
        """The last arguments are those of `WeightCodes`."""
        super().__init__(torch.empty(shape, dtype=rows.dtype, device="meta"), *options)
        self.high_precision, self.device = None, rows.device
        self.dequant_scale, self.amax = self.new_scales(), self.new_scales()

    def store(self, start: int, encoded: Tensor) -> None:
        """Keep the codes of this rank's rows for the next gathers."""
        self.own = encoded.view(-1, self.shape[1])

    def build_parameter(self, gathered: Tensor) -> Tensor:
        """What layers get as weight after the first gather: a tensor on the gathered codes, uint8 [N, K]."""
        self.raw = gathered
        return QuantizedParameter(self)

    def renew(self, parameter: Any, gathered: Tensor) -> None:
        """Let a parameter that was built before have newly gathered codes."""
        self.raw = gathered


class QuantizedParameter(torch.Tensor):
    """A weight [N, K] stored as codes and scales, which behaves like a BF16 or FP16 tensor.

    The emulated linears read `codes`. Every other torch operation works on the dequantized values. `copy_` assigns
    high-precision values, which are kept until `quantize_assigned_weights`. Nothing else writes to it but the
    optimizer, through `quantize_shards`.
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
        if function is aten.detach.default:  # `.data` also gets here; the result shares the codes
            return cls(args[0].codes)
        if function is aten.as_strided.default and isinstance(args[0], cls):  # after a gather, to its own shape
            assert tuple(args[1]) == args[0].codes.shape
            return cls(args[0].codes)
        if function is aten.copy_.default and isinstance(args[0], cls):
            target, source = args[0].codes, args[1]
            target.high_precision = source.to(target.device, target.dtype, copy=True)
            return args[0]
        if function is aten.empty_like.default:  # for a gradient; the values are not needed
            like = {"dtype": args[0].dtype, "device": args[0].device} | kwargs
            return torch.empty(args[0].shape, dtype=like["dtype"], device=like["device"])
        for described, argument in zip(function._schema.arguments, args, strict=False):
            if isinstance(argument, cls) and described.alias_info is not None and described.alias_info.is_write:
                raise TypeError(f"{function}: a quantized weight is not computed upon in place; copy_() sets it")
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.dequantize, (args, kwargs))
        return function(*args, **kwargs)


def quantized_parameters(modules: Iterable[nn.Module]) -> list[QuantizedParameter]:
    """All quantized parameters of some modules, in an order that all ranks with the same modules share."""
    return [weight for module in modules for weight in module.parameters() if isinstance(weight, QuantizedParameter)]


def quantize_assigned_weights(modules: Iterable[nn.Module]) -> None:
    """Quantize the weights that were assigned high-precision values, and free those values.

    Call it after initialization and after loading, when the optimizer has its master weights. It is collective over the
    ranks that share scales.
    """
    waiting = [weight for weight in quantized_parameters(modules) if weight.codes.high_precision is not None]
    quantize_shards(waiting, [weight.codes.values().flatten() for weight in waiting], [0] * len(waiting), None)
    for weight in waiting:
        weight.codes.high_precision = None


# --- quantization of shards -------------------------------------------------------------------------------------------


def quantize_shards(
    parameters: Sequence[QuantizedParameter],
    shards: Sequence[Optional[Tensor]],
    starts: Sequence[Optional[int]],
    group: Optional[dist.ProcessGroup],
) -> None:
    """Quantize weights of which each rank has a flat shard, each rank its shards. Collective over the group.

    Args:
        parameters: the same on all ranks.
        shards: FP32 [n], or the weight's own dtype; None where this rank has no part of a weight.
        starts: index of the shard's first element in the flattened weight; None where there is no shard.
        group: ranks that together have all shards; None: this rank has complete weights.

    Numerics: shards are first rounded to the weight's dtype. Codes and scales are then those of `quantize` for the
    complete weight. Rounding is monotonic, so that the amax of the rounded shard is the rounded amax.
    """
    quantize_codes([parameter.codes for parameter in parameters], shards, starts, group)


@torch.no_grad()
def quantize_codes(
    weights: Sequence[WeightCodes],
    shards: Sequence[Optional[Tensor]],
    starts: Sequence[Optional[int]],
    group: Optional[dist.ProcessGroup],
) -> None:
    """`quantize_shards` for the contents of parameters."""
    for rule in dict.fromkeys(codes.rule for codes in weights):
        chosen = [index for index, codes in enumerate(weights) if codes.rule == rule]
        _quantize_same_rule(
            [weights[i] for i in chosen], [shards[i] for i in chosen], [starts[i] for i in chosen], group
        )


def _quantize_same_rule(
    weights: Sequence[WeightCodes],
    shards: Sequence[Optional[Tensor]],
    starts: Sequence[Optional[int]],
    group: Optional[dist.ProcessGroup],
) -> None:
    """`quantize_shards` for weights with one rule, whose amaxes share one all-reduce."""
    sizes = [math.prod(codes.scales_shape) for codes in weights]
    amax = torch.zeros(sum(sizes), device=weights[0].device)
    for codes, shard, start, weight_amax in zip(weights, shards, starts, amax.split(sizes), strict=True):
        if shard is not None:
            assert start is not None
            codes.write_amax(shard, start, weight_amax.view(codes.scales_shape))
    amax = amax.to(weights[0].dtype).float()
    for ranks in (group, weights[0].scale_group):
        weights[0].exchange(amax, ranks)
    scales = _scales(weights, amax)
    amaxes, quant_scales, dequant_scales = (
        [each.view(codes.scales_shape) for each, codes in zip(tensor.split(sizes), weights, strict=True)]
        for tensor in (amax, scales.quant, scales.dequant)
    )
    torch._foreach_copy_([codes.amax for codes in weights], amaxes)
    torch._foreach_copy_([codes.dequant_scale for codes in weights], dequant_scales)
    for codes, shard, start, quant_scale in zip(weights, shards, starts, quant_scales, strict=True):
        if shard is not None:
            assert start is not None
            codes.quantize(shard, start, quant_scale)


def _complete_rows(codes: WeightCodes, shard: Tensor, start: int) -> tuple[Tensor, int]:
    """The rows that a shard overlaps, zero outside the shard, beginning with the first row of a block.

    Returns:
        [rows, K] in the weight's dtype, and the index of the first of these rows in the weight.
    """
    num_columns, height = codes.shape[1], codes.block[0]
    first_row = start // num_columns // height * height
    end_row = -(-(start + len(shard)) // num_columns)
    rows = torch.zeros((end_row - first_row) * num_columns, dtype=codes.dtype, device=codes.device)
    rows.narrow(0, start - first_row * num_columns, len(shard)).copy_(shard)
    return rows.view(-1, num_columns), first_row


def _scales(weights: Sequence[WeightCodes], amax: Tensor) -> Scales:
    """Concatenated scales of all weights, from their amaxes or from delayed scaling."""
    rule = weights[0].rule
    if rule.scale_rule is ScaleRule.DELAYED:
        states = [codes.delayed for codes in weights]
        assert None not in states, "delayed scaling has its scale from before"
        return tensor_scales(torch.stack([state.quant_scale[WEIGHT] for state in states if state is not None]))
    if rule.block is None:
        return tensor_scales(current_scale_of(amax, rule))
    return block_scales(amax, rule, weights[0].dtype, None)
