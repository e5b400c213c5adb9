"""The emulated quantized linear: the three GEMMs of a linear with the results of low-precision tensor cores.

A linear layer y = x w^T + b has three GEMMs. With T tokens, K inputs and N outputs:

    fprop   y  [T, N] = x  [T, K] . w [N, K]^T
    dgrad   dx [T, K] = dy [T, N] . w [N, K]
    wgrad   dw [N, K] = dy [T, N]^T . x [T, K]

Each operand (input x, weight w, grad_output dy) is replaced by low-precision codes c and a dequantization scale d. The
per-tensor scale factors out of the sums: with x ~ c_x d_x and w ~ c_w d_w,

    y = (d_x d_w) (c_x . c_w^T) + b

A tensor core multiplies codes exactly, sums in FP32, multiplies once by d_x d_w, adds the bias and rounds once to the
output type. Here the codes are decoded to BF16, which holds every FP8 and FP4 value exactly, and multiplied by an
ordinary BF16 GEMM with FP32 accumulation. The products are the same, the order of the sums differs, and there is the
same single rounding, because d_x d_w is passed to the GEMM as `alpha` instead of scaling its rounded result. With FP32
or FP16 parameters the GEMM and its decoded operands are FP32.

Hopper's FP8 tensor cores keep about 14 bits of a sum. With a scale per tensor, Transformer Engine's fprop leaves all of
a sum in the tensor core. tests/conformance/tensor_core.py models them to the bit and shows the effect on results.

Block scales do not factor out of the sums. Those that are powers of two (blockwise, MXFP8) or E4M3 (NVFP4) are
multiplied into the decoded codes: the product is still a BF16 number, so that nothing is rounded. FP32 block scales
need FP32 operands.

A block recipe quantizes x and dy twice, along rows and along columns, because fprop and dgrad sum over another dim than
wgrad. Both copies come from high precision. Square blocks of w serve both fprop and dgrad. A recipe that requantizes
keeps the codes of x and w for fprop alone, and the backward pass makes its codes from what they represent.

Saved for the backward pass are the codes of x and w that it needs, one byte an element instead of two or four. The bias
gradient is the sum of the unquantized grad_output. A GEMM whose operands are not quantized runs in the dtype of the
parameters, as in the plain layer; if that is wgrad, x itself is saved. Each GEMM may follow another recipe: an operand
is quantized once for each rule.

Tensor parallelism over P ranks, for megatron-core's two layers, which do the outer communication themselves:

    column-parallel   w is [N/P, K]; x is complete, or a shard [T/P, K] with sequence parallelism
                      fprop: with sequence parallelism the codes of x, a byte an element, and the scales are gathered
                      dgrad: each rank has a partial sum of dx: all-reduce, or reduce-scatter to [T/P, K]
    row-parallel      w is [N, K/P]; x is [T, K/P]; the layer itself sums y over the ranks

The collective of dx overlaps with wgrad. Gathered codes must share the tensor's scale, so that with sequence
parallelism the amax of x is reduced over the group. `AmaxGroups` has the other amax reductions. Column blocks
that would span two shards (T/P is not a multiple of their length) are quantized after a gather in high precision, as
in Transformer Engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.quantization import scaled_gemm
from megafp8.quantization.linear_plan import LinearPlan, QuantizedWeight, quantize_weight
from megafp8.quantization.quantize import decode_operand
from megafp8.quantization.quantized_tensor import Decoded, Quantized
from megafp8.quantization.scaled_gemm import accumulate, emulated_gemm, product_of, rows_of
from megafp8.recipes.base import FULL_DIM, Gemm, Operand


def emulated_linear(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    plan: LinearPlan,
    quantized_weight: Optional[QuantizedWeight] = None,
) -> Tensor:
    """y = x w^T + b with quantized operands, differentiable in all three.

    Args:
        input: [..., K], BF16, FP16 or FP32; with `plan.gather_input` a shard along dim 0.
        weight: [N, K], the same dtype.
        bias: [N], the same dtype, or None.
        plan: recipe and communication.
        quantized_weight: `quantize_weight` of this weight, if it is known already.

    Returns:
        [..., N] in the input's dtype; with `plan.gather_input` dim 0 is `tensor_group.size()` times the input's.

    Raises:
        TypeError: the dtypes differ, or torch.autocast is enabled.
    """
    _check_dtypes(input, weight, bias)
    if quantized_weight is None:
        quantized_weight = quantize_weight(weight, plan)
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    return _EmulatedLinear.apply(input, weight, bias, plan, quantized_weight, needs_wgrad)


def _check_dtypes(input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> None:
    """Refuse what would silently compute in another dtype than the caller expects."""
    if torch.is_autocast_enabled(input.device.type):
        raise TypeError(
            f"emulated_linear computes in the dtype of its tensors and torch.autocast is enabled for "
            f"{input.device.type}: convert the model and its input, for example by .to(torch.bfloat16), and call it "
            "under torch.autocast(enabled=False)"
        )
    if weight.dtype != input.dtype or (bias is not None and bias.dtype != input.dtype):
        of_bias = "" if bias is None else f", bias {bias.dtype}"
        raise TypeError(
            f"emulated_linear needs tensors of one dtype: input is {input.dtype}, weight {weight.dtype}{of_bias}; "
            "convert them to one, for example by .to(weight.dtype)"
        )


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        plan: LinearPlan,
        quantized_weight: QuantizedWeight,
        needs_wgrad: bool,
    ) -> Tensor:
        ctx.plan, ctx.weight, ctx.has_bias, ctx.input_shape = plan, weight, bias is not None, input.shape
        is_quantized = quantized_weight.fprop is not None
        dtype = plan.gemm_dtype(input, Gemm.FPROP) if is_quantized else input.dtype
        # Codes are gathered, not decoded values: they are half the bytes.
        dtypes: dict[Gemm, Optional[torch.dtype]] = {}
        requantizes = needs_wgrad and plan.recipe.requantizes(Operand.INPUT)
        if is_quantized:
            dtypes[Gemm.FPROP] = None if plan.gather_input or requantizes else dtype
        if needs_wgrad and _saves_codes(input, plan):
            dtypes[Gemm.WGRAD] = None
        quantized = plan.quantize_for(input, Operand.INPUT, dtypes) if dtypes else {}
        stored_gemm = Gemm.FPROP if requantizes else Gemm.WGRAD
        saved_input: Union[Quantized, Decoded, Tensor, None] = quantized.get(stored_gemm)
        if needs_wgrad and saved_input is None:
            saved_input = input.contiguous()
        _save(ctx, quantized_weight.dgrad, saved_input)
        if quantized_weight.fprop is None:
            gathered = _gather(input, plan)[0]
            output = emulated_gemm(rows_of(gathered), plan.smoothed(weight).t(), None, input.dtype)
            output = output.view(*gathered.shape[:-1], weight.shape[0])
            return output if bias is None else output + bias
        a = quantized[Gemm.FPROP]
        if isinstance(a, Quantized) and plan.gather_input:
            a = _gather_quantized(a, plan)[0]
        output = _fprop(a, quantized_weight.fprop, bias, dtype, input.dtype)
        leading = a.codes.shape[:-1] if isinstance(a, Quantized) else a.values.shape[:-1]
        return output.view(*leading, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Optional[Tensor], ...]:
        plan: LinearPlan = ctx.plan.for_backward(grad_output.device)
        weight, saved_input = _load_saved(ctx)
        needs_dgrad, needs_wgrad, needs_bias_grad = ctx.needs_input_grad[:3]
        gathers: list[dist.Work] = []
        reductions: list[dist.Work] = []
        grad_input = grad_weight = grad_bias = None
        if isinstance(saved_input, Quantized) and needs_wgrad:  # overlaps with dgrad
            saved_input, gathers = _gather_quantized(saved_input, plan, async_op=True)
        elif needs_wgrad:
            assert saved_input is not None
            saved_input, gathers = _gather(saved_input, plan, async_op=True)
        rows = rows_of(grad_output)
        needed = {Gemm.DGRAD: needs_dgrad, Gemm.WGRAD: needs_wgrad}
        dtypes = {
            gemm: plan.gemm_dtype(rows, gemm)
            for gemm, is_needed in needed.items()
            if is_needed and plan.recipe.is_quantized(gemm)
        }
        dy = plan.quantize_for(rows, Operand.GRAD_OUTPUT, dtypes) if dtypes else {}
        if needs_dgrad:
            # `pop`: the decoded copy for dgrad is freed before wgrad allocates.
            stored_weight = plan.smoothed(ctx.weight) if weight is None else weight
            grad_rows = _dgrad(rows, dy.pop(Gemm.DGRAD, None), stored_weight, plan)
            grad_input, reductions = _start_reduction(grad_rows, ctx.input_shape, plan)  # overlaps with wgrad
        if needs_wgrad:
            _wait(gathers)
            assert saved_input is not None
            grad_weight = _wgrad(rows, dy.get(Gemm.WGRAD), saved_input, ctx.weight, plan)
        if ctx.has_bias and needs_bias_grad:
            grad_bias = rows.sum(dim=0)
        _wait(reductions)
        if plan.after_backward is not None:
            plan.after_backward()
        return grad_input, grad_weight, grad_bias, None, None, None


# --- saved for the backward pass --------------------------------------------------------------------------------------


def _saves_codes(input: Tensor, plan: LinearPlan) -> bool:
    """Whether the input is quantized for wgrad in the forward pass; otherwise it is saved unquantized."""
    rule = plan.recipe.rule(Operand.INPUT, Gemm.WGRAD)
    if rule is None or rule.is_requantized:
        return False
    if not plan.gather_input or rule.block is None:
        return True
    num_rows = input.numel() // input.shape[-1] if input.numel() else 0
    # Blocks that would span two shards are quantized after the gather.
    return rule.block[0] is not FULL_DIM and num_rows % rule.block[0] == 0


def _save(ctx: Any, *values: Union[Quantized, Decoded, Tensor, None]) -> None:
    """Save codes and plain tensors for the backward pass; `_load_saved` returns them."""
    tensors: list[Optional[Tensor]] = []
    for value in values:
        assert not isinstance(value, Decoded)
        tensors += value.tensors if isinstance(value, Quantized) else (value, None, None)
    ctx.rules = [value.rule if isinstance(value, Quantized) else None for value in values]
    ctx.save_for_backward(*tensors)


def _load_saved(ctx: Any) -> list[Union[Quantized, Tensor, None]]:
    tensors = ctx.saved_tensors  # activation checkpointing permits one access
    values: list[Union[Quantized, Tensor, None]] = []
    for index, rule in enumerate(ctx.rules):
        codes, dequant_scale, tensor_scale = tensors[3 * index : 3 * index + 3]
        values.append(codes if rule is None else Quantized(codes, dequant_scale, tensor_scale, rule))
    return values


# --- GEMMs ------------------------------------------------------------------------------------------------------------


def _fprop(
    a: Union[Quantized, Decoded], weight: Quantized, bias: Optional[Tensor], dtype: Optional[torch.dtype],
    output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x . w^T + b as rows; `dtype` is what decoded operands are multiplied in, None multiplies codes."""
    if dtype is None:
        assert isinstance(a, Quantized)
        w = scaled_gemm.transposed(scaled_gemm.rows_along_sum(weight))
        return scaled_gemm.multiply(scaled_gemm.rows_along_sum(a), w, output_dtype, bias=bias, is_fast=True)
    a = decode_operand(a, dtype) if isinstance(a, Quantized) else a
    b = decode_operand(weight, dtype)
    return emulated_gemm(rows_of(a.values), b.values.t(), product_of(a.factor, b.factor), output_dtype, bias)


