"""What to try against a health warning, in words: flags, with values that follow from the run.

Whether a run accepts a flag is not tried here, beside training: the run that gets it says so before step 1. A resumed
run accepts another schedule or other number formats only with an --override flag, and another model not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megafp8.config import derived, mixture, precision_map
from megafp8.config.health_case import HealthCase
from megafp8.config.precision_map import GEMMS
from megafp8.config.schema import ModelConfig, OptimizerConfig, TrainingConfig
from megafp8.recipes import registry

LONG_AMAX_HISTORY = 16  # steps
WARMUP_FACTOR = 2
FIRST_WARMUP_DIVISOR = 20  # of the run's length, if it has no warm-up
STATISTICS_INTERVAL = 100  # if the run has no statistics; a step that stops the run gets them at any interval
AUX_LOSS_COEFF = 0.01  # that of Switch Transformer, if the run has none


Suggestions = Callable[[HealthCase], Iterator[str]]


# --- single suggestions -----------------------------------------------------------------------------------------------


def other_recipes(case: HealthCase, names: Sequence[str], why: str) -> Iterator[str]:
    """Other recipes: for all linears if the linear has that of --fp8-recipe, else for the linear alone."""
    choice = case.choice
    others = " or ".join(name for name in names if name not in choice.recipes)
    if not choice.is_quantized or not others:
        return
    if case.precision.fp8_format is not None and choice == precision_map.base_choice(case.precision):
        yield f"--fp8-recipe {others}{why}"
    elif case.linear is not None:
        yield f"--precision {case.linear}={others}{why}"


def block_recipes(case: HealthCase) -> Iterator[str]:
    """Recipes with block scales, and statistics of them. FP4 already has shorter blocks."""
    if case.has_four_bits:
        yield from fallbacks(case)
        return
    names = [recipe.name for recipe in reversed(registry.recipes("fp8")) if recipe.block_length]
    if case.fp8_what_if is None:
        yield f"--fp8-what-if {','.join(names)} to see the effect of recipes with block scales"
    yield from other_recipes(case, names, ", which has one scale per block")


def high_precision_linear(case: HealthCase, gemms: Sequence[str] = GEMMS) -> Iterator[str]:
    """The linear, or some of its GEMMs, in the dtype of the weights."""
    if case.linear is not None and any(choice.recipe for choice in case.choice):
        suffix = "" if len(gemms) == len(GEMMS) else f":{','.join(gemms)}"
        dtype = derived.params_dtype(case.precision)
        yield f"--precision {case.linear}{suffix}={dtype}, which keeps it in high precision"


def lower_learning_rate(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    """A lower learning rate and a longer warm-up."""
    if optimizer.lr is not None:
        yield f"--lr {optimizer.lr / 2:g}, half of the current value"
    if optimizer.lr_warmup_fraction is not None:
        yield f"--lr-warmup-fraction {min(1.0, WARMUP_FACTOR * optimizer.lr_warmup_fraction):g}"
        return
    for unit, length, warmup in (
        ("samples", training.train_samples, optimizer.lr_warmup_samples),
        ("iters", training.train_iters, optimizer.lr_warmup_iters),
    ):
        if length is not None:
            yield f"--lr-warmup-{unit} {WARMUP_FACTOR * warmup or max(1, length // FIRST_WARMUP_DIVISOR)}"
            return


def fallbacks(case: HealthCase) -> Iterator[str]:
    """The fallbacks that the linear's recipes name."""
    for recipe in case.recipes:
        for name, why in recipe.fallbacks:
            yield from other_recipes(case, [name], why)


def current_scaling(case: HealthCase) -> Iterator[str]:
    """Current scaling in place of delayed scaling."""
    if case.choice.is_stateful:
        yield from fallbacks(case)


def longer_amax_history(case: HealthCase) -> Iterator[str]:
    """A longer amax history, whose scales leave room for amaxes of earlier steps."""
    if case.choice.is_stateful:
        length = max(LONG_AMAX_HISTORY, 2 * case.precision.fp8_amax_history_len)
        words = f"--fp8-amax-history-len {length} --fp8-amax-compute-algo max"
        yield f"{words}, which leaves headroom in the scales"


def more_statistics(case: HealthCase) -> Iterator[str]:
    """Quantization statistics, which name the linear; in high precision those of a what-if recipe."""
    if case.fp8_log_interval is None:
        is_quantized = precision_map.is_quantized(case.precision)
        what_if = "" if is_quantized else f" --fp8-what-if {registry.stateless()[0].name}"
        yield f"--fp8-log-interval {STATISTICS_INTERVAL}{what_if} to find the first linear layer with such values"


