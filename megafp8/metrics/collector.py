"""What quantization does to the operands of the linears while a model trains.

In a step that is looked at, each linear shows every operand together with its codes, once for each of its uses: the
first microbatch of the rank. The emulated layers show what they multiply. Transformer Engine's and megatron-core's own
are watched from outside: their inputs and the gradients of their outputs are quantized here again, by the same rules,
whose codes are those of Transformer Engine. (Two things are then nearly so: the input of a linear with a norm in it is
made with torch's norm, and Transformer Engine's fused kernels under delayed scaling quantize before they round to
BF16.) Other recipes can be tried on the same tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from megafp8.config import derived, precision_map
from megafp8.config.precision_map import build_linear_recipe, build_recipe
from megafp8.config.schema import RunConfig
from megafp8.metrics.accumulators import accumulate, accumulate_with_triton
from megafp8.metrics.recipe_comparison import GEMMS
from megafp8.metrics.records import TensorStats
from megafp8.metrics.tensor_table import StatisticsTable
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.quantization.nvfp4 import transform_columns
from megafp8.quantization.quantize import Quantized, Use, has_kernels, quantize_for
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, LinearRecipe, Operand, OperandRule

# --- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrackedTensor:
    """One tensor under one rule: a row of the table.

    Attributes:
        linear: `layers.3.linear_fc1`.
        recipe: that the run has, or that is tried; `is_tried` tells which.
        gemms: of which the rule is, with the same codes for all.
    """

    linear: str
    operand: Operand
    side: str
    recipe: str
    is_tried: bool
    rule: OperandRule
    gemms: tuple[Gemm, ...]

    @property
    def tensor(self) -> str:
        """Its name in records."""
        return ".".join(part for part in (self.linear, self.operand.value, self.side) if part)

    @property
    def row(self) -> str:
        """Its name in the table."""
        return f"{self.tensor}|{self.recipe}" if self.is_tried else self.tensor


@dataclass(frozen=True)
class StatisticsPlan:
    """Everything that is looked at, the same on all ranks.

    Attributes:
        linears: names of the linears.
        watched: their tensors, by linear and operand.
        recipe: of the layers' linears without a precision map; None in high precision.
        recipes: of each of the linears.
    """

    linears: tuple[str, ...]
    watched: Mapping[tuple[str, Operand], tuple[TrackedTensor, ...]]
    recipe: Optional[LinearRecipe]
    recipes: Mapping[str, Optional[LinearRecipe]]

    def rows(self) -> list[str]:
        """Rows of the table: the weights of all linears, and every tensor under every rule."""
        return [*self.linears, *(each.row for each in self.all())]

    def other_recipes(self) -> dict[str, str]:
        """Names of those recipes that are not the run's, by linear."""
        return {name: each.name for name, each in self.recipes.items() if each not in (None, self.recipe)}

    def all(self) -> Iterator[TrackedTensor]:
        """Every tensor under every rule."""
        for group in self.watched.values():
            yield from group


def plan_observation(config: RunConfig) -> StatisticsPlan:
    """What `--fp8-log-layers` and `--fp8-what-if` ask for."""
    tried = [what_if_recipe(name) for name in derived.what_if_recipes(config.logging)]
    linears, chosen = tracked_linears(config), precision_map.resolve(config.model, config.precision)
    recipes = {linear: build_linear_recipe(config.precision, chosen[linear]) for linear in linears}
    watched = {
        (linear, operand): tuple(
            entry
            for is_tried, each in [(False, recipes[linear]), *((True, other) for other in tried)]
            if each is not None
            for entry in entries_of(linear, operand, each, is_tried)
        )
        for linear in linears
        for operand in Operand
    }
    return StatisticsPlan(linears, watched, build_recipe(config.precision), recipes)


def tracked_linears(config: RunConfig) -> tuple[str, ...]:
    """Names of the quantized linears (of all layers' in high precision) that the patterns name."""
    names = precision_map.observable_linears(config.model, config.precision)
    patterns = derived.log_layer_patterns(config.logging)
    return tuple(name for name in names if any(precision_map.is_named(name, pattern) for pattern in patterns))


def what_if_recipe(name: str) -> LinearRecipe:
    """A recipe to try, in its usual formats."""
    return registry.get(name).rules()


def entries_of(linear: str, operand: Operand, recipe: LinearRecipe, is_tried: bool) -> Iterator[TrackedTensor]:
    """An operand under a recipe: once, or along rows and along columns."""
    by_side = {side: recipe.rule(operand, gemm) for side, gemm in GEMMS[operand].items()}
    is_one = by_side["row"] == by_side["column"]
    for side, rule in by_side.items():
        if rule is None or (is_one and side == "column"):
            continue
        gemms = tuple(GEMMS[operand].values()) if is_one else (GEMMS[operand][side],)
        yield TrackedTensor(linear, operand, "" if is_one else side, recipe.name, is_tried, rule, gemms)