def _dgrad(
    rows: Tensor, dy: Union[Quantized, Decoded, None], weight: Union[Quantized, Tensor], plan: LinearPlan
) -> Tensor:
    """dy . w; `rows` is grad_output in high precision."""
    if dy is None:
        assert isinstance(weight, Tensor)
        return emulated_gemm(rows, weight, None, rows.dtype)
    weight = plan.backward_codes(weight, Operand.WEIGHT, Gemm.DGRAD)
    if isinstance(dy, Quantized):
        a, b = scaled_gemm.rows_along_sum(dy), scaled_gemm.columns_along_sum(weight)
        return scaled_gemm.multiply(a, b, rows.dtype)
    w = decode_operand(weight, dy.values.dtype)
    return emulated_gemm(dy.values, w.values, product_of(dy.factor, w.factor), rows.dtype)


def _wgrad(
    rows: Tensor, dy: Union[Quantized, Decoded, None], saved_input: Union[Quantized, Tensor], weight: Tensor,
    plan: LinearPlan,
) -> Optional[Tensor]:  # fmt: skip
    """dy^T . x [N, K], in the dtype of the weight; or added to `weight.main_grad` without rounding in between."""
    main_grad = getattr(weight, "main_grad", None) if plan.fuse_wgrad else None
    a, b, factor = rows.t(), saved_input, None
    if dy is not None:
        saved_input = plan.backward_codes(saved_input, Operand.INPUT, Gemm.WGRAD)
        if isinstance(dy, Quantized):
            grad_rows_t = scaled_gemm.transposed(scaled_gemm.columns_along_sum(dy))
            product = scaled_gemm.multiply(grad_rows_t, scaled_gemm.columns_along_sum(saved_input), torch.float32)
            product = plan.smoothed(product)
            if main_grad is None:
                return product.to(weight.dtype)
            main_grad.add_(product)
            return main_grad_stand_in(weight)
        x = decode_operand(saved_input, dy.values.dtype)
        a, b, factor = dy.values.t(), x.values, product_of(dy.factor, x.factor)
    assert isinstance(b, Tensor)
    if main_grad is None:
        return plan.smoothed(emulated_gemm(a, rows_of(b), factor, weight.dtype))
    if plan.channel_scales is None:
        accumulate(main_grad, a, rows_of(b), factor)
    else:  # the sum of this microbatch alone is scaled
        product = torch.zeros_like(main_grad, dtype=torch.float32)
        accumulate(product, a, rows_of(b), factor)
        main_grad.add_(plan.smoothed(product))
    return main_grad_stand_in(weight)


