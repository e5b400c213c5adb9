"""The experts of a mixture on one GPU: two linears with SwiGLU for each expert, all experts in one launch a GEMM.

    gather + cast -> fc1 -> weighted SwiGLU + cast -> fc2 -> sum of each token's rows

and backward in the opposite order. FP8 codes are written where the data is made, by rows and transposed at once, so
that a BF16 copy of the gathered tokens, of SwiGLU's result and of both gradients is never written; blockwise scaling
alone writes that of SwiGLU's gradients. The probability of a row is applied in SwiGLU, in FP32. No size is read by the
host.

Under delayed scaling the scale of each expert is known before each cast, which records the amax in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from megafp8.kernels import expert_blockwise, expert_casts, expert_rowwise, expert_wgrad
from megafp8.kernels.expert_scales import ColumnCodes, CurrentScale
from megafp8.kernels.expert_wgrad import Operand
from megafp8.kernels.rounding import FormatSpec
from megafp8.kernels.routed_rows import RoutedRows, values_of_rows
from megafp8.quantization import grouped_linear
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.grouped_linear import Codes
from megafp8.quantization.linear import main_grad_stand_in
from megafp8.quantization.prequantized import PrequantizedScale
from megafp8.recipes.base import OperandRule, ScaleRule


class ExpertCodes(NamedTuple):
    """Codes of both weights, cast once a step.

    Attributes:
        spec: the format of inputs and weights.
        gradient_spec: the format of output gradients.
        casts: of rows, with the scales of the recipe.
    """

    fc1: Codes
    fc2: Codes
    spec: FormatSpec
    gradient_spec: FormatSpec
    casts: Any = expert_casts

    @property
    def is_fast(self) -> bool:
        """Whether products of backward GEMMs may be added with fewer bits: as in linears of the rowwise recipe, fprop
        alone does."""
        return self.casts is not expert_rowwise


Scale = Union[CurrentScale, DelayedScale]


class ExpertScales(NamedTuple):
    """Delayed scales [E] of what is cast in each microbatch, or where current scaling records infinite amaxes.

    Attributes:
        after_backward: called at the end of the backward pass.
    """

    fc1_input: Scale = CurrentScale()
    fc2_input: Scale = CurrentScale()
    fc1_grad_output: Scale = CurrentScale()
    fc2_grad_output: Scale = CurrentScale()
    after_backward: Optional[Callable[[], None]] = None


def cast_weights(
    fc1: Tensor, fc2: Tensor, spec: FormatSpec, of_fc1: Scale = CurrentScale(), of_fc2: Scale = CurrentScale(), *,
    gradient_spec: Optional[FormatSpec] = None, casts: Any = expert_casts,
) -> ExpertCodes:  # fmt: skip
    """Codes of fc1 [E, 2 F, H] and fc2 [E, H, F], BF16, by their scales; `gradient_spec` of None is `spec`."""
    codes = casts.weight_codes(fc1, spec, of_fc1), casts.weight_codes(fc2, spec, of_fc2)
    return ExpertCodes(*codes, spec, gradient_spec or spec, casts)


def casts_of(rule: OperandRule) -> Any:
    """The casts of a recipe, by its rule of inputs of the forward pass: a scale for each expert, row or block."""
    if rule.block is None:
        return expert_casts
    if rule.block[1] is None:
        return expert_rowwise
    return expert_blockwise.BlockwiseCasts(is_power_of_two=rule.scale_rule is ScaleRule.POWER_OF_TWO)


def experts(
    inputs: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor, routing_map: Tensor, rows: RoutedRows,
    codes: Optional[ExpertCodes] = None, prequantized: Optional[PrequantizedScale] = None,
    scales: ExpertScales = ExpertScales(),
) -> Tensor:  # fmt: skip
    """Sum over each token's experts of p fc2(silu(a) b), where a and b are the halves of fc1(token).

    Args:
        inputs: BF16 [T, H].
        probs: FP32 [T, E].
        fc1: BF16 [E, 2 F, H]; wgrad is added to `main_grad` (FP32) where it has one.
        fc2: BF16 [E, H, F].
        routing_map: bool [T, E].
        rows: of the routing map.
        codes: of the weights; None computes in BF16.
        prequantized: [E], the scales of inputs that arrived as codes; None: they did not.
        scales: of the operands.

    Returns:
        BF16 [T, H].
    """
    # `values_of_rows` is outside the function: autograd computes the gradients of `probs` from those of the rows.
    function = _BF16Experts if codes is None else _FP8Experts
    assert codes is not None or prequantized is None
    return function.apply(inputs, values_of_rows(probs, rows), fc1, fc2, routing_map, rows, codes, prequantized, scales)


def add_wgrad(
    weight: Tensor, grad_output: Operand, inputs: Operand, rows: RoutedRows, is_fast: bool = True
) -> Optional[Tensor]:
    """Add wgrad to `main_grad`, or overwrite it, and return what autograd gets: no values if there was a `main_grad`.

    Args:
        grad_output: BF16 [R, N], or codes [N, R].
        inputs: BF16 [R, W], or codes [W, R].
        is_fast: FP8 products may be added with fewer bits.
    """
    main_grad = getattr(weight, "main_grad", None)
    target = torch.empty_like(weight, dtype=torch.bfloat16) if main_grad is None else main_grad
    # In the first microbatch of a step the buffer still has the gradients of the last one (`WgradOverwrite`).
    is_overwritten = main_grad is None or getattr(main_grad, "is_overwritten", False)
    expert_wgrad.add_wgrad(target, grad_output, inputs, rows, is_fast=is_fast, is_overwritten=is_overwritten)
    return target if main_grad is None else main_grad_stand_in(weight)


class _BF16Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor, routing_map: Tensor, rows: RoutedRows,
        codes: None, prequantized: None, scales: ExpertScales,
    ) -> Tensor:  # fmt: skip
        # The gathered tokens are saved, because wgrad of fc1 multiplies them.
        x = expert_casts.gather(inputs, rows)
        h = grouped_linear.fprop(x, fc1, rows)
        y = expert_casts.swiglu(h, probs, rows)
        ctx.save_for_backward(x, h, y, probs)
        ctx.weights, ctx.rows = (fc1, fc2), rows
        return expert_casts.sum_rows(grouped_linear.fprop(y, fc2, rows), rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        (x, h, y, probs), (fc1, fc2), rows = ctx.saved_tensors, ctx.weights, ctx.rows
        # A token's output is a sum of rows: each of its rows has the gradient of the sum.
        dz = expert_casts.gather(grad.contiguous(), rows)
        dy = grouped_linear.dgrad(dz, fc2, rows)
        dfc2 = add_wgrad(fc2, dz, y, rows)
        dh, dprobs = expert_casts.swiglu_backward(dy, h, probs, rows)
        dfc1 = add_wgrad(fc1, dh, x, rows)
        # A token was copied to its rows: its gradient is their sum.
        dx = expert_casts.sum_rows(grouped_linear.dgrad(dh, fc1, rows), rows)
        return dx, dprobs, dfc1, dfc2, None, None, None, None, None


class _FP8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor, routing_map: Tensor, rows: RoutedRows,
        codes: ExpertCodes, prequantized: Optional[PrequantizedScale], scales: ExpertScales,
    ) -> Tensor:  # fmt: skip
        casts, dequant_scale = codes.casts, None
        # Infinite tokens arrived as finite codes; only the sender has seen them.
        if prequantized is not None:
            dequant_scale = prequantized.dequant_scale
            scales.fc1_input.record(prequantized.amax)
        x = casts.gather_codes(inputs, rows, routing_map, codes.spec, dequant_scale, scales.fc1_input)
        h = grouped_linear.fp8_fprop(x, codes.fc1, rows)
        y = casts.swiglu_codes(h, probs, rows, codes.spec, scales.fc2_input)
        # fprop alone reads codes by rows, wgrad alone reads the transposed ones.
        (x_columns, x_scale, _), (y_columns, y_scale, _) = x.transposed, y.transposed
        ctx.save_for_backward(x_columns, x_scale, h, y_columns, y_scale, probs, routing_map)
        # Attributes, not saved tensors: wgrad is added to `main_grad` of these very parameters.
        ctx.weights, ctx.rows, ctx.codes, ctx.scales = (fc1, fc2), rows, codes, scales
        return expert_casts.sum_rows(grouped_linear.fp8_fprop(y, codes.fc2, rows), rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x_columns, x_scale, h, y_columns, y_scale, probs, routing_map = ctx.saved_tensors
        (fc1, fc2), rows, codes, scales = ctx.weights, ctx.rows, ctx.codes, ctx.scales
        x, y = ColumnCodes(x_columns, x_scale), ColumnCodes(y_columns, y_scale)
        casts, is_fast = codes.casts, codes.is_fast
        # One cast writes codes by rows, for dgrad, and transposed, for wgrad.
        dz = casts.gather_codes(grad.contiguous(), rows, routing_map, codes.gradient_spec, scale=scales.fc2_grad_output)
        dy = grouped_linear.fp8_dgrad(dz, codes.fc2, rows, is_fast)
        dfc2 = add_wgrad(fc2, dz.transposed, y, rows, is_fast)
        dh, dprobs = casts.swiglu_backward_codes(dy, h, probs, rows, codes.gradient_spec, scales.fc1_grad_output)
        dfc1 = add_wgrad(fc1, dh.transposed, x, rows, is_fast)
        dx = expert_casts.sum_rows(grouped_linear.fp8_dgrad(dh, codes.fc1, rows, is_fast), rows)
        # All amaxes of the pass are recorded now, so that the scales may be updated.
        if scales.after_backward is not None:
            scales.after_backward()
        return dx, dprobs, dfc1, dfc2, None, None, None, None, None
