"""Attention in FP8: which runs Transformer Engine has it for."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.rules.rule import Rule
from megafp8.config.schema import RunConfig
from megafp8.recipes import registry

FLAG = "--fp8-dot-product-attention"


def its_products_can_be_in_fp8(config: RunConfig, world_size: int) -> Iterator[str]:
    """cuDNN's kernels alone compute in FP8, and every pass of theirs has to run under the layers' recipe."""
    model, precision, parallel = config.model, config.precision, config.parallel
    if not precision.fp8_dot_product_attention or precision.fp8_format is None:
        return
    if derived.params_dtype(precision) == "fp32":
        yield f"{FLAG} without --bf16: cuDNN's kernels quantize BF16 tensors, not FP32; give --bf16"
    if not registry.get(precision.fp8_recipe).supports_fp8_attention:
        known = " or ".join(recipe.flag for recipe in registry.recipes() if recipe.supports_fp8_attention)
        yield (
            f"{FLAG} with --fp8-recipe {precision.fp8_recipe}: on Hopper Transformer Engine has it for delayed scaling "
            f"alone; give {known}, or remove it"
        )
    if precision.attention_backend not in ("auto", "fused"):
        yield f"{FLAG} with --attention-backend {precision.attention_backend}: only fused attention has FP8; give fused"
    if "core_attn" in derived.recompute_modules(config.training):
        yield (
            f"{FLAG} with --recompute-modules core_attn: megatron-core would compute it again outside of the recipe: "
            "recompute other modules, or give --recompute-granularity full"
        )
    untried = (
        (model.attention_dropout, f"--attention-dropout {model.attention_dropout}", "give --attention-dropout 0"),
        (parallel.context_parallel_size > 1, f"--context-parallel-size {parallel.context_parallel_size}", "remove one"),
        (model.window_size is not None, f"--window-size {model.window_size}", "remove one"),
    )
    yield from (f"{FLAG} with {flag}: this was not tried; {mend}" for is_there, flag, mend in untried if is_there)


RULES: tuple[Rule, ...] = (its_products_can_be_in_fp8,)
