"""Transformer Engine's casts and linears on this GPU, for the comparison of `training/device_verification/`."""

from __future__ import annotations

from typing import Any, Optional

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState

from megafp8.quantization.te_layout import COLUMN, ROW, StoredOperand, stored
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand
from megafp8.te.recipes import FORMATS

WARM_UP_ROUNDS = 5
# Position of an operand among the quantizers of a linear.
SLOTS = {Operand.INPUT: ("forward", 0), Operand.WEIGHT: ("forward", 1), Operand.GRAD_OUTPUT: ("backward", 0)}


def build_recipe(name: str, number_format: str, *, rounds_to_nearest: bool) -> Any:
    """Transformer Engine's recipe.

    Args:
        rounds_to_nearest: switch stochastic rounding off, so that casts can be compared.
    """
    recipe = registry.get(name)
    assert recipe.te_recipe_class is not None
    options: dict[str, Any] = {"fp8_format": FORMATS[number_format]} if recipe.family == "fp8" else {}
    if rounds_to_nearest and recipe.rules(number_format).is_stochastic:
        options["disable_stochastic_rounding"] = True
    return getattr(te_recipe, recipe.te_recipe_class)(**options)


class TransformerEngineLayers:
    """`NativeLayers` of Transformer Engine."""

    def cast(self, recipe: str, number_format: str, operand: Operand, tensor: Tensor) -> dict[str, StoredOperand]:
        """See `NativeLayers`."""
        mode, slot = SLOTS[operand]
        state = RecipeState.create(
            build_recipe(recipe, number_format, rounds_to_nearest=True), mode=mode, num_quantizers=slot + 1
        )
        quantizer = state.make_quantizers()[slot]
        quantizer.set_usage(rowwise=True, columnwise=True)
        quantized = quantizer(tensor.cuda())
        return {side: stored(quantized, side) for side in (ROW, COLUMN)}

    def linear(
        self, recipe: Optional[str], number_format: str, x: Tensor, w: Tensor, dy: Tensor,
        rounds_to_nearest: bool = True,
    ) -> dict[Gemm, Tensor]:  # fmt: skip
        """See `NativeLayers`."""
        layer, x = linear_of(w), x.cuda().requires_grad_()
        y = forward_backward(layer, recipe, number_format, x, dy.cuda(), rounds_to_nearest=rounds_to_nearest)
        results = {Gemm.FPROP: y, Gemm.DGRAD: x.grad, Gemm.WGRAD: layer.weight.grad}
        return {gemm: result.detach().cpu() for gemm, result in results.items()}

    def step_times(
        self, recipes: dict[Optional[str], str], sizes: tuple[int, int, int], rounds: int
    ) -> dict[Optional[str], list[float]]:
        """See `NativeLayers`; by CUDA events."""
        tokens, inputs, outputs = sizes
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        dy = torch.randn(tokens, outputs, dtype=torch.bfloat16, device="cuda")
        layer = linear_of(torch.randn(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5)
        times: dict[Optional[str], list[float]] = {name: [] for name in recipes}
        for i in range(WARM_UP_ROUNDS + rounds):
            for name, number_format in recipes.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                forward_backward(layer, name, number_format, x, dy)
                end.record()
                end.synchronize()
                if i >= WARM_UP_ROUNDS:
                    times[name].append(start.elapsed_time(end))
        return times


def linear_of(weight: Tensor) -> te.Linear:
    """A linear without bias with a weight [N, K] in BF16."""
    outputs, inputs = weight.shape
    layer = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def forward_backward(
    layer: te.Linear, recipe: Optional[str], number_format: str, x: Tensor, dy: Tensor, rounds_to_nearest: bool = False
) -> Tensor:
    """Output of a forward pass, with a backward pass that replaces the gradients; delayed scales are those of a first
    step."""
    FP8GlobalStateManager.reset()
    x.grad = layer.weight.grad = None
    built = None if recipe is None else build_recipe(recipe, number_format, rounds_to_nearest=rounds_to_nearest)
    with te.autocast(enabled=built is not None, recipe=built):
        y = layer(x)
    y.backward(dy)
    return y
