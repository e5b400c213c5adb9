"""The settings that megafp8 chose where the command line gives `auto` or nothing, in one line with the reasons.

`planning/automatic.py` chooses those that are values of the configuration. The ones here follow from the configuration
and the machine without a change of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megafp8.config import precision_map
from megafp8.config.rules.precision import fuses_swiglu_quantization, triton_cast_recipes, uses_op_fuser
from megafp8.config.schema import RunConfig
from megafp8.device.capability import Target
from megafp8.planning.automatic import Choice


def format_chosen(choices: Iterable[Choice]) -> str:
    """The choices as one line: `chosen: --transformer-impl emulated (no GPU)`; empty for none."""
    parts = [f"{flag} {value} ({reason})" for flag, value, reason in choices]
    return f"chosen: {', '.join(parts)}" if parts else ""


def chosen_settings(config: RunConfig, target: Target, implementation: str) -> Iterator[Choice]:
    """The choices that follow from the settings and the machine.

    Transformer Engine chooses its attention kernel in the first step, after which `AttentionReport` records it.

    Args:
        config: with a micro-batch size.
        implementation: the layers in use, see `Run`.
    """
    if config.precision.transformer_impl == "auto":
        yield Choice("--transformer-impl", implementation, implementation_reason(target, implementation))
    if config.precision.attention_backend == "auto" and implementation != "transformer_engine":
        yield Choice("--attention-backend", "sdpa", f"the fused kernel of {implementation} layers")
    if implementation == "transformer_engine":
        yield from chosen_kernels(config)


def implementation_reason(target: Target, implementation: str) -> str:
    """Why `--transformer-impl auto` is this implementation."""
    if target.kind != "cuda":
        return "no GPU"
    if target.transformer_engine is None:
        return "Transformer Engine is not installed"
    has = "has" if implementation == "transformer_engine" else "lacks"
    return f"Transformer Engine {has} the recipes"


def chosen_kernels(config: RunConfig) -> Iterator[Choice]:
    """Kernels that replace those of Transformer Engine's layers."""
    if config.precision.use_transformer_engine_op_fuser is None and uses_op_fuser(config):
        swiglu = "; SwiGLU writes FP8" if fuses_swiglu_quantization(config) else ""
        yield Choice("--use-transformer-engine-op-fuser", "on", f"fused operations for the MLP{swiglu}")
    if config.precision.quantize_kernels is None:
        used = precision_map.used_recipes(config.precision)
        recipes = [name for name in triton_cast_recipes(config) if name in used]
        if recipes:
            reason = f"faster for {' and '.join(recipes)}, the same bytes"
            yield Choice("--quantize-kernels", "triton", reason)
