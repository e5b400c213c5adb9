"""`--fp8-lm-level`: the flags of each level, and what takes precedence over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.config import flags, fp8_lm, rules
from megafp8.config.fp8_lm import level_values
from megafp8.config.settings import to_json, value_of
from megafp8.device import capability

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 255 --tokenizer-type "
    "NullTokenizer --mock-data --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 "
    "--position-embedding-type rope"
)
SPELLED_OUT = {
    "O1": "--bf16 --fp8-format hybrid --fp8-recipe delayed --grad-reduce-in-fp8 --grad-reduce-fp8-scaling tensor",
    "O2": "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
    "O3": "--fp8-param-gather --main-params-dtype fp16",
}


def parse(text: str) -> flags.ParsedArgs:
    return flags.parse(f"{MODEL} {text}".split())


@pytest.mark.parametrize("level", SPELLED_OUT)
def test_a_level_equals_its_flags_and_those_before_it(level: str) -> None:
    """The warning prints them; given back, they are the same settings."""
    names = list(SPELLED_OUT)
    expected = " ".join(SPELLED_OUT[name] for name in names[: names.index(level) + 1])
    parsed = parse(f"--fp8-lm-level {level}")
    assert f"--fp8-lm-level {level} stands for {expected}" in parsed.warnings
    spelled_out = parse(expected).config
    for name in level_values("O3"):
        assert value_of(parsed.config, name) == value_of(spelled_out, name)
    assert rules.problems(parsed.config, 2) == []


def test_own_flags_and_files_replace_parts_of_a_level(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"precision": {"fp8_lm_level": "O2"}, "optimizer": {"exp_avg_dtype": "bf16"}}))
    parsed = parse(f"--config {file} --grad-reduce-fp8-scaling block")
    assert parsed.config.optimizer.exp_avg_dtype == "bf16"
    assert parsed.config.precision.grad_reduce_fp8_scaling == "block"
    assert parsed.config.optimizer.exp_avg_sq_dtype == "fp16"
    (warning,) = (text for text in parsed.warnings if "stands for" in text)
    assert "replaced by your own settings: --grad-reduce-fp8-scaling tensor" in warning
    assert "--exp-avg-dtype fp8 (here optimizer.exp_avg_dtype = bf16)" in warning


def test_the_shortest_command_line_has_the_level() -> None:
    config = parse("--fp8-lm-level O3 --exp-avg-dtype bf16").config
    words = flags.to_argv(config)
    assert "--exp-avg-sq-dtype" not in words and "--exp-avg-dtype" in words
    assert flags.parse(words).config == config


def test_a_level_of_a_checkpoint_does_not_replace_its_other_settings() -> None:
    saved = {"precision.fp8_lm_level": "O1", "precision.grad_reduce_fp8_scaling": "block"}
    parsed, problems = flags.parse_with_problems(MODEL.split(), saved)
    assert not problems
    assert parsed.config.precision.grad_reduce_fp8_scaling == "block"


@pytest.mark.parametrize(
    ("off", "options"),
    [
        ("--no-grad-reduce-in-fp8", ("precision.grad_reduce_fp8_scaling",)),
        (
            "--no-use-precision-aware-optimizer",
            ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype", "optimizer.main_params_dtype"),
        ),
        ("--no-fp8-param-gather", ()),
        ("--no-use-distributed-optimizer --no-use-precision-aware-optimizer --no-fp8-param-gather", ()),
    ],
)
def test_a_switch_of_a_level_can_be_turned_off(off: str, options: tuple[str, ...]) -> None:
    """The level's options of the switch go with it; others stay."""
    config = parse(f"--fp8-lm-level O3 {off}").config
    assert rules.problems(config, 2) == []
    for name in options:
        assert value_of(config, name) == value_of(parse("").config, name)
    assert config.precision.fp8_format == "hybrid"
    words = flags.to_argv(config)
    assert set(off.split()) <= set(words) and not any(word.endswith("-dtype") for word in words)
    assert flags.parse(words).config == config


def test_a_switch_in_a_file_can_be_turned_off(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"precision": {"fp8_lm_level": "O1", "grad_reduce_in_fp8": False}}))
    config = parse(f"--config {file}").config
    assert config.precision.grad_reduce_fp8_scaling == "block" and rules.problems(config, 1) == []
    (problem,) = rules.problems(parse(f"--config {file} --grad-reduce-fp8-scaling tensor").config, 2)
    assert "tensor has no effect without --grad-reduce-in-fp8" in problem  # asked for, so not dropped