# --- suggestions for each rule ----------------------------------------------------------------------------------------


def more_balance(model: ModelConfig) -> Iterator[str]:
    """Stronger auxiliary losses, or one for a run without; the bias of experts."""
    if set(model.moe_router_load_balancing_type) <= set(mixture.AUXILIARY_LOSSES):
        stronger = [2 * each or AUX_LOSS_COEFF for each in model.moe_aux_loss_coeff]
        yield f"--moe-aux-loss-coeff {' '.join(f'{each:g}' for each in stronger)}"
    elif model.moe_router_load_balancing_type == ("none",):
        yield f"--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff {AUX_LOSS_COEFF:g}"
    is_padded = mixture.has_capacity(model) and model.moe_pad_expert_input_to_capacity  # then the bias never changes
    if model.moe_router_score_function == "sigmoid" and not (model.moe_router_enable_expert_bias or is_padded):
        yield "--moe-router-enable-expert-bias"


def for_nonfinite_values(case: HealthCase) -> Iterator[str]:
    """Non-finite values."""
    yield from lower_learning_rate(case.optimizer, case.training)
    clip = case.optimizer.clip_grad
    yield f"--clip-grad {clip / 2 if clip else 1:g}"
    yield from current_scaling(case)
    yield from high_precision_linear(case)
    precision = case.precision
    if case.linear is None and precision_map.is_quantized(precision) and not precision.first_last_layers_bf16:
        yield "--first-last-layers-bf16"
    yield from more_statistics(case)


def for_saturation(case: HealthCase) -> Iterator[str]:
    """Quantization scales that are too large for their values."""
    yield from current_scaling(case)
    if case.choice.is_stateful:
        yield f"--fp8-margin {case.precision.fp8_margin + 1}"
    yield from longer_amax_history(case)
    if case.has_four_bits:
        yield from fallbacks(case)
    yield from high_precision_linear(case)


def for_underflow(case: HealthCase) -> Iterator[str]:
    """Gradients that are too small for their scales."""
    choice = case.choice
    if choice.dgrad.format == "e4m3":
        is_default = choice == precision_map.base_choice(case.precision)
        flag = "--fp8-format hybrid" if is_default else f"--precision {case.linear}={choice.dgrad.recipe}/hybrid"
        yield f"{flag}, whose gradient format represents smaller values, where the recipe has it"
    yield from block_recipes(case)
    yield from high_precision_linear(case, ("dgrad", "wgrad"))


def for_noise(case: HealthCase) -> Iterator[str]:
    """A recipe with a large error."""
    has_squares = any("fp4_2d_weights" in recipe.option_names for recipe in case.recipes)
    if has_squares and case.precision.fp4_2d_weights:
        yield "--no-fp4-2d-weights, which uses blocks of 16 weights instead of 256"
    yield from current_scaling(case)
    yield from block_recipes(case)
    yield from high_precision_linear(case)


def for_moving_scales(case: HealthCase) -> Iterator[str]:
    """Amaxes that jump between statistics steps."""
    yield from lower_learning_rate(case.optimizer, case.training)
    yield from current_scaling(case)


def for_stale_scales(case: HealthCase) -> Iterator[str]:
    """Delayed scales that no longer fit their tensors."""
    yield from current_scaling(case)
    if case.precision.fp8_amax_history_len > 1:
        yield "--fp8-amax-history-len 1, whose scales adapt faster"
    yield from longer_amax_history(case)


def for_stalled_weights(case: HealthCase) -> Iterator[str]:
    """Updates that do not change a weight: the possible causes."""
    clip = ", --clip-grad" if case.optimizer.clip_grad else ""
    yield f"check --lr and its schedule at this step{clip}, and whether gradients of the layer underflow"


def for_outliers(case: HealthCase) -> Iterator[str]:
    """A channel that uses up the range of the others."""
    yield from block_recipes(case)
    if not case.has_normed_attention:
        yield "--qk-layernorm"
    decay = case.optimizer.weight_decay
    yield f"--weight-decay {2 * decay if decay else 0.01:g}"
    yield from high_precision_linear(case)


def for_collapsed_router(model: ModelConfig, optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    """A router that sends nearly all tokens to the same experts."""
    yield from more_balance(model)
    yield from lower_learning_rate(optimizer, training)
