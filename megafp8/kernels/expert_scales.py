"""What casts of experts get their scales from, where they record infinite amaxes, and codes for wgrad."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor


class ColumnCodes(NamedTuple):
    """Transposed codes of rows or weights, which wgrad or dgrad multiplies.

    Attributes:
        codes: uint8 [W, R], of weights [E, W, N].
        scale_inv: FP32 dequantization scales, [E], by the rowwise recipe [E, W], by the blockwise one [R / 128, 1, W],
            of weights [E, W / 128, N / 128]. So the number of dimensions tells what has a scale.
        dtype: of the format.
    """

    codes: Tensor
    scale_inv: Tensor
    dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def fp8(self) -> Tensor:
        """The codes as the numbers of their format."""
        return self.codes.view(self.dtype)


class RowColumnCodes(NamedTuple):
    """Codes of rows [R, W], or of weights [E, N, W], whose transpose has scales of its own.

    Attributes:
        rows: uint8, as the tensor.
        columns: uint8, with the last two dimensions transposed.
        row_scale_inv: FP32 dequantization scales of `rows`, by the rowwise recipe [R], by the blockwise one
            [W / 128, R]; of weights [E, N] and [E, N / 128, W / 128].
        column_scale_inv: FP32, those of `columns`, as in `ColumnCodes`.
        dtype: of the format.
    """

    rows: Tensor
    columns: Tensor
    row_scale_inv: Tensor
    column_scale_inv: Tensor
    dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def transposed(self) -> ColumnCodes:
        """Of rows, the operand of wgrad; of weights, that of dgrad."""
        return ColumnCodes(self.columns, self.column_scale_inv, self.dtype)


class CurrentScale(NamedTuple):
    """Current scaling of one operand: a cast computes the scales.

    Attributes:
        infinities: integers [E], set to 1 where the amax of an expert is infinite; None records nothing.
    """

    infinities: Optional[Tensor] = None

    def record(self, amax: Tensor) -> None:
        """Record amaxes [E] that no cast computes."""
        if self.infinities is not None:
            self.infinities.masked_fill_(amax.isinf(), 1)


class CurrentScales(NamedTuple):
    """The operands of a linear."""

    input: CurrentScale = CurrentScale()
    weight: CurrentScale = CurrentScale()
    grad_output: CurrentScale = CurrentScale()


CastScale = Union[CurrentScale, tuple[Tensor, Optional[Tensor]]]
"""Current scaling, or delayed: quantization scales FP32 [E], and the amaxes FP32 [E] that are raised to those of the
experts; None records none."""
