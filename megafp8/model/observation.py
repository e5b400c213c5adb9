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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Optional

import torch
from torch import Tensor

from megafp8.config import derived, precision_map
from megafp8.config.precision_map import OUTPUT_LAYER
from megafp8.config.rules.telemetry import with_recipe
from megafp8.config.schema import RunConfig
from megafp8.fp8.fp4 import unpack
from megafp8.fp8.hadamard import transform_columns
from megafp8.fp8.parameter import QuantizedParameter
from megafp8.fp8.quantize import Quantized, as_blocks, has_kernels, quantize
from megafp8.fp8.recipes import Gemm, Operand, OperandRule, Recipe, build_linear_recipe, build_recipe
from megafp8.fp8.scaling import ScaleRule, block_amax
from megafp8.model.quantization_report import GEMMS
from megafp8.telemetry.quantization import ROUNDING
from megafp8.telemetry.records import TensorStats
from megafp8.telemetry.tensor_sums import TensorTable, compare, exponent_counts, outlier_key

CHUNK_VALUES = 1 << 18
CAN_SATURATE = (ScaleRule.DELAYED, ScaleRule.TWO_LEVEL)  # other scales are made from the amax at hand


# --- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
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
class Plan:
    """Everything that is looked at, the same on all ranks.

    Attributes:
        linears: names of the linears.
        watched: their tensors, by linear and operand.
        recipe: of the layers' linears without a precision map; None in high precision.
        recipes: of each of the linears.
    """

    linears: tuple[str, ...]
    watched: Mapping[tuple[str, Operand], tuple[Watched, ...]]
    recipe: Optional[Recipe]
    recipes: Mapping[str, Optional[Recipe]]

    def rows(self) -> list[str]:
        """Rows of the table: the weights of all linears, and every tensor under every rule."""
        return [*self.linears, *(each.row for each in self.all())]

    def other_recipes(self) -> dict[str, str]:
        """Names of those recipes that are not the run's, by linear."""
        return {name: each.name for name, each in self.recipes.items() if each not in (None, self.recipe)}

    def all(self) -> Iterator[Watched]:
        """Every tensor under every rule."""
        for group in self.watched.values():
            yield from group


def plan_observation(config: RunConfig) -> Plan:
    """What `--fp8-log-layers` and `--fp8-what-if` ask for."""
    tried = [what_if_recipe(name) for name in derived.what_if_recipes(config.logging)]
    linears, chosen = watched_linears(config), precision_map.resolve(config.model, config.precision)
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
    return Plan(linears, watched, build_recipe(config.precision), recipes)


def watched_linears(config: RunConfig) -> tuple[str, ...]:
    """Names of the quantized linears (of all layers' in high precision) that the patterns name."""
    chosen = precision_map.resolve(config.model, config.precision)
    is_quantized = precision_map.is_quantized(config.precision)
    names = [
        name for name, choice in chosen.items() if choice.is_quantized or not (is_quantized or name == OUTPUT_LAYER)
    ]
    patterns = derived.log_layer_patterns(config.logging)
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def what_if_recipe(name: str) -> Recipe:
    """A recipe to try, in its usual formats."""
    recipe = build_recipe(with_recipe(RunConfig(), name).precision)
    assert recipe is not None
    return recipe


def entries_of(linear: str, operand: Operand, recipe: Recipe, is_tried: bool) -> Iterator[Watched]:
    """An operand under a recipe: once, or along rows and along columns."""
    by_side = {side: recipe.rule(operand, gemm) for side, gemm in GEMMS[operand].items()}
    is_one = by_side["row"] == by_side["column"]
    for side, rule in by_side.items():
        if rule is None or (is_one and side == "column"):
            continue
        gemms = tuple(GEMMS[operand].values()) if is_one else (GEMMS[operand][side],)
        yield Watched(linear, operand, "" if is_one else side, recipe.name, is_tried, rule, gemms)


