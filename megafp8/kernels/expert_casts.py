"""Launches of the kernels in `experts.py`: what a mixture of experts computes between its grouped GEMMs.

Rows beyond the last expert's are left uninitialized in every result. Casts take the scales of delayed scaling, or
compute scales from the current amax of each expert and record where that is infinite.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
import triton
from torch import Tensor

from megafp8.kernels import experts
from megafp8.kernels.expert_scales import CastScale, ColumnCodes, CurrentScale
from megafp8.kernels.rounding import FormatSpec, code_dtype
from megafp8.kernels.routed_rows import ALIGNMENT, RoutedRows

COLUMNS, BLOCK_SIZE, GRADIENTS_BLOCK_SIZE = 128, 128, 64


class RoutedCodes(NamedTuple):
    """Codes of rows [R, W], or of weights [E, R, W].

    Attributes:
        rows: uint8, as the tensor.
        columns: uint8, with the last two dimensions transposed.
        scale_inv: FP32 [E], the dequantization scale of each expert.
        dtype: of the format.
    """

    rows: Tensor
    columns: Tensor
    scale_inv: Tensor
    dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def transposed(self) -> ColumnCodes:
        """Of rows, the operand of wgrad; of weights, that of dgrad."""
        return ColumnCodes(self.columns, self.scale_inv, self.dtype)


def _empty_codes(num_rows: int, width: int, scale_inv: Tensor, spec: FormatSpec) -> RoutedCodes:
    """Room for codes [num_rows, width]."""
    # Uninitialized: what lies past the last expert's rows is never multiplied.
    return RoutedCodes(
        scale_inv.new_empty(num_rows, width, dtype=torch.uint8),
        scale_inv.new_empty(width, num_rows, dtype=torch.uint8),
        scale_inv,
        code_dtype(spec),
    )


def _experts(rows: RoutedRows) -> dict[str, int]:
    return {"NUM_EXPERTS": len(rows.ends), "EXPERTS": triton.next_power_of_2(len(rows.ends))}


class _Scales(NamedTuple):
    """What a cast gets its scales from.

    Attributes:
        amaxes: FP32 [E]. Without known scales they give the scales; else they are raised, and None records nothing.
        known: FP32 [E], quantization scales; None under current scaling.
        infinities: flags [E], set where an amax is infinite; None under delayed scaling, and where nothing is recorded.
        scale_inv: FP32 [E], room for the dequantization scales.
    """

    amaxes: Optional[Tensor]
    known: Optional[Tensor]
    infinities: Optional[Tensor]
    scale_inv: Tensor


def _scales(scale: CastScale, num_experts: int, inputs: Tensor) -> _Scales:
    """Known scales, or amaxes of zero that a first launch has to raise."""
    if isinstance(scale, CurrentScale):
        # Zeros, because atomic maxima of magnitudes raise them in the first launch.
        zeros = inputs.new_zeros(num_experts, dtype=torch.float32)
        return _Scales(zeros, None, scale.infinities, torch.empty_like(zeros))
    # Delayed scaling finds infinities in its history of amaxes, not in this cast.
    known, amaxes = scale
    return _Scales(amaxes, known, None, torch.empty_like(known))


def token_amaxes(inputs: Tensor) -> Tensor:
    """FP32 [T] of inputs [T, W]."""
    amaxes = inputs.new_empty(inputs.shape[0], dtype=torch.float32)
    width = inputs.shape[1]
    experts.token_amax_kernel[(inputs.shape[0],)](inputs, amaxes, width, WIDTH=triton.next_power_of_2(width))
    return amaxes


def gather_codes(
    inputs: Tensor, rows: RoutedRows, routing_map: Tensor, spec: FormatSpec, prequantized: Optional[Tensor] = None,
    scale: CastScale = CurrentScale(),
) -> RoutedCodes:  # fmt: skip
    """Quantize the token of each row to codes [R, W].

    Args:
        inputs: BF16 [T, W].
        routing_map: bool [T, E].
        prequantized: FP32 [E], dequantization scales, where the inputs are the numbers of codes.
        scale: unused with `prequantized`.
    """
    (num_rows,), width = rows.token_of_row.shape, inputs.shape[1]
    if prequantized is not None:
        # The scales came with the codes, and their sender has computed the amaxes.
        scales = _Scales(None, None, None, prequantized)
    else:
        # The amax of a token is computed once, not once for each of its K rows. The map then gives each expert the
        # maximum over its tokens, without a launch over rows.
        amaxes = torch.where(routing_map, token_amaxes(inputs)[:, None], 0.0).amax(0)
        if isinstance(scale, CurrentScale):
            scales = _Scales(amaxes, None, scale.infinities, torch.empty_like(amaxes))
        else:
            known, recorded = scale
            if recorded is not None:
                torch.maximum(recorded, amaxes, out=recorded)
            scales = _Scales(None, known, None, torch.empty_like(known))
    codes = _empty_codes(num_rows, width, scales.scale_inv, spec)
    # The grid covers the worst case; programs past the last live row return at once. See `routed_rows`.
    experts.gather_codes_kernel[(width // BLOCK_SIZE, num_rows // BLOCK_SIZE)](
        inputs, rows.token_of_row, rows.expert_of_block, scales.amaxes, scales.known, scales.infinities, rows.ends,
        *codes[:3], num_rows, width, IS_SCALED=prequantized is not None,
        **_experts(rows), FORMAT=spec, BLOCK_SIZE=BLOCK_SIZE, num_warps=8,
    )  # fmt: skip
    return codes


def gather(inputs: Tensor, rows: RoutedRows) -> Tensor:
    """The token of each row, [R, W]; zeros in empty rows."""
    (num_rows,), width = rows.token_of_row.shape, inputs.shape[1]
    results = inputs.new_empty(num_rows, width)
    experts.gather_kernel[(num_rows,)](
        inputs, rows.token_of_row, rows.ends, results, width, NUM_EXPERTS=len(rows.ends),
        WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return results


def sum_rows(inputs: Tensor, rows: RoutedRows) -> Tensor:
    """The sum of the rows of each token: inputs [R, W] to [T, W], added in FP32."""
    (num_tokens, top_k), width = rows.rows_of_token.shape, inputs.shape[1]
    results = inputs.new_empty(num_tokens, width)
    # A token reads its rows by index. Empty rows belong to no token, so that nobody reads them.
    experts.sum_rows_kernel[(num_tokens,)](
        inputs, rows.rows_of_token, results, width, TOP_K=top_k, WIDTH=triton.next_power_of_2(width)
    )
    return results


def swiglu(inputs: Tensor, probs: Tensor, rows: RoutedRows) -> Tensor:
    """p silu(a) b [R, W]; a and b are the halves of inputs [R, 2 W] BF16, probs FP32 [R]."""
    num_rows, width = inputs.shape[0], inputs.shape[1] // 2
    results = inputs.new_empty(num_rows, width)
    experts.swiglu_rows_kernel[(num_rows // ALIGNMENT,)](
        inputs, probs, rows.ends, rows.expert_of_block, results, None, width, NUM_EXPERTS=len(rows.ends),
        COLUMNS=COLUMNS,
    )  # fmt: skip
    return results


def swiglu_codes(
    inputs: Tensor, probs: Tensor, rows: RoutedRows, spec: FormatSpec, scale: CastScale = CurrentScale()
) -> RoutedCodes:
    """The codes of `swiglu`."""
    num_rows, width = inputs.shape[0], inputs.shape[1] // 2
    scales = _scales(scale, len(rows.ends), inputs)
    # The first launch computes the same FP32 values as the second one and keeps only their amaxes.
    if scales.known is None:
        experts.swiglu_rows_kernel[(num_rows // ALIGNMENT,)](
            inputs, probs, rows.ends, rows.expert_of_block, None, scales.amaxes, width, NUM_EXPERTS=len(rows.ends),
            COLUMNS=COLUMNS,
        )  # fmt: skip
    codes = _empty_codes(num_rows, width, scales.scale_inv, spec)
    experts.swiglu_codes_kernel[(width // BLOCK_SIZE, num_rows // BLOCK_SIZE)](
        inputs, probs, rows.expert_of_block, scales.amaxes, scales.known, scales.infinities, rows.ends, *codes[:3],
        num_rows, width, **_experts(rows), FORMAT=spec, BLOCK_SIZE=BLOCK_SIZE, num_warps=8,
    )  # fmt: skip
    return codes


def swiglu_backward(gradients: Tensor, inputs: Tensor, probs: Tensor, rows: RoutedRows) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu`: of inputs [R, 2 W] BF16 and of probs FP32 [R]."""
    num_rows, width = gradients.shape
    # Zeros, because no program writes the rows past the end.
    results, prob_gradients = torch.empty_like(inputs), torch.zeros_like(probs)
    experts.swiglu_gradients_rows_kernel[(num_rows // ALIGNMENT,)](
        gradients, inputs, probs, rows.ends, rows.expert_of_block, results, prob_gradients, None, width,
        NUM_EXPERTS=len(rows.ends), COLUMNS=COLUMNS,
    )  # fmt: skip
    return results, prob_gradients


def swiglu_backward_codes(
    gradients: Tensor, inputs: Tensor, probs: Tensor, rows: RoutedRows, spec: FormatSpec,
    scale: CastScale = CurrentScale(),
) -> tuple[RoutedCodes, Tensor]:  # fmt: skip
    """Codes of the gradients of inputs, and the gradients of probs."""
    num_rows, width = gradients.shape
    scales = _scales(scale, len(rows.ends), inputs)
    # A row of sums for each tile of columns: they are added in a fixed order. Rows past the end stay zero.
    prob_sums = probs.new_zeros(1 if scales.known is None else width // GRADIENTS_BLOCK_SIZE, num_rows)
    # The first launch has complete rows and stores complete sums. Where it is left out, each tile of the second one
    # stores its own part, and the parts are added below.
    if scales.known is None:
        experts.swiglu_gradients_rows_kernel[(num_rows // ALIGNMENT,)](
            gradients, inputs, probs, rows.ends, rows.expert_of_block, None, prob_sums, scales.amaxes, width,
            NUM_EXPERTS=len(rows.ends), COLUMNS=COLUMNS,
        )  # fmt: skip
    codes = _empty_codes(num_rows, 2 * width, scales.scale_inv, spec)
    # Smaller tiles than in the forward pass: a program holds a, b, dy and two results in registers.
    experts.swiglu_gradients_codes_kernel[(width // GRADIENTS_BLOCK_SIZE, num_rows // GRADIENTS_BLOCK_SIZE)](
        gradients, inputs, probs, None if scales.known is None else prob_sums, rows.expert_of_block, scales.amaxes,
        scales.known, scales.infinities, rows.ends, *codes[:3], num_rows, width,
        **_experts(rows), FORMAT=spec, BLOCK_SIZE=GRADIENTS_BLOCK_SIZE, num_warps=4,
    )  # fmt: skip
    return codes, prob_sums[0] if scales.known is None else prob_sums.sum(0)


def weight_codes(weights: Tensor, spec: FormatSpec, scale: CastScale = CurrentScale()) -> RoutedCodes:
    """Codes of weights [E, R, W] BF16, one scale for each expert."""
    num_experts, num_rows, width = weights.shape
    scales = _scales(scale, num_experts, weights)
    if scales.known is None:
        # About 1,024 programs in all; each strides over its expert's weights.
        programs = max(1, 1024 // num_experts)
        experts.weights_amax_kernel[(programs, num_experts)](weights, scales.amaxes, num_rows * width, COLUMNS=2048)
    codes = RoutedCodes(
        torch.empty_like(weights, dtype=torch.uint8),
        weights.new_empty(num_experts, width, num_rows, dtype=torch.uint8),
        scales.scale_inv,
        code_dtype(spec),
    )
    experts.weights_codes_kernel[(width // BLOCK_SIZE, num_rows // BLOCK_SIZE, num_experts)](
        weights, scales.amaxes, scales.known, scales.infinities, *codes[:3], num_rows, width, FORMAT=spec,
        BLOCK_SIZE=BLOCK_SIZE, num_warps=8,
    )  # fmt: skip
    return codes
