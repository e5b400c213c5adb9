"""Suggestions for health warnings, as flags to add to the run's command line.

Which suggestions help depends on the run: `--fp8-recipe tensorwise` is no suggestion for a tensorwise run, and an FP4
run refuses it. So each suggestion is applied to the run's settings first. Those that the configuration rules or the
machine refuse, or that change nothing, are left out. A resumed run accepts another schedule or other number formats
only with an --override flag, and another model not at all.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from megafp8.config import derived, flags, mixture, precision_map, rules
from megafp8.config.precision_map import GEMMS, LinearChoice
from megafp8.config.schema import RunConfig
from megafp8.config.settings import value_of, with_values
from megafp8.recipes import registry
from megafp8.recipes.base import Recipe

LONG_AMAX_HISTORY = 16  # steps
WARMUP_FACTOR = 2
FIRST_WARMUP_DIVISOR = 20  # of the run's length, if it has no warm-up
STATISTICS_INTERVAL = 100  # if the run has no statistics; a step that stops the run gets them at any interval
AUX_LOSS_COEFF = 0.01  # that of Switch Transformer, if the run has none
MAP_ENTRIES = "precision.precision_map"
CHOSEN_AGAIN = {"parallel.moe_expert_kernels": None}  # for other settings, which those of a run may exclude

Problems = Callable[[RunConfig], list[str]]


class Suggestion(NamedTuple):
    """Something to try.

    Attributes:
        words: of the command line; empty for a suggestion that is no flag.
        why: text that follows the words.
    """

    words: tuple[str, ...]
    why: str = ""

    def __str__(self) -> str:
        return f"{shlex.join(self.words)}{self.why}"


@dataclass(frozen=True)
class Case:
    """A run and the linear of a warning.

    Attributes:
        linear: `layers.3.linear_fc1`; None if it is not known.
        machine_problems: what the run's machine does not support of a configuration; default nothing.
    """

    config: RunConfig
    world_size: int
    linear: Optional[str] = None
    machine_problems: Problems = lambda config: []

    @property
    def choice(self) -> LinearChoice:
        """The recipes of the linear, or the run's default if the linear is not known."""
        if self.linear is None:
            return precision_map.base_choice(self.config.precision)
        return precision_map.resolve(self.config.model, self.config.precision)[
            precision_map.name_of_all_experts(self.linear)
        ]

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipe objects of `choice`."""
        return tuple(map(registry.get, self.choice.recipes))

    @property
    def is_stateful(self) -> bool:
        """Whether one of the recipes keeps an amax history."""
        return any(recipe.is_stateful for recipe in self.recipes)

    @property
    def has_run_recipe(self) -> bool:
        """Whether the linear has the recipe of --fp8-recipe, so that a flag changes it for all linears."""
        precision = self.config.precision
        return precision.fp8_format is not None and self.choice == precision_map.base_choice(precision)

    def accepts(self, words: Sequence[str]) -> bool:
        """Whether these words on the run's command line are valid and change its configuration."""
        parsed, problems = flags.parse_with_problems(words)
        values = {name: value_of(parsed.config, name) for name in parsed.given}
        if MAP_ENTRIES in values:
            values[MAP_ENTRIES] = (*self.config.precision.precision_map, *values[MAP_ENTRIES])
        free = with_values(self.config, CHOSEN_AGAIN)
        changed = with_values(free, values)
        if changed == free or problems:
            return False
        found = self._problems(changed)
        return not found or set(found) <= set(self._problems(free))

    def _problems(self, config: RunConfig) -> list[str]:
        return rules.setting_problems(config, self.world_size) + self.machine_problems(config)


Suggestions = Callable[[Case], Iterator[Suggestion]]


def suggestion_text(case: Case, suggestions: Suggestions) -> str:
    """The suggestions that the run accepts, in one text."""
    return "; ".join(map(str, accepted(case, suggestions(case))))


def accepted(case: Case, suggestions: Iterable[Suggestion]) -> list[Suggestion]:
    """The suggestions that the run accepts."""
    return [suggestion for suggestion in suggestions if not suggestion.words or case.accepts(suggestion.words)]


# --- single suggestions -----------------------------------------------------------------------------------------------


