"""The emulated quantized linear: what a tensor core computes, on any device.

A linear layer y = x w^T + b is three matrix products (GEMMs). With T tokens, K inputs and N outputs:

    fprop   y  [T, N] = x  [T, K] . w [N, K]^T
    dgrad   dx [T, K] = dy [T, N] . w [N, K]
    wgrad   dw [N, K] = dy [T, N]^T . x [T, K]

Each operand (input x, weight w, grad_output dy) is replaced by low-precision codes and scales. A scale of a whole
tensor comes out of the sums: with x ~ c_x d_x, where d_x is `dequant_scale`,

    y = (d_x d_w) (c_x . c_w^T) + b

A tensor core multiplies codes exactly, sums in FP32, multiplies once by d_x d_w, adds the bias and rounds once to the
output type. Here the codes are decoded to BF16, which holds every FP8 and FP4 value exactly, and an ordinary BF16 GEMM
with FP32 sums does the rest: the same products, other sums, and the same single rounding, because the factor goes into
the GEMM (`alpha`) instead of being multiplied to its rounded result. With FP32 or FP16 parameters the decoded values
are FP32 and so is the GEMM. (Hopper's FP8 units keep about 14 bits of a sum, of the whole one in Transformer Engine's
fprop with a scale per tensor. tests/conformance/tensor_core.py has them to the bit, and what that does to results.)

Scales of blocks do not come out of the sums. Those that are powers of two (blockwise, MXFP8) or have few digits (E4M3
in NVFP4) are multiplied to the decoded codes, whose product with them still is a BF16 number: no rounding either.
FP32 scales of blocks need FP32 operands.

A block recipe quantizes x and dy twice, along the rows and along the columns, because the sums of fprop and dgrad run
over other elements than those of wgrad. Both copies come from high precision. Square blocks of w serve both its uses.

What is kept for the backward pass is the codes of x and w that it needs: one byte an element instead of two or four.
The bias gradient is the sum of the unquantized grad_output. A GEMM whose operands a recipe leaves alone runs in the
parameters' type, as the plain layer's does, and for wgrad that means that x itself is kept too. Each GEMM may have
rules of another recipe: an operand is then quantized once for each rule.

Tensor parallelism over P ranks (megatron-core's two layers, which do the outer communication themselves):

    column-parallel   w is [N/P, K]; x is whole, or with sequence parallelism a shard [T/P, K]
                      fprop: with sequence parallelism the ranks gather the codes of x, a byte an element, and scales
                      dgrad: each rank has a part of the sum dx: all-reduce, or reduce-scatter back to [T/P, K]
    row-parallel      w is [N, K/P]; x is [T, K/P]; the sum over ranks of y is the layer's affair

The collective of dx runs while wgrad computes. Gathered codes must share the tensor's scale, so with sequence
parallelism the amax of x is reduced over the group; which other amaxes are reduced is the caller's choice
(`AmaxGroups`). Blocks of columns that would span two shards (T/P is no multiple of their length) are quantized after a
gather in high precision, which is also what Transformer Engine does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.quantization import scaled_gemm
from megafp8.quantization.delayed_scaling import DelayedScales
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.quantize import Decoded, Quantized, Use, decode_operand, quantize_for
from megafp8.quantization.scaled_gemm import accumulate, emulated_gemm, product_of, rows_of
from megafp8.recipes.base import OPERANDS_OF, WHOLE, Gemm, LinearRecipe, Operand


class AmaxGroups(NamedTuple):
    """Ranks whose shards of an operand share one scale; None: each rank scales its own shard."""

    input: Optional[dist.ProcessGroup] = None
    weight: Optional[dist.ProcessGroup] = None
    grad_output: Optional[dist.ProcessGroup] = None


# Looks at an operand and at what became of it for each of the GEMMs that it is quantized for.
Observer = Callable[[Operand, Tensor, Mapping[Gemm, Quantized]], None]


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
        delayed: with delayed scaling, the operands' scales.
        noise: with stochastic rounding, its random numbers.
        after_backward: called at the end of the backward pass.
        observer: is shown every operand that is quantized; then all are quantized to codes, and decoded from them.
    """

    recipe: LinearRecipe
    tensor_group: Optional[dist.ProcessGroup] = None
    gather_input: bool = False
    allreduce_dgrad: bool = False
    amax_groups: AmaxGroups = AmaxGroups()
    fuse_wgrad: bool = False
    delayed: Optional[DelayedScales] = None
    noise: Optional[RoundingNoise] = None
    after_backward: Optional[Callable[[], None]] = None
    observer: Optional[Observer] = None

    def quantize(self, tensor: Tensor, operand: Operand, gemm: Gemm) -> Quantized:
        """The codes of one operand for one GEMM."""
        return self.quantize_for(tensor, operand, {gemm: None})[gemm]

    def quantize_for(
        self, tensor: Tensor, operand: Operand, dtypes: Mapping[Gemm, Optional[torch.dtype]]
    ) -> dict[Gemm, Union[Quantized, Decoded]]:
        """An operand for some of its GEMMs: numbers in the type that the GEMM multiplies, or codes for None."""
        if self.observer is not None and any(dtype is not None for dtype in dtypes.values()):
            return self._decoded(self.quantize_for(tensor, operand, dict.fromkeys(dtypes)), dtypes)
        uses = [Use(self.recipe.rule(operand, gemm), dtype) for gemm, dtype in dtypes.items()]
        group = getattr(self.amax_groups, operand.value)
        delayed = None if self.delayed is None else getattr(self.delayed, operand.value)
        generators = [self.noise.next_generator(tensor.device) if use.rule.is_stochastic else None for use in uses]
        results = dict(zip(dtypes, quantize_for(tensor, uses, group, delayed, generators), strict=True))
        if self.observer is not None:
            self.observer(operand, tensor, results)
        return results

    @staticmethod
    def _decoded(
        codes: Mapping[Gemm, Quantized], dtypes: Mapping[Gemm, Optional[torch.dtype]]
    ) -> dict[Gemm, Union[Quantized, Decoded]]:
        """Codes as numbers, where a type is given for them."""
        return {
            gemm: codes[gemm] if dtype is None else decode_operand(codes[gemm], dtype) for gemm, dtype in dtypes.items()
        }

    def gemm_dtype(self, activation: Tensor, gemm: Gemm) -> Optional[torch.dtype]:
        """The type that decoded operands are multiplied in: BF16 where that holds them exactly. None: codes are
        multiplied as they are.

        A CUDA GEMM takes BF16 operands to an FP32 result; a CPU GEMM returns the type of its operands, so that an FP32
        result needs FP32 operands.
        """
        if scaled_gemm.multiplies_codes(self.recipe, gemm, activation):
            return None
        rules = [self.recipe.rule(operand, gemm) for operand in dict(OPERANDS_OF)[gemm]]
        fits = activation.is_cuda or activation.dtype == torch.bfloat16
        return torch.bfloat16 if fits and all(rule.is_bf16_exact for rule in rules) else torch.float32


