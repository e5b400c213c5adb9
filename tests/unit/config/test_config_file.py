"""Configuration files that people write: a flag per key, read as on the command line, errors with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.config import flags
from megafp8.config.settings import all_settings, settings_by_key, to_json

LINES = """\
# a comment
model_preset: tiny
recipe: tensorwise
lr: 3e-4
seq-length: 128
split: 98,2,0
swiglu: false
disable_bias_linear: true
tensorboard_dir: on
recompute_modules: [mlp, moe]
train_samples: 1000
parallel:
  tensor_model_parallel_size: 2
"""
AS_FLAGS = (
    "--model-preset tiny --recipe tensorwise --lr 3e-4 --seq-length 128 --split 98,2,0 --disable-bias-linear "
    "--tensorboard-dir on --recompute-modules mlp moe --train-samples 1000 --tensor-model-parallel-size 2"
)


def written(folder: Path, text: str, name: str = "c.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def problems_of(*argv: str) -> list[str]:
    return flags.parse_with_problems(argv)[1]


def test_a_file_is_read_as_the_same_flags(tmp_path: Path) -> None:
    path = written(tmp_path, LINES)
    parsed = flags.parse([path])
    # The only value without a flag: the preset turns SwiGLU on, and Megatron-LM has no flag that turns it off.
    assert not parsed.config.model.swiglu
    assert parsed.config == flags.parse(["--config", path]).config
    with_swiglu = written(tmp_path, LINES.replace("swiglu: false", "swiglu: true"), "d.yml")
    assert flags.parse([with_swiglu]).config == flags.parse(AS_FLAGS.split()).config
    assert "optimizer.lr" in parsed.from_file and "optimizer.lr" not in parsed.given


def test_json_has_the_same_form(tmp_path: Path) -> None:
    tree = {"model_preset": "tiny", "lr": 1e-05, "swiglu": True, "save": None, "recompute_modules": ["mlp"]}
    found = flags.parse([written(tmp_path, json.dumps(tree), "c.json")]).config
    assert found == flags.parse(["--model-preset", "tiny", "--lr", "1e-05", "--recompute-modules", "mlp"]).config


def test_the_settings_of_a_run_are_read(tmp_path: Path) -> None:
    config = flags.parse(AS_FLAGS.split()).config
    assert flags.parse([written(tmp_path, to_json(config), "run.json")]).config == config


def test_flags_override_the_file(tmp_path: Path) -> None:
    parsed = flags.parse([written(tmp_path, LINES), "--lr", "1", "--model-preset", "gpt2-124m"])
    assert parsed.config.optimizer.lr == 1 and parsed.config.model.num_layers == 12
    assert any("--model-preset gpt2-124m replaces the model section" in warning for warning in parsed.warnings)


@pytest.mark.parametrize(
    "line, expected",
    [
        ("seq_lenght: 1", "unknown key `seq_lenght`; did you mean seq_length?"),
        ("colour: 1", "unknown key `colour`; a key is a flag"),
        ("max_steps: 1", "unknown key `max_steps`; use train_iters"),
        ("learning_rat: 1", "unknown key `learning_rat`; use lr"),
        ("use_mcore_models: true", "unknown key `use_mcore_models`: all models are"),
        ("position_embeddings: rope", "unknown key `position_embeddings`; did you mean"),
        ("dry_run: true", "unknown key `dry_run`"),
        ("lr: much", "--lr: 'much' is not a number"),
        ("lr: 1\nlr: 2", "`lr` sets the same flag as `lr` (FILE:1): keep one"),
        ("bias_swiglu_fusion: true\nno_bias_swiglu_fusion: true", "sets the same flag as `bias_swiglu_fusion`"),
        ("swiglu: 3", "--swiglu: '3' is not true or false"),
        ("lr: true", "`lr` takes a value, not true"),
        ("lr: [1, 2]", "--lr: does not take '2'"),
        ("lr: {a: 1}", "`lr` takes a value, not keys of its own"),
        ("recompute_modules: [[mlp]]", "takes a list of values"),
        ("fp8_recipe: nvfp4", "nvfp4 is an FP4 recipe: use --recipe nvfp4"),
        ("lr: 'a", "found unexpected end of stream"),
        ("- lr", "a flag and its value per line"),
    ],
)
def test_problems_have_file_line_and_key(line: str, expected: str, tmp_path: Path) -> None:
    path = written(tmp_path, line)
    (problem,) = problems_of(path)
    assert problem.startswith(path) and expected.replace("FILE", path) in problem
    if "lr: 'a" not in line and "- lr" not in line and "2026" not in line:
        assert problem.startswith(f"{path}:{1 + line.count(chr(10))}: ")


def test_json_problems_have_lines_and_equal_keys_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, '{\n"swiglu": true,\n"recipes": "bf16"\n}', "c.json")
    assert problems_of(path) == [f"{path}:3: unknown key `recipes`; did you mean recipe?"]
    (problem,) = problems_of(written(tmp_path, '{"lr": 1, "lr": 2}', "d.json"))
    assert "'lr' is given twice" in problem


def test_two_files_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "lr: 1")
    (problem,) = problems_of(path, "--config", path)
    assert "both given" in problem
    assert problems_of("c.txt") == [
        "'c.txt' does not belong to any flag; configuration files end in .yaml, .yml or .json"
    ]


def test_a_key_means_one_setting() -> None:
    keys = [
        key for each in all_settings() for key in {each.field, *(name[2:].replace("-", "_") for name in each.flags)}
    ]
    assert len(keys) == len(set(keys)) and set(keys) <= set(settings_by_key())
