"""Cross-field rules: what must hold between settings before any work starts.

A rule is a function of a configuration and a world size that yields a text for each problem: what is wrong, the values
and the arithmetic, the flag and the mend. Rules edit nothing, stop at nothing and never raise: values that are missing
or out of range are another rule's problem, so a rule that needs them is silent without them.
"""

from __future__ import annotations

from megafp8.config.rules import base, checkpoint, data, model, optimizer, precision, precision_map, recompute, training
from megafp8.config.rules.base import Rule
from megafp8.config.rules.notices import notices
from megafp8.config.schema import RunConfig

__all__ = ["ALL_RULES", "PATH_RULES", "SETTING_RULES", "notices", "path_problems", "problems", "setting_problems"]

SETTING_RULES: tuple[Rule, ...] = (
    *model.RULES,
    *training.RANGE_RULES,
    *model.LAYOUT_RULES,
    *training.BATCH_RULES,
    *precision.RULES,
    *precision_map.RULES,
    *precision_map.FP8_ATTENTION_RULES,
    *optimizer.RULES,
    *recompute.RULES,
    *recompute.CUDA_GRAPH_RULES,
    *data.RULES,
    *checkpoint.RULES,
    *precision_map.STATISTICS_RULES,
    *training.BAD_STEP_RULES,
    *base.RULES,
)
"""Rules about the settings alone: they hold or fail alike on every machine."""

PATH_RULES: tuple[Rule, ...] = data.PATH_RULES
"""Rules about files and folders of this machine."""

ALL_RULES: tuple[Rule, ...] = SETTING_RULES + PATH_RULES


def problems(config: RunConfig, world_size: int) -> list[str]:
    """Everything that is wrong, in the order of the rules; empty for a run that may start."""
    return found_by(ALL_RULES, config, world_size)


def setting_problems(config: RunConfig, world_size: int) -> list[str]:
    """What is wrong wherever the run would start."""
    return found_by(SETTING_RULES, config, world_size)


def path_problems(config: RunConfig, world_size: int) -> list[str]:
    """What is wrong with paths on this machine; a dry run for another machine may show these as notices."""
    return found_by(PATH_RULES, config, world_size)


def found_by(rules: tuple[Rule, ...], config: RunConfig, world_size: int) -> list[str]:
    """What the given rules find, each problem once."""
    found = [problem for rule in rules for problem in rule(config, world_size)]
    return list(dict.fromkeys(found))