def other_recipe(case: Case, recipe: str, why: str) -> Iterator[Suggestion]:
    """Another recipe, for all linears if the run accepts the flag, else for the linear alone."""
    if not case.choice.is_quantized or recipe in case.choice.recipes:
        return
    for_all = Suggestion(("--fp8-recipe", recipe), why)
    if case.has_run_recipe and case.accepts(for_all.words):
        yield for_all
    elif case.linear is not None:
        yield Suggestion(("--precision", f"{case.linear}={recipe}"), why)


def block_recipes(case: Case) -> Iterator[Suggestion]:
    """Recipes with block scales, and statistics of them. FP4 already has shorter blocks."""
    if any(recipe.family == "fp4" for recipe in case.recipes):
        yield from fallbacks(case)
        return
    names = [recipe.name for recipe in reversed(registry.recipes("fp8")) if recipe.block_length]
    what_if = [name for name in names if case.accepts(("--fp8-what-if", name))]
    if what_if and case.config.logging.fp8_what_if is None:
        yield Suggestion(("--fp8-what-if", ",".join(what_if)), " to see the effect of recipes with block scales")
    for recipe in names:
        yield from other_recipe(case, recipe, ", which has one scale per block")


def high_precision_linear(case: Case, gemms: Sequence[str] = GEMMS) -> Iterator[Suggestion]:
    """The linear, or some of its GEMMs, in the dtype of the weights."""
    if case.linear is not None and any(choice.recipe for choice in case.choice):
        suffix = "" if len(gemms) == len(GEMMS) else f":{','.join(gemms)}"
        dtype = derived.params_dtype(case.config.precision)
        yield Suggestion(("--precision", f"{case.linear}{suffix}={dtype}"), ", which keeps it in high precision")


