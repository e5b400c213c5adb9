"""--use-checkpoint-args: the model and the tokenizer of the checkpoint, unless flags give them."""

from pathlib import Path

import torch

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.checkpoint.standalone import LazyTensor, save_weights
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.training.checkpoint_settings import parse

SAVED = {
    "model.num_layers": 3, "model.hidden_size": 48, "model.num_attention_heads": 4, "model.swiglu": True,
    "data.seq_length": 64, "data.tokenizer_type": "NullTokenizer", "data.num_workers": 7,
    "parallel.tensor_model_parallel_size": 2, "optimizer.lr": 0.5,
}  # fmt: skip


def save(folder: Path) -> None:
    source = LazyTensor((2,), torch.float32, lambda: torch.zeros(2))
    save_weights(folder, with_values(RunConfig(), SAVED), {"decoder.final_layernorm.weight": source})


def test_settings_are_the_checkpoints(tmp_path: Path) -> None:
    save(tmp_path)
    for flag in ("--load", "--pretrained-checkpoint"):
        parsed, problems = parse([flag, str(tmp_path), "--use-checkpoint-args", "--hidden-size", "64"])
        model, data, parallel = (getattr(parsed.config, name) for name in ("model", "data", "parallel"))
        assert not problems
        assert (model.num_layers, model.hidden_size, model.swiglu) == (3, 64, True)
        assert (data.seq_length, data.tokenizer_type, data.num_workers) == (64, "NullTokenizer", 2)
        assert parallel.tensor_model_parallel_size == 1 and parsed.config.optimizer.lr is None
        assert parsed.given == {f"checkpoint.{flag[2:].replace('-', '_')}", "checkpoint.use_checkpoint_args",
                                    "model.hidden_size"}  # fmt: skip
        assert str(tmp_path / "iter_0000000") in parsed.warnings[-1]


def test_parallel_sizes_have_their_own_flag(tmp_path: Path) -> None:
    save(tmp_path)
    given = ["--load", str(tmp_path), "--use-checkpoint-args", "--use-mp-args-from-checkpoint-args"]
    assert parse(given)[0].config.parallel.tensor_model_parallel_size == 2


def test_a_preset_that_is_given_replaces_the_model(tmp_path: Path) -> None:
    save(tmp_path)
    given = ["--load", str(tmp_path), "--use-checkpoint-args", "--model-preset", "tiny"]
    assert parse(given)[0].config.model.hidden_size == 128


def test_without_a_checkpoint_the_flags_count(tmp_path: Path) -> None:
    parsed, _ = parse(["--load", str(tmp_path), "--use-checkpoint-args"])
    assert parsed.config.model.num_layers is None
    assert "has no checkpoint" in parsed.warnings[-1]