class QuantizedWeight(NamedTuple):
    """A weight [N, K] for the two GEMMs that read it: the same codes twice, where the rules are the same. None is for
    a GEMM in high precision, which reads the weight itself."""

    fprop: Optional[Quantized]
    dgrad: Optional[Quantized]


def quantize_weight(weight: Tensor, plan: LinearPlan) -> QuantizedWeight:
    """Codes and scales of a weight [N, K], which may have nothing else; valid until the weight changes."""
    if isinstance(weight, QuantizedParameter):
        if plan.delayed is not None:
            plan.delayed.weight.note(weight.codes.amax)
        codes = weight.codes.quantized()
        if plan.observer is not None:
            plan.observer(Operand.WEIGHT, weight, {Gemm.FPROP: codes, Gemm.DGRAD: codes})
        return QuantizedWeight(codes, codes)
    wanted = {gemm: None for gemm in (Gemm.FPROP, Gemm.DGRAD) if plan.recipe.is_quantized(gemm)}
    quantized = plan.quantize_for(weight, Operand.WEIGHT, wanted) if wanted else {}
    return QuantizedWeight(quantized.get(Gemm.FPROP), quantized.get(Gemm.DGRAD))


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
    """Refuse what would silently compute in another dtype than the caller thinks."""
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
        wanted = {Gemm.FPROP: None if plan.gather_input else dtype} if is_quantized else {}
        if needs_wgrad and _is_kept_as_codes(input, plan):
            wanted[Gemm.WGRAD] = None
        quantized = plan.quantize_for(input, Operand.INPUT, wanted) if wanted else {}
        kept = quantized.get(Gemm.WGRAD)
        if needs_wgrad and kept is None:
            kept = input.contiguous()
        _keep(ctx, quantized_weight.dgrad, kept)
        if not is_quantized:
            output = torch.matmul(_gather(input, plan)[0], weight.t())
            return output if bias is None else output + bias
        a = quantized[Gemm.FPROP]
        if plan.gather_input:
            a = _gather_quantized(a, plan)[0]
        output = _fprop(a, quantized_weight.fprop, bias, dtype, input.dtype)
        leading = a.codes.shape[:-1] if isinstance(a, Quantized) else a.values.shape[:-1]
        return output.view(*leading, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Optional[Tensor], ...]:
        plan: LinearPlan = ctx.plan
        weight, kept_input = _kept(ctx)
        needs_dgrad, needs_wgrad, needs_bias_grad = ctx.needs_input_grad[:3]
        gathering: list[dist.Work] = []
        reducing = grad_input = grad_weight = grad_bias = None
        if needs_wgrad:
            kept_input, gathering = _gather_kept(kept_input, plan)  # while dgrad computes
        rows = rows_of(grad_output)
        dy = _quantized_grad_output(rows, needs_dgrad, needs_wgrad, plan)
        if needs_dgrad:
            grad_rows = _dgrad(rows, dy.pop(Gemm.DGRAD, None), ctx.weight if weight is None else weight)
            grad_input, reducing = _start_reduction(grad_rows, ctx.input_shape, plan)  # while wgrad computes
        if needs_wgrad:
            _wait(gathering)
            grad_weight = _wgrad(rows, dy.get(Gemm.WGRAD), kept_input, ctx.weight, plan)
        if ctx.has_bias and needs_bias_grad:
            grad_bias = rows.sum(dim=0)
        _wait(reducing or [])
        if plan.after_backward is not None:
            plan.after_backward()
        return grad_input, grad_weight, grad_bias, None, None, None


