"""What to try against a finding: words that go behind the run's own command line, which takes them.

What helps depends on the run. `--fp8-recipe tensorwise` is no advice for a tensorwise run, and an FP4 run refuses it.
So each remedy is tried on the run's settings, and those that its rules or its machine refuse, or that change nothing,
are left out. A run that resumes takes another schedule or other number formats with an --override flag beside them, and
another model not at all.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from megafp8.config import derived, flags, precision_map, rules
from megafp8.config.precision_map import GEMMS, LinearChoice
from megafp8.config.schema import RunConfig
from megafp8.config.settings import value_of, with_values
from megafp8.recipes import registry
from megafp8.recipes.base import Recipe

LONG_HISTORY = 16  # steps whose largest amax a scale is made of, where one step's is not enough
LONGER_WARMUP = 2
FIRST_WARMUP_DIVISOR = 20  # of the run's length, where it has no warm-up
STATISTICS_INTERVAL = 100  # where nobody looks; a step that is stopped is looked at in any case
MAP_ENTRIES = "precision.precision_map"


Problems = Callable[[RunConfig], list[str]]


class Remedy(NamedTuple):
    """Something to try.

    Attributes:
        words: of the command line; none where something is to be looked at.
        why: follows them in the text.
    """

    words: tuple[str, ...]
    why: str = ""

    def __str__(self) -> str:
        return f"{shlex.join(self.words)}{self.why}"


@dataclass(frozen=True)
class Case:
    """A run, and the linear that something is wrong with.

    Attributes:
        linear: `layers.3.linear_fc1`; None where it is not known.
        of_machine: what of a configuration the run's machine cannot do; default nothing.
    """

    config: RunConfig
    world_size: int
    linear: Optional[str] = None
    of_machine: Problems = lambda config: []

    @property
    def choice(self) -> LinearChoice:
        """The recipes of the linear; those of all of them where it is not known."""
        if self.linear is None:
            return precision_map.base_choice(self.config.precision)
        return precision_map.resolve(self.config.model, self.config.precision)[self.linear]

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The same as objects."""
        return tuple(map(registry.get, self.choice.recipes))

    @property
    def is_stateful(self) -> bool:
        """Does one of them remember amaxes?"""
        return any(recipe.is_stateful for recipe in self.recipes)

    @property
    def is_of_run(self) -> bool:
        """Is its recipe the one that --fp8-recipe gives, which a flag changes for all linears?"""
        precision = self.config.precision
        return precision.fp8_format is not None and self.choice == precision_map.base_choice(precision)

    def accepts(self, words: Sequence[str]) -> bool:
        """Does the run's command line take these words, and do they change it?"""
        invocation, problems = flags.read(words)
        values = {name: value_of(invocation.config, name) for name in invocation.given}
        if MAP_ENTRIES in values:
            values[MAP_ENTRIES] = (*self.config.precision.precision_map, *values[MAP_ENTRIES])
        changed = with_values(self.config, values)
        known = self._problems(self.config)
        return changed != self.config and not problems and all(each in known for each in self._problems(changed))

    def _problems(self, config: RunConfig) -> list[str]:
        return rules.setting_problems(config, self.world_size) + self.of_machine(config)


Remedies = Callable[[Case], Iterator[Remedy]]


def advice(case: Case, remedies: Remedies) -> str:
    """The remedies that the run takes, in one text."""
    return "; ".join(str(each) for each in taken(case, remedies(case)))


def taken(case: Case, remedies: Iterable[Remedy]) -> list[Remedy]:
    """Those that the run takes."""
    return [each for each in remedies if not each.words or case.accepts(each.words)]


# --- parts ------------------------------------------------------------------------------------------------------------


def another_recipe(case: Case, recipe: str, why: str) -> Iterator[Remedy]:
    """A recipe for all linears if a flag gives it to them and the run takes that, else for the linear alone."""
    if not case.choice.is_quantized or recipe in case.choice.recipes:
        return
    for_all = Remedy(("--fp8-recipe", recipe), why)
    if case.is_of_run and case.accepts(for_all.words):
        yield for_all
    elif case.linear is not None:
        yield Remedy(("--precision", f"{case.linear}={recipe}"), why)


def recipes_of_blocks(case: Case) -> Iterator[Remedy]:
    """Recipes in which few neighbours share a scale, and a look at what they would do. FP4 has shorter blocks."""
    if any(recipe.family == "fp4" for recipe in case.recipes):
        yield from fallbacks(case)
        return
    blocks = [recipe.name for recipe in reversed(registry.recipes("fp8")) if recipe.block_length]
    tried = [recipe for recipe in blocks if case.accepts(("--fp8-what-if", recipe))]
    if tried and case.config.logging.fp8_what_if is None:
        yield Remedy(("--fp8-what-if", ",".join(tried)), " shows what recipes of blocks would do")
    for recipe in blocks:
        yield from another_recipe(case, recipe, ", whose blocks have scales of their own")


def high_precision(case: Case, gemms: Sequence[str] = GEMMS) -> Iterator[Remedy]:
    """The linear, or some GEMMs of it, in the type of the weights."""
    if case.linear is not None and any(choice.recipe for choice in case.choice):
        of = "" if len(gemms) == len(GEMMS) else f":{','.join(gemms)}"
        dtype = derived.params_dtype(case.config.precision)
        yield Remedy(("--precision", f"{case.linear}{of}={dtype}"), ", which takes it out of the recipe")


