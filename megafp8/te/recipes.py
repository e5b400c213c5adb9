"""Precision maps on Transformer Engine: per-linear recipes, and an FP8 output layer.

megatron-core enters one autocast around a layer, or around all layers of a chunk under delayed scaling. It can give a
linear another recipe (`TEQuantizationRecipe`), but not one whose backward pass is in high precision. Where the layer's
autocast is not quantized, it also never notifies the linear that weights have changed. Here such a linear runs in a
separate autocast.

megatron-core's output layer is in high precision. `OutputLayer` is a Transformer Engine linear, which computes logits
and their gradients in FP8. It does not support delayed scaling, whose state megatron-core removes from checkpoints for
an output layer, but works in a model whose layers use it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor
from transformer_engine.common import recipe as te_recipe
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megafp8.config import precision_map
from megafp8.config.precision_map import OUTPUT_LAYER, LinearChoice
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.errors import CapabilityError
from megafp8.mcore.modules import named_linears
from megafp8.recipes import registry

FORMATS = {"e4m3": te_recipe.Format.E4M3, "hybrid": te_recipe.Format.HYBRID}


def build_te_recipe(chosen: LinearChoice) -> Optional[te_recipe.Recipe]:
    """Transformer Engine's recipe for a linear's three GEMMs.

    `device.capability.unsupported_precision_map` has accepted the choice.

    Returns:
        None in high precision.

    Raises:
        CapabilityError: this release has no recipe whose backward pass is in high precision.
    """
    if not chosen.is_quantized:
        return None
    name, fmt = chosen.fprop
    assert name is not None
    recipe = registry.get(name)
    assert recipe.te_recipe_class is not None, f"Transformer Engine has no recipe {name}"
    options: dict[str, Any] = {"fp8_format": FORMATS[str(fmt)]} if recipe.family == "fp8" else {}
    override = None if chosen.dgrad == chosen.fprop else "high_precision"
    if override is not None:
        options["backward_override"] = override
    built = getattr(te_recipe, recipe.te_recipe_class)(**options)
    if getattr(built, "backward_override", None) != override:  # recipes ignore unknown options
        raise CapabilityError(
            f"the precision map gives a linear {chosen}, and this release of Transformer Engine has no recipe whose "
            "backward pass is in high precision: upgrade it, or give --transformer-impl emulated"
        )
    return built


def apply_precision_map(chunk: GPTModel, model: ModelConfig, precision: PrecisionConfig) -> None:
    """Run the linears whose recipe differs from their layer's, and the output layer, under their own recipes."""
    chosen = precision_map.resolve(model, precision)
    names = precision_map.changed_linears(model, precision)
    group = parallel_state.get_amax_reduction_group(
        with_context_parallel=True, tp_only_amax_red=precision.tp_only_amax_red
    )
    linears = [(precision_map.name_of_all_experts(name), linear) for name, linear in named_linears(chunk)]
    changed = [(name, linear) for name, linear in linears if name in names and isinstance(linear, torch.nn.Module)]
    for name, linear in changed:
        wrap_with_recipe(linear, build_te_recipe(chosen[name]), group)
    output_recipe = build_te_recipe(chosen[OUTPUT_LAYER])
    if chunk.post_process and output_recipe is not None:
        chunk.output_layer = OutputLayer.from_plain(chunk.output_layer, output_recipe)
        changed.append((OUTPUT_LAYER, chunk.output_layer))
    if not precision_map.base_choice(precision).is_quantized:
        # megatron-core reports the first microbatch of a step only where its own autocast is quantized. Without that
        # the cached codes of weights would never be renewed.
        for _, linear in changed:
            linear.disable_parameter_transpose_cache = True


def set_precision(model: ModelConfig, precision: PrecisionConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Compute in the precision of a phase of `--fp8-schedule` from now on, but for linears moved to high precision.

    Only linears that the map of some phase changes have an attribute `own_recipe`. In the other phases the autocast of
    their layer applies.
    """
    chosen = precision_map.resolve(model, precision)
    changed = precision_map.changed_linears(model, precision)
    for name, linear in (named for chunk in chunks for named in named_linears(chunk)):
        name = precision_map.name_of_all_experts(name)
        if not hasattr(linear, "own_recipe") or getattr(linear, "is_fallback", False):
            continue
        linear.own_recipe = build_te_recipe(chosen[name])
        linear.is_quantizing = name in changed or name == OUTPUT_LAYER
        linear._fp8_workspaces.clear()  # codes of the weight in another recipe


def wrap_with_recipe(linear: torch.nn.Module, recipe: Optional[te_recipe.Recipe], group: Any) -> None:
    """Run a linear's forward pass, and with it its backward pass, under a recipe; None is high precision.

    The recipe is the linear's attribute `own_recipe`. While its attribute `is_quantizing` is False, the surrounding
    autocast applies.
    """
    plain = linear.forward

    @functools.wraps(plain)
    def forward(*args: Any, **options: Any) -> Any:
        if not linear.is_quantizing:
            return plain(*args, **options)
        own = linear.own_recipe
        with te.autocast(enabled=own is not None, recipe=own, amax_reduction_group=group):
            return plain(*args, **options)

    linear.is_quantizing, linear.own_recipe = True, recipe
    linear.forward = forward


@contextmanager
def nested_autocast() -> Iterator[None]:
    """Within, an autocast counts as nested, so that Transformer Engine does not update delayed scaling for it.

    Transformer Engine updates the scales of all layers when an outermost autocast ends, and after the backward pass of
    that autocast's first linear. The autocast of the layers causes both updates. An outermost autocast of the output
    layer would cause each of them once more: amaxes of 0 would enter the histories, in the backward pass before any
    layer had its gradients.
    """
    state = FP8GlobalStateManager.quantization_state
    state.autocast_depth += 1
    try:
        yield
    finally:
        state.autocast_depth -= 1


class OutputLayer(TEColumnParallelLinear):
    """Logits [S, B, vocabulary / P] of hidden states [S, B, H], or [S / P, B, H] with sequence parallelism."""

    own_recipe: Optional[Recipe]  # None: high precision
    is_output = True
    is_quantizing = True

    @classmethod
    def from_plain(cls, plain: ColumnParallelLinear, recipe: Recipe) -> OutputLayer:
        """A layer with the weight of megatron-core's output layer, which must not be shared with the embedding."""
        config = copy.copy(plain.config)
        config.tp_comm_overlap = False  # there are no buffers of this shape
        layer = cls(
            plain.input_size, plain.output_size, config=config, init_method=config.init_method, gather_output=False,
            bias=False, skip_bias_add=False, is_expert=False, tp_group=plain.tp_group,
        )  # fmt: skip
        layer.weight = plain.weight
        layer.own_recipe = recipe
        return layer

    def forward(
        self, input_: Tensor, weight: Optional[Tensor] = None, runtime_gather_output: Optional[bool] = None
    ) -> tuple[Tensor, Any]:
        """Logits, and None in place of a bias."""
        assert weight is None and not runtime_gather_output, "logits stay split over the vocabulary, for the loss"
        is_quantizing = self.is_quantizing and self.own_recipe is not None
        with nested_autocast(), te.autocast(enabled=is_quantizing, recipe=self.own_recipe):
            return super().forward(input_)

    def get_extra_state(self) -> None:
        """None. megatron-core tests the truth value of the state, which an empty tensor does not have."""

    def set_extra_state(self, state: Any) -> None:
        """Ignored: there is no state."""
