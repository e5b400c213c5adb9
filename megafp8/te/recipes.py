"""Recipes of single linears that Transformer Engine computes: each runs in a context of its own.

megatron-core enters one context around a layer, or around all layers of a chunk under delayed scaling. It can also give
a linear another recipe (its `TEQuantizationRecipe`), but not one whose backward pass is in high precision, and where
the layer's context is not quantized it never tells the linear that weights have changed.

The output layer as one of Transformer Engine's linears, to compute logits and their gradients in FP8.

megatron-core makes its own, in high precision. A recipe with a memory (delayed scaling) is not for it: megatron-core
takes what an output layer remembers out of checkpoints. Beside layers that have one it leaves theirs alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
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
from megafp8.config.schema import RunConfig
from megafp8.errors import CapabilityError
from megafp8.mcore.modules import linears_of
from megafp8.recipes import registry

FORMATS = {"e4m3": te_recipe.Format.E4M3, "hybrid": te_recipe.Format.HYBRID}


def build_te_recipe(chosen: LinearChoice) -> Optional[te_recipe.Recipe]:
    """Transformer Engine's recipe for a linear's three GEMMs, which `device.capability.map_problems` has let pass.

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
    if getattr(built, "backward_override", None) != override:  # recipes pass over options that they do not know
        raise CapabilityError(
            f"the precision map gives a linear {chosen}, and this release of Transformer Engine has no recipe whose "
            "backward pass is in high precision: upgrade it, or give --transformer-impl emulated"
        )
    return built


def give_recipes(chunk: GPTModel, config: RunConfig) -> None:
    """Let each linear that the map gives another recipe than its layer's run under that, and the output layer too."""
    precision = config.precision
    chosen = precision_map.resolve(config.model, precision)
    names = precision_map.changed_linears(config.model, precision)
    group = parallel_state.get_amax_reduction_group(
        with_context_parallel=True, tp_only_amax_red=precision.tp_only_amax_red
    )
    changed = [(name, linear) for name, linear in linears_of(chunk) if name in names]
    for name, linear in changed:
        run_under(linear, build_te_recipe(chosen[name]), group)
    output_recipe = build_te_recipe(chosen[OUTPUT_LAYER])
    if chunk.post_process and output_recipe is not None:
        chunk.output_layer = OutputLayer.in_place_of(chunk.output_layer, output_recipe)
        changed.append((OUTPUT_LAYER, chunk.output_layer))
    if not precision_map.base_choice(precision).is_quantized:
        # megatron-core says which microbatch is the first only where its own context is quantized; without, codes of
        # the weights would be kept for ever.
        for _, linear in changed:
            linear.disable_parameter_transpose_cache = True


def run_under(linear: torch.nn.Module, recipe: Optional[te_recipe.Recipe], group: Any) -> None:
    """Run a linear's forward pass under a recipe, None being high precision; its backward pass follows it.

    With the attribute `is_quantizing` set to False it runs as the context around it says.
    """
    plain = linear.forward

    @functools.wraps(plain)
    def forward(*args: Any, **options: Any) -> Any:
        if not linear.is_quantizing:
            return plain(*args, **options)
        with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group):
            return plain(*args, **options)

    linear.is_quantizing = True
    linear.forward = forward


@contextmanager
def after_layers() -> Iterator[None]:
    """Within, a context counts as one inside another: Transformer Engine updates no scales of delayed scaling for it.

    It updates those of all layers when an outermost context ends, and when the context's first linear has had its
    backward pass. The layers' own context sees to both. For the output layer it would be once more, each way: amaxes of
    0 in the histories, and in the backward pass before any layer had its gradients.
    """
    state = FP8GlobalStateManager.quantization_state
    state.autocast_depth += 1
    try:
        yield
    finally:
        state.autocast_depth -= 1


class OutputLayer(TEColumnParallelLinear):
    """Logits [S, B, vocabulary / P] of hidden states [S, B, H], or [S / P, B, H] with sequence parallelism."""

    recipe: Recipe
    is_output = True
    is_quantizing = True

    @classmethod
    def in_place_of(cls, plain: ColumnParallelLinear, recipe: Recipe) -> OutputLayer:
        """A layer with the weight of megatron-core's own, which must not be the embedding's."""
        config = copy.copy(plain.config)
        config.tp_comm_overlap = False  # there are no buffers of this shape
        layer = cls(
            plain.input_size, plain.output_size, config=config, init_method=config.init_method, gather_output=False,
            bias=False, skip_bias_add=False, is_expert=False, tp_group=plain.tp_group,
        )  # fmt: skip
        layer.weight = plain.weight
        layer.recipe = recipe
        return layer

    def forward(
        self, input_: Tensor, weight: Optional[Tensor] = None, runtime_gather_output: Optional[bool] = None
    ) -> tuple[Tensor, Any]:
        """Logits, and None for the bias that there is not."""
        assert weight is None and not runtime_gather_output, "logits stay split over the vocabulary, for the loss"
        with after_layers(), te.autocast(enabled=self.is_quantizing, recipe=self.recipe):
            return super().forward(input_)

    def get_extra_state(self) -> None:
        """None: megatron-core asks for its truth, which Transformer Engine's tensor without elements does not have."""

    def set_extra_state(self, state: Any) -> None:
        """There is none."""
