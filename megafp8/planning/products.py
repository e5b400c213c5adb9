"""The GEMMs of a rank for one microbatch: every linear of a layer, and the output layer, in all three products."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import gemms
from megafp8.planning.planned_run import PlannedRun

GEMMS = ("fprop", "dgrad", "wgrad")
OUTPUT_LAYER = "output_layer"


@dataclass(frozen=True)
class Product:
    """A matrix of rows x summed numbers times one of summed x columns."""

    linear: str
    gemm: str
    rows: int
    columns: int
    summed: int

    @property
    def flops(self) -> float:
        """Two for each multiplication."""
        return 2.0 * self.rows * self.columns * self.summed


def products_of(linear: str, tokens: int, out_features: int, in_features: int) -> tuple[Product, Product, Product]:
    """Fprop, dgrad and wgrad of a linear that sees so many tokens."""
    return (
        Product(linear, "fprop", tokens, out_features, in_features),
        Product(linear, "dgrad", tokens, in_features, out_features),
        Product(linear, "wgrad", out_features, in_features, tokens),
    )


def layer_products(run: PlannedRun) -> list[Product]:
    """Those of one transformer layer, in the order of the forward pass."""
    return [
        product
        for linear in gemms.gemm_dimensions(run.config)
        for product in products_of(linear.name, run.tokens, linear.out_features, linear.in_features)
    ]


def output_products(run: PlannedRun) -> tuple[Product, Product, Product]:
    """Those of the output layer, on the last pipeline stage."""
    return products_of(OUTPUT_LAYER, run.tokens, run.padded_vocab // run.tensor, run.hidden_size)