# --- one tensor -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def enter(
    table: StatisticsTable,
    row: str,
    tensor: Tensor,
    quantized: Quantized,
    *,
    margin: int = 0,
    first_channel: Optional[int] = None,
) -> None:
    """Enter what quantization did to a tensor into the table.

    Args:
        tensor: FP32, BF16 or FP16 [..., columns]; a weight that is kept as codes has no other values to compare with.
        margin: of delayed scaling.
        first_channel: number of the first column, where the tensor is a part of the columns; None leaves outliers out.

    Numerics: counts are exact; differences in FP32, sums of their squares in FP64.
    """
    rule, is_known = quantized.rule, not is_kept_as_codes(tensor)
    values = tensor.detach() if is_known else tensor.dequantize()
    rows = values.reshape(-1, values.shape[-1])
    rows = transform_columns(rows) if rule.is_transformed else rows
    add_up = accumulate_with_triton if has_kernels(rows) else accumulate
    table.add(row, add_up(rows, quantized, is_known, margin, first_channel is not None), first_channel)


# --- what linears show ------------------------------------------------------------------------------------------------


class TensorObserver:
    """Enters the operands of one linear into a table, the first time that it sees each.

    Args:
        linear: its name in the plan.
        first_channel: number of the first input channel of this rank's part.
    """

    def __init__(self, plan: StatisticsPlan, table: StatisticsTable, linear: str, first_channel: int = 0):
        self.plan, self.table, self.linear, self.first_channel = plan, table, linear, first_channel
        recipe = plan.recipes[linear]
        self.margin = recipe.delayed.margin if recipe is not None and recipe.delayed is not None else 0
        self.seen: set[str] = set()

    def __call__(self, operand: Operand, tensor: Tensor, quantized: Mapping[Gemm, Quantized]) -> None:
        unseen = [each for each in self.plan.watched[self.linear, operand] if each.row not in self.seen]
        for each in (each for each in unseen if not each.is_tried):
            codes = next((quantized[gemm] for gemm in each.gemms if gemm in quantized), None)
            if codes is not None:
                first_channel = self.first_channel if operand is Operand.INPUT else 0
                self._enter(each, tensor, codes, first_channel)
        tried = [] if is_kept_as_codes(tensor) else [each for each in unseen if each.is_tried]
        for _, group in itertools.groupby(tried, key=lambda each: each.recipe):  # one recipe's codes are held at a time
            sides = list(group)
            for each, codes in zip(sides, try_rules(tensor, [each.rule for each in sides]), strict=True):
                self._enter(each, tensor, codes, None)

    def _enter(self, each: TrackedTensor, tensor: Tensor, codes: Quantized, first_channel: Optional[int]) -> None:
        self.seen.add(each.row)
        enter(self.table, each.row, tensor, codes, margin=self.margin, first_channel=first_channel)


def is_kept_as_codes(tensor: Tensor) -> bool:
    """Is it a weight without values in high precision: ours, or Transformer Engine's?"""
    return isinstance(tensor, QuantizedParameter) or hasattr(tensor, "_quantizer")


def try_rules(tensor: Tensor, rules: Sequence[OperandRule]) -> list[Quantized]:
    """A tensor under rules that the run does not have; stochastic rounding by numbers of their own."""
    return quantize_for(
        tensor.detach().reshape(-1, tensor.shape[-1]), [Use(rule) for rule in rules],
        generators=separate_generators(rules, tensor.device),
    )  # fmt: skip


def separate_generators(rules: Iterable[OperandRule], device: torch.device) -> list[Optional[torch.Generator]]:
    """One each for stochastic rounding, always with the same numbers, so that looking draws none of the run's."""
    return [torch.Generator(device).manual_seed(0) if rule.is_stochastic else None for rule in rules]


def collect(
    plan: StatisticsPlan, table: StatisticsTable
) -> tuple[dict[str, TensorStats], dict[str, dict[str, TensorStats]]]:
    """The reduced table as statistics: of the run's recipe by tensor, and of tried ones by recipe and tensor."""
    own: dict[str, TensorStats] = {}
    tried: dict[str, dict[str, TensorStats]] = {}
    for each in plan.all():
        num_exponents = 1 + (1 << each.rule.format.exponent_bits)
        stats = table.stats(each.row, each.rule.format.name, num_exponents)
        if stats is None:
            continue
        if each.is_tried:
            tried.setdefault(each.recipe, {})[each.tensor] = dataclasses.replace(stats, exponent_counts=())
            continue
        if each.operand is Operand.WEIGHT:
            stats = dataclasses.replace(stats, **table.update_stats([each.linear]))
        own[each.tensor] = stats
    return own, tried
