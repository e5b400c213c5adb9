"""The order of samples: megatron-core's in the first epoch, and the same for any length of the run."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from shard_files import write_shard

from megafp8.config.schema import DataConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.gpt_dataset import EpochsBlend
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.errors import DataError

pytest.importorskip("megatron.core")
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)

VOCAB_SIZE = 30_000
EOD = VOCAB_SIZE
SEQ_LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), VOCAB_SIZE)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two shards of documents of 1 to 90 tokens. Only the end of document occurs twice."""
    folder, generator, next_token, prefixes = tmp_path_factory.mktemp("shards"), np.random.default_rng(0), 0, []
    for name, count in (("a", 40), ("b", 75)):
        documents = []
        for length in generator.integers(0, 90, count):
            documents.append([*range(next_token, next_token + length), EOD])
            next_token += length
        prefixes.append(write_shard(folder / name, documents))
    return prefixes


def data_config(**data):
    return DataConfig(**{"seq_length": SEQ_LENGTH, **data})


@pytest.fixture
def build(tmp_path, tokenizer):
    """Ours: `build(num_samples, seed=7, data_path=...)`; training, validation and test."""

    def build(*num_samples, seed=7, **data):
        config = data_config(data_cache_path=str(tmp_path / "ours"), **data)
        return build_datasets(config, tokenizer, (*num_samples, 0, 0, 0)[:3], seed=seed)

    return build


@pytest.fixture
def build_theirs(tmp_path, tokenizer):
    """megatron-core's own datasets."""

    def build_theirs(*num_samples, seed=7, kind=GPTDataset, **settings):
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=SEQ_LENGTH,
            path_to_cache=None if kind is MockGPTDataset else str(tmp_path / "theirs"),
            tokenizer=tokenizer,
            **{
                "reset_position_ids": False,
                "reset_attention_mask": False,
                "eod_mask_loss": False,
                "create_attention_mask": False,
                **settings,
            },
        )
        return BlendedMegatronDatasetBuilder(kind, list(num_samples), lambda: True, config).build()

    return build_theirs


@pytest.fixture
def few_mock_documents(monkeypatch):
    monkeypatch.setattr(MockGPTLowLevelDataset, "size", 300)


@pytest.fixture(autouse=True)
def blends_of_megatron_core_need_a_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


def assert_equal_samples(ours, theirs, count):
    assert len(ours) >= count and len(theirs) >= count
    for number in range(count):
        mine, other = ours[number], theirs[number]
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            assert torch.equal(mine[key], other[key]), (number, key)
            assert mine[key].dtype == other[key].dtype


def tokens_of(dataset, count):
    return [dataset[number]["tokens"].tolist() for number in range(count)]