# --- one tensor -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def enter(
    table: TensorTable,
    row: str,
    tensor: Tensor,
    quantized: Quantized,
    *,
    margin: int = 0,
    first_channel: int = 0,
) -> None:
    """Enter what quantization did to a tensor into the table.

    Args:
        tensor: FP32, BF16 or FP16 [..., columns]; a weight that is kept as codes has no other values to compare with.
        margin: of delayed scaling.
        first_channel: number of the first column, where the tensor is a part of the columns.

    Numerics: counts are exact; differences and squares in FP32, in units of the amax, sums of them in FP64.
    """
    rule, is_known = quantized.rule, not is_kept_as_codes(tensor)
    values = tensor.detach() if is_known else tensor.dequantize()
    rows = values.reshape(-1, values.shape[-1])
    rows = transform_columns(rows) if rule.is_transformed else rows
    channel_amax, num_nonzero, num_bad = _magnitudes(rows)
    largest = channel_amax.amax()
    counts = _code_counts(quantized)
    dequant = _block_scales(quantized)
    sums = {"values": largest.new_tensor(rows.numel()), "non_finite": num_bad}
    if is_known:
        sums |= {
            "compared": largest.new_tensor(rows.numel()),
            "nonzero": num_nonzero,
            "underflow": _num_zeros(quantized, counts) - (rows.numel() - num_nonzero - num_bad),
            "saturated": _num_saturated(rows, quantized, dequant),
        }
        sums |= _compared(rows, quantized, largest)
    used = dequant if rule.block is None else dequant[_used_blocks(quantized) & (dequant > 0)]
    tops = {"amax": largest, "outlier": outlier_key(channel_amax, first_channel)}
    if used.numel() and bool(largest > 0):
        tops |= {"quant_scale": used.amin().double().reciprocal(), "dequant_scale": used.amax()}
        if rule.scale_rule is ScaleRule.DELAYED:
            tops["staleness"] = largest.double() / (used.double() * rule.format.max * 2.0**-margin)
    special = rule.format.first_special_code
    table.add(row, sums, tops, exponent_counts(counts, rule.format.mantissa_bits, special))