# --- what the backward pass needs -------------------------------------------------------------------------------------


def _is_kept_as_codes(input: Tensor, plan: LinearPlan) -> bool:
    """Can the input be quantized for wgrad already? Else it is kept as it is."""
    rule = plan.recipe.rule(Operand.INPUT, Gemm.WGRAD)
    if rule is None:
        return False
    if not plan.gather_input or rule.block is None:
        return True
    num_rows = input.numel() // input.shape[-1] if input.numel() else 0
    # Blocks that would span shards are quantized after the gather.
    return rule.block[0] is not WHOLE and num_rows % rule.block[0] == 0


def _keep(ctx: Any, *kept: Union[Quantized, Tensor, None]) -> None:
    """Save quantized and other tensors for `_kept`."""
    saved = [each.tensors if isinstance(each, Quantized) else (each, None, None) for each in kept]
    ctx.rules = [each.rule if isinstance(each, Quantized) else None for each in kept]
    ctx.save_for_backward(*(tensor for tensors in saved for tensor in tensors))


def _kept(ctx: Any) -> list[Union[Quantized, Tensor, None]]:
    """What `_keep` was given."""
    tensors = ctx.saved_tensors
    triples = [tensors[i : i + 3] for i in range(0, len(tensors), 3)]
    return [
        triple[0] if rule is None else Quantized(*triple, rule) for triple, rule in zip(triples, ctx.rules, strict=True)
    ]


# --- GEMMs ------------------------------------------------------------------------------------------------------------


