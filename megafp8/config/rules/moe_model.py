"""Rules about the shape of mixture-of-experts layers, without their router (`routing.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import mixture
from megafp8.config.rules.base import flags_without_effect
from megafp8.config.schema import RunConfig
from megafp8.utils.integers import fitting_size, round_up


def layers_with_experts_are_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """--moe-layer-freq is a number, or a list with an element for each layer and at least one 1."""
    model = config.model
    if not mixture.is_mixture(model):
        return
    try:
        frequency = mixture.layer_frequency(model.moe_layer_freq)
    except ValueError as error:
        yield f"--moe-layer-freq {error}: give a number from 1 on, or a list of 0 and 1 such as ([0]*1+[1]*3)"
        return
    if not isinstance(frequency, list) or model.num_layers is None:
        return
    if len(frequency) != model.num_layers:
        yield (
            f"--moe-layer-freq {model.moe_layer_freq} has {len(frequency)} elements for --num-layers "
            f"{model.num_layers}: give one for each layer"
        )
    elif not any(frequency):
        yield f"--moe-layer-freq {model.moe_layer_freq} has no layer with experts: remove --num-experts"


def capacity_has_its_parts(config: RunConfig, world_size: int) -> Iterator[str]:
    """A capacity needs the alltoall dispatcher and a router that assigns without it; its options need a capacity."""
    model, dispatcher = config.model, mixture.token_dispatcher(config)
    if not mixture.is_mixture(model):
        return
    if not mixture.has_capacity(model):
        options = ("--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy VALUE")
        yield from flags_without_effect(config, options, "--moe-expert-capacity-factor")
        return
    factor = f"--moe-expert-capacity-factor {model.moe_expert_capacity_factor:g}"
    if model.moe_expert_capacity_factor == 0:
        yield f"{factor} would drop every token: give a number above 0, or leave it out for no limit"
    if dispatcher == "allgather":
        yield f"{factor} with --moe-token-dispatcher-type allgather: use alltoall"
    if "sinkhorn" in model.moe_router_load_balancing_type:
        yield f"{factor} with --moe-router-load-balancing-type sinkhorn: use an auxiliary loss, or none"


def shared_experts_have_their_parts(config: RunConfig, world_size: int) -> Iterator[str]:
    """Options of shared experts need their size; they have no biases and overlap with the alltoall dispatcher only."""
    model, parallel = config.model, config.parallel
    if not mixture.is_mixture(model):
        return
    size = model.moe_shared_expert_intermediate_size
    if size is None:
        options = ("--moe-shared-expert-gate", "--moe-shared-expert-overlap")
        yield from flags_without_effect(config, options, "--moe-shared-expert-intermediate-size")
        return
    if model.add_bias_linear:
        yield "--moe-shared-expert-intermediate-size: shared experts have no biases; give --disable-bias-linear"
    if size % max(1, parallel.tensor_model_parallel_size):
        tp = parallel.tensor_model_parallel_size
        yield (
            f"--moe-shared-expert-intermediate-size {size} is not divisible by --tensor-model-parallel-size {tp}: use "
            f"--tensor-model-parallel-size {fitting_size(tp, size)}, or another model with {round_up(size, tp)}"
        )
    if parallel.moe_shared_expert_overlap and mixture.token_dispatcher(config) != "alltoall":
        yield (
            f"--moe-shared-expert-overlap with --moe-token-dispatcher-type {mixture.token_dispatcher(config)}: use "
            "alltoall"
        )


def scores_on_input_are_of_one_expert(config: RunConfig, world_size: int) -> Iterator[str]:
    """Scores are multiplied into the input of the experts only where a token has one expert."""
    model = config.model
    if model.moe_apply_probs_on_input and model.moe_router_topk != 1:
        yield f"--moe-apply-probs-on-input with --moe-router-topk {model.moe_router_topk}: it needs --moe-router-topk 1"