def epoch_ends(dataset):
    """Numbers of the samples at which epochs end."""
    tokens, epochs = dataset._get_num_tokens_per_epoch(), dataset._get_num_epochs(dataset._get_num_tokens_per_epoch())
    return [(number * tokens - 1) // SEQ_LENGTH for number in range(1, epochs + 1)]


@pytest.mark.parametrize("seed", [1, 1234])
def test_the_first_epoch_equals_megatron_core(shards, build, build_theirs, seed):
    (ours, valid, test), count = build(60, 8, 4, seed=seed, data_path=shards[1:], split="70,20,10"), 60
    theirs = build_theirs(60, 8, 4, seed=seed, blend=(shards[1:], None), split="70,20,10")
    assert len(ours) == len(theirs[0])
    assert_equal_samples(ours, theirs[0], len(ours))
    assert_equal_samples(valid, theirs[1], len(valid))
    assert_equal_samples(test, theirs[2], len(test))
    assert epoch_ends(ours) == [len(ours)] and len(ours) >= count


def test_every_seed_has_an_order_of_its_own(shards, build):
    orders = [tokens_of(build(100, seed=seed, data_path=shards[1:], split="1")[0], 100) for seed in (0, 2**32, 2**62)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("settings", [{"reset_position_ids": True}, {"eod_mask_loss": True}])
def test_positions_and_masks_equal_megatron_core(shards, build, build_theirs, settings):
    (ours, _, _) = build(100, data_path=shards[1:], split="1", **settings)
    theirs = build_theirs(100, 0, 0, blend=(shards[1:], None), split="1", **settings)
    assert_equal_samples(ours, theirs[0], len(ours))
    plain = build(100, data_path=shards[1:], split="1")[0]
    key = "position_ids" if "reset_position_ids" in settings else "loss_mask"
    assert any(not torch.equal(ours[number][key], plain[number][key]) for number in range(100))


def test_a_blend_draws_like_megatron_core(shards, build, build_theirs):
    words = ("0.3", shards[0], "0.7", shards[1])
    (ours, _, _) = build(120, data_path=words, split="1")
    theirs = build_theirs(120, 0, 0, blend=(shards, [0.3, 0.7]), split="1")
    assert isinstance(ours, EpochsBlend)
    assert_equal_samples(ours, theirs[0], 120)


def test_shards_without_weights_are_drawn_like_megatron_core(shards, build, build_theirs):
    (ours, _, _) = build(150, data_path=tuple(shards), split="1")
    assert_equal_samples(ours, build_theirs(150, 0, 0, blend=(shards, None), split="1")[0], 150)


def test_shards_for_each_split_equal_megatron_core(shards, build, build_theirs):
    words = {"train_data_path": (shards[0],), "valid_data_path": ("2", shards[1], "1", shards[0])}
    ours, valid, test = build(60, 40, 40, **words)
    blends = [([shards[0]], None), ([shards[1], shards[0]], [2.0, 1.0]), None]
    theirs = build_theirs(60, 40, 40, blend_per_split=blends)
    assert_equal_samples(ours, theirs[0], 60)
    assert_equal_samples(valid, theirs[1], 40)
    assert test is None


def test_mock_data_equals_megatron_core(few_mock_documents, build, build_theirs):
    ours = build(50, 10, mock_data=True)
    theirs = build_theirs(50, 10, 0, kind=MockGPTDataset)
    assert_equal_samples(ours[0], theirs[0], 50)
    assert_equal_samples(ours[1], theirs[1], 10)


def test_mock_data_follows_the_split(few_mock_documents, build):
    train, valid, _ = build(10, 10, mock_data=True, split="1,0,0")
    assert valid is None and len(train.indices) == 300


def test_megatron_core_changes_the_order_with_the_length_of_the_run(shards, build_theirs):
    """The behaviour that is fixed here. If megatron-core fixes it, `epochs` can be removed."""
    short, long = (build_theirs(count, 0, 0, blend=(shards[:1], None), split="1")[0] for count in (90, 400))
    assert tokens_of(short, 90) != tokens_of(long, 90)


@pytest.mark.parametrize("words", ["one", "weights"])
def test_a_longer_run_starts_with_the_samples_of_a_shorter_one(shards, build, words):
    data_path = shards[:1] if words == "one" else ["1", shards[0], "3", shards[1]]
    longest = tokens_of(build(900, data_path=data_path, split="1")[0], 900)
    for count in (1, 10, 89, 90, 91, 150, 200, 400, 899):
        assert tokens_of(build(count, data_path=data_path, split="1")[0], count) == longest[:count]


def test_shards_without_weights_can_be_shortened_but_not_extended(shards, build):
    full = build(200, data_path=shards, split="1")[0]
    assert tokens_of(build(50, data_path=shards, split="1")[0], 50) == tokens_of(full, 50)


def test_every_epoch_reads_every_token_once_in_its_own_order(shards, build):
    dataset = build(500, data_path=shards[:1], split="1")[0]
    ends = epoch_ends(dataset)
    assert len(ends) > 3 and ends[-1] == len(dataset) >= 500
    epochs = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    num_tokens = dataset._get_num_tokens_per_epoch()
    for samples in epochs:
        inside = [token for number in samples for token in dataset[number]["tokens"].tolist() if token != EOD]
        # A sample that spans two epochs may contain tokens of the previous one.
        assert len(inside) - len(set(inside)) < SEQ_LENGTH
        assert len(set(inside)) > num_tokens - 41 - 2 * SEQ_LENGTH
    documents = np.reshape(dataset.document_index, (len(epochs), -1)).tolist()
    assert all(sorted(epoch) == list(range(40)) for epoch in documents)
    assert len({tuple(epoch) for epoch in documents}) == len(epochs)
    ids = dataset.sample_ids(np.arange(len(dataset)))
    assert len(np.unique(ids[epochs[0]], axis=0)) == len(epochs[0]), "no sample twice"


def test_a_blend_may_draw_one_sample_beyond_an_epoch(shards, build):
    epoch = len(build(1, data_path=shards[:1], split="1")[0])
    total = 2 * epoch + 1
    dataset = build(total, data_path=["1", shards[0], "1", shards[1]], split="1")[0]
    assert np.count_nonzero(dataset.dataset_index == 0) == epoch + 1
    tokens_of(dataset, total)


def test_one_cache_serves_runs_of_every_length_and_seed(tmp_path, shards, tokenizer):
    """In any order, none uses the index of another."""

    def samples(folder, **changes):
        settings = {"num_samples": 90, "seed": 7, "seq_length": SEQ_LENGTH, "split": "80,20,0", **changes}
        count, seed = settings.pop("num_samples"), settings.pop("seed")
        config = data_config(data_path=(shards[0],), data_cache_path=str(folder), **settings)
        return [
            tokens_of(dataset, count) for dataset in build_datasets(config, tokenizer, (count, count, 0), seed=seed)[:2]
        ]

    variants = [{}, {"num_samples": 300}, {"seed": 8}, {"seq_length": 8}, {"split": "50,50,0"}, {"num_samples": 5}]
    shared = [samples(tmp_path / "shared", **changes) for changes in variants]
    assert shared == [samples(tmp_path / str(number), **changes) for number, changes in enumerate(variants)]


def test_sample_ids_locate_the_sample(shards, build):
    dataset = build(300, data_path=["1", shards[0], "2", shards[1]], split="1")[0]
    ids = dataset.sample_ids(np.arange(300))
    assert ids.dtype == np.int64 and ids.shape == (300, 3)
    for number, (source, document, offset) in enumerate(ids):
        expected = dataset.datasets[source].dataset.get(document, offset=int(offset), length=1)
        assert dataset[number]["tokens"][0] == expected[0]
    assert np.array_equal(dataset.sample_ids(np.arange(100, 200)), ids[100:200])
    assert dataset.sample_ids(np.arange(0)).shape == (0, 3)


def test_sample_sources(shards, build):
    dataset = build(100, data_path=["1", shards[0], "3", shards[1]], split="80,20,0")[0]
    assert [source.shard for source in dataset.sources] == shards
    assert [source.weight for source in dataset.sources] == [0.25, 0.75]
    assert [source.documents for source in dataset.sources] == [(0, 32), (0, 60)]
    (alone,) = build(10, 2, data_path=shards[:1], split="80,20,0")[1].sources
    assert alone.documents == (32, 40) and alone.weight is None
    assert alone.content == dataset.sources[0].content != dataset.sources[1].content


@pytest.mark.parametrize(("dtype", "token"), [(np.int32, VOCAB_SIZE + 1), (np.int32, -1), (np.uint16, 65535)])
def test_an_id_beyond_the_vocabulary_names_shard_and_sample(tmp_path, tokenizer, monkeypatch, dtype, token):
    """It lies where the search at startup does not check."""
    documents = [[number] * 49 for number in range(20)]
    documents[13][20] = token
    prefix = write_shard(tmp_path / "s", documents, dtype)
    with pytest.raises(DataError, match="has token ids"):
        build_datasets(data_config(data_path=(prefix,)), tokenizer, (10, 0, 0), seed=7)
    monkeypatch.setattr("megafp8.data.shard_verification._check_token_range", lambda *args: None)
    dataset = build_datasets(data_config(data_path=(prefix,), split="1"), tokenizer, (40, 0, 0), seed=7)[0]
    found = []
    for number in range(len(dataset)):
        try:
            assert dataset[number]["tokens"].max() < VOCAB_SIZE
        except DataError as error:
            found.append(str(error))
    assert found and all(f"{prefix}: token " in text and f"has the id {token}, " in text for text in found)
    assert all("13" in text.split("documents [")[1].split("]")[0] for text in found)


def test_no_index_is_loaded_as_a_pickle(shards, build, monkeypatch):
    """megatron-core loads indices with allow_pickle=True. If a version moves them, our hooks would not be used."""

    def load(*args, **kwargs):
        raise AssertionError(f"numpy.load{args}")

    monkeypatch.setattr(np, "load", load)
    for _ in range(2):
        dataset = build(300, data_path=["1", shards[0], "2", shards[1]], split="1")[0]
        tokens_of(dataset, 10)


def test_the_cache_serves_a_moved_shard_and_another_length_of_the_same_epochs(tmp_path, shards, tokenizer):
    told = []
    config = data_config(data_path=(shards[0],), data_cache_path=str(tmp_path / "cache"), split="1")
    build_datasets(config, tokenizer, (300, 0, 0), seed=7, on_progress=told.append)
    assert told == [f"building the index of {shards[0]} (40 documents, 3 epochs)"]
    for suffix in (".bin", ".idx"):
        shutil.copyfile(shards[0] + suffix, tmp_path / f"moved{suffix}")
    moved = dataclasses.replace(config, data_path=(str(tmp_path / "moved"),))
    told.clear()
    build_datasets(moved, tokenizer, (301, 0, 0), seed=7, on_progress=told.append)
    assert told == []
