"""Checkpoints of every `--fp8-lm-level` converted to Megatron-LM's and Hugging Face's form and back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hf_folders import same, weights_in
from level_runs import LEVELS, SAVED, config_of, resume, save_in_the_middle
from ranks import run_ranks
from small_run import build_run
from tolerances import FP8_LM_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.standalone import CheckpointTensors
from megafp8.cli import convert
from megafp8.config import flags, rules
from megafp8.config.schema import RunConfig
from megafp8.config.settings import value_of

# Settings of a level that Megatron-LM has, too.
SHARED = (
    "precision.bf16", "precision.fp8_format", "precision.fp8_recipe", "precision.fp8_param_gather",
    "optimizer.use_precision_aware_optimizer", "optimizer.main_params_dtype", "optimizer.exp_avg_dtype",
    "optimizer.exp_avg_sq_dtype",
)  # fmt: skip
# With the distributed optimizer, and without it.
MASTER = re.compile(r"optimizer\.state\.(?:fp32_)?param\.(.*)")


def convert_to(command: str, source: Path, output: Path, *more: str) -> Path:
    assert convert.main([command, str(source), str(output), *more]) == 0
    return output


def tensors_of(run: Path, step: int = SAVED) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint by name, without scales."""
    tensors = CheckpointTensors(checkpoint_path(run, step))
    return {name: tensors.load(name) for name in tensors.locations if ".quantizer_state." not in name}


@pytest.mark.parametrize("level", LEVELS)
def test_megatron_and_back(level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, master weights and moments are bitwise equal, and a run of the level continues from them.

    Scales start again, and so do the errors of FP8 gradients, which Megatron-LM does not have.
    """
    config = config_of(level, "dp2", "--grad-reduce-fp8-error-feedback")
    unbroken = run_ranks(2, save_in_the_middle, config, tmp_path / "run")
    theirs = convert_to("to-megatron", tmp_path / "run", tmp_path / "theirs")
    notes = capsys.readouterr().out
    assert "FP8 gradients" in notes and "--grad-reduce-in-fp8" in notes
    ours = convert_to("from-megatron", theirs, tmp_path / "ours")
    before, after = tensors_of(tmp_path / "run"), tensors_of(ours)
    residuals = [name for name in before if "gradient_residuals" in name]
    assert residuals and not set(residuals) & set(tensors_of(theirs))
    assert same({name: each for name, each in before.items() if name not in residuals}, after)
    written = flags.parse(["--config", str(ours / "config.json"), "--mock-data"]).config
    assert list(rules.problems(written, 2)) == []
    assert written.parallel.use_distributed_optimizer == (level != "O1")
    assert {name: value_of(written, name) for name in SHARED} == {name: value_of(config, name) for name in SHARED}
    losses, _ = run_ranks(2, resume, config, ours)[0]
    assert losses == pytest.approx(unbroken[0][0][SAVED:], abs=FP8_LM_LOSS)


def save_as_started(config: RunConfig, source: Path, folder: Path) -> None:
    """Start from converted weights, and save before the first step."""
    run = build_run(config)
    load_checkpoint(checkpoint_path(source, 0), config, run.training_state, weights_only=True)
    save_checkpoint(folder, config, run.training_state, Progress(1, run.global_batch_size))


def master_weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The master weights of a checkpoint by the names of the weights."""
    found = {MASTER.fullmatch(name): tensor for name, tensor in tensors.items()}
    return {match[1]: tensor for match, tensor in found.items() if match}


@pytest.mark.parametrize("level", LEVELS)
def test_hugging_face_and_back(level: str, tmp_path: Path) -> None:
    """The folder has the master weights rounded to BF16; a run that starts from it has these as master weights."""
    config = config_of(level, "dp2")
    run_ranks(2, save_in_the_middle, config, tmp_path / "run")
    theirs = convert_to("to-hf", tmp_path / "run", tmp_path / "theirs")
    ours = convert_to("from-hf", theirs, tmp_path / "ours", "--make-vocab-size-divisible-by", "16")
    before = tensors_of(tmp_path / "run")
    trained = {name: each for name, each in before.items() if not name.startswith("optimizer.")}
    masters = master_weights(before)
    assert same({name: each.bfloat16() for name, each in masters.items()}, trained)
    assert not any(torch.equal(masters[name], each.float()) for name, each in trained.items() if "linear" in name)
    imported = tensors_of(ours, step=0)
    assert same(imported, trained)
    again = convert_to("to-hf", ours, tmp_path / "again")
    assert same(weights_in(again), weights_in(theirs))
    run_ranks(2, save_as_started, config, ours, tmp_path / "started")
    started = master_weights(tensors_of(tmp_path / "started", step=1))
    assert same(started, {name: each.float() for name, each in imported.items()})
