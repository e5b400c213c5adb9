"""Which layers stay out of FP8."""

from __future__ import annotations

from megafp8.config.schema import PrecisionConfig


def is_high_precision(layer: int, num_layers: int, precision: PrecisionConfig) -> bool:
    """Whether `--first-last-layers-bf16` keeps a layer (counted from 0 over the whole model) out of FP8."""
    if not precision.first_last_layers_bf16:
        return False
    return (
        layer < precision.num_layers_at_start_in_bf16 or layer >= num_layers - precision.num_layers_at_end_in_bf16
    )
