"""Parameter groups of megatron-core's optimizers: the weights that are matrices of the layers, and what muP sets."""

from __future__ import annotations

from typing import Any, Optional

from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamWithNamePredicate
from torch import Tensor

from megafp8.config.mup import width_multiplier
from megafp8.config.schema import ModelConfig

TABLES = ("embedding", "output_layer")
"""Modules whose matrices are no matrices of the layers: a row for each token or position."""


def is_matrix(parameter: Tensor, name: str) -> bool:
    """Whether a weight is a matrix of the layers, or the stacked matrices of experts, outside of `TABLES`."""
    return parameter.ndim in (2, 3) and not set(TABLES) & set(name.split("."))


def matrices() -> ParamKey:
    """The key of these weights in the overrides of megatron-core's optimizers."""
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name="matrix", fn=is_matrix))


def mup_overrides(model: ModelConfig, core_config: OptimizerConfig) -> Optional[dict[ParamKey, Any]]:
    """The parameter groups of muP; None for those that megatron-core has without.

    Learning rate and epsilon of the matrices of the layers are divided by the width multiplier. All others have those
    of the settings, or of --decoupled-lr.
    """
    width = width_multiplier(model)
    if width == 1:
        return None
    settings = {
        "max_lr": core_config.lr / width,
        "min_lr": core_config.min_lr / width,
        "eps": core_config.adam_eps / width,
        # Read by nobody but the search for the group of a checkpoint, which compares neither rates nor epsilon.
        "lr_mult": 1 / width,
    }
    return {**get_standard_config_overrides(core_config), matrices(): settings}
