"""Collection of quantization statistics from the operands of the linears during training.

In a statistics step each linear passes every operand of the rank's first microbatch, together with its codes, to a
`TensorObserver`. The emulated linears pass the operands that they multiply. The linears of Transformer Engine and
megatron-core are hooked: their inputs and output gradients are quantized again by the same rules, with the same codes.
Two of these are approximate. The input of a linear with a fused norm is computed with torch's norm, and under
delayed scaling Transformer Engine's fused kernels quantize before they round to BF16.

What-if recipes quantize the same tensors without an effect on the run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from megafp8.config import derived, precision_map
from megafp8.config.precision_map import build_linear_recipe, build_recipe, name_of_all_experts
from megafp8.config.schema import LoggingConfig, ModelConfig, PrecisionConfig
from megafp8.metrics.accumulators import accumulate, accumulate_with_triton
from megafp8.metrics.recipe_comparison import GEMMS
from megafp8.metrics.records import TensorStats
from megafp8.metrics.tensor_table import StatisticsTable, num_exponents
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.quantization.nvfp4_variants import transformed
from megafp8.quantization.quantize import has_kernels, quantize_for
from megafp8.quantization.quantized_tensor import Quantized, Use
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, LinearRecipe, Operand, OperandRule

# --- plan of the statistics -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrackedTensor:
    """One operand of one linear under one rule: a row of the table.

    Attributes:
        linear: `layers.3.linear_fc1`.
        side: `row` or `column`; empty if both have the same rule.
        recipe: the run's own, or a what-if recipe.
        gemms: the GEMMs that use the codes of the rule.
    """

    linear: str
    operand: Operand
    side: str
    recipe: str
    is_what_if: bool
    rule: OperandRule
    gemms: tuple[Gemm, ...]

    @property
    def name(self) -> str:
        """Name of the tensor in records."""
        return ".".join(part for part in (self.linear, self.operand.value, self.side) if part)

    @property
    def row(self) -> str:
        """Name of the row in the table."""
        return f"{self.name}|{self.recipe}" if self.is_what_if else self.name


@dataclass(frozen=True)
class StatisticsPlan:
    """The tensors that statistics are collected from, the same on all ranks.

    Attributes:
        linears: names of the linears.
        tracked: their tensors, by linear and operand.
        recipe: of linears that no precision map entry names; None in high precision.
        recipes: of each linear.
    """

    linears: tuple[str, ...]
    tracked: Mapping[tuple[str, Operand], tuple[TrackedTensor, ...]]
    recipe: Optional[LinearRecipe]
    recipes: Mapping[str, Optional[LinearRecipe]]

    def rows(self) -> list[str]:
        """Rows of the table: the weights of all linears, and every tensor under every rule."""
        return [*self.linears, *(tensor.row for tensor in self.tensors())]

    def other_recipes(self) -> dict[str, str]:
        """Names of the recipes that differ from the run's default, by linear."""
        recipes = self.recipes.items()
        return {name: recipe.name for name, recipe in recipes if recipe is not None and recipe != self.recipe}

    def tensors(self) -> Iterator[TrackedTensor]:
        """Every tensor under every rule."""
        return itertools.chain.from_iterable(self.tracked.values())


def build_statistics_plan(model: ModelConfig, precision: PrecisionConfig, logging: LoggingConfig) -> StatisticsPlan:
    """The plan of `--fp8-log-layers` and `--fp8-what-if`."""
    what_if = [(True, registry.get(name).rules()) for name in derived.what_if_recipes(logging)]
    names = precision_map.linears_with_statistics(model, precision)
    patterns = derived.log_layer_patterns(logging)
    linears = tuple(name for name in names if any(precision_map.matches_pattern(name, each) for each in patterns))
    choices = precision_map.resolve(model, precision)
    recipes = {linear: build_linear_recipe(precision, choices[name_of_all_experts(linear)]) for linear in linears}
    tracked = {
        (linear, operand): tuple(
            tensor
            for is_what_if, recipe in [(False, recipes[linear]), *what_if]
            if recipe is not None
            for tensor in tracked_tensors(linear, operand, recipe, is_what_if)
        )
        for linear in linears
        for operand in Operand
    }
    return StatisticsPlan(linears, tracked, build_recipe(precision), recipes)


def tracked_tensors(linear: str, operand: Operand, recipe: LinearRecipe, is_what_if: bool) -> Iterator[TrackedTensor]:
    """An operand under a recipe: once, or along rows and along columns if their rules differ."""
    by_side = {side: recipe.rule(operand, gemm) for side, gemm in GEMMS[operand].items()}
    is_same = by_side["row"] == by_side["column"]
    for side, rule in by_side.items():
        if rule is None or (is_same and side == "column"):
            continue
        gemms = tuple(GEMMS[operand].values()) if is_same else (GEMMS[operand][side],)
        yield TrackedTensor(linear, operand, "" if is_same else side, recipe.name, is_what_if, rule, gemms)