def _fprop(
    a: Union[Quantized, Decoded], weight: Quantized, bias: Optional[Tensor], dtype: Optional[torch.dtype],
    output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x . w^T + b as rows; `dtype` is what decoded operands are multiplied in."""
    if dtype is None:
        w = scaled_gemm.transposed(scaled_gemm.rows_along_sum(weight))
        return scaled_gemm.multiply(scaled_gemm.rows_along_sum(a), w, output_dtype, bias=bias, is_fast=True)
    a = decode_operand(a, dtype) if isinstance(a, Quantized) else a
    b = decode_operand(weight, dtype)
    return emulated_gemm(rows_of(a.values), b.values.t(), product_of(a.factor, b.factor), output_dtype, bias)


def _quantized_grad_output(
    rows: Tensor, needs_dgrad: bool, needs_wgrad: bool, plan: LinearPlan
) -> dict[Gemm, Union[Quantized, Decoded]]:
    """grad_output as what the GEMMs of the backward pass multiply, numbers or codes, where they are quantized."""
    needed = [gemm for gemm, is_needed in ((Gemm.DGRAD, needs_dgrad), (Gemm.WGRAD, needs_wgrad)) if is_needed]
    dtypes = {gemm: plan.gemm_dtype(rows, gemm) for gemm in needed if plan.recipe.is_quantized(gemm)}
    return plan.quantize_for(rows, Operand.GRAD_OUTPUT, dtypes) if dtypes else {}


def _dgrad(rows: Tensor, dy: Union[Quantized, Decoded, None], weight: Union[Quantized, Tensor]) -> Tensor:
    """dy . w from grad_output, as it is and for dgrad, and the weight, quantized or not as that is."""
    if dy is None:
        return torch.mm(rows, weight)
    if isinstance(dy, Quantized):
        a, b = scaled_gemm.rows_along_sum(dy), scaled_gemm.columns_along_sum(weight)
        return scaled_gemm.multiply(a, b, rows.dtype)
    b = decode_operand(weight, dy.values.dtype)
    return emulated_gemm(dy.values, b.values, product_of(dy.factor, b.factor), rows.dtype)


def _wgrad(
    rows: Tensor, dy: Union[Quantized, Decoded, None], kept_input: Union[Quantized, Tensor], weight: Tensor,
    plan: LinearPlan,
) -> Optional[Tensor]:  # fmt: skip
    """dy^T . x from grad_output, as it is and for wgrad, and what was kept of the input."""
    if dy is None:
        return _weight_gradient(rows.t(), rows_of(kept_input), None, weight, plan)
    if not isinstance(kept_input, Quantized):
        kept_input = plan.quantize(kept_input, Operand.INPUT, Gemm.WGRAD)
    if isinstance(dy, Quantized):
        a = scaled_gemm.transposed(scaled_gemm.columns_along_sum(dy))
        product = scaled_gemm.multiply(a, scaled_gemm.columns_along_sum(kept_input), torch.float32)
        return _deliver(product, weight, plan)
    x = decode_operand(kept_input, dy.values.dtype)
    return _weight_gradient(dy.values.t(), rows_of(x.values), product_of(dy.factor, x.factor), weight, plan)


def _weight_gradient(
    grad_rows_t: Tensor, input_rows: Tensor, factor: Optional[Tensor], weight: Tensor, plan: LinearPlan
) -> Optional[Tensor]:
    """factor (dy^T . x), [N, K]: returned in the type of the weight, or added to `weight.main_grad` without rounding in
    between, with a stand-in returned."""
    main_grad = getattr(weight, "main_grad", None) if plan.fuse_wgrad else None
    if main_grad is None:
        return emulated_gemm(grad_rows_t, input_rows, factor, weight.dtype)
    accumulate(main_grad, grad_rows_t, input_rows, factor)
    return _main_grad_stand_in(weight)


def _deliver(gradient: Tensor, weight: Tensor, plan: LinearPlan) -> Optional[Tensor]:
    """An FP32 weight gradient [N, K]: returned in the type of the weight, or added to `weight.main_grad`."""
    main_grad = getattr(weight, "main_grad", None) if plan.fuse_wgrad else None
    if main_grad is None:
        return gradient.to(weight.dtype)
    main_grad.add_(gradient)
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


# --- communication ----------------------------------------------------------------------------------------------------


def _gather_kept(kept: Union[Quantized, Tensor], plan: LinearPlan) -> tuple[Union[Quantized, Tensor], list[dist.Work]]:
    """All shards of the input in the form in which it was kept, and the works to wait for."""
    if isinstance(kept, Quantized):
        return _gather_quantized(kept, plan, async_op=True)
    return _gather(kept, plan, async_op=True)


def _gather_quantized(shard: Quantized, plan: LinearPlan, async_op: bool = False) -> tuple[Quantized, list[dist.Work]]:
    """The whole of a tensor sharded along dim 0: codes, and with blocks their scales."""
    codes, works = _gather(shard.codes, plan, async_op)
    if shard.rule.block is None:  # one scale, that the ranks share
        return dataclasses.replace(shard, codes=codes), works
    dequant_scale, more = _gather(shard.dequant_scale, plan, async_op)
    return dataclasses.replace(shard, codes=codes, dequant_scale=dequant_scale), works + more


def _gather(shard: Tensor, plan: LinearPlan, async_op: bool = False) -> tuple[Tensor, list[dist.Work]]:
    """All shards along dim 0, and the works to wait for; the shard itself without sequence parallelism.

    The collective moves bytes: gloo knows no FP8 type.
    """
    if not plan.gather_input:
        return shard, []
    shape = (shard.shape[0] * plan.tensor_group.size(), *shard.shape[1:])
    whole = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    source, target = (shard, whole) if shard.dtype.itemsize > 1 else (shard.view(torch.uint8), whole.view(torch.uint8))
    work = dist.all_gather_into_tensor(target, source, group=plan.tensor_group, async_op=async_op)
    return whole, [work] if async_op else []


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
