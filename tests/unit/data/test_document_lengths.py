"""The estimate of the documents' squares before a run, against those of its samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from shard_files import write_megatron_shard, write_shard

from megafp8.config.data_phases import training_blends
from megafp8.config.schema import DataConfig, RunConfig, TrainingConfig
from megafp8.data import document_lengths
from megafp8.data.datasets import build_datasets
from megafp8.data.document_lengths import DocumentEstimate, estimate_documents, expected_squares
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.models.loss import document_ends

EOD = 999
SEQ_LENGTH = 64


def documents(seed: int, count: int, mean: float) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [[1] * int(length) + [EOD] for length in generator.geometric(1 / mean, count)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Short, medium and long documents, of a sequence."""
    folder = tmp_path_factory.mktemp("shards")
    sizes = {"a": (2000, 12), "b": (800, 50), "c": (300, 300)}
    return [write_shard(folder / name, documents(ord(name), *size)) for name, size in sizes.items()]


def config_of(words: tuple[str, ...], packing: str, **data: object) -> RunConfig:
    data = {"reset_attention_mask": True, "split": "1", **data}
    return RunConfig(
        data=DataConfig(seq_length=SEQ_LENGTH, data_path=words, packing=packing, **data),
        training=TrainingConfig(train_iters=100, global_batch_size=10, micro_batch_size=1),
    )


def estimated(config: RunConfig) -> DocumentEstimate:
    return estimate_documents(config.data, training_blends(config, 1))


def counted(config: RunConfig, num_samples: int) -> tuple[float, float]:
    """Squares of the documents over tokens, and share of padding, of the run's samples."""
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), EOD)
    starts = (0, 500) if config.data.data_phases else ()
    samples = build_datasets(config.data, tokenizer, (num_samples, 0, 0), seed=1234, phase_starts=starts)[0]
    squares = padding = 0.0
    for number in range(num_samples):
        squares += document_ends(samples[number]["document_starts"]).diff().double().square().sum().item()
        padding += (samples[number]["tokens"] == 0).sum().item()
    return squares / num_samples / SEQ_LENGTH, padding / num_samples / SEQ_LENGTH


@pytest.mark.parametrize("packing", ["cut", "best-fit"])
@pytest.mark.parametrize("blend", ["0", "1", "2", "0 1 2", "1 0 3 2", "phases"])
def test_the_estimate_is_what_samples_have(shards: list[str], blend: str, packing: str, tmp_path: Path) -> None:
    words, phases = tuple(shards[int(word)] for word in blend.split()) if blend[:-1].isdigit() else (), ()
    if blend in ("0", "1", "2"):
        words = (shards[int(blend)],)
    elif blend == "0 1 2":
        words = tuple(shards)
    elif blend == "1 0 3 2":
        words = ("1", shards[0], "3", shards[2])
    else:
        phases = (f"first 0samples {shards[0]}", f"last 500samples 1 {shards[1]} 1 {shards[2]}")
    config = config_of(words, packing, data_phases=phases, data_cache_path=str(tmp_path), split=None if phases else "1")
    found = estimated(config)
    length, padding = counted(config, 1000 if blend != "0 1 2" else 2000)
    assert found.problem == "" and found.length == pytest.approx(length, rel=0.03)
    if packing == "best-fit":
        assert found.padding_fraction == pytest.approx(padding, abs=0.002)
    else:
        assert found.padding_fraction is None and padding == 0


def test_only_the_training_part_counts(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "mixed", [[1] * 9 + [EOD]] * 900 + [[1] * 63 + [EOD]] * 100)
    for packing in ("cut", "best-fit"):
        found = [estimated(config_of((prefix,), packing, split=split)).length for split in ("9,1", "5,5")]
        assert found[0] == pytest.approx(found[1], rel=0.05) and found[0] < 11


@pytest.mark.parametrize("length", [0, 1, 2, 5, 12, 13, 40])
@pytest.mark.parametrize("seq_length", [1, 2, 5, 12])
def test_expected_squares_are_the_mean_over_offsets(length: int, seq_length: int) -> None:
    total = 0
    for offset in range(seq_length):
        of_sequence = np.bincount((np.arange(length) + offset) // seq_length)
        total += (of_sequence**2).sum()
    assert expected_squares(np.array([length], np.int32), seq_length)[0] == pytest.approx(total / seq_length)


def test_a_sample_of_a_large_index_is_enough(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [estimated(config_of((shards[1],), packing)) for packing in ("cut", "best-fit")]
    monkeypatch.setattr(document_lengths, "MOST_DOCUMENTS", 640)
    for before, packing in zip(whole, ("cut", "best-fit"), strict=True):
        after = estimated(config_of((shards[1],), packing))
        assert after != before and after.length == pytest.approx(before.length, rel=0.05)


def test_the_parts_of_a_document_are_one_without_packing(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    prefix = write_megatron_shard(tmp_path / "parts", [[[1] * 10, [1] * 5, [1] * 4 + [EOD]]] * 50)
    (squares,) = expected_squares(np.array([20]), SEQ_LENGTH)
    assert estimated(config_of((prefix,), "cut")).length == pytest.approx(squares / 20)
    found = estimated(config_of((prefix,), "best-fit"))
    assert found.length == pytest.approx(25 / 3, rel=0.3)


def test_without_ends_of_documents_nothing_is_a_border(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_shard(tmp_path / "a", [[1] * 10] * 50)
    monkeypatch.setattr(document_lengths, "load_manifest", lambda prefix: SimpleNamespace(append_eod=False))
    assert estimated(config_of((prefix,), "cut")).length == SEQ_LENGTH
    assert estimated(config_of((prefix,), "best-fit")).length < 15


def test_what_is_not_known_has_a_reason(tmp_path: Path) -> None:
    nothing = config_of((str(tmp_path / "gone"),), "cut", reset_attention_mask=False)
    assert estimated(nothing) == DocumentEstimate()
    for config, reason in (
        (config_of((str(tmp_path / "gone"),), "cut"), "gone.bin missing"),
        (config_of(("s3://bucket/a",), "cut"), "s3://bucket/a is in object storage"),
        (config_of((), "best-fit", mock_data=True), "documents are made up"),
        (config_of(("1", "a", "b"), "cut"), "must alternate"),
    ):
        found = estimated(config)
        assert found.length is None and found.padding_fraction is None and reason in found.problem
