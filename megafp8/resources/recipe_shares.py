"""The recipes of a stage: how many of its layers have each, and which part of its weights is quantized."""

from __future__ import annotations

import functools

from megafp8.config import dimensions, mixture, precision_map
from megafp8.config.precision_map import GEMMS, MLP_LINEARS, OUTPUT_LAYER
from megafp8.config.run_sizes import RunSizes
from megafp8.config.schema import ModelConfig, PrecisionConfig

BF16 = "bf16"
FORWARD_GEMMS, BACKWARD_GEMMS = ("fprop",), ("dgrad", "wgrad")


@functools.lru_cache(maxsize=256)
def layers_by_recipe(sizes: RunSizes, stage: int, gemms: tuple[str, ...]) -> dict[str, float]:
    """Number of layers of a stage per recipe, `bf16` for high precision. Linears are weighted by their FLOPs.

    Experts count as all that a token passes; the MLP of a mixture's dense layer counts as these do.

    Args:
        gemms: the GEMMs to count: FORWARD_GEMMS, BACKWARD_GEMMS, or a part of them.
    """
    model = sizes.model
    elements: dict[str, float] = {each.name: each.in_features * each.out_features for each in sizes.linears}
    if mixture.is_mixture(model):
        share = model.moe_router_topk * mixture.moe_ffn_hidden_size(model) / dimensions.ffn_hidden_size(model)
        elements = {name: size * (share if name in MLP_LINEARS else 1) for name, size in elements.items()}
    choices = precision_map.resolve(model, sizes.precision)
    weights: dict[str, float] = {}
    for layer in sizes.layers[stage]:
        for linear, size in elements.items():
            name = f"layers.{layer}.{linear}"
            choice = choices[name if name in choices else f"layers.{layer}.experts.{linear}"]
            for gemm in gemms:
                recipe = getattr(choice, gemm).recipe or BF16
                weights[recipe] = weights.get(recipe, 0) + size
    layer_weight = len(gemms) * sum(elements.values())
    return {recipe: weight / layer_weight for recipe, weight in weights.items()}


def quantized_fraction(sizes: RunSizes, stage: int) -> float:
    """The fraction of a stage's linear weights that fprop quantizes."""
    precision, layers = sizes.precision, sizes.layers[stage]
    if not layers:
        return 1.0
    if precision.precision_map:
        return 1 - layers_by_recipe(sizes, stage, FORWARD_GEMMS).get(BF16, 0.0) / len(layers)
    if not precision.first_last_layers_bf16:
        return 1.0
    assert sizes.model.num_layers is not None
    quantized = range(
        precision.num_layers_at_start_in_bf16, sizes.model.num_layers - precision.num_layers_at_end_in_bf16
    )
    return sum(layer in quantized for layer in layers) / len(layers)


def output_layer_recipes(model: ModelConfig, precision: PrecisionConfig) -> dict[str, str]:
    """The recipe of each GEMM of the output layer: `bf16` unless a precision map quantizes it."""
    choice = precision_map.resolve(model, precision)[OUTPUT_LAYER]
    return {gemm: getattr(choice, gemm).recipe or BF16 for gemm in GEMMS}
