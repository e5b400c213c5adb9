"""The recipes of a stage: how many of its layers have each, and which part of its weights is quantized."""

from __future__ import annotations

import functools

from megafp8.config import dimensions, mixture, model_shapes, precision_map, stages
from megafp8.config.precision_map import GEMMS, MLP_LINEARS, OUTPUT_LAYER
from megafp8.config.schema import RunConfig

BF16 = "bf16"
FORWARD_GEMMS, BACKWARD_GEMMS = ("fprop",), ("dgrad", "wgrad")


@functools.lru_cache(maxsize=256)
def layers_by_recipe(config: RunConfig, stage: int, gemms: tuple[str, ...]) -> dict[str, float]:
    """Number of layers of a stage per recipe, `bf16` for high precision. Linears are weighted by their FLOPs.

    Experts count as all that a token passes; the MLP of a mixture's dense layer counts as these do.

    Args:
        gemms: the GEMMs to count: FORWARD_GEMMS, BACKWARD_GEMMS, or a part of them.
    """
    model = config.model
    sizes: dict[str, float] = {
        linear.name: linear.in_features * linear.out_features for linear in model_shapes.gemm_dimensions(config)
    }
    if mixture.is_mixture(model):
        share = model.moe_router_topk * mixture.moe_ffn_hidden_size(model) / dimensions.ffn_hidden_size(model)
        sizes = {name: size * (share if name in MLP_LINEARS else 1) for name, size in sizes.items()}
    choices = precision_map.resolve(model, config.precision)
    weights: dict[str, float] = {}
    for layer in stages.layers_on(config, stage):
        for linear, size in sizes.items():
            name = f"layers.{layer}.{linear}"
            choice = choices[name if name in choices else f"layers.{layer}.experts.{linear}"]
            for gemm in gemms:
                recipe = getattr(choice, gemm).recipe or BF16
                weights[recipe] = weights.get(recipe, 0) + size
    layer_weight = len(gemms) * sum(sizes.values())
    return {recipe: weight / layer_weight for recipe, weight in weights.items()}


def quantized_fraction(config: RunConfig, stage: int) -> float:
    """The fraction of a stage's linear weights that fprop quantizes."""
    precision, layers = config.precision, stages.layers_on(config, stage)
    if not layers:
        return 1.0
    if precision.precision_map:
        return 1 - layers_by_recipe(config, stage, FORWARD_GEMMS).get(BF16, 0.0) / len(layers)
    if not precision.first_last_layers_bf16:
        return 1.0
    assert config.model.num_layers is not None
    quantized = range(
        precision.num_layers_at_start_in_bf16, config.model.num_layers - precision.num_layers_at_end_in_bf16
    )
    return sum(layer in quantized for layer in layers) / len(layers)


def output_layer_recipes(config: RunConfig) -> dict[str, str]:
    """The recipe of each GEMM of the output layer: `bf16` unless a precision map quantizes it."""
    choice = precision_map.resolve(config.model, config.precision)[OUTPUT_LAYER]
    return {gemm: getattr(choice, gemm).recipe or BF16 for gemm in GEMMS}
