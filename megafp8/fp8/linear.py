"""The emulated FP8 linear: what an FP8 tensor core computes, on any device.

A linear layer y = x w^T + b is three matrix products (GEMMs). With T tokens, K inputs and N outputs:

    fprop   y  [T, N] = x  [T, K] . w [N, K]^T
    dgrad   dx [T, K] = dy [T, N] . w [N, K]
    wgrad   dw [N, K] = dy [T, N]^T . x [T, K]

Each operand (input x, weight w, grad_output dy) is replaced by FP8 codes c and a scale: x ~ c_x d_x, where d_x is
`dequant_scale`. The scales are per tensor, so they come out of the sums:

    y = (d_x d_w) (c_x . c_w^T) + b

A tensor core multiplies codes exactly, sums in FP32, multiplies once by d_x d_w, adds the bias and rounds once to the
output type. Here the codes are decoded to BF16, which holds every FP8 value exactly, and an ordinary BF16 GEMM with
FP32 sums does the rest: the same products, another order of summation, and the same single rounding, because the
factor goes into the GEMM (`alpha`) instead of being multiplied to its rounded result. With FP32 or FP16 parameters
the decoded values are FP32 and so is the GEMM.

What is kept for the backward pass is the codes of x and w: one byte an element instead of two or four. The bias
gradient is the sum of the unquantized grad_output. A GEMM whose operands a recipe leaves alone runs in the
parameters' type; for wgrad that means that x itself is kept too.

Tensor parallelism over P ranks (megatron-core's two layers, which do the outer communication themselves):

    column-parallel   w is [N/P, K]; x is whole, or with sequence parallelism a shard [T/P, K]
                      fprop: with sequence parallelism the ranks gather the codes of x, a byte an element
                      dgrad: each rank has a part of the sum dx: all-reduce, or reduce-scatter back to [T/P, K]
    row-parallel      w is [N, K/P]; x is [T, K/P]; the sum over ranks of y is the layer's affair

The collective of dx runs while wgrad computes. Gathered codes must share one scale, so with sequence parallelism the
amax of x is reduced over the group; which other amaxes are reduced is the caller's choice (`AmaxGroups`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.fp8.quantize import Quantized, quantize
from megafp8.fp8.recipes import Gemm, Operand, Recipe
from megafp8.fp8.rounding import decode


class AmaxGroups(NamedTuple):
    """Ranks whose shards of an operand share one scale; None: each rank scales its own shard."""

    input: Optional[dist.ProcessGroup] = None
    weight: Optional[dist.ProcessGroup] = None
    grad_output: Optional[dist.ProcessGroup] = None


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """All that a linear needs besides its tensors.

    Attributes:
        recipe: how each operand is quantized.
        tensor_group: the tensor-parallel ranks; None with one rank.
        gather_input: the input is a shard along dim 0 (sequence parallelism): gather its codes over `tensor_group`,
            reduce-scatter its gradient.
        allreduce_dgrad: sum the input gradient over `tensor_group`.
        amax_groups: where amaxes are reduced.
        fuse_wgrad: add the weight gradient to `weight.main_grad`, where data parallelism has made one.
    """

    recipe: Recipe
    tensor_group: Optional[dist.ProcessGroup] = None
    gather_input: bool = False
    allreduce_dgrad: bool = False
    amax_groups: AmaxGroups = AmaxGroups()
    fuse_wgrad: bool = False


def quantize_weight(weight: Tensor, plan: LinearPlan) -> Quantized:
    """Codes and scale of a weight [N, K]; valid until the weight changes."""
    return quantize(weight, plan.recipe.rule(Operand.WEIGHT, Gemm.FPROP), plan.amax_groups.weight)


def emulated_linear(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    plan: LinearPlan,
    quantized_weight: Optional[Quantized] = None,
) -> Tensor:
    """y = x w^T + b with quantized operands, differentiable in all three.

    Args:
        input: [..., K], BF16, FP16 or FP32; with `plan.gather_input` a shard along dim 0.
        weight: [N, K], the same dtype.
        bias: [N] or None.
        plan: recipe and communication.
        quantized_weight: `quantize_weight` of this weight, if it is known already.

    Returns:
        [..., N] in the input's dtype; with `plan.gather_input` dim 0 is `tensor_group.size()` times the input's.
    """
    if quantized_weight is None:
        quantized_weight = quantize_weight(weight, plan)
    return _EmulatedLinear.apply(input, weight, bias, plan, quantized_weight)


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Optional[Tensor], plan: LinearPlan, quantized_weight: Quantized
    ) -> Tensor:
        quantized_input = quantize(input, plan.recipe.rule(Operand.INPUT, Gemm.FPROP), plan.amax_groups.input)
        ctx.plan, ctx.weight, ctx.has_bias, ctx.input_shape = plan, weight, bias is not None, input.shape
        ctx.input_format, ctx.weight_format = quantized_input.format, quantized_weight.format
        ctx.save_for_backward(
            quantized_input.codes if plan.recipe.is_quantized(Gemm.WGRAD) else input.contiguous(),
            quantized_input.dequant_scale,
            quantized_weight.codes,
            quantized_weight.dequant_scale,
        )
        codes, _ = _gather(quantized_input.codes, plan)
        compute_dtype = _gemm_dtype(input)
        output = _scaled_gemm(
            _rows(decode(codes, quantized_input.format, compute_dtype)),
            quantized_weight.unscaled(compute_dtype).t(),
            quantized_input.dequant_scale * quantized_weight.dequant_scale,
            input.dtype,
            bias,
        )
        return output.view(*codes.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Optional[Tensor], ...]:
        plan: LinearPlan = ctx.plan
        saved_input, input_scale, weight_codes, weight_scale = ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias_grad = ctx.needs_input_grad[:3]
        gathering = reducing = grad_input = grad_weight = grad_bias = None
        if needs_wgrad:
            saved_input, gathering = _gather(saved_input, plan, async_op=True)  # while dgrad computes

        compute_dtype = _gemm_dtype(grad_output)
        rows = _rows(grad_output)
        quantized_rows = quantize(rows, plan.recipe.rule(Operand.GRAD_OUTPUT, Gemm.DGRAD), plan.amax_groups.grad_output)
        row_values = quantized_rows.unscaled(compute_dtype)
        if needs_dgrad:
            weight_values = decode(weight_codes, ctx.weight_format, compute_dtype)
            factor = quantized_rows.dequant_scale * weight_scale
            grad_input = _scaled_gemm(row_values, weight_values, factor, grad_output.dtype)
            grad_input, reducing = _start_reduction(grad_input, ctx.input_shape, plan)  # while wgrad computes
        if needs_wgrad:
            _wait(gathering)
            if plan.recipe.is_quantized(Gemm.WGRAD):
                input_rows = _rows(decode(saved_input, ctx.input_format, compute_dtype))
                factor = quantized_rows.dequant_scale * input_scale
                grad_weight = _weight_gradient(row_values.t(), input_rows, factor, ctx.weight, plan)
            else:
                one = torch.ones_like(input_scale)
                grad_weight = _weight_gradient(rows.t(), _rows(saved_input), one, ctx.weight, plan)
        if ctx.has_bias and needs_bias_grad:
            grad_bias = rows.sum(dim=0)
        _wait(reducing)
        return grad_input, grad_weight, grad_bias, None, None


def _rows(tensor: Tensor) -> Tensor:
    """[..., K] as [T, K]."""
    return tensor.reshape(-1, tensor.shape[-1])


def _gemm_dtype(activation: Tensor) -> torch.dtype:
    """The type that decoded codes are multiplied in. A CUDA GEMM takes BF16 operands to an FP32 result; a CPU GEMM
    returns the type of its operands, so that an FP32 result needs FP32 operands."""
    return torch.bfloat16 if activation.is_cuda or activation.dtype == torch.bfloat16 else torch.float32


def _scaled_gemm(a: Tensor, b: Tensor, factor: Tensor, dtype: torch.dtype, bias: Optional[Tensor] = None) -> Tensor:
    """factor (a . b) + bias, summed in FP32 and rounded once to `dtype`.

    Args:
        a, b: [M, K] and [K, N], in `_gemm_dtype`.
        factor: FP32 scalar on their device.
        bias: [N] or None.
    """
    if a.is_cuda:
        product = torch.mm(a, b, out_dtype=torch.float32).mul_(factor)
        return (product if bias is None else product.add_(bias)).to(dtype)
    alpha = factor.item()
    if bias is None:  # beta 0: the first operand is not read
        return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=alpha).to(dtype)
    return torch.addmm(bias.to(a.dtype), a, b, alpha=alpha).to(dtype)


def _weight_gradient(
    grad_rows_t: Tensor, input_rows: Tensor, factor: Tensor, weight: Tensor, plan: LinearPlan
) -> Optional[Tensor]:
    """factor (dy^T . x), [N, K]: returned, or added to `weight.main_grad` with a stand-in returned.

    Numerics: added to an FP32 main_grad without rounding in between, except that a CPU's BF16 GEMM rounds to BF16
    first, as it does for plain layers.
    """
    main_grad = getattr(weight, "main_grad", None) if plan.fuse_wgrad else None
    if main_grad is None:
        return _scaled_gemm(grad_rows_t, input_rows, factor, weight.dtype)
    if grad_rows_t.dtype == main_grad.dtype and not main_grad.is_cuda:
        main_grad.addmm_(grad_rows_t, input_rows, alpha=factor.item())
    else:
        product_dtype = torch.float32 if grad_rows_t.is_cuda else grad_rows_t.dtype
        main_grad.add_(_scaled_gemm(grad_rows_t, input_rows, factor, product_dtype))
    return _main_grad_stand_in(weight)


def _main_grad_stand_in(weight: Tensor) -> Optional[Tensor]:
    """What autograd gets when the gradient is in `main_grad` already.

    megatron-core's data-parallel hook counts a parameter as ready when autograd delivers a gradient, and with
    overlapped reduction insists on one. It reads `grad_added_to_main_grad` and then ignores the values, which
    therefore are not even written, unless `zero_out_wgrad` announces that it will add them.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight, requires_grad=False)
    return torch.empty_like(weight, requires_grad=False)


