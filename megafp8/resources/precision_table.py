"""Tables of the resolved precision of every GEMM of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megafp8.config import derived, precision_map
from megafp8.config.precision_map import (
    ATTENTION_LINEARS,
    GEMMS,
    MLP_LINEARS,
    OUTPUT_LAYER,
    LinearChoice,
    build_linear_recipe,
)
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.config.topology import as_ranges
from megafp8.recipes.description import describe
from megafp8.utils.formatting import text_table

HEADER = ("GEMM of", "layers", *GEMMS)
ALIGNMENT = "l" * len(HEADER)


@dataclass(frozen=True)
class GemmPrecision:
    """One row of the table: a linear, its layers, its recipes, and the operand formats of its GEMMs."""

    linear: str
    layers: str
    chosen: LinearChoice
    fprop: str
    dgrad: str
    wgrad: str


def resolve_precision_map(model: ModelConfig, precision: PrecisionConfig) -> list[GemmPrecision]:
    """One row per linear of a layer and precision, and one for the output layer."""
    chosen = precision_map.resolve(model, precision)
    rows = []
    kinds = dict.fromkeys(name.split(".", 2)[2] for name in chosen if name != OUTPUT_LAYER)
    order = (*ATTENTION_LINEARS, *MLP_LINEARS)
    for linear in sorted(kinds, key=lambda kind: order.index(kind) if kind in order else len(order)):
        layers: dict[LinearChoice, list[int]] = {}
        for name, choice in chosen.items():
            if name != OUTPUT_LAYER and name.split(".", 2)[2] == linear:
                layers.setdefault(choice, []).append(int(name.split(".")[1]))
        rows += [gemm_precision(linear, as_ranges(numbers), choice, precision) for choice, numbers in layers.items()]
    return [*rows, gemm_precision(OUTPUT_LAYER, "-", chosen[OUTPUT_LAYER], precision)]


def gemm_precision(linear: str, layers: str, chosen: LinearChoice, precision: PrecisionConfig) -> GemmPrecision:
    """Operand formats of fprop (input x weight), dgrad (grad_output x weight) and wgrad (grad_output x input).

    They are the same for emulated and Transformer Engine layers. What Transformer Engine lacks is refused earlier.
    """
    high = derived.params_dtype(precision)
    fprop, dgrad, wgrad = (
        f"{row.operands} per {row.granularity}, {row.scale} scale" if row.is_quantized else f"{high} x {high}"
        for row in describe(build_linear_recipe(precision, chosen))
    )
    return GemmPrecision(linear, layers, chosen, fprop, dgrad, wgrad)


def format_precision_map(rows: Iterable[GemmPrecision]) -> str:
    """The table as text, with formats and scales."""
    cells = [(row.linear, row.layers, row.fprop, row.dgrad, row.wgrad) for row in rows]
    return text_table(HEADER, cells, ALIGNMENT)


def format_recipes(rows: Iterable[GemmPrecision], precision: PrecisionConfig) -> str:
    """The table as text, with recipe names only."""
    high = derived.params_dtype(precision)
    names = [(row.linear, row.layers, *(choice.name or high for choice in row.chosen)) for row in rows]
    return text_table(HEADER, names, ALIGNMENT)
