"""Devices and settings of the tests of what runs where."""

from __future__ import annotations

from typing import Any

from megafp8.config.layer_backends import LayerBackend
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.device.capability import TARGETS, Target, capability_problems, layer_backend

CPU, H200, B200 = TARGETS["cpu"], TARGETS["h200"], TARGETS["b200"]
A100 = Target("NVIDIA A100", "cuda", (8, 0), "2.9")
WITHOUT_TE = Target("NVIDIA H200", "cuda", (9, 0), None)
RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


def fp8(recipe: str, **others: Any) -> RunConfig:
    """A run in an FP8 recipe."""
    return RunConfig(precision=PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe, **others))


def backend_of(config: RunConfig, target: Target) -> LayerBackend:
    """The layers of a run on a device."""
    return layer_backend(config.model, config.precision, target)


def only_problem(config: RunConfig, target: Target) -> str:
    """The one problem of a run on a device."""
    found = capability_problems(config, target)
    assert len(found) == 1, found
    return found[0]
