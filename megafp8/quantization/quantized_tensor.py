"""Quantized tensors as plain data: codes with their scales, decoded GEMM operands, and what a tensor is quantized for.

`quantize.py` makes and decodes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from megafp8.recipes.base import Block, OperandRule


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor: value = codes x dequant_scale of their block x tensor_scale.

    Attributes:
        codes: the payload, in the shape of the source tensor, with E2M1 half as long in the last dim. Its bytes are
            `codes.view(torch.uint8)`.
        dequant_scale: FP32 scalar; with blocks FP32, E8M0 or E4M3 of shape [ceil(rows / block rows),
            ceil(columns / block columns)].
        tensor_scale: FP32 scalar of two-level scaling, which multiplies all block scales; None is 1.
        rule: the rule that it was quantized by, its block in numbers (`OperandRule.for_shape`).
        signs: FP32 [128], of a Hadamard transform with random signs; None without one.
    """

    codes: Tensor
    dequant_scale: Tensor
    tensor_scale: Optional[Tensor]
    rule: OperandRule
    signs: Optional[Tensor] = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Codes and scales, in the order of the constructor. `signs` are never kept."""
        return self.codes, self.dequant_scale, self.tensor_scale

    @property
    def factor(self) -> Optional[Tensor]:
        """FP32 scalar that multiplies the result of a GEMM of the decoded operand; None is 1."""
        return self.dequant_scale if self.rule.block is None else self.tensor_scale


class Decoded(NamedTuple):
    """A quantized operand, decoded for a GEMM: the quantized tensor is `values` times `factor`.

    Attributes:
        values: codes times the scales of their blocks, in the dtype of the GEMM.
        factor: FP32 scalar that multiplies the result of the GEMM; None is 1.
    """

    values: Tensor
    factor: Optional[Tensor]
    rule: OperandRule


class Use(NamedTuple):
    """One use of a tensor that is being quantized.

    Attributes:
        dtype: decode to this dtype at once (`Decoded`); None keeps codes and scales (`Quantized`).
    """

    rule: OperandRule
    dtype: Optional[torch.dtype] = None


def sized_block(rule: OperandRule) -> Block:
    """(rows, columns) of a rule's blocks; the rule has blocks and went through `OperandRule.for_shape`."""
    assert rule.block is not None
    num_rows, num_columns = rule.block
    assert num_rows is not None and num_columns is not None
    return num_rows, num_columns


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """(rows, columns) of a tensor viewed as a matrix: all dims but the last are rows."""
    columns = tensor.shape[-1] if tensor.ndim else 1
    return math.prod(tensor.shape[:-1]), columns
