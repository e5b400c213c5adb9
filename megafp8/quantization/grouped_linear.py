"""The GEMMs of all experts in one launch each, in BF16 or FP8, by PyTorch's grouped GEMM.

Its group sizes stay on the device. Its FP8 kernel takes E4M3 with a scale for each row of both matrices: those of the
rowwise recipe, or the one scale of an expert, repeated. Output gradients in E5M2 are multiplied by kernels of this
package. Codes of tensorwise and delayed scaling can be used transposed by wgrad.
"""

from __future__ import annotations

from typing import Union

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from megafp8.kernels import expert_dgrad, expert_wgrad
from megafp8.kernels.expert_casts import RoutedCodes
from megafp8.kernels.expert_rowwise import RowwiseCodes
from megafp8.kernels.expert_scales import ColumnCodes
from megafp8.kernels.routed_rows import ALIGNMENT, RoutedRows

Codes = Union[RoutedCodes, RowwiseCodes]


def fprop(inputs: Tensor, weights: Tensor, rows: RoutedRows) -> Tensor:
    """inputs [R, W] times each expert's weights [E, N, W] transposed: [R, N]."""
    return grouped_mm(inputs, weights.transpose(1, 2), offs=rows.ends)


def dgrad(grad_output: Tensor, weights: Tensor, rows: RoutedRows) -> Tensor:
    """grad_output [R, N] times each expert's weights [E, N, W]: [R, W]."""
    return grouped_mm(grad_output, weights, offs=rows.ends)


def wgrad(grad_output: Tensor, inputs: Tensor, rows: RoutedRows) -> Tensor:
    """Of each expert, grad_output [R, N] transposed times inputs [R, W]: [E, N, W]."""
    return grouped_mm(grad_output.t(), inputs, offs=rows.ends)


def _fp8(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn)


def _scales(codes: Codes) -> Tensor:
    """Of codes by rows: of each row, or of each expert."""
    return codes.row_scale_inv if isinstance(codes, RowwiseCodes) else codes.scale_inv


def _row_scales(codes: Codes, rows: RoutedRows) -> Tensor:
    """Of the codes of rows, [R]."""
    if isinstance(codes, RowwiseCodes):
        return codes.row_scale_inv
    return codes.scale_inv[rows.expert_of_block.long()].repeat_interleave(ALIGNMENT)


def _repeated(scale_inv: Tensor, times: int) -> Tensor:
    """Scales [E] repeated, or those of the rowwise recipe [E, times]."""
    return scale_inv if scale_inv.dim() == 2 else scale_inv[:, None].expand(-1, times).contiguous()


def fp8_fprop(inputs: Codes, weights: Codes, rows: RoutedRows, is_fast: bool = True) -> Tensor:
    """`fprop` of codes, BF16."""
    weight_scales = _repeated(_scales(weights), weights.rows.shape[1])
    return torch._scaled_grouped_mm(
        _fp8(inputs.rows), _fp8(weights.rows).transpose(1, 2), _row_scales(inputs, rows), weight_scales,
        offs=rows.ends, out_dtype=torch.bfloat16, use_fast_accum=is_fast,
    )  # fmt: skip


def fp8_dgrad(grad_output: Codes, weights: Codes, rows: RoutedRows, is_fast: bool = True) -> Tensor:
    """`dgrad` of codes, BF16."""
    columns, scales, dtype = weights.transposed
    if grad_output.dtype != dtype:
        fp8, scale_inv = grad_output.rows.view(grad_output.dtype), _scales(grad_output)
        return expert_dgrad.dgrad(fp8, scale_inv, weights.transposed, rows, is_fast=is_fast)
    return torch._scaled_grouped_mm(
        _fp8(grad_output.rows), _fp8(columns).transpose(1, 2), _row_scales(grad_output, rows),
        _repeated(scales, columns.shape[1]), offs=rows.ends, out_dtype=torch.bfloat16, use_fast_accum=is_fast,
    )  # fmt: skip


def fp8_wgrad(grad_output: ColumnCodes, inputs: ColumnCodes, rows: RoutedRows, is_fast: bool = True) -> Tensor:
    """`wgrad` of codes, BF16."""
    if grad_output.dtype != inputs.dtype:
        shape = len(rows.ends), len(grad_output.codes), len(inputs.codes)
        result = inputs.codes.new_empty(shape, dtype=torch.bfloat16)
        expert_wgrad.add_wgrad(result, grad_output, inputs, rows, is_fast=is_fast, is_overwritten=True)
        return result
    num_outputs, width = grad_output.codes.shape[0], inputs.codes.shape[0]
    return torch._scaled_grouped_mm(
        _fp8(grad_output.codes), _fp8(inputs.codes).t(), _repeated(grad_output.scale_inv, num_outputs).view(-1),
        _repeated(inputs.scale_inv, width).view(-1), offs=rows.ends, out_dtype=torch.bfloat16, use_fast_accum=is_fast,
    )  # fmt: skip
