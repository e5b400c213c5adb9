"""Suggestions name flags that exist, with values that follow from the run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Optional

import pytest
from test_health import TINY

from megafp8.config import flags, rules
from megafp8.config.health_case import health_case
from megafp8.metrics.health import RULES
from megafp8.metrics.health_suggestions import (
    Suggestions,
    for_noise,
    for_nonfinite_values,
    for_outliers,
    for_saturation,
    for_underflow,
)

STATISTICS = "--fp8-log-interval 2"
RUNS = {
    "bf16": "--fp8-log-interval 2 --fp8-what-if mxfp8",
    "bf16-not-looked-at": "",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "tensorwise-e4m3": f"--fp8-format e4m3 --fp8-recipe tensorwise {STATISTICS} --fp8-power-2-scale",
    "delayed": f"--fp8-format hybrid --fp8-recipe delayed {STATISTICS} --clip-grad 0",
    "delayed-margin": f"--fp8-format e4m3 --fp8-recipe delayed {STATISTICS} --fp8-margin 1 --fp8-amax-history-len 1024",
    "blockwise": f"--fp8-format e4m3 --fp8-recipe blockwise {STATISTICS} --lr-warmup-fraction 0.1",
    "mxfp8": f"--fp8-format e4m3 --fp8-recipe mxfp8 {STATISTICS} --fp8-what-if nvfp4 --lr-warmup-iters 10",
    "nvfp4": f"--fp4-format e2m1 {STATISTICS}",
    "nvfp4-1d": f"--fp4-format e2m1 {STATISTICS} --no-fp4-2d-weights --first-last-layers-bf16 --num-layers 4",
    "map": f"--fp8-format e4m3 --fp8-recipe tensorwise {STATISTICS} --precision layers.0.*=nvfp4 output_layer=mxfp8",
    "weights-in-fp8": "--fp8-format hybrid --fp8-recipe delayed --fp8-param-gather --use-distributed-optimizer",
    "schedule": f"--fp8-format hybrid --fp8-recipe tensorwise --fp8-schedule bf16:20,fp8 {STATISTICS} --min-lr 9e-4",
    "op-fuser": "--fp8-format hybrid --fp8-recipe delayed --use-transformer-engine-op-fuser --disable-bias-linear",
}


def text_of(name: str, suggestions: Suggestions, linear: Optional[str] = "layers.1.linear_fc1") -> str:
    case = health_case(flags.parse(f"{TINY} {RUNS[name]}".split()).config)
    return "; ".join(suggestions(replace(case, linear=linear)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "-"))
@pytest.mark.parametrize("name", RUNS)
def test_every_suggestion_can_be_read_as_flags(name: str, rule: object) -> None:
    """Appended to the run's, for every linear: with one of several recipes, and without what follows a comma."""
    command = f"{TINY} {RUNS[name]}".split()
    config = flags.parse(command).config
    assert rules.setting_problems(config, 1) == []
    case = health_case(config)
    for linear in (None, *case.choices):
        for text in rule.suggestions(replace(case, linear=linear)):
            words = re.sub(r" or [\w-]+|, (which|whose|half) .*| to (see|find) .*", "", text)
            assert words.startswith("--") or text.startswith("check --lr")
            changed, problems = flags.parse_with_problems([*command, *words.split()] if words[0] == "-" else command)
            assert not problems and (changed.config != config or words[0] != "-"), text


@pytest.mark.parametrize("name", RUNS)
def test_nonfinite_values_have_a_suggestion(name: str) -> None:
    assert "--clip-grad" in text_of(name, for_nonfinite_values, None)


def test_suggestion_is_for_the_recipe_of_the_run() -> None:
    assert "--fp8-recipe tensorwise" in text_of("delayed", for_saturation)
    assert "tensorwise" not in text_of("tensorwise", for_nonfinite_values)
    margin = text_of("delayed-margin", for_saturation)
    assert "--fp8-margin 2" in margin and "--fp8-amax-history-len 2048" in margin


def test_recipes_with_block_scales_are_named_together() -> None:
    assert "--fp8-recipe mxfp8 or blockwise, which" in text_of("tensorwise", for_noise)
    assert "--fp8-recipe mxfp8, which" in text_of("blockwise", for_noise)


def test_four_bit_recipes_are_advised_eight_bits_or_more() -> None:
    assert "fp8-recipe" not in text_of("nvfp4", for_underflow)
    for suggestions in (for_saturation, for_underflow, for_outliers):
        assert "--precision layers.1.linear_fc1=mxfp8" in text_of("nvfp4", suggestions)
    assert "--precision layers.1.linear_fc1:dgrad,wgrad=bf16" in text_of("nvfp4", for_underflow)
    assert "layers.0.linear_qkv=mxfp8" in text_of("map", for_underflow, "layers.0.linear_qkv")


def test_a_format_that_reaches_further_down_is_advised_where_there_is_one() -> None:
    assert "--fp8-format hybrid" in text_of("tensorwise-e4m3", for_underflow)
    assert "--fp8-format" not in text_of("delayed", for_underflow)
    assert "output_layer=mxfp8/hybrid" in text_of("map", for_underflow, "output_layer")


def test_statistics_are_advised_where_they_are_off() -> None:
    assert "--fp8-log-interval 100 to find" in text_of("tensorwise", for_nonfinite_values, None)
    assert "--fp8-log-interval 100 --fp8-what-if tensorwise" in text_of(
        "bf16-not-looked-at", for_nonfinite_values, None
    )
    assert "--fp8-log-interval" not in text_of("bf16", for_nonfinite_values, None)
