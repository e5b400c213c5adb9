"""Rules and warnings about `--fp8-guard`."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived, precision_map, precision_schedule
from megafp8.config.expert_layers import is_mixture
from megafp8.config.guarded_linears import SWIGLU_OUTPUT, is_of_routed_experts, watched_linears
from megafp8.config.rules.base import all_positive, no_effect_without
from megafp8.config.schema import RunConfig, TrainingConfig


def guard_has_quantized_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """--fp8-guard changes linears that quantize in a way that the run has, and its interval needs it."""
    training, precision = config.training, config.precision
    flag = f"--fp8-guard {training.fp8_guard}"
    if training.fp8_guard == "off":
        if training.fp8_guard_interval != TrainingConfig().fp8_guard_interval:
            yield no_effect_without(f"--fp8-guard-interval {training.fp8_guard_interval}", "--fp8-guard warn")
        return
    if training.fp8_guard != "warn" and not precision_map.is_quantized(precision):
        yield no_effect_without(flag, "--fp8-format, --fp4-format or --precision")
    if training.fp8_guard != "warn" and precision.fp8_param_gather:
        yield (
            f"{flag} with --fp8-param-gather: the weights have no copy in high precision; remove one, or use "
            "--fp8-guard warn"
        )
    if training.fp8_guard == "smooth-swiglu" and derived.is_stateful(precision):
        yield (
            f"{flag} with delayed scaling: the weight has the channel scales of each microbatch, and would saturate "
            f"with a scale of earlier amaxes; use {policies_instead_of_scales(config)}, or a recipe without amax "
            "history"
        )
    if training.fp8_guard == "smooth-swiglu" and any(precision_schedule.phases_with_entries(config.precision)):
        yield (
            f"{flag} with entries in --fp8-schedule: scales per channel are for linears of one recipe; use "
            f"{policies_instead_of_scales(config)}"
        )
    if training.fp8_guard == "smooth-swiglu" and not config.model.swiglu:
        yield f"{flag} scales the output of SwiGLU: add --swiglu, or use {policies_instead_of_scales(config)}"


def guard_can_change_a_layer(config: RunConfig, world_size: int) -> Iterator[str]:
    """--fp8-guard bf16-layer and smooth-swiglu need linears that they watch and may change."""
    guard, model, precision = config.training.fp8_guard, config.model, config.precision
    if guard in ("off", "warn") or not all_positive(model.num_layers) or not precision_map.is_quantized(precision):
        return
    flag, watched = f"--fp8-guard {guard}", watched_linears(model, precision)
    if guard == "bf16-layer" and not watched:
        yield (
            f"{flag}: it watches no linear whose input is quantized, and would move no layer; quantize linears of "
            "attention or dense MLPs with --precision, or use --fp8-guard warn"
        )
    if guard != "smooth-swiglu" or not model.swiglu or any(name.endswith(SWIGLU_OUTPUT) for name in watched):
        return
    outputs = [name for name in precision_map.linear_names(model) if name.endswith(SWIGLU_OUTPUT)]
    if all(map(is_of_routed_experts, outputs)):
        yield (
            f"{flag}: the MLPs of all layers are routed experts, whose linears it does not scale; use "
            f"{policies_instead_of_scales(config)}"
        )
    else:
        modules = "dense MLPs and shared experts" if is_mixture(model) else "layers"
        yield (
            f"{flag}: the inputs of {SWIGLU_OUTPUT} in all {modules} are in high precision, where scales have no use; "
            "quantize them with --precision, or use --fp8-guard warn"
        )


def policies_instead_of_scales(config: RunConfig) -> str:
    """Policies of --fp8-guard that the run may have if it cannot have smooth-swiglu."""
    model, precision = config.model, config.precision
    has_watched = all_positive(model.num_layers) and bool(watched_linears(model, precision))
    return "--fp8-guard warn or bf16-layer" if has_watched and not precision.fp8_param_gather else "--fp8-guard warn"


def guard_warnings(config: RunConfig) -> Iterator[str]:
    """What --fp8-guard does not watch."""
    guard, model, precision = config.training.fp8_guard, config.model, config.precision
    if guard == "off" or not all_positive(model.num_layers):
        return
    watched = watched_linears(model, precision)
    if not watched:
        yield (
            f"--fp8-guard {guard} watches no linear, because no input of one that it could watch is quantized; it "
            "takes attention logits, the residual and the signal-to-noise ratio of gradients only"
        )
        return
    names = [name for name, choice in precision_map.resolve(model, precision).items() if choice.is_quantized]
    layers = {name.split(".")[1] for name in names if is_of_routed_experts(name)}
    if layers:
        kinds = {
            "attention": precision_map.ATTENTION_LINEARS,
            "dense MLPs": precision_map.MLP_LINEARS,
            "shared experts": tuple(precision_map.SHARED_EXPERTS + linear for linear in precision_map.MLP_LINEARS),
        }
        kinds_of_layers = {name.split(".", 2)[2] for name in watched}
        found = [kind for kind, linears in kinds.items() if kinds_of_layers.intersection(linears)]
        listed = " and ".join(filter(None, [", ".join(found[:-1]), found[-1]]))
        yield (
            f"--fp8-guard {guard} does not watch the routed experts of {len(layers)} "
            f"layer{'s' if len(layers) > 1 else ''}; it watches the linears of {listed}"
        )
