"""The model that a stability suite trains: that of its size, of the user's flags, or of a checkpoint; on any ranks."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.checkpoint.standalone import LazyTensor, save_weights
from megafp8.cli import stability as command
from megafp8.config import flags
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.config.variants import recipe_names
from megafp8.errors import ConfigError
from megafp8.launch.built_in_sizes import SIZES
from megafp8.launch.stability import (
    CONTINUATION,
    CONTROLS,
    PAIRS,
    PARTS,
    SWEEP,
    Suite,
    build_study,
    part_runs,
    plan_controls,
)
from megafp8.launch.study import StudyRun

DATA = ("--mock-data", "--tokenizer-type", "ByteLevelTokenizer")
LLAMA = {
    "num_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "ffn_hidden_size": 256, "swiglu": True,
    "position_embedding_type": "rope", "normalization": "RMSNorm",
}  # fmt: skip
GPT = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64}
MIXTURE = LLAMA | {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "add_bias_linear": False}


def runs_of(folder: Path, *parts: str, **fields) -> list[StudyRun]:
    fields = {"size": "tiny", "recipes": ("tensorwise",), "num_seeds": 2} | fields
    suite = Suite(folder=folder / "suite", parts=parts, **fields)
    return [each.run for each in part_runs(build_study(suite))]


@pytest.mark.parametrize("preset", ["tiny-gpt2", "tiny-moe", "llama-1b", "qwen3-0.6b"])
def test_a_preset_without_dropout_is_the_model_of_all_runs(tmp_path: Path, preset: str) -> None:
    """The control draws other masks than the baseline."""
    no_dropout = ["--attention-dropout", "0", "--hidden-dropout", "0"]
    expected = flags.parse(["--model-preset", preset, *no_dropout]).config.model
    found = runs_of(tmp_path, PAIRS, SWEEP, CONTROLS, flags=(*DATA, "--model-preset", preset))
    assert all(run.config.model == expected for run in found)
    assert {run.config.data.seq_length for run in found} == {64}


def test_a_file_with_a_model_is_the_model_of_all_runs_and_its_other_settings_count(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(
        json.dumps({"model": GPT | {"attention_dropout": 0.1}, "optimizer": {"weight_decay": 0.01, "lr": 2e-3}})
    )
    expected = flags.parse(["--config", str(path), "--hidden-dropout", "0"]).config
    found = runs_of(tmp_path, PAIRS, SWEEP, flags=(*DATA, "--config", str(path)))
    assert all(run.config.model == expected.model and run.config.optimizer.weight_decay == 0.01 for run in found)
    assert min(run.config.optimizer.lr for run in found) == 2e-3 and found[0].config.optimizer.min_lr == 2e-4


def test_a_file_without_a_model_changes_what_it_says_only(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"model": {"swiglu": False, "num_layers": 3}}))
    model = runs_of(tmp_path, PAIRS, flags=(*DATA, "--config", str(path)))[0].config.model
    plain = runs_of(tmp_path, PAIRS, flags=DATA)[0].config.model
    assert model == flags.parse(["--config", str(path), *_without_swiglu(plain)]).config.model and not model.swiglu


def _without_swiglu(model) -> list[str]:
    plain = with_values(RunConfig(), {f"model.{name}": value for name, value in vars(model).items()})
    return flags.to_argv(with_values(plain, {"model.swiglu": False, "model.num_layers": 3}))


def test_settings_of_the_suite_are_refused_in_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"precision": {"fp8_format": "hybrid"}, "training": {"seed": 3}}))
    with pytest.raises(ConfigError) as caught:
        runs_of(tmp_path, PAIRS, flags=(*DATA, "--config", str(path)))
    text = "\n".join(caught.value.problems)
    assert "--seed: set by the suite" in text and "--fp8-format: set by the suite" in text


def test_a_file_with_all_settings_gives_those_of_the_suite_only_if_it_changes_them(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    model = flags.parse(["--model-preset", "tiny-gpt2"]).config.model
    precision = {"transformer_impl": RunConfig().precision.transformer_impl}
    path.write_text(json.dumps({"model": vars(model), "training": {"seed": 1234}, "precision": precision}))
    suite = Suite(folder=tmp_path, size="tiny", parts=(PAIRS,), recipes=("tensorwise",), flags=("--config", str(path)))
    assert suite.given == {f"model.{name}" for name in vars(model)}
    assert "training.seed" in dataclasses.replace(suite, flags=(*suite.flags, "--seed", "1234")).given
    found = runs_of(tmp_path, PAIRS, CONTROLS, flags=(*DATA, "--config", str(path)))
    assert all(run.config.model == model for run in found)


def test_a_model_that_does_not_fit_the_suite_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-position-embeddings 512 is less than --seq-length 1024: use"):
        runs_of(tmp_path, PAIRS, size="gpu-hour", flags=(*DATA, "--model-preset", "tiny-gpt2"))


def save(folder: Path, model: dict, tokenizer: str = "ByteLevelTokenizer") -> None:
    values = {f"model.{name}": value for name, value in model.items()}
    config = with_values(RunConfig(), values | {"data.seq_length": 32, "data.tokenizer_type": tokenizer})
    source = LazyTensor((512, 128), torch.float32, lambda: torch.zeros(512, 128))
    save_weights(folder, config, {"embedding.word_embeddings.weight": source})


def run_command(folder: Path, *words: str) -> int:
    arguments = ["--output-dir", str(folder / "suite"), "--recipes", "tensorwise", "--seeds", "2", "--dry-run"]
    return command.main([*arguments, "--checkpoint", str(folder / "saved"), *words])


@pytest.mark.parametrize("model", [LLAMA, GPT, MIXTURE], ids=["tied", "biases", "mixture"])
def test_a_continuation_has_the_model_of_its_checkpoint(tmp_path: Path, capsys, model: dict) -> None:
    save(tmp_path / "saved", model)
    assert run_command(tmp_path, "--parts", "pairs,continuation") == 0
    lines = [line.partition("pretrain_gpt.py ")[2].split() for line in capsys.readouterr().out.splitlines()[:-1]]
    configs = [flags.parse(words).config for words in lines]
    expected = with_values(RunConfig(), {f"model.{name}": value for name, value in model.items()}).model
    continued = [config for config in configs if config.checkpoint.pretrained_checkpoint]
    assert len(continued) == 4 and all(config.model == expected for config in continued)
    assert {config.data.seq_length for config in continued} == {32}
    assert {config.model.hidden_size for config in configs if config not in continued} == {64}
    assert {config.data.seq_length for config in configs if config not in continued} == {64}


@pytest.mark.parametrize(
    ("tokenizer", "words", "text"),
    [
        ("ByteLevelTokenizer", ("--num-layers", "4"), "a different model .*model.num_layers: 3 -> 4"),
        ("ByteLevelTokenizer", ("--model-preset", "tiny-moe"), "a different model .*model.num_experts: null -> 4"),
        ("GPT2BPETokenizer", (), "trained with GPT2BPETokenizer.*give --data-path"),
        ("ByteLevelTokenizer", ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "999"),
         "embedding of 512 rows, but this run has 1024"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_the_checkpoint_are_refused_at_once(
    tmp_path: Path, capsys, tokenizer: str, words: tuple[str, ...], text: str
) -> None:
    save(tmp_path / "saved", LLAMA, tokenizer)
    assert run_command(tmp_path, "--parts", "continuation", "--", *words) == 64
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(text, error), error


QUARTET = "quartet2"
WIDE = ("--hidden-size", "128", "--kv-channels", "128", "--ffn-hidden-size", "256")
"""What docs/stability.md gives for Quartet II at `tiny`."""


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model": LLAMA | {"hidden_size": 64}}, "a different model .*model.hidden_size: 128 -> 64"),
        ({"model": {"num_layers": 4}}, "a different model .*model.num_layers: 3 -> 4"),
        ({"model": {"model_preset": "llama-1b"}}, "a different model .*model.hidden_size: 128 -> 2048"),
    ],
)
def test_a_file_that_does_not_fit_the_checkpoint_is_refused(tmp_path: Path, capsys, settings: dict, text: str) -> None:
    save(tmp_path / "saved", LLAMA)
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))
    assert run_command(tmp_path, "--parts", "continuation", "--", "--config", str(path)) == 64
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(text, error), error


def test_a_file_gives_the_sequence_length_of_a_continuation(tmp_path: Path, capsys) -> None:
    save(tmp_path / "saved", LLAMA)
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"data": {"seq_length": 16}}))
    assert run_command(tmp_path, "--parts", "continuation", "--", "--config", str(path)) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert flags.parse(line.partition("pretrain_gpt.py ")[2].split()).config.data.seq_length == 16


def test_prepared_data_and_another_tokenizer_are_refused_at_once(tmp_path: Path, capsys) -> None:
    words = ["--output-dir", str(tmp_path), "--parts", "pairs", "--dry-run", "--", "--tokenizer-type", "NullTokenizer"]
    assert command.main([*words, "--vocab-size", "99"]) == 64
    assert "--tokenizer-type NullTokenizer: the built-in data are for ByteLevelTokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", list(SIZES))
def test_every_size_accepts_every_recipe_on_one_two_and_four_ranks(tmp_path: Path, size: str, ranks: int) -> None:
    """All parts on four ranks, which take the smallest micro-batch; the pairs on fewer."""
    parts = [part for part in PARTS if part not in (CONTINUATION, CONTROLS)] if ranks == 4 else [PAIRS]
    recipes = [name for name in recipe_names() if size != "tiny" or name != QUARTET]
    for part in parts:
        found = runs_of(tmp_path, part, size=size, recipes=recipes, gpus=ranks, flags=DATA)
        assert {run.world_size for run in found} == {ranks}
        assert len({run.config.training.global_batch_size for run in found}) == 1
    suite = Suite(folder=tmp_path, size=size, parts=(CONTROLS,), recipes=("tensorwise",), gpus=ranks, flags=DATA)
    assert {run.gpus for run in plan_controls(suite, Path("pretrain_gpt.py")).forks} == {ranks}


def test_tiny_accepts_quartet_ii_with_other_widths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiples of 128; use --hidden-size 128"):
        runs_of(tmp_path, PAIRS, recipes=[QUARTET], flags=DATA)
    assert runs_of(tmp_path, PAIRS, recipes=[QUARTET], flags=(*DATA, *WIDE))


def test_ranks_that_cannot_share_the_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--gpus 3: 3 data-parallel ranks cannot share the 16 sequences of a step"):
        runs_of(tmp_path, PAIRS, gpus=3, flags=DATA)


def test_a_given_micro_batch_size_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--micro-batch-size 16 and 4 sequences per rank"):
        runs_of(tmp_path, PAIRS, gpus=4, flags=(*DATA, "--micro-batch-size", "16"))
