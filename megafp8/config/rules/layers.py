"""Rules about norms and residual connections of layers, and their rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.rules.base import no_effect_without
from megafp8.config.schema import RunConfig


def norms_across_heads_are_rms(config: RunConfig, world_size: int) -> Iterator[str]:
    """The norm over all heads is an RMSNorm, and an option of --qk-layernorm."""
    model, flag = config.model, "--qk-layernorm-across-heads"
    if model.qk_layernorm_across_heads:
        if not model.qk_layernorm:
            yield no_effect_without(flag, "--qk-layernorm")
        if model.normalization != "RMSNorm":
            yield f"{flag} with --normalization {model.normalization}: use --normalization RMSNorm"


def parallel_residual_has_its_norms(config: RunConfig, world_size: int) -> Iterator[str]:
    """--parallel-residual needs norms of its input, and complete layers."""
    if not config.model.parallel_residual:
        return
    if config.model.norm_placement == "post":
        yield "--parallel-residual with --norm-placement post: attention and MLP need a norm of their input; remove one"
    modules = [each for each in ("layernorm", "mlp") if each in derived.recompute_modules(config.training)]
    if modules:
        yield (
            f"--parallel-residual does not support --recompute-modules {' '.join(modules)}: use core_attn, or "
            "--recompute-granularity full"
        )


def local_rotary_base_has_its_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """--rotary-base-local is for layers with a sliding window, and rotary embeddings."""
    model = config.model
    flag = f"--rotary-base-local {model.rotary_base_local}"
    if model.rotary_base_local is None:
        return
    if model.window_size is None:
        yield no_effect_without(flag, "--window-size")
    if model.position_embedding_type != "rope":
        yield no_effect_without(flag, "--position-embedding-type rope")
    if model.parallel_residual:
        yield f"{flag} with --parallel-residual: no layers here have both; remove one"