# --- one tensor -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def add_statistics(
    table: StatisticsTable,
    row: str,
    tensor: Tensor,
    quantized: Quantized,
    *,
    margin: int = 0,
    first_channel: Optional[int] = None,
    has_exponents: bool = True,
) -> None:
    """Add the quantization statistics of a tensor to the table.

    Args:
        tensor: FP32, BF16 or FP16 [..., columns], or a weight that is kept as codes, which has no error to measure.
        margin: of delayed scaling.
        first_channel: number of the first column, if the tensor is a shard of the columns; None skips outliers.
        has_exponents: whether to count codes by exponent.

    Numerics: counts are exact; differences in FP32, sums of their squares in FP64.
    """
    rule, is_known = quantized.rule, not is_stored_as_codes(tensor)
    values = tensor.detach() if is_known else tensor.dequantize()
    rows = values.reshape(-1, values.shape[-1])
    rows = transformed(rows, rule, quantized.signs)
    accumulate_stats = accumulate_with_triton if has_kernels(rows) else accumulate
    stats = accumulate_stats(rows, quantized, is_known, margin, first_channel is not None, has_exponents)
    table.add(row, stats, first_channel)


# --- operands of a linear ---------------------------------------------------------------------------------------------


class TensorObserver:
    """Adds the operands of one linear to a table, each the first time that it is observed.

    Args:
        linear: its name in the plan.
        generator: of stochastic rounding by what-if recipes.
        first_channel: number of the first input channel of this rank's shard.
    """

    def __init__(
        self,
        plan: StatisticsPlan,
        table: StatisticsTable,
        linear: str,
        generator: torch.Generator,
        first_channel: int = 0,
    ):
        self.plan, self.table, self.linear, self.first_channel = plan, table, linear, first_channel
        self.generator = generator
        recipe = plan.recipes[linear]
        self.margin = recipe.delayed.margin if recipe is not None and recipe.delayed is not None else 0
        self.seen: set[str] = set()

    def __call__(self, operand: Operand, tensor: Tensor, quantized: Mapping[Gemm, Quantized]) -> None:
        unseen = [tracked for tracked in self.plan.tracked[self.linear, operand] if tracked.row not in self.seen]
        for tracked in unseen:
            codes = next((quantized[gemm] for gemm in tracked.gemms if gemm in quantized), None)
            if not tracked.is_what_if and codes is not None:
                first_channel = self.first_channel if operand is Operand.INPUT else 0
                self._add(tracked, tensor, codes, first_channel)
        what_if = [] if is_stored_as_codes(tensor) else [tracked for tracked in unseen if tracked.is_what_if]
        # Grouped by recipe, so that the codes of only one are in memory at a time.
        for _, group in itertools.groupby(what_if, key=lambda tracked: tracked.recipe):
            sides = list(group)
            quantized_sides = quantize_what_if(tensor, [side.rule for side in sides], self.generator)
            for tracked, codes in zip(sides, quantized_sides, strict=True):
                self._add(tracked, tensor, codes, None)

    def _add(self, tracked: TrackedTensor, tensor: Tensor, codes: Quantized, first_channel: Optional[int]) -> None:
        self.seen.add(tracked.row)
        add_statistics(
            self.table,
            tracked.row,
            tensor,
            codes,
            margin=self.margin,
            first_channel=first_channel,
            has_exponents=not tracked.is_what_if,
        )


def is_stored_as_codes(tensor: Tensor) -> bool:
    """Whether a weight has no high-precision values; also for Transformer Engine's quantized tensors."""
    return isinstance(tensor, QuantizedParameter) or hasattr(tensor, "_quantizer")


def quantize_what_if(tensor: Tensor, rules: Sequence[OperandRule], generator: torch.Generator) -> list[Quantized]:
    """Quantize a tensor by rules of what-if recipes.

    Args:
        generator: of stochastic rounding, so that it draws none of the run's random numbers.
    """
    generators = [generator if rule.is_stochastic else None for rule in rules]
    uses = [Use(rule) for rule in rules]
    results = quantize_for(tensor.detach().reshape(-1, tensor.shape[-1]), uses, generators=generators)
    return [result for result in results if isinstance(result, Quantized)]


def collect(
    plan: StatisticsPlan, table: StatisticsTable
) -> tuple[dict[str, TensorStats], dict[str, dict[str, TensorStats]]]:
    """Statistics from the reduced table: of the run's recipe by tensor, and of what-if recipes by recipe and tensor."""
    own: dict[str, TensorStats] = {}
    what_if: dict[str, dict[str, TensorStats]] = {}
    for tensor in plan.tensors():
        fmt = tensor.rule.format
        stats = table.stats(tensor.row, fmt.name, 0 if tensor.is_what_if else num_exponents(fmt))
        if stats is None:
            continue
        if tensor.is_what_if:
            what_if.setdefault(tensor.recipe, {})[tensor.name] = stats
            continue
        if tensor.operand is Operand.WEIGHT:
            changes: dict[str, Any] = table.update_stats([tensor.linear])
            stats = dataclasses.replace(stats, **changes)
        own[tensor.name] = stats
    return own, what_if