def _magnitudes(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest finite magnitude of each column in FP32, values that are neither zero nor not finite, and those that are
    not finite. Magnitudes of one sign are ordered as their bits are, and integers are counted faster."""
    integer = torch.int16 if rows.dtype.itemsize == 2 else torch.int32
    bits = rows.contiguous().view(integer).bitwise_and(torch.iinfo(integer).max)
    infinity = torch.tensor(torch.inf, dtype=rows.dtype).view(integer).item()
    num_bad = torch.zeros((), dtype=torch.int64, device=rows.device)
    columns = bits.amax(0)
    if bool(columns.amax() >= infinity):
        is_bad = bits >= infinity
        num_bad = is_bad.sum()
        columns = bits.masked_fill_(is_bad, 0).amax(0)
    return columns.view(rows.dtype).float(), torch.count_nonzero(bits), num_bad


def _code_counts(quantized: Quantized) -> Tensor:
    """How often each code occurs: 256 of FP8, 16 of FP4."""
    counts = torch.bincount(quantized.codes.view(torch.uint8).flatten(), minlength=256)
    if quantized.rule.format.codes_per_byte == 2:
        pairs = counts.view(16, 16)
        return pairs.sum(0) + pairs.sum(1)
    return counts


def _num_zeros(quantized: Quantized, counts: Tensor) -> Tensor:
    """Codes that stand for zero: of two-level scales one may be zero itself, and then all of its block is."""
    if quantized.rule.scale_rule is not ScaleRule.TWO_LEVEL:
        return counts[0] + counts[len(counts) // 2]
    values = quantized.operand(torch.bfloat16)
    return values.numel() - torch.count_nonzero(values)


def _block_scales(quantized: Quantized) -> Tensor:
    """Dequantization scales in FP32, that of the tensor included: scalar or [blocks of rows, blocks of columns]."""
    scales = quantized.dequant_scale.float()
    return scales if quantized.tensor_scale is None else scales * quantized.tensor_scale


def _used_blocks(quantized: Quantized) -> Tensor:
    """Which blocks have a code that is not zero."""
    codes = quantized.codes
    raw = unpack(codes) if quantized.rule.format.codes_per_byte == 2 else codes.view(torch.uint8)
    magnitudes = raw.view(-1, raw.shape[-1]).bitwise_and(0x7F).to(torch.bfloat16)  # whole numbers below 2^8: exact
    return block_amax(as_blocks(magnitudes, quantized.rule.block)) > 0


def _num_saturated(rows: Tensor, quantized: Quantized, dequant: Tensor) -> Tensor:
    """Finite values beyond the largest number that their scale expresses."""
    rule = quantized.rule
    if rule.scale_rule not in CAN_SATURATE:
        return torch.zeros((), dtype=torch.int64, device=rows.device)
    limit = dequant * (rule.format.max * (1 + ROUNDING))
    if rule.block is None:
        magnitudes = rows.abs()
        return torch.count_nonzero((magnitudes > limit) & (magnitudes < torch.inf))
    magnitudes = as_blocks(rows, rule.block).abs()
    return torch.count_nonzero((magnitudes > limit[:, None, :, None]) & (magnitudes < torch.inf))


def _compared(rows: Tensor, quantized: Quantized, largest: Tensor) -> dict[str, Tensor]:
    """Signal and noise."""
    is_short = quantized.rule.is_bf16_exact
    decoded = quantized.operand(torch.bfloat16 if is_short else torch.float32).reshape(rows.shape)
    if has_kernels(rows):
        from megafp8.telemetry.triton_sums import compare_whole  # needs Triton

        totals = compare_whole(rows, decoded, quantized.factor, largest)
    else:
        totals = _compared_by_chunks(rows, decoded, quantized.factor, largest)
    square = largest.double().square()
    return totals | {"signal": totals["signal"] * square, "noise": totals["noise"] * square}


def _compared_by_chunks(
    rows: Tensor, decoded: Tensor, factor: Optional[Tensor], largest: Tensor
) -> dict[str, Tensor]:
    """The same in units of the amax squared, some whole rows at a time."""
    step = max(1, CHUNK_VALUES // rows.shape[1])
    totals: dict[str, Tensor] = {}
    for start in range(0, len(rows), step):
        values, others = rows[start : start + step].float(), decoded[start : start + step].float()
        others = others if factor is None else others * factor
        if not bool(torch.isfinite(values.sum())):
            is_finite = values.isfinite()
            values, others = values.where(is_finite, 0.0), others.where(is_finite, 0.0)
        for name, value in compare(values, others, largest).items():
            totals[name] = totals[name] + value if name in totals else value
    return totals


# --- what linears show ------------------------------------------------------------------------------------------------


class TensorObserver:
    """Enters the operands of one linear into a table, the first time that it sees each.

    Args:
        linear: its name in the plan.
        first_channel: number of the first input channel of this rank's part.
    """

    def __init__(self, plan: Plan, table: TensorTable, linear: str, first_channel: int = 0):
        self.plan, self.table, self.linear, self.first_channel = plan, table, linear, first_channel
        recipe = plan.recipes[linear]
        self.margin = recipe.delayed.margin if recipe is not None and recipe.delayed is not None else 0
        self.seen: set[str] = set()

    def __call__(self, operand: Operand, tensor: Tensor, quantized: Mapping[Gemm, Quantized]) -> None:
        for each in self.plan.watched[self.linear, operand]:
            codes = self._codes(each, tensor, quantized)
            if codes is not None:
                self.seen.add(each.row)
                first_channel = self.first_channel if operand is Operand.INPUT else 0
                enter(self.table, each.row, tensor, codes, margin=self.margin, first_channel=first_channel)

    def _codes(self, each: Watched, tensor: Tensor, quantized: Mapping[Gemm, Quantized]) -> Optional[Quantized]:
        """Those at hand, or of a recipe that is tried; None if there are none or they were seen before."""
        if each.row in self.seen:
            return None
        if not each.is_tried:
            return next((quantized[gemm] for gemm in each.gemms if gemm in quantized), None)
        if is_kept_as_codes(tensor):
            return None
        return try_rule(tensor, each.rule)


def is_kept_as_codes(tensor: Tensor) -> bool:
    """Is it a weight without values in high precision: ours, or Transformer Engine's?"""
    return isinstance(tensor, QuantizedParameter) or hasattr(tensor, "_quantizer")


def try_rule(tensor: Tensor, rule: OperandRule) -> Quantized:
    """A tensor under a rule that the run does not have; stochastic rounding by numbers of its own."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    generator = torch.Generator(rows.device).manual_seed(0) if rule.is_stochastic else None
    return quantize(rows, rule, generator=generator)


def collect(plan: Plan, table: TensorTable) -> tuple[dict[str, TensorStats], dict[str, dict[str, TensorStats]]]:
    """The reduced table as statistics: of the run's recipe by tensor, and of tried ones by recipe and tensor."""
    own: dict[str, TensorStats] = {}
    tried: dict[str, dict[str, TensorStats]] = {}
    for each in plan.all():
        num_exponents = 1 + (1 << each.rule.format.exponent_bits)
        stats = table.stats(each.row, each.rule.format.name, num_exponents)
        if stats is None:
            continue
        if each.is_tried:
            stats = dataclasses.replace(stats, exponent_counts=(), outlier_octaves=None, outlier_channel=None)
            tried.setdefault(each.recipe, {})[each.tensor] = stats
            continue
        if each.operand is Operand.WEIGHT:
            stats = dataclasses.replace(stats, **table.update_stats([each.linear]))
        own[each.tensor] = stats
    return own, tried

