"""How much of a pipeline stage's linears computes by which recipe, and by which ones the output layer does."""

from __future__ import annotations

import functools

from megafp8.config import derived, gemms, precision_map
from megafp8.config.schema import RunConfig

HIGH = "bf16"
FORWARD, BACKWARD = ("fprop",), ("dgrad", "wgrad")


@functools.lru_cache(maxsize=256)
def layer_shares(config: RunConfig, stage: int, products: tuple[str, ...]) -> dict[str, float]:
    """Layers of a stage by recipe, `bf16` for high precision. Of a layer, each linear counts by its multiplications.

    Args:
        products: the GEMMs that are counted, FORWARD or BACKWARD.
    """
    sizes = {linear.name: linear.in_features * linear.out_features for linear in gemms.gemm_dimensions(config)}
    chosen, counted = precision_map.resolve(config.model, config.precision), dict[str, int]()
    for layer in layers_of_stage(config, stage):
        for linear, size in sizes.items():
            for product in products:
                recipe = getattr(chosen[f"layers.{layer}.{linear}"], product).recipe or HIGH
                counted[recipe] = counted.get(recipe, 0) + size
    of_layer = len(products) * sum(sizes.values())
    return {recipe: size / of_layer for recipe, size in counted.items()}


def output_recipes(config: RunConfig) -> dict[str, str]:
    """The recipe of each GEMM of the output layer, `bf16` for high precision, which it has unless a map names it."""
    chosen = precision_map.resolve(config.model, config.precision)[precision_map.OUTPUT_LAYER]
    return {gemm: getattr(chosen, gemm).recipe or HIGH for gemm in precision_map.GEMMS}


def layers_of_stage(config: RunConfig, stage: int) -> list[int]:
    """Numbers of the layers of a pipeline stage, from all its chunks."""
    stages, chunks = config.parallel.pipeline_model_parallel_size, derived.virtual_pipeline_size(config) or 1
    length = derived.layers_per_pipeline_rank(config) // chunks
    return [(chunk * stages + stage) * length + index for chunk in range(chunks) for index in range(length)]
