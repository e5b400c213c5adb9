"""Activations that are kept for the backward pass as FP8 codes (`--fp8-saved-activations`)."""

from __future__ import annotations

from megafp8.config import dimensions
from megafp8.config.schema import RunConfig

NORM, ACTIVATION = "norm", "activation"
GROUP = 16
"""Consecutive elements of the last dimension that share a scale: COAT's size for non-linear layers."""

PACKED_BYTES = 1 + 1 / GROUP
"""Bytes of an element: its E4M3 code, and its share of the group's E8M0 scale."""


def grouped_channels(config: RunConfig) -> dict[str, int]:
    """The number of channels on a rank that groups of each part divide.

    Half of a gated linear_fc1 counts for itself, so that layouts of tensor parallelism have the same groups.
    """
    model, parallel = config.model, config.parallel
    assert model.hidden_size is not None
    return {
        NORM: model.hidden_size,
        ACTIVATION: dimensions.ffn_hidden_size(model) // parallel.tensor_model_parallel_size,
    }
