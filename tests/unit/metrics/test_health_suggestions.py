"""Advised flags are accepted on the run's command line, and change it."""

from __future__ import annotations

import dataclasses
from typing import Optional

import pytest
from test_health import TINY

from megafp8.config import flags, rules
from megafp8.config.precision_map import resolve
from megafp8.config.settings import with_values
from megafp8.device import capability
from megafp8.metrics.health import RULES
from megafp8.metrics.health_suggestions import (
    Case,
    accepted,
    for_noise,
    for_nonfinite_values,
    for_outliers,
    for_saturation,
    for_underflow,
    suggestion_text,
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


def case_of(name: str, linear: Optional[str] = "layers.1.linear_fc1") -> Case:
    return Case(flags.parse(f"{TINY} {RUNS[name]}".split()).config, 1, linear)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "-"))
@pytest.mark.parametrize("name", RUNS)
def test_every_suggestion_is_accepted_by_the_command_line(name: str, rule: object) -> None:
    """Appended to its flags, for every linear."""
    config = case_of(name).config
    command = f"{TINY} {RUNS[name]}".split()
    assert rules.setting_problems(config, 1) == []
    for linear in (None, *resolve(config.model, config.precision)):
        for suggestion in accepted(Case(config, 1, linear), rule.suggestions(Case(config, 1, linear))):
            together, problems = flags.parse_with_problems([*command, *suggestion.words])
            assert not problems and not rules.setting_problems(together.config, 1), suggestion
            assert not suggestion.words or together.config != config, suggestion
            assert all(word in str(suggestion) for word in suggestion.words)


def test_kernels_that_a_run_chose_for_its_experts_exclude_no_suggestion() -> None:
    """One launch for all experts is for a few recipes."""
    words = f"{TINY} --bf16 --num-experts 4 --fp8-format e4m3 --fp8-recipe tensorwise".split()
    config = with_values(flags.parse(words).config, {"parallel.moe_expert_kernels": "triton"})
    assert Case(config, 1).accepts(["--fp8-recipe", "blockwise"])
    assert not Case(config, 1).accepts(["--fp8-recipe", "tensorwise"]), "nothing changes"


@pytest.mark.parametrize("name", RUNS)
def test_nonfinite_values_have_a_suggestion(name: str) -> None:
    assert "--clip-grad" in suggestion_text(case_of(name, None), for_nonfinite_values)


def test_suggestion_is_for_the_recipe_of_the_run() -> None:
    assert "--fp8-recipe tensorwise" in suggestion_text(case_of("delayed"), for_saturation)
    assert "tensorwise" not in suggestion_text(case_of("tensorwise"), for_nonfinite_values)
    margin = suggestion_text(case_of("delayed-margin"), for_saturation)
    assert "--fp8-recipe tensorwise" in margin, "--fp8-margin has then no effect, which a notice says"
    assert "--fp8-margin 2" in margin and "--fp8-amax-history-len 2048" in margin


def test_four_bit_recipes_are_advised_eight_bits_or_more() -> None:
    assert "fp8-recipe" not in suggestion_text(case_of("nvfp4"), for_underflow)
    for suggestions in (for_saturation, for_underflow, for_outliers):
        assert "--precision layers.1.linear_fc1=mxfp8" in suggestion_text(case_of("nvfp4"), suggestions)
    assert "--precision layers.1.linear_fc1:dgrad,wgrad=bf16" in suggestion_text(case_of("nvfp4"), for_underflow)
    assert "layers.0.linear_qkv=mxfp8" in suggestion_text(case_of("map", "layers.0.linear_qkv"), for_underflow)


def test_a_format_that_reaches_further_down_is_advised_where_there_is_one() -> None:
    assert "--fp8-format hybrid" in suggestion_text(case_of("tensorwise-e4m3"), for_underflow)
    assert "--fp8-format" not in suggestion_text(case_of("delayed"), for_underflow)
    assert "output_layer=mxfp8/hybrid" in suggestion_text(case_of("map", "output_layer"), for_underflow)


def test_statistics_are_advised_where_they_are_off() -> None:
    assert "--fp8-log-interval 100 to find" in suggestion_text(case_of("tensorwise", None), for_nonfinite_values)
    tried = suggestion_text(case_of("bf16-not-looked-at", None), for_nonfinite_values)
    assert "--fp8-log-interval 100 --fp8-what-if tensorwise" in tried
    assert "--fp8-log-interval 100 to find" in suggestion_text(case_of("op-fuser", None), for_nonfinite_values)
    case = case_of("op-fuser", None)
    case = dataclasses.replace(case, config=with_values(case.config, {"model.swiglu": False}))
    assert "--fp8-log-interval" not in suggestion_text(case, for_nonfinite_values), "only SwiGLU shows operands"
    assert "--fp8-log-interval" not in suggestion_text(case_of("bf16", None), for_nonfinite_values)


def test_unsupported_settings_are_not_advised() -> None:
    """Hopper has no MXFP8, and Transformer Engine's fused operations have no recipes of their own."""
    native = "--transformer-impl transformer_engine --no-emulation"
    words = f"{TINY} --fp8-format hybrid --fp8-recipe tensorwise --disable-bias-linear {native}"
    for flag, refused in (("", "mxfp8"), ("--use-transformer-engine-op-fuser", "linear_fc1=bf16")):
        config = flags.parse(f"{words} {flag}".split()).config
        anywhere = Case(config, 1, "layers.1.linear_fc1")
        on_hopper = dataclasses.replace(
            anywhere,
            machine_problems=lambda changed: capability.capability_problems(changed, capability.TARGETS["h100"]),
        )
        for suggestions in (for_underflow, for_noise, for_outliers, for_nonfinite_values):
            assert refused not in suggestion_text(on_hopper, suggestions).replace("--fp8-what-if mxfp8", "")
        assert any(
            refused in suggestion_text(anywhere, suggestions) for suggestions in (for_noise, for_nonfinite_values)
        )
