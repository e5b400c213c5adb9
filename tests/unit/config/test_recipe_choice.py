"""`--recipe` sets format, recipe and tested options; what contradicts it is refused."""

from __future__ import annotations

import json

import pytest

from megafp8.config import flags, recipe_values
from megafp8.config.schema import PrecisionConfig
from megafp8.config.settings import from_json, to_json
from megafp8.recipes import registry


def precision_of(line: str) -> PrecisionConfig:
    return flags.parse(line.split()).config.precision


def problems_of(line: str) -> list[str]:
    return flags.parse_with_problems(line.split())[1]


@pytest.mark.parametrize("name", registry.names())
def test_a_name_is_the_same_run_as_its_flags(name: str) -> None:
    recipe = registry.get(name)
    options = {"delayed": "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max"}.get(name, "")
    formats = {"tensorwise": "hybrid", "delayed": "hybrid", "nvfp4": "e2m1", "quartet2": "e2m1"}
    expected = f"--bf16 --{recipe.family}-format {formats.get(name, 'e4m3')} {recipe.flag} {options}"
    found = flags.parse(["--recipe", name])
    assert found.config == flags.parse(expected.split()).config
    assert found.warnings == (f"--recipe {name} stands for {expected.strip()}",)
    assert from_json(to_json(found.config)) == found.config  # saved and printed settings are those of the run


def test_without_quantization() -> None:
    assert precision_of("--recipe bf16") == PrecisionConfig(bf16=True)


def test_megatrons_flags_keep_their_history() -> None:
    precision = precision_of("--bf16 --fp8-format hybrid --fp8-recipe delayed")
    assert (precision.fp8_amax_history_len, precision.fp8_amax_compute_algo) == (1, "most_recent")


def test_flags_override_its_options() -> None:
    parsed = flags.parse(["--recipe", "delayed", "--fp8-amax-history-len", "16", "--fp8-format", "e4m3"])
    precision = parsed.config.precision
    assert (precision.fp8_format, precision.fp8_amax_history_len, precision.fp8_amax_compute_algo) == (
        "e4m3",
        16,
        "max",
    )
    assert parsed.warnings[-1].endswith("; given: --fp8-format e4m3 --fp8-amax-history-len 16")


@pytest.mark.parametrize(
    "flag",
    ["--fp8-recipe tensorwise", "--fp8-format hybrid", "--fp4-format none", "--fp4-recipe quartet2", "--fp16"],
)
def test_contradictions_name_both_flags(flag: str) -> None:
    (problem,) = problems_of(f"--recipe nvfp4 {flag}")
    assert problem == f"--recipe nvfp4 and {flag} contradict each other: remove one"


def test_bf16_contradicts_a_format() -> None:
    assert "--recipe bf16 and --fp8-format e4m3" in problems_of("--recipe bf16 --fp8-format e4m3")[0]


def test_a_mixture_gets_the_format_of_its_grouped_kernels() -> None:
    parsed = flags.parse(["--model-preset", "tiny-moe", "--recipe", "tensorwise"])
    assert parsed.config.precision.fp8_format == "e4m3"
    assert "all experts of a GPU run in one launch" in parsed.warnings[-1]
    assert precision_of("--model-preset tiny-moe --recipe tensorwise --fp8-format hybrid").fp8_format == "hybrid"


def test_a_flag_replaces_the_recipe_of_a_file(tmp_path) -> None:
    by_name, dumped = tmp_path / "c.json", tmp_path / "run.json"
    by_name.write_text(json.dumps({"recipe": "delayed", "fp8_amax_history_len": 16}))
    assert precision_of(str(by_name)).fp8_amax_history_len == 16
    assert precision_of(f"{by_name} --recipe delayed").fp8_amax_history_len == 1024
    dumped.write_text(to_json(flags.parse(["--recipe", "tensorwise"]).config))
    precision = precision_of(f"{dumped} --recipe nvfp4")
    assert (precision.fp8_format, precision.fp4_format, precision.fp4_recipe) == (None, "e2m1", "nvfp4")


@pytest.mark.parametrize(
    "line, name, family, others",
    [
        ("--fp8-recipe nvfp4", "nvfp4", "FP4", "--fp4-format e2m1 --fp4-recipe nvfp4"),
        ("--fp4-recipe mxfp8", "mxfp8", "FP8", "--fp8-format e4m3 --fp8-recipe mxfp8"),
    ],
)
def test_a_recipe_of_the_other_family_says_what_to_write(line: str, name: str, family: str, others: str) -> None:
    flag = line.split()[0]
    assert problems_of(line) == [f"{flag}: {name} is an {family} recipe: use --recipe {name}, or {others}"]


def test_the_names_are_those_of_the_registry() -> None:
    assert recipe_values.names() == ("bf16", *registry.names())
    assert "--recipe: fp8 (known recipes: bf16, " in problems_of("--recipe fp8")[0]