def main_grad_stand_in(weight: Tensor) -> Optional[Tensor]:
    """The tensor for autograd when the gradient is in `main_grad` already.

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


# --- communication ----------------------------------------------------------------------------------------------------


def _gather_quantized(shard: Quantized, plan: LinearPlan, async_op: bool = False) -> tuple[Quantized, list[dist.Work]]:
    """Gather a tensor sharded along dim 0: its codes, and its block scales if it has blocks."""
    codes, works = _gather(shard.codes, plan, async_op)
    if shard.rule.block is None:  # the ranks share one scale
        return dataclasses.replace(shard, codes=codes), works
    dequant_scale, scale_works = _gather(shard.dequant_scale, plan, async_op)
    return dataclasses.replace(shard, codes=codes, dequant_scale=dequant_scale), works + scale_works


def _gather(shard: Tensor, plan: LinearPlan, async_op: bool = False) -> tuple[Tensor, list[dist.Work]]:
    """All shards along dim 0, and the works to wait for; without sequence parallelism the shard itself."""
    if not plan.gather_input:
        return shard, []
    assert plan.tensor_group is not None
    shape = (shard.shape[0] * plan.tensor_group.size(), *shard.shape[1:])
    gathered = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    source, target = shard, gathered
    if shard.dtype.itemsize == 1:  # gloo does not support FP8 dtypes
        source, target = shard.view(torch.uint8), gathered.view(torch.uint8)
    work = dist.all_gather_into_tensor(target, source, group=plan.tensor_group, async_op=async_op)
    return gathered, [work] if async_op else []


def _start_reduction(grad_rows: Tensor, input_shape: torch.Size, plan: LinearPlan) -> tuple[Tensor, list[dist.Work]]:
    """Sum the input gradient over the tensor-parallel ranks: the result's buffer, and the works to wait for."""
    if plan.gather_input:
        shard = grad_rows.new_empty(input_shape)
        return shard, [dist.reduce_scatter_tensor(rows_of(shard), grad_rows, group=plan.tensor_group, async_op=True)]
    grad_input = grad_rows.view(input_shape)
    if plan.allreduce_dgrad:
        return grad_input, [dist.all_reduce(grad_input, group=plan.tensor_group, async_op=True)]
    return grad_input, []


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
