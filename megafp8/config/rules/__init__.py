"""Rules that validate the settings of a run before any work starts.

A rule is a generator function of a configuration and a world size. It yields a message for each problem, with the
values, the arithmetic, the flag and the fix. Rules never raise and change nothing. A rule yields nothing if a value
that it needs is missing or out of range, which another rule reports.
"""

from __future__ import annotations

from megafp8.config import fp8_lm
from megafp8.config.rules import (
    attention,
    base,
    batch,
    checkpoint,
    cuda_graph,
    data,
    declared,
    gradient_reduction,
    guard,
    layers,
    mla,
    model,
    moe,
    moe_model,
    mtp,
    optimizer,
    parallel,
    paths,
    pipeline,
    precision,
    precision_map,
    profile,
    recompute,
    routing,
    sharding,
    skipped_updates,
    statistics,
    training,
)
from megafp8.config.rules.base import Rule, rules_of
from megafp8.config.rules.setting_warnings import warnings
from megafp8.config.schema import RunConfig

__all__ = ["ALL_RULES", "PATH_RULES", "SETTING_RULES", "path_problems", "problems", "setting_problems", "warnings"]

SETTING_RULES: tuple[Rule, ...] = (
    *rules_of(model, routing, moe_model, attention, mla, mtp, layers),
    declared.model_has_what_its_settings_require,
    declared.numbers_are_in_range,
    *rules_of(profile, parallel, moe, pipeline, sharding, training, batch, precision, precision_map),
    *rules_of(gradient_reduction, optimizer, recompute, cuda_graph, data, checkpoint, statistics),
    *rules_of(skipped_updates, guard),
    declared.run_has_what_its_settings_require,
    *rules_of(base),
)
"""Rules about settings only, whose result is the same on every machine."""

PATH_RULES: tuple[Rule, ...] = rules_of(paths)
"""Rules about files and folders on this machine."""

ALL_RULES: tuple[Rule, ...] = SETTING_RULES + PATH_RULES


def problems(config: RunConfig, world_size: int) -> list[str]:
    """All problems, in the order of the rules; empty if the run may start."""
    return found_by(ALL_RULES, config, world_size)


def setting_problems(config: RunConfig, world_size: int) -> list[str]:
    """Problems of the settings, independent of the machine."""
    return found_by(SETTING_RULES, config, world_size)


def path_problems(config: RunConfig, world_size: int) -> list[str]:
    """Problems with paths on this machine. A dry run for another machine shows them as warnings."""
    return found_by(PATH_RULES, config, world_size)


def found_by(rules: tuple[Rule, ...], config: RunConfig, world_size: int) -> list[str]:
    """Problems that the given rules find, without duplicates, with the flags of --fp8-lm-level marked as such."""
    found = [problem for rule in rules for problem in rule(config, world_size)]
    return fp8_lm.with_origins(dict.fromkeys(found), config)