def lower_learning_rate(case: Case) -> Iterator[Suggestion]:
    """A lower learning rate and a longer warm-up."""
    optimizer, training = case.config.optimizer, case.config.training
    if optimizer.lr is not None:
        yield Suggestion(("--lr", f"{optimizer.lr / 2:g}"), ", half of the current value")
    if optimizer.lr_warmup_fraction is not None:
        yield Suggestion(("--lr-warmup-fraction", f"{WARMUP_FACTOR * optimizer.lr_warmup_fraction:g}"))
        return
    for unit, length, warmup in (
        ("samples", training.train_samples, optimizer.lr_warmup_samples),
        ("iters", training.train_iters, optimizer.lr_warmup_iters),
    ):
        if length is not None:
            longer = WARMUP_FACTOR * warmup or max(1, length // FIRST_WARMUP_DIVISOR)
            yield Suggestion((f"--lr-warmup-{unit}", str(longer)))
            return


def fallbacks(case: Case) -> Iterator[Suggestion]:
    """The fallbacks that the linear's recipes name."""
    for recipe in case.recipes:
        for name, why in recipe.fallbacks:
            yield from other_recipe(case, name, why)


def current_scaling(case: Case) -> Iterator[Suggestion]:
    """Current scaling in place of delayed scaling."""
    if case.is_stateful:
        yield from fallbacks(case)


def longer_amax_history(case: Case) -> Iterator[Suggestion]:
    """A longer amax history, whose scales leave room for amaxes of earlier steps."""
    if case.is_stateful:
        length = max(LONG_AMAX_HISTORY, 2 * case.config.precision.fp8_amax_history_len)
        words = ("--fp8-amax-history-len", str(length), "--fp8-amax-compute-algo", "max")
        yield Suggestion(words, ", which leaves headroom in the scales")


def more_statistics(case: Case) -> Iterator[Suggestion]:
    """Quantization statistics, which name the linear; in high precision those of a what-if recipe."""
    if case.config.logging.fp8_log_interval is None:
        is_quantized = precision_map.is_quantized(case.config.precision)
        what_if = () if is_quantized else ("--fp8-what-if", registry.stateless()[0].name)
        words = ("--fp8-log-interval", str(STATISTICS_INTERVAL), *what_if)
        yield Suggestion(words, " to find the first linear layer with such values")


def more_balance(case: Case) -> Iterator[Suggestion]:
    """Stronger auxiliary losses, or one for a run without; the bias of experts."""
    model = case.config.model
    if set(model.moe_router_load_balancing_type) <= set(mixture.AUXILIARY_LOSSES):
        stronger = [2 * each or AUX_LOSS_COEFF for each in model.moe_aux_loss_coeff]
        yield Suggestion(("--moe-aux-loss-coeff", *(f"{each:g}" for each in stronger)))
    elif model.moe_router_load_balancing_type == ("none",):
        loss = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", f"{AUX_LOSS_COEFF:g}")
        yield Suggestion(loss)
    if not (mixture.has_capacity(model) and model.moe_pad_expert_input_to_capacity):  # then it never changes
        yield Suggestion(("--moe-router-enable-expert-bias",))


# --- suggestions for each rule ----------------------------------------------------------------------------------------


def for_nonfinite_values(case: Case) -> Iterator[Suggestion]:
    """Non-finite values."""
    yield from lower_learning_rate(case)
    clip = case.config.optimizer.clip_grad
    yield Suggestion(("--clip-grad", f"{clip / 2:g}" if clip else "1"))
    yield from current_scaling(case)
    yield from high_precision_linear(case)
    if case.linear is None:
        yield Suggestion(("--first-last-layers-bf16",))
    yield from more_statistics(case)


def for_saturation(case: Case) -> Iterator[Suggestion]:
    """Quantization scales that are too large for their values."""
    yield from current_scaling(case)
    if case.is_stateful:
        yield Suggestion(("--fp8-margin", str(case.config.precision.fp8_margin + 1)))
    yield from longer_amax_history(case)
    if any(recipe.family == "fp4" for recipe in case.recipes):
        yield from fallbacks(case)
    yield from high_precision_linear(case)


def for_underflow(case: Case) -> Iterator[Suggestion]:
    """Gradients that are too small for their scales."""
    dgrad = case.choice.dgrad
    if dgrad.format == "e4m3":
        why = ", whose gradient format represents smaller values"
        if case.has_run_recipe:
            yield Suggestion(("--fp8-format", "hybrid"), why)
        else:
            yield Suggestion(("--precision", f"{case.linear}={dgrad.recipe}/hybrid"), why)
    yield from block_recipes(case)
    yield from high_precision_linear(case, ("dgrad", "wgrad"))


def for_noise(case: Case) -> Iterator[Suggestion]:
    """A recipe with a large error."""
    if any(recipe.family == "fp4" for recipe in case.recipes):
        yield Suggestion(("--no-fp4-2d-weights",), ", which uses blocks of 16 weights instead of 256")
    yield from current_scaling(case)
    yield from block_recipes(case)
    yield from high_precision_linear(case)


def for_moving_scales(case: Case) -> Iterator[Suggestion]:
    """Amaxes that jump between statistics steps."""
    yield from lower_learning_rate(case)
    yield from current_scaling(case)


def for_stale_scales(case: Case) -> Iterator[Suggestion]:
    """Delayed scales that no longer fit their tensors."""
    yield from current_scaling(case)
    if case.config.precision.fp8_amax_history_len > 1:
        yield Suggestion(("--fp8-amax-history-len", "1"), ", whose scales adapt faster")
    yield from longer_amax_history(case)


def for_stalled_weights(case: Case) -> Iterator[Suggestion]:
    """Updates that do not change a weight: the possible causes."""
    clip = ", --clip-grad" if case.config.optimizer.clip_grad else ""
    why = f"check --lr and its schedule at this step{clip}, and whether gradients of the layer underflow"
    yield Suggestion((), why)


def for_outliers(case: Case) -> Iterator[Suggestion]:
    """A channel that uses up the range of the others."""
    yield from block_recipes(case)
    yield Suggestion(("--qk-layernorm",))
    decay = case.config.optimizer.weight_decay
    yield Suggestion(("--weight-decay", f"{2 * decay:g}" if decay else "0.01"))
    yield from high_precision_linear(case)


def for_collapsed_router(case: Case) -> Iterator[Suggestion]:
    """A router that sends nearly all tokens to the same experts."""
    yield from more_balance(case)
    yield from lower_learning_rate(case)
