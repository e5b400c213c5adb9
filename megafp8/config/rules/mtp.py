"""Rules about multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from megafp8.config import derived, multi_token, precision_map, stages
from megafp8.config.rules.base import excluded
from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError

_NOT_DEFINED = "which layers it is for is not defined after the last one; remove one"
EXCLUDED = MappingProxyType(
    {
        "--window-size": _NOT_DEFINED,
        "--no-rope-freq VALUE": _NOT_DEFINED,
        "--rotary-base-local VALUE": _NOT_DEFINED,
    }
)
EXCLUDED_LAYOUTS = MappingProxyType(
    {
        "--tp-comm-overlap": "there are no user buffers for its projection; remove one",
        "--fp8-schedule": "not tested; remove one",
        "--fp8-dot-product-attention": "not tested; remove one",
    }
)


def multi_token_layers_are_like_all_others(config: RunConfig, world_size: int) -> Iterator[str]:
    """megatron-core numbers the layers of multi-token prediction after those of the model, which patterns end with."""
    model = config.model
    if not multi_token.num_depths(model):
        return
    flag = f"--mtp-num-layers {model.mtp_num_layers}"
    if model.position_embedding_type == "learned_absolute":
        yield (
            f"{flag} with learned position embeddings: megatron-core's multi-token prediction supports rope and none; "
            "use --position-embedding-type rope"
        )
    yield from excluded(config, flag, EXCLUDED)


def multi_token_fits_the_layout(config: RunConfig, world_size: int) -> Iterator[str]:
    """The modules are on the last stage, whose copy of the embedding must not be the output layer too."""
    model, parallel = config.model, config.parallel
    if not multi_token.num_depths(model):
        return
    flag, pp = f"--mtp-num-layers {model.mtp_num_layers}", parallel.pipeline_model_parallel_size
    if pp > 1 and model.share_embeddings_and_output_weights:
        yield (
            f"{flag} with --pipeline-model-parallel-size {pp} and a shared embedding: megatron-core gives the last "
            "stage an output layer that it cannot save; add --untie-embeddings-and-output-weights"
        )
    yield from excluded(config, flag, EXCLUDED_LAYOUTS)


def layout_string_has_multi_token_prediction(config: RunConfig, world_size: int) -> Iterator[str]:
    """A layout string has the modules once, all on the last stage."""
    text, depths = config.parallel.pipeline_model_parallel_layout, multi_token.num_depths(config.model)
    if text is None:
        return
    try:
        contents = stages.expand_layout(text)
    except ConfigError:
        return
    flag, count = f"--pipeline-model-parallel-layout {text}", "".join(contents).count(stages.MULTI_TOKEN)
    if count != depths:
        yield f"{flag} has {count} modules of multi-token prediction (m), not --mtp-num-layers {depths}"
    elif contents[-1].count(stages.MULTI_TOKEN) != depths or stages.MULTI_TOKEN + stages.LAYER in contents[-1]:
        yield f"{flag}: m must be on the last stage, after its layers and before L: end with {'m' * depths}L"


def multi_token_recomputes_one_layer(config: RunConfig, world_size: int) -> Iterator[str]:
    """megatron-core recomputes the modules one by one, and not with the method block."""
    model, training = config.model, config.training
    if not multi_token.num_depths(model) or derived.recompute_granularity(training) != "full":
        return
    flag = f"--mtp-num-layers {model.mtp_num_layers} with --recompute-granularity full"
    if training.recompute_method == "block":
        yield f"{flag} --recompute-method block: its layers would not be recomputed; use --recompute-method uniform"
    elif training.recompute_num_layers not in (None, 1):
        yield (
            f"{flag} --recompute-num-layers {training.recompute_num_layers}: megatron-core recomputes its layers one "
            "by one; use 1"
        )


def precision_map_leaves_multi_token_prediction(config: RunConfig, world_size: int) -> Iterator[str]:
    """The linears of multi-token prediction have no names in a precision map."""
    model, precision = config.model, config.precision
    if not multi_token.num_depths(model) or model.num_layers is None:
        return
    linears = precision_map.layer_linears(model, multi_token.has_experts(model))
    after = f"layers.{model.num_layers}"
    for source, entry in precision_map.entries_with_source(precision):
        if any(precision_map.matches_pattern(f"{after}.{linear}", entry.pattern) for linear in linears):
            yield (
                f"{source} with --mtp-num-layers {model.mtp_num_layers}: the linears of multi-token prediction have "
                "the recipe of the run and no names; give the range of the layers, as in "
                f"layers.0-{model.num_layers - 1}.linear_fc2"
            )
