"""What is compared: the device's own casts and linears. `te/native.py` has those of Transformer Engine."""

from __future__ import annotations

from typing import Optional, Protocol

from torch import Tensor

from megafp8.quantization.te_layout import StoredOperand
from megafp8.recipes.base import Gemm, Operand


class NativeLayers(Protocol):
    """Casts and linears of a device. Gradients are rounded to nearest in all recipes."""

    def cast(self, recipe: str, number_format: str, operand: Operand, tensor: Tensor) -> dict[str, StoredOperand]:
        """Both sides ("row" and "col") of a BF16 tensor [M, K], quantized as an operand; delayed scales are 1."""

    def linear(self, recipe: Optional[str], number_format: str, x: Tensor, w: Tensor, dy: Tensor) -> dict[Gemm, Tensor]:
        """Output, input gradient and weight gradient of a linear, in BF16 on the CPU; None is BF16."""

    def step_times(
        self, recipes: dict[Optional[str], str], sizes: tuple[int, int, int], rounds: int
    ) -> dict[Optional[str], list[float]]:
        """Milliseconds of forward and backward pass of a linear, casts included, by recipe, all interleaved.

        Args:
            recipes: number formats by recipe; None is BF16.
            sizes: tokens, inputs, outputs.
        """
