"""The GEMMs of all experts in one launch each: in BF16 by PyTorch's grouped GEMM, in FP8 by a kernel of this package.

Group sizes stay on the device. Weight gradients are in `kernels/expert_wgrad.py`.
"""

from __future__ import annotations

from typing import Union

from torch import Tensor
from torch.nn.functional import grouped_mm

from megafp8.kernels import expert_product
from megafp8.kernels.expert_casts import RoutedCodes
from megafp8.kernels.expert_scales import RowColumnCodes
from megafp8.kernels.routed_rows import RoutedRows

Codes = Union[RoutedCodes, RowColumnCodes]


def fprop(inputs: Tensor, weights: Tensor, rows: RoutedRows) -> Tensor:
    """inputs [R, W] times each expert's weights [E, N, W] transposed: [R, N]."""
    return grouped_mm(inputs, weights.transpose(1, 2), offs=rows.ends)


def dgrad(grad_output: Tensor, weights: Tensor, rows: RoutedRows) -> Tensor:
    """grad_output [R, N] times each expert's weights [E, N, W]: [R, W]."""
    return grouped_mm(grad_output, weights, offs=rows.ends)


def _scales(codes: Codes) -> Tensor:
    """Of codes by rows: of each row or block, or of each expert."""
    return codes.scale_inv if isinstance(codes, RoutedCodes) else codes.row_scale_inv


def fp8_fprop(inputs: Codes, weights: Codes, rows: RoutedRows, is_fast: bool = True) -> Tensor:
    """`fprop` of codes, BF16."""
    return expert_product.product(
        inputs.rows.view(inputs.dtype), _scales(inputs), weights.rows.view(weights.dtype), _scales(weights), rows,
        is_fast=is_fast,
    )  # fmt: skip


def fp8_dgrad(grad_output: Codes, weights: Codes, rows: RoutedRows, is_fast: bool = True) -> Tensor:
    """`dgrad` of codes, BF16."""
    columns = weights.transposed
    return expert_product.product(
        grad_output.rows.view(grad_output.dtype), _scales(grad_output), columns.fp8, columns.scale_inv, rows,
        is_fast=is_fast,
    )  # fmt: skip
