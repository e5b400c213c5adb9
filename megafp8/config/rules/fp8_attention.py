"""Attention in FP8: which runs Transformer Engine has it for."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.rules.rule import Rule
from megafp8.config.schema import RunConfig

FLAG = "--fp8-dot-product-attention"


def its_products_can_be_in_fp8(config: RunConfig, world_size: int) -> Iterator[str]:
    """cuDNN's kernels alone compute in FP8, and every pass of theirs has to run under the layers' recipe."""
    precision, training = config.precision, config.training
    if not precision.fp8_dot_product_attention or precision.fp8_format is None:
        return
    if precision.fp8_recipe != "delayed":
        yield (
            f"{FLAG} with --fp8-recipe {precision.fp8_recipe}: on Hopper Transformer Engine has it for delayed scaling "
            "alone; give --fp8-recipe delayed, or remove it"
        )
    if precision.attention_backend not in ("auto", "fused"):
        yield f"{FLAG} with --attention-backend {precision.attention_backend}: only fused attention has FP8; give fused"
    if config.parallel.context_parallel_size > 1:
        size = config.parallel.context_parallel_size
        yield f"{FLAG} with --context-parallel-size {size}: it was not tried over pieces of a sequence; remove one"
    if (granularity := derived.recompute_granularity(training)) is not None:
        yield (
            f"{FLAG} with --recompute-granularity {granularity}: recomputed outside of the recipe, attention would be "
            "another one; remove one"
        )


RULES: tuple[Rule, ...] = (its_products_can_be_in_fp8,)
