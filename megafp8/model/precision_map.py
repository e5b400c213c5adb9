"""The resolved precision of every GEMM of the model, as a table for people: what is quantized and what is not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megafp8.config import derived
from megafp8.config.gemms import LINEARS
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.fp8.recipes import build_recipe, describe
from megafp8.model.high_precision import is_high_precision
from megafp8.parallel.topology import as_ranges

HEADER = ("GEMM of", "layers", "fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class GemmPrecision:
    """One row: a linear, in which layers, and what its three GEMMs multiply."""

    linear: str
    layers: str
    fprop: str
    dgrad: str
    wgrad: str


def resolve_precision_map(config: RunConfig) -> list[GemmPrecision]:
    """Rows for the four linears of a layer (once per precision) and the output layer, whichever layers compute them."""
    num_layers, precision = config.model.num_layers, config.precision
    assert num_layers is not None
    high = derived.params_dtype(precision)
    plain = (f"{high} x {high}",) * 3
    gemms = plain if derived.quantization_recipe(precision) is None else quantized_gemms(precision)
    kept = [layer for layer in range(num_layers) if is_high_precision(layer, num_layers, precision)]
    quantized = [layer for layer in range(num_layers) if layer not in kept]
    rows = []
    for layers, formats in ((quantized, gemms), (kept, plain)):
        if layers:
            rows += [GemmPrecision(linear, as_ranges(layers), *formats) for linear in LINEARS]
    return [*rows, GemmPrecision("output_layer", "-", *plain)]


def quantized_gemms(precision: PrecisionConfig) -> tuple[str, str, str]:
    """Operand formats of fprop (input x weight), dgrad (grad_output x weight) and wgrad (grad_output x input).

    The emulated layers and Transformer Engine's follow the same rules; what it does not have is refused earlier.
    """
    high = derived.params_dtype(precision)
    fprop, dgrad, wgrad = (
        f"{row.operands} per {row.granularity}, {row.scale} scale" if row.is_quantized else f"{high} x {high}"
        for row in describe(build_recipe(precision))
    )
    return fprop, dgrad, wgrad


def format_precision_map(rows: Iterable[GemmPrecision]) -> str:
    """The table as aligned text."""
    cells = [HEADER, *((row.linear, row.layers, row.fprop, row.dgrad, row.wgrad) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in padded)

