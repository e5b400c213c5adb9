"""What a health warning is about: a linear, its recipes, and the settings of the run that bear on its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from megafp8.config.precision_map import LinearChoice, base_choice, name_of_all_experts, resolve
from megafp8.config.schema import OptimizerConfig, PrecisionConfig, RunConfig, TrainingConfig
from megafp8.recipes import registry
from megafp8.recipes.base import Recipe


@dataclass(frozen=True, kw_only=True)
class HealthCase:
    """A run, and the linear of a warning.

    Attributes:
        choices: the recipes of each linear of the run.
        has_normed_attention: whether queries and keys are normed.
        linear: `layers.3.linear_fc1`, or None if it is not known.
    """

    precision: PrecisionConfig
    choices: Mapping[str, LinearChoice]
    optimizer: OptimizerConfig
    training: TrainingConfig
    has_normed_attention: bool
    fp8_log_interval: Optional[int]
    fp8_what_if: Optional[str]
    linear: Optional[str] = None

    @property
    def choice(self) -> LinearChoice:
        """The recipes of the linear, or the run's default if the linear is not known."""
        return base_choice(self.precision) if self.linear is None else self.choices[name_of_all_experts(self.linear)]

    @property
    def recipes(self) -> list[Recipe]:
        """The recipe objects of `choice`."""
        return [registry.get(name) for name in self.choice.recipes]

    @property
    def has_four_bits(self) -> bool:
        """Whether one of the recipes is of FP4."""
        return any(recipe.family == "fp4" for recipe in self.recipes)


def health_case(config: RunConfig) -> HealthCase:
    """A run, without a linear."""
    model, precision, logging = config.model, config.precision, config.logging
    return HealthCase(
        precision=precision, choices=resolve(model, precision), optimizer=config.optimizer, training=config.training,
        has_normed_attention=model.qk_layernorm or model.qk_l2_norm,
        fp8_log_interval=logging.fp8_log_interval, fp8_what_if=logging.fp8_what_if,
    )  # fmt: skip
