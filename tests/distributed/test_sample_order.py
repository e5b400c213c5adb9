"""A resumed run continues where it stopped, in any layout, or reports what changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from shard_writer import ShardWriter
from small_run import PLAIN, small_config

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.metadata import load_common_state
from megafp8.checkpoint.progress import Progress
from megafp8.config.layer_backends import LOCAL
from megafp8.data.sample_hash import SampleHash
from megafp8.device import platform
from megafp8.errors import CheckpointError
from megafp8.training.pretrain import train
from megafp8.training.setup import build_training_run
from megafp8.utils.plain_data import from_plain

FLAGS = (
    f"{PLAIN} --lr-warmup-iters 1 --lr-decay-iters 8 --eval-iters 0 --no-progress-bar --save-interval 2 "
    "--micro-batch-size 2 --no-save-optim --no-load-optim"
)


def write(prefix: Path, seed: int, num_documents: int = 30) -> str:
    generator = np.random.default_rng(seed)
    with ShardWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for length in generator.integers(20, 60, num_documents):
            writer.add_documents(generator.integers(0, 255, length, np.uint16).tobytes(), np.array([length], np.int32))
        writer.finish()
    return str(prefix)


@pytest.fixture
def shards(tmp_path: Path) -> tuple[str, str]:
    """The first shard is read several times in six steps."""
    return write(tmp_path / "a", 1, 10), write(tmp_path / "b", 2, 90)


def start(folder: Path, data_path: tuple[str, ...], steps: int, flags: str = "", world_size: int = 1) -> Progress:
    """Start or resume a run, up to a step."""
    text = f"{FLAGS} --train-iters {steps} --save {folder} --load {folder} {flags}"
    config = small_config("llama", text, world_size)
    data = dataclasses.replace(config.data, mock_data=False, data_path=data_path, split=config.data.split or "1")
    config = dataclasses.replace(config, data=data)
    return run_ranks(world_size, lambda: train(build_training_run(config, platform.detect_platform(), LOCAL)))[0]


def mark(folder: Path, step: int) -> SampleHash:
    path = checkpoint_path(folder, step)
    saved: dict[str, Any] = run_ranks(1, lambda: load_common_state(path)["samples"])[0]
    return from_plain(SampleHash, saved)


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as raised:
        start(*args, **options)
    assert isinstance(raised.value.__cause__, CheckpointError)
    return str(raised.value.__cause__)


def test_resume_in_other_layouts_reads_the_samples_of_the_unbroken_run(tmp_path: Path, shards: tuple[str, str]) -> None:
    blend = ("1", shards[0], "2", shards[1])
    start(tmp_path / "unbroken", blend, 6)
    start(tmp_path / "parts", blend, 2, world_size=2)
    start(tmp_path / "parts", blend, 4, "--num-workers 2")
    start(tmp_path / "parts", blend, 6, "--micro-batch-size 1 --num-workers 1", world_size=2)
    unbroken, parts = mark(tmp_path / "unbroken", 6), mark(tmp_path / "parts", 6)
    assert unbroken == parts
    assert unbroken.num_samples == 48
    assert mark(tmp_path / "unbroken", 4) == mark(tmp_path / "parts", 4) != unbroken
    notes = [event.detail for event in load_run(tmp_path / "parts").events if event.name == "checkpoint"]
    assert not any("order" in note or "cannot be checked" in note for note in notes)


def test_packed_sequences_are_read_in_the_order_of_the_unbroken_run(tmp_path: Path, shards: tuple[str, str]) -> None:
    flags = "--packing best-fit --reset-attention-mask --eod-mask-loss"
    blend = ("1", shards[0], "2", shards[1])
    start(tmp_path / "unbroken", blend, 6, flags)
    start(tmp_path / "parts", blend, 2, flags)
    start(tmp_path / "parts", blend, 6, f"{flags} --num-workers 2", world_size=2)
    assert mark(tmp_path / "unbroken", 6) == mark(tmp_path / "parts", 6)
    squares = ([each.document_squares for each in load_run(tmp_path / name).steps] for name in ("unbroken", "parts"))
    assert next(squares) == next(squares)
    (detail,) = {event.detail for event in load_run(tmp_path / "parts").events if event.name == "packing"}
    assert "sequences an epoch" in detail and "documents are longer than a sequence and cut" in detail
    assert "--packing: best-fit -> cut" in refusal(tmp_path / "parts", blend, 8)


def test_a_changed_sample_order_is_refused(tmp_path: Path, shards: tuple[str, str]) -> None:
    blend = ("1", shards[0], "2", shards[1])
    start(tmp_path / "run", blend, 2)
    seed = refusal(tmp_path / "run", blend, 4, "--seed 77")
    assert "was trained on 16 samples, which differ from the first samples of this run" in seed
    assert "--seed: 1234 -> 77" in seed and "--override-sample-order" in seed and "shard" not in seed
    assert "weight 0.333" in refusal(tmp_path / "run", ("1", shards[0], "3", shards[1]), 4)
    assert "shards: " in refusal(tmp_path / "run", shards[:1], 4)
    assert "documents 0 to 9 -> 0 to 4" in refusal(tmp_path / "run", blend, 4, "--split 1,1")
    assert "--seq-length: 32 -> 16" in refusal(tmp_path / "run", blend, 4, "--seq-length 16")
    write(Path(shards[1]), 3, 90)
    assert f"shard {shards[1]}: different content" in refusal(tmp_path / "run", blend, 4)

    assert start(tmp_path / "run", blend, 4, "--override-sample-order") == Progress(4, 32)
    notes = [event.detail for event in load_run(tmp_path / "run").events]
    assert any(
        f"training continues at sample 16 of a different order (shard {shards[1]}: different content)" in note
        for note in notes
    )
    assert start(tmp_path / "run", blend, 6) == Progress(6, 48), "from then on the new order is the run's"


def test_a_moved_shard_is_accepted(tmp_path: Path, shards: tuple[str, str]) -> None:
    start(tmp_path / "run", shards[:1], 2)
    for suffix in (".bin", ".idx"):
        Path(shards[0] + suffix).rename(tmp_path / f"moved{suffix}")
    assert start(tmp_path / "run", (str(tmp_path / "moved"),), 4) == Progress(4, 32)


def test_shorter_and_finetune_runs_skip_the_sample_check(tmp_path: Path, shards: tuple[str, str]) -> None:
    start(tmp_path / "run", shards[1:], 4)
    assert start(tmp_path / "run", shards[1:], 2) == Progress(4, 32), "nothing is left to read"
    assert start(tmp_path / "run", shards[:1], 2, f"--finetune --save {tmp_path / 'tuned'}") == Progress(2, 16)
