"""Steps of a run whose length is given in epochs, against the samples that the data set has."""

from __future__ import annotations

from pathlib import Path

import pytest
from shard_files import write_shard

from megafp8.config import flags
from megafp8.config.schema import DataConfig, RunConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.training.checks import with_epochs

DOCUMENT = range(50)


def resolved(flag_text: str, num_epochs: float, ranks: int = 1) -> tuple[RunConfig, list[str], list[str]]:
    warnings: list[str] = []
    problems: list[str] = []
    config = flags.parse_with_problems(flag_text.split())[0].config
    return with_epochs(config, num_epochs, ranks, warnings, problems), warnings, problems


def test_an_epoch_is_the_training_part_of_all_shards(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / name, [DOCUMENT] * 100) for name in "ab"]
    common = "--seq-length 20 --micro-batch-size 2 --global-batch-size 8"
    config, (text,), problems = resolved(f"{common} --split 90,10,0 --data-path {' '.join(shards)}", 2)
    assert problems == [] and config.training.train_iters == 113  # 2 x 10,000 tokens x 0.9 / 20 / 8 = 112.5
    assert text == "--num-epochs 2: --train-iters 113 (an epoch is 450 samples = 56.2 steps)"
    config, _, _ = resolved(f"{common} --train-data-path {shards[0]}", 0.5, ranks=2)
    assert config.training.train_iters == 16  # 0.5 x 5,000 / 20 / 8 = 15.6


def test_an_epoch_of_packed_documents_has_as_many_sequences_as_the_data_set(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "a", [range(length) for length in (50, 13, 21, 7, 9, 40, 20, 3, 18, 11)])
    common = "--seq-length 20 --micro-batch-size 1 --global-batch-size 1 --packing best-fit --data-path"
    for split in ("1", "50,50,0"):
        config, (text,), problems = resolved(f"{common} {prefix} --split {split}", 1)
        assert problems == []
        tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 50)
        size = len(build_datasets(config.data, tokenizer, (1, 0, 0), seed=1234)[0])
        assert config.training.train_iters == size and f"an epoch is {size} samples" in text


@pytest.mark.parametrize(
    ("flag_text", "reason"),
    [
        ("--mock-data", "needs the shards"),
        ("--data-path 0.3 {a} 0.7 {a}", "a blend with weights"),
        ("--data-path {a} --train-iters 5", "keep one"),
        ("--data-path {a} --global-batch-size 8 --rampup-batch-size 2 2 80", "changes during the run"),
        ("--data-path {a}/gone", "missing"),
    ],
)
def test_what_has_no_epochs_is_refused(tmp_path: Path, flag_text: str, reason: str) -> None:
    shard = write_shard(tmp_path / "a", [DOCUMENT] * 10)
    text = f"--seq-length 20 --micro-batch-size 2 {flag_text.format(a=shard)}"
    _, _, (problem,) = resolved(text, 1)
    assert problem.startswith("--num-epochs 1") and reason in problem