@pytest.mark.parametrize("level", ["O1", "O2", "none"])
def test_a_flag_replaces_the_level_of_a_recorded_run(level: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(to_json(parse("--fp8-lm-level O3 --weight-decay 0.3").config))
    again = parse(f"--config {file} --fp8-lm-level {level}").config
    assert again == parse(f"--weight-decay 0.3 --fp8-lm-level {level}").config
    remaining = parse(f"--config {file} --fp8-lm-level O3").config
    assert remaining == parse("--fp8-lm-level O3 --weight-decay 0.3").config


@pytest.mark.parametrize("off", ["--no-grad-reduce-in-fp8", "--no-use-precision-aware-optimizer"])
def test_a_switch_that_is_turned_off_takes_options_of_a_file_along(off: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(to_json(parse("--fp8-lm-level O3").config))
    config = parse(f"--config {file} {off}").config
    assert config == parse(f"--fp8-lm-level O3 {off}").config and rules.problems(config, 2) == []


@pytest.mark.parametrize(
    ("flags_given", "ranks", "origin", "fixes"),
    [
        (
            "O1 --override ddp.reduce_scatter_with_fp32_accumulation=true",
            2,
            "--fp8-lm-level O1 sets --grad-reduce-in-fp8",
            ["O1 --override ddp.reduce_scatter_with_fp32_accumulation=true --no-grad-reduce-in-fp8"],
        ),
        (
            "O3 --no-use-distributed-optimizer --no-use-precision-aware-optimizer",
            2,
            "--fp8-lm-level O3 sets --fp8-param-gather",
            ["O3 --no-use-distributed-optimizer --no-use-precision-aware-optimizer --no-fp8-param-gather"],
        ),
        (
            "O3 --no-use-distributed-optimizer --no-fp8-param-gather",
            2,
            "--fp8-lm-level O3 sets --use-precision-aware-optimizer",
            ["O1 --no-use-distributed-optimizer"],
        ),
        (
            "O2 --optimizer sgd --no-use-precision-aware-optimizer",
            2,
            "--fp8-lm-level O2 sets --use-distributed-optimizer",
            [
                "O1 --optimizer sgd",
                "O2 --optimizer sgd --no-use-distributed-optimizer --no-use-precision-aware-optimizer",
            ],
        ),
        ("O1 --fp4-format e2m1", 2, "sets --fp8-format hybrid", ["O1 --fp4-format e2m1 --fp8-format none"]),
    ],
)
def test_errors_name_the_level_and_fixes_that_work(flags_given: str, ranks: int, origin: str, fixes: list[str]) -> None:
    (problem,) = rules.problems(parse(f"--fp8-lm-level {flags_given}").config, ranks)
    assert origin in problem
    for fix in fixes:
        assert rules.problems(parse(f"--fp8-lm-level {fix}").config, ranks) == []


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("--fp8-param-gather needs --use-distributed-optimizer", False),
        ("--muon-x is not tested; use --use-distributed-optimizer", False),
        ("--use-distributed-optimizer-x: not known", False),
        ("--optimizer sgd with --use-distributed-optimizer: remove one", True),
    ],
)
def test_a_flag_that_a_message_recommends_is_not_blamed(problem: str, expected: bool) -> None:
    assert fp8_lm.is_blamed("--use-distributed-optimizer", problem) is expected


@pytest.mark.parametrize("implementation", ["emulated", "local"])
def test_state_of_a_level_needs_layers_of_transformer_engine_on_a_gpu(implementation: str) -> None:
    problem = next(
        text for text in gpu_problems(f"O2 --transformer-impl {implementation}") if "--use-precision-aware" in text
    )
    assert "other layers round it and keep it in FP32, which saves no memory" in problem
    assert "or use --fp8-lm-level O1" in problem


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_master_weights_of_a_level_that_a_recipe_excludes(recipe: str) -> None:
    (problem,) = gpu_problems(f"O3 --fp8-recipe {recipe}")
    assert "give --main-params-dtype fp32 or use --fp8-lm-level O2" in problem
    for fix in ("O3 --main-params-dtype fp32", "O3 --no-fp8-param-gather", "O2"):
        assert gpu_problems(f"{fix} --fp8-recipe {recipe}") == []


def gpu_problems(level: str) -> list[str]:
    return capability.capability_problems(parse(f"--fp8-lm-level {level}").config, capability.TARGETS["h200"])


def test_fp16_is_not_for_levels() -> None:
    found = rules.problems(parse("--fp8-lm-level O1 --fp16").config, 2)
    assert found == [
        "--fp16 with --fp8-lm-level O1, which is for BF16: remove one of them",
        "--fp8-recipe delayed with --fp16: remove --fp16",
    ]


def test_own_flags_are_not_said_to_be_of_a_level() -> None:
    (problem,) = rules.problems(parse("--bf16 --fp8-format hybrid --grad-reduce-in-fp8").config, 1)
    assert problem.endswith("remove it, or use more ranks")


def test_fp16_masters_need_16_bit_weights() -> None:
    text = "--use-distributed-optimizer --use-precision-aware-optimizer --main-params-dtype fp16"
    (problem,) = rules.problems(parse(text).config, 2)
    assert "have no master weights: also give --bf16" in problem
