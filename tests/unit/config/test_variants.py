"""Recipe names become flags, and the runs of a comparison differ as their names say."""

from __future__ import annotations

import pytest

from megafp8.config import flags, rules
from megafp8.config.variants import (
    build_variant,
    control_micro_batch_size,
    differences,
    names,
    parse_shared_flags,
    parse_variant,
)
from megafp8.errors import ConfigError
from megafp8.recipes import registry

FLAGS = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --micro-batch-size 4 --global-batch-size 8 --train-iters 10 "
    "--lr 1e-3"
)
SHARED = FLAGS.split()


def config_of(words: list[str]):
    config = flags.parse([*SHARED, *words]).config
    assert rules.setting_problems(config, 1) == []
    return config


@pytest.mark.parametrize("name", [*names(), "delayed-e4m3", "mxfp8-e5m2"])
def test_every_name_is_a_run_that_breaks_no_rule(name: str) -> None:
    config = config_of(list(build_variant(name, config_of([]), 1).flags))
    assert config.precision.bf16
    recipe = name.split("-")[0]
    if recipe in registry.names("fp4"):
        assert (config.precision.fp4_recipe, config.precision.fp4_format) == (recipe, "e2m1")
    elif recipe != "bf16":
        assert config.precision.fp8_recipe == recipe
    assert name != "delayed-e4m3" or config.precision.fp8_format == "e4m3"


def test_four_over_six_is_a_name() -> None:
    assert "nvfp4-four-over-six" in names()
    precision = config_of(list(build_variant("nvfp4-four-over-six", config_of([]), 1).flags)).precision
    assert (precision.fp4_recipe, precision.fp4_format, precision.fp4_four_over_six) == ("nvfp4", "e2m1", True)
    with pytest.raises(ConfigError, match="recipe mxfp8-four-over-six: unknown; did you mean nvfp4-four-over-six"):
        build_variant("mxfp8-four-over-six", config_of([]), 1)


def test_the_control_is_the_baseline_in_other_microbatches() -> None:
    shared = config_of([])
    bf16, control = (config_of(list(build_variant(name, shared, 1).flags)) for name in ("bf16", "bf16-control"))
    assert differences(bf16, control) == ["training.micro_batch_size: 4 -> 2"]
    odd = flags.parse([*SHARED, "--micro-batch-size", "1", "--global-batch-size", "2"]).config
    assert control_micro_batch_size(odd, 1) == 2
    with pytest.raises(ConfigError, match="no other division"):
        control_micro_batch_size(odd, 2)


def test_a_default_global_batch_is_unchanged() -> None:
    shared = flags.parse(["--micro-batch-size", "4"]).config
    words = build_variant("bf16-control", shared, 2).flags
    assert words[words.index("--global-batch-size") + 1] == "8"


@pytest.mark.parametrize("name", ["fp8", "bf16-e4m3", "delayed-e2m1", "nvfp4-e4m3", ""])
def test_unknown_names_are_reported_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="choose from bf16, bf16-control, tensorwise"):
        build_variant(name, config_of([]), 1)


def test_flags_that_the_comparison_gives_are_refused() -> None:
    config, problems = parse_shared_flags([*SHARED, "--fp8-format", "hybrid", "--save", "here"], "runs/all")
    assert [text.split()[0] for text in problems] == ["--save", "--fp8-format"]
    assert config.checkpoint.save == config.checkpoint.load == "runs/all"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x=--fp8-format hybrid --fp8-format=e4m3", "--variant x: --fp8-format is given twice"),
        ("x=--fp8-recipe delayed", "--fp8-recipe has no effect without --fp8-format"),
        ("x=--fp8-format hybrid --micro-batch-size auto", "auto: each run could find a different size"),
        ("x=--seed 3", "--seed: set by the comparison"),
        ("x=--precision '*=bf16", "No closing quotation"),
        ("a/b=--fp8-format hybrid", "must be NAME='FLAGS'"),
    ],
)
def test_a_variant_that_contradicts_itself_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_variant(text)
    assert words in str(caught.value)


def test_a_variant_has_its_given_flags() -> None:
    variant = parse_variant("edges=--fp8-format hybrid --precision 'layers.0.*=bf16'")
    assert (variant.name, variant.flags) == (
        "edges", ("--bf16", "--fp8-format", "hybrid", "--precision", "layers.0.*=bf16")
    )  # fmt: skip


def test_where_a_run_writes_makes_no_difference() -> None:
    words = ["--save", "a", "--num-threads", "3", "--log-interval", "7"]
    assert differences(config_of([]), config_of(words)) == []
    assert differences(config_of([]), config_of(["--seed", "3"])) == ["training.seed: 1234 -> 3"]