def calmer_steps(case: Case) -> Iterator[Remedy]:
    """Smaller steps, and a slower start."""
    optimizer, training = case.config.optimizer, case.config.training
    if optimizer.lr is not None:
        yield Remedy(("--lr", f"{optimizer.lr / 2:g}"), ", half of what it is")
    if optimizer.lr_warmup_fraction is not None:
        yield Remedy(("--lr-warmup-fraction", f"{LONGER_WARMUP * optimizer.lr_warmup_fraction:g}"))
    elif training.train_samples is not None:
        first = max(1, training.train_samples // FIRST_WARMUP_DIVISOR)
        yield Remedy(("--lr-warmup-samples", str(LONGER_WARMUP * optimizer.lr_warmup_samples or first)))
    elif training.train_iters is not None:
        first = max(1, training.train_iters // FIRST_WARMUP_DIVISOR)
        yield Remedy(("--lr-warmup-iters", str(LONGER_WARMUP * optimizer.lr_warmup_iters or first)))


def fallbacks(case: Case) -> Iterator[Remedy]:
    """The recipes that the linear's own recipes name for when they are too coarse."""
    for recipe in case.recipes:
        for name, why in recipe.fallbacks:
            yield from another_recipe(case, name, why)


def current_scales(case: Case) -> Iterator[Remedy]:
    """Instead of delayed scaling's."""
    if case.is_stateful:
        yield from fallbacks(case)


def a_long_history(case: Case) -> Iterator[Remedy]:
    """Delayed scales that keep room for what was large some steps ago."""
    if case.is_stateful:
        length = max(LONG_HISTORY, 2 * case.config.precision.fp8_amax_history_len)
        words = ("--fp8-amax-history-len", str(length), "--fp8-amax-compute-algo", "max")
        yield Remedy(words, ", whose scales keep room")


def statistics_of_numbers(case: Case) -> Iterator[Remedy]:
    """What names a linear where nobody looks; in high precision it is the tensors of a recipe that is tried."""
    if case.config.logging.fp8_log_interval is None:
        is_quantized = precision_map.is_quantized(case.config.precision)
        tried = () if is_quantized else ("--fp8-what-if", registry.stateless()[0].name)
        words = ("--fp8-log-interval", str(STATISTICS_INTERVAL), *tried)
        yield Remedy(words, " names the first linear with such numbers")


# --- of each finding --------------------------------------------------------------------------------------------------


def of_bad_numbers(case: Case) -> Iterator[Remedy]:
    """Against numbers that are not finite."""
    yield from calmer_steps(case)
    clip = case.config.optimizer.clip_grad
    yield Remedy(("--clip-grad", f"{clip / 2:g}" if clip else "1"))
    yield from current_scales(case)
    yield from high_precision(case)
    if case.linear is None:
        yield Remedy(("--first-last-layers-bf16",))
    yield from statistics_of_numbers(case)


def of_saturation(case: Case) -> Iterator[Remedy]:
    """Against scales that are too large for their values."""
    yield from current_scales(case)
    if case.is_stateful:
        yield Remedy(("--fp8-margin", str(case.config.precision.fp8_margin + 1)))
    yield from a_long_history(case)
    if any(recipe.family == "fp4" for recipe in case.recipes):
        yield from fallbacks(case)
    yield from high_precision(case)


def of_underflow(case: Case) -> Iterator[Remedy]:
    """Against gradients that are too small for their scales."""
    dgrad = case.choice.dgrad
    if dgrad.format == "e4m3":
        why = ", whose gradients reach further down"
        if case.is_of_run:
            yield Remedy(("--fp8-format", "hybrid"), why)
        else:
            yield Remedy(("--precision", f"{case.linear}={dgrad.recipe}/hybrid"), why)
    yield from recipes_of_blocks(case)
    yield from high_precision(case, ("dgrad", "wgrad"))


def of_noise(case: Case) -> Iterator[Remedy]:
    """Against a recipe that leaves little of a tensor."""
    if any(recipe.family == "fp4" for recipe in case.recipes):
        yield Remedy(("--no-fp4-2d-weights",), ", which gives weights blocks of 16 values instead of 256")
    yield from current_scales(case)
    yield from recipes_of_blocks(case)
    yield from high_precision(case)


def of_moving_scales(case: Case) -> Iterator[Remedy]:
    """Against amaxes that leap."""
    yield from calmer_steps(case)
    yield from current_scales(case)


def of_stale_scales(case: Case) -> Iterator[Remedy]:
    """Against delayed scales that no longer fit."""
    yield from current_scales(case)
    if case.config.precision.fp8_amax_history_len > 1:
        yield Remedy(("--fp8-amax-history-len", "1"), ", whose scales follow")
    yield from a_long_history(case)


def of_stalled_weights(case: Case) -> Iterator[Remedy]:
    """Where steps leave a weight as it is: what may be behind it."""
    clip = ", --clip-grad" if case.config.optimizer.clip_grad else ""
    yield Remedy((), f"look at --lr and its schedule at this step{clip}, and whether gradients of the layer underflow")


def of_outliers(case: Case) -> Iterator[Remedy]:
    """Against a channel that takes the range from the others."""
    yield from recipes_of_blocks(case)
    yield Remedy(("--qk-layernorm",))
    decay = case.config.optimizer.weight_decay
    yield Remedy(("--weight-decay", f"{2 * decay:g}" if decay else "0.01"))
    yield from high_precision(case)
