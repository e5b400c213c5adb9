"""What casts of experts get their scales from, where they record infinite amaxes, and codes for wgrad."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor


class ColumnCodes(NamedTuple):
    """Transposed codes of rows or weights, which wgrad or dgrad multiplies.

    Attributes:
        codes: uint8 [W, R], of weights [E, W, N].
        scale_inv: FP32 dequantization scales, [E], by the rowwise recipe [E, W], by the blockwise one [R / 128, W], of
            weights [E, W / 128, N / 128].
        dtype: of the format.
        is_blockwise: whether blocks have scales.
    """

    codes: Tensor
    scale_inv: Tensor
    dtype: torch.dtype = torch.float8_e4m3fn
    is_blockwise: bool = False

    @property
    def fp8(self) -> Tensor:
        """The codes as the numbers of their format."""
        return self.codes.view(self.dtype)


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
