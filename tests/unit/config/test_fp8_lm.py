"""`--fp8-lm-level`: the flags of each level, and what takes precedence over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.config import flags, rules
from megafp8.config.fp8_lm import level_values
from megafp8.config.settings import value_of

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


def parse(text: str) -> flags.Invocation:
    return flags.parse(f"{MODEL} {text}".split())


@pytest.mark.parametrize("level", SPELLED_OUT)
def test_a_level_equals_its_flags_and_those_before_it(level: str) -> None:
    """The notice prints them; given back, they are the same settings."""
    names = list(SPELLED_OUT)
    expected = " ".join(SPELLED_OUT[name] for name in names[: names.index(level) + 1])
    invocation = parse(f"--fp8-lm-level {level}")
    assert f"--fp8-lm-level {level} stands for {expected}" in invocation.notices
    spelled_out = parse(expected).config
    for name in level_values("O3"):
        assert value_of(invocation.config, name) == value_of(spelled_out, name)
    assert rules.problems(invocation.config, 2) == []


def test_own_flags_and_files_replace_parts_of_a_level(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"precision": {"fp8_lm_level": "O2"}, "optimizer": {"exp_avg_dtype": "bf16"}}))
    invocation = parse(f"--config {file} --grad-reduce-fp8-scaling block")
    assert invocation.config.optimizer.exp_avg_dtype == "bf16"
    assert invocation.config.precision.grad_reduce_fp8_scaling == "block"
    assert invocation.config.optimizer.exp_avg_sq_dtype == "fp16"
    (notice,) = (text for text in invocation.notices if "stands for" in text)
    assert "replaced by your own settings: --grad-reduce-fp8-scaling tensor" in notice
    assert "--exp-avg-dtype fp8 (here optimizer.exp_avg_dtype = bf16)" in notice


def test_the_shortest_command_line_has_the_level() -> None:
    config = parse("--fp8-lm-level O3 --exp-avg-dtype bf16").config
    words = flags.to_argv(config)
    assert "--exp-avg-sq-dtype" not in words and "--exp-avg-dtype" in words
    assert flags.parse(words).config == config


def test_a_level_of_a_checkpoint_does_not_replace_its_other_settings() -> None:
    saved = {"precision.fp8_lm_level": "O1", "precision.grad_reduce_fp8_scaling": "block"}
    invocation, problems = flags.parse_with_problems(MODEL.split(), saved)
    assert not problems
    assert invocation.config.precision.grad_reduce_fp8_scaling == "block"


def test_one_rank_has_nothing_to_send() -> None:
    (problem,) = rules.problems(parse("--fp8-lm-level O1").config, 1)
    assert "in place of --fp8-lm-level O1 give --bf16 --fp8-format hybrid --fp8-recipe delayed, or use" in problem


def test_fp16_masters_need_16_bit_weights() -> None:
    text = "--use-distributed-optimizer --use-precision-aware-optimizer --main-params-dtype fp16"
    (problem,) = rules.problems(parse(text).config, 2)
    assert "have no master weights: also give --bf16" in problem
