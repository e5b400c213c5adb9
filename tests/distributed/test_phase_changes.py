"""Runs with phases of data: killed and resumed in a change of phase, on any ranks, and with other phases later."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from shard_writer import ShardWriter
from small_run import COMMON, PLAIN, STYLES, fingerprint, weights

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.metadata import load_common_state
from megafp8.config import flags, rules
from megafp8.config.data_phases import EVENT
from megafp8.config.layer_backends import LOCAL
from megafp8.data.sample_hash import SampleHash
from megafp8.device import platform
from megafp8.errors import CheckpointError
from megafp8.training.pretrain import train
from megafp8.training.setup import build_training_run
from megafp8.utils.plain_data import from_plain

# Steps read 8 samples: the third reads 16 to 23, and the phase changes at 20.
FLAGS = (
    f"{COMMON.replace('--mock-data', '')} {STYLES['llama']} {PLAIN} --train-iters 6 --micro-batch-size 2 "
    "--save-interval 2 --eval-iters 1 --eval-interval 3 --no-progress-bar --split 80,20,0"
)
STEPS = 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, generator = tmp_path_factory.mktemp("shards"), np.random.default_rng(1)
    for name, num_documents in (("a", 90), ("b", 30), ("c", 12)):
        with ShardWriter(str(folder / name), np.dtype(np.uint16)) as writer:
            for length in generator.integers(20, 60, num_documents):
                tokens = generator.integers(0, 255, length, np.uint16)
                writer.add_documents(tokens.tobytes(), np.array([length], np.int32))
            writer.finish()
    return folder


def start(shards: Path, folder: Path, words: str = "", world_size: int = 1, last: str = "3 {0}/c 1 {0}/a") -> str:
    """Start or resume a run; returns the fingerprint of rank 0's weights."""
    file = folder.with_suffix(".yaml")
    file.write_text(
        f"- {{name: web, data_path: [2, {shards}/a, 1, {shards}/b]}}\n"
        f"- {{name: anneal, start: 20 samples, data_path: {last.format(shards)}}}\n"
    )
    text = f"{FLAGS} --data-path {shards}/a --data-phases {file} --save {folder} --load {folder} {words}"
    config = flags.parse(text.split()).config
    assert not rules.problems(config, world_size)

    def run_once() -> str:
        run = build_training_run(config, platform.detect_platform(), LOCAL)
        train(run)
        return fingerprint(weights(run))

    return run_ranks(world_size, run_once)[0]


def mark(folder: Path, step: int = STEPS) -> SampleHash:
    path = checkpoint_path(folder, step)
    return from_plain(SampleHash, run_ranks(1, lambda: load_common_state(path)["samples"])[0])


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(each.loss, each.grad_norm) for each in load_run(folder).steps]


@pytest.fixture(scope="module")
def unbroken(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return folder, start(shards, folder)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_run_that_is_resumed_in_the_change_equals_the_unbroken_one(
    shards: Path, unbroken: tuple[Path, str], tmp_path: Path, is_lost: bool
) -> None:
    """After step 3, in which the phase changes. If its checkpoint is lost as in a kill, the step is repeated."""
    folder = tmp_path / "run"
    start(shards, folder, "--exit-interval 3")
    if is_lost:
        shutil.rmtree(checkpoint_path(folder, 3))
    assert start(shards, folder) == unbroken[1]
    assert numbers(folder) == numbers(unbroken[0]) and len(numbers(folder)) == STEPS
    assert mark(folder) == mark(unbroken[0])
    assert [each.loss for each in load_run(folder).evals] == [each.loss for each in load_run(unbroken[0]).evals]
    assert load_run(folder).data_phases == {"anneal": 2 * 8 * 32}


def test_a_resumed_run_on_packed_documents_equals_the_unbroken_one(shards: Path, tmp_path: Path) -> None:
    words = "--packing best-fit --reset-attention-mask"
    whole = start(shards, tmp_path / "whole", words)
    start(shards, tmp_path / "parts", f"{words} --exit-interval 3")
    assert start(shards, tmp_path / "parts", words) == whole
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    evals = ([each.loss for each in load_run(tmp_path / name).evals] for name in ("whole", "parts"))
    assert next(evals) == next(evals)
    assert all(each.document_squares for each in load_run(tmp_path / "parts").steps)


def test_the_change_is_recorded_and_two_ranks_read_the_same_samples(
    shards: Path, unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    events = [(each.step, each.detail) for each in load_run(unbroken[0]).events if each.name == EVENT]
    assert events == [(1, "web, from sample 0"), (3, "anneal, from sample 20")]
    start(shards, tmp_path / "two", "--num-workers 1", world_size=2)
    assert mark(tmp_path / "two") == mark(unbroken[0])
    assert [source.first_sample for source in mark(tmp_path / "two").sources] == [0, 0, 20, 20]
    assert len(mark(unbroken[0], 2).sources) == 2


def test_only_phases_that_follow_may_change(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(shards, folder, "--exit-interval 2")
    start(shards, folder, "--exit-interval 3", last="{0}/c")
    notes = [each.detail for each in load_run(folder).events]
    assert any("settings that differ from the checkpoint's: data.data_phases: " in note for note in notes)
    with pytest.raises(AssertionError) as raised:
        start(shards, folder, last="{0}/b")
    assert isinstance(raised.value.__cause__, CheckpointError)
    assert "was trained on 24 samples" in str(raised.value) and "/b: different content" in str(raised.value)


def test_phases_may_be_added_to_a_run(shards: Path, tmp_path: Path) -> None:
    """The first phase of a run reads what the run without phases reads."""
    words = (
        f"{FLAGS} --save-interval 2 --exit-interval 2 --data-path 2 {shards}/a 1 {shards}/b --save {tmp_path / 'run'}"
    )
    config = flags.parse(words.split()).config
    run_ranks(1, lambda: train(build_training_run(config, platform.detect_platform(), LOCAL)))
    start(shards, tmp_path / "run")
    assert len(numbers(tmp_path / "run")) == STEPS
