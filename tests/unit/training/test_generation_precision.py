"""Which arithmetic a checkpoint generates in, for every combination of flags."""

from __future__ import annotations

import pytest

from megafp8.config import flags
from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError
from megafp8.training.generation_precision import cache_warning, generation_config, quantization_words, trained_config

FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"


def trained(text: str) -> RunConfig:
    return flags.parse(f"--model-preset tiny {text}".split()).config


def arithmetic(text: str, precision: str | None, uses_cache: bool, has_bf16_units: bool = True) -> str:
    """The dtype and the quantization, in words."""
    chosen = generation_config(trained(text), precision, uses_cache, has_bf16_units).precision
    return " ".join(["bf16" if chosen.bf16 else "fp32", *quantization_words(chosen)])


@pytest.mark.parametrize(
    ("run", "precision", "uses_cache", "expected"),
    [
        (f"--bf16 {FP8}", None, True, "bf16"),
        (f"--bf16 {FP8}", "high", True, "bf16"),
        (f"--bf16 {FP8}", "high", False, "bf16"),
        (f"--bf16 {FP8}", None, False, "bf16 FP8 hybrid tensorwise"),
        (f"--bf16 {FP8}", "checkpoint", False, "bf16 FP8 hybrid tensorwise"),
        ("--bf16 --fp4-format e2m1 --fp4-recipe nvfp4", None, True, "bf16"),
        ("--bf16 --fp4-format e2m1 --fp4-recipe nvfp4", None, False, "bf16 FP4 e2m1 nvfp4"),
        (FP8, None, True, "fp32"),
        (FP8, None, False, "fp32 FP8 hybrid tensorwise"),
        ("--bf16", None, True, "bf16"),
        ("--bf16", "checkpoint", True, "bf16"),
        ("", "checkpoint", True, "fp32"),
        ("", "high", False, "fp32"),
        (f"--bf16 {FP8}", "fp32", False, "fp32"),
        (FP8, "bf16", False, "bf16"),
        ("--bf16", "mxfp8", False, "bf16 FP8 e4m3 mxfp8"),
        (f"--bf16 {FP8}", "nvfp4", False, "bf16 FP4 e2m1 nvfp4"),
    ],
)
def test_arithmetic(run: str, precision: str | None, uses_cache: bool, expected: str) -> None:
    assert arithmetic(run, precision, uses_cache) == expected


def test_another_recipe_has_layers_that_quantize() -> None:
    """The local layers of a run in high precision ignore FP8."""
    chosen = generation_config(trained("--transformer-impl local"), "tensorwise", False, True)
    assert chosen.precision.transformer_impl == "auto"


def test_a_recipe_with_a_history_is_refused() -> None:
    with pytest.raises(ConfigError, match="amax history of training"):
        generation_config(trained("--bf16"), "delayed", False, True)


def test_emulated_bf16_is_replaced_only_where_the_arithmetic_is_another_one_anyway() -> None:
    assert arithmetic(f"--bf16 {FP8}", None, True, has_bf16_units=False) == "fp32"
    assert arithmetic(f"--bf16 {FP8}", "high", True, has_bf16_units=False) == "bf16"
    assert arithmetic(f"--bf16 {FP8}", None, False, has_bf16_units=False) == "bf16 FP8 hybrid tensorwise"
    assert arithmetic("--bf16", None, True, has_bf16_units=False) == "bf16"


def test_a_cache_for_quantized_gemms_is_refused() -> None:
    with pytest.raises(ConfigError, match="--precision checkpoint: .*FP8 hybrid tensorwise.* add --no-cache, or leave"):
        generation_config(trained(FP8), "checkpoint", True, True)


def test_a_precision_map_counts_as_quantization() -> None:
    run = trained(f"--bf16 {FP8}")
    mapped = generation_config(run, None, False, True)
    assert mapped == run
    by_map = trained("--bf16 --precision layers.0.*=tensorwise")
    assert quantization_words(by_map.precision) == ["layers.0.*=tensorwise"]
    assert not quantization_words(generation_config(by_map, None, True, True).precision)


def test_a_step_in_high_precision_is_generated_in_it_without_a_warning() -> None:
    run = trained(f"--bf16 {FP8} --fp8-schedule fp8:6,bf16 --train-iters 9")
    assert trained_config(run, 6) == trained(f"--bf16 {FP8} --train-iters 9")
    last = trained_config(run, 7)
    assert not quantization_words(last.precision)
    chosen = generation_config(last, None, True, has_bf16_units=False)
    assert chosen == last
    assert cache_warning(last.precision, chosen.precision) == ""
