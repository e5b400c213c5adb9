"""A checkpoint of another model, vocabulary, optimizer or schedule is refused, with the differences and the fix."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from small_run import PLAIN, build_run, small_config
from test_checkpoint import DISTRIBUTED, load_newest, run_leg

from megafp8.checkpoint.compatibility import check_model, check_vocabulary
from megafp8.checkpoint.directory import find_checkpoint
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import CheckpointError
from megafp8.training.resume import resume

CONFIG = small_config("llama", PLAIN)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of `CONFIG`. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, run_leg, CONFIG, 1, None, folder)
    return folder


def refusal(folder: Path, config: RunConfig) -> str:
    """The error message of a load."""

    def load() -> str:
        run = build_run(config)
        with pytest.raises(CheckpointError) as caught:
            load_newest(run, folder)
        return str(caught.value)

    return run_ranks(1, load)[0]


@pytest.mark.parametrize(
    ("style", "flags", "field"),
    [
        ("llama", "--num-layers 3", "model.num_layers"),
        ("llama", "--hidden-size 128", "model.hidden_size"),
        ("llama", "--rotary-base 500000", "model.rotary_base"),
        ("llama", "--num-query-groups 4", "model.num_query_groups"),
        ("gpt2", "", "model.normalization"),
    ],
)
def test_another_model_is_refused(saved: Path, style: str, flags: str, field: str) -> None:
    """Also where every tensor would fit: another rotary base is another model."""
    text = refusal(saved, small_config(style, f"{PLAIN} {flags}"))
    assert "is a checkpoint of a different model" in text
    assert field in text


def test_another_vocabulary_is_refused(saved: Path) -> None:
    assert "model.vocab_size" in refusal(saved, small_config("llama", f"{PLAIN} --vocab-size 300"))


def test_a_vocabulary_of_the_tokenizer_is_compared_by_its_size(saved: Path) -> None:
    """A converted checkpoint has --vocab-size. A run that uses the tokenizer's size has none."""
    unsaid = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, vocab_size=None))
    check_model(saved, CONFIG, unsaid)
    check_model(saved, unsaid, CONFIG)

    def compare() -> None:
        path = find_checkpoint(saved)[1]
        check_vocabulary(path, CONFIG, unsaid, 256)
        with pytest.raises(CheckpointError, match="an embedding of 256 rows, but this run has 320"):
            check_vocabulary(path, CONFIG, unsaid, 320)

    run_ranks(1, compare)


def test_mock_data_is_compared_by_vocabulary_rows() -> None:
    """NullTokenizer adds an id to --vocab-size. Other tokenizers do not."""
    text = with_values(CONFIG, {"data.tokenizer_type": "HuggingFaceTokenizer", "model.vocab_size": 256})
    check_model(Path("theirs"), text, CONFIG)
    check_model(Path("theirs"), CONFIG, text)
    for other in (text, CONFIG):
        with pytest.raises(CheckpointError, match="model.vocab_size"):
            check_model(Path("theirs"), other, with_values(other, {"model.vocab_size": 250}))


@pytest.mark.parametrize("flags", ["--optimizer sgd", "--bf16", f"--bf16 {DISTRIBUTED}", "--decoupled-lr 1e-4"])
def test_state_of_another_optimizer_is_refused(saved: Path, flags: str) -> None:
    precision = "--transformer-impl emulated" if "bf16" in flags else PLAIN
    text = refusal(saved, small_config("llama", f"{precision} {flags}"))
    assert "--no-load-optim" in text and "cannot be read" not in text


def test_another_schedule_is_refused(saved: Path) -> None:
    """Every difference is named by its flag."""
    text = refusal(saved, small_config("llama", f"{PLAIN} --lr 2e-3 --lr-decay-iters 17 --lr-decay-style constant"))
    assert "a different learning-rate schedule" in text and "--override-opt_param-scheduler" in text
    assert "--lr: 0.001 -> 0.002\n" in text and "--lr-decay-iters" in text and "-> constant" in text


@pytest.mark.parametrize(("num_threads", "warns"), [(1, False), (3, True)])
def test_another_number_of_threads_is_reported(
    saved: Path, num_threads: int, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of the tests has one thread, whatever the flag says. The next run only reports the difference."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)

    def resumed() -> tuple[str, ...]:
        return resume(build_run(small_config("llama", f"{PLAIN} --load {saved}")))[1]

    (notes,) = run_ranks(1, resumed)
    warnings = [note for note in notes if "CPU threads" in note]
    assert len(warnings) == warns
    assert all("saved with 1 CPU threads per rank, this run has 3" in text for text in warnings)
    assert all("--num-threads 1" in text for text in warnings)


def test_a_checkpoint_without_optimizer_state(tmp_path: Path) -> None:
    config = small_config("llama", f"{PLAIN} --no-save-optim --save {tmp_path}")
    leg = run_ranks(1, run_leg, config, 1, None, tmp_path)[0]
    assert "--no-load-optim" in refusal(tmp_path, config)
    without = small_config("llama", f"{PLAIN} --no-load-optim --load {tmp_path}")
    loaded = run_ranks(1, run_leg, without, 0, tmp_path, None)[0]
    assert loaded.weights == leg.weights