def _gather(shard: Tensor, plan: LinearPlan, async_op: bool = False) -> tuple[Tensor, Optional[dist.Work]]:
    """All shards along dim 0, and the work to wait for; the shard itself without sequence parallelism.

    The collective moves bytes: gloo knows no FP8 type.
    """
    if not plan.gather_input:
        return shard, None
    shape = (shard.shape[0] * plan.tensor_group.size(), *shard.shape[1:])
    whole = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    source, target = (shard, whole) if shard.dtype.itemsize > 1 else (shard.view(torch.uint8), whole.view(torch.uint8))
    return whole, dist.all_gather_into_tensor(target, source, group=plan.tensor_group, async_op=async_op)


def _start_reduction(
    grad_rows: Tensor, input_shape: torch.Size, plan: LinearPlan
) -> tuple[Tensor, Optional[dist.Work]]:
    """Sum the input gradient over the tensor-parallel ranks: the result's buffer, and the work to wait for."""
    if plan.gather_input:
        shard = grad_rows.new_empty(input_shape)
        return shard, dist.reduce_scatter_tensor(_rows(shard), grad_rows, group=plan.tensor_group, async_op=True)
    grad_input = grad_rows.view(input_shape)
    if plan.allreduce_dgrad:
        return grad_input, dist.all_reduce(grad_input, group=plan.tensor_group, async_op=True)
    return grad_input, None


def _wait(work: Optional[dist.Work]) -> None:
    if work is not None:
        work.wait()
