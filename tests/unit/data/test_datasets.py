import base64
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from shard_files import write_megatron_shard
from shard_files import write_shard as write_sequences
from shard_writer import ShardWriter

from megafp8.config.schema import DataConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.shards import read_index
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.errors import DataError

pytest.importorskip("megatron.core")
VOCAB_SIZE = 30_000
EOD = VOCAB_SIZE
DOCUMENT_TOKENS = 50
build = partial(build_datasets, seed=7)


@pytest.fixture
def tokenizer():
    return build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), VOCAB_SIZE)


def write_shard(prefix, num_documents=100, first_token=0):
    """Documents of 49 rising tokens and the end of document; no token occurs twice."""
    with ShardWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for number in range(num_documents):
            start = first_token + number * (DOCUMENT_TOKENS - 1)
            ids = np.append(np.arange(start, start + DOCUMENT_TOKENS - 1), EOD).astype(np.uint16)
            writer.add_documents(ids.tobytes(), np.array([DOCUMENT_TOKENS], np.int32))
        writer.finish()
    return str(prefix)


@pytest.fixture
def shards(tmp_path):
    return write_shard(tmp_path / "a"), write_shard(tmp_path / "b", first_token=10_000)


def data_config(**data):
    return DataConfig(**{"seq_length": 16, **data})


def all_tokens(dataset, count=None):
    return torch.stack([dataset[n]["tokens"] for n in range(count or len(dataset))])


def documents_of(tokens, first_token=0):
    """Numbers of the documents that tokens come from."""
    inside = tokens[tokens != EOD] - first_token
    return set((inside // (DOCUMENT_TOKENS - 1)).tolist())


def test_items_are_shifted_by_one_and_typed(shards, tokenizer):
    train, valid, test = build(data_config(data_path=(shards[0],)), tokenizer, (20, 2, 0))
    item = train[0]
    assert {name: (tuple(value.shape), value.dtype) for name, value in item.items()} == {
        "tokens": ((16,), torch.int64),
        "labels": ((16,), torch.int64),
        "position_ids": ((16,), torch.int64),
        "loss_mask": ((16,), torch.float32),
    }
    assert torch.equal(item["tokens"][1:], item["labels"][:-1])
    assert item["loss_mask"].sum() == 16
    assert item["position_ids"].tolist() == list(range(16))
    assert len(train) >= 20
    assert len(valid) >= 2
    assert test is None


def test_split_divides_documents(shards, tokenizer):
    config = data_config(data_path=(shards[0],), split="80,15,5")
    train, valid, test = build(config, tokenizer, (200, 40, 10))
    assert documents_of(all_tokens(train)) == set(range(80))
    assert documents_of(all_tokens(valid)) == set(range(80, 95))
    assert documents_of(all_tokens(test)) == set(range(95, 100))


def test_one_epoch_reads_every_token_once(shards, tokenizer):
    train, _, _ = build(data_config(data_path=(shards[0],), split="1"), tokenizer, (300, 0, 0))
    assert len(train) == (100 * DOCUMENT_TOKENS - 1) // 16 == int(train.fresh_samples)
    tokens = all_tokens(train)
    inside = tokens[tokens != EOD]
    assert len(inside.unique()) == len(inside)


def test_seed_decides_the_order(shards, tokenizer):
    tokens = [
        all_tokens(build_datasets(data_config(data_path=shards[:1]), tokenizer, (50, 0, 0), seed=seed)[0], 50)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("modes", [True, False])
def test_shards_of_megatrons_writer(tmp_path, tokenizer, dtype, modes):
    """Without a manifest, with documents of several sequences: sequences are shuffled and read."""
    ids = np.arange(6000, dtype=dtype).reshape(100, 60)
    documents = [[row[:50].tolist(), row[50:].tolist()] for row in ids]
    prefix = write_megatron_shard(tmp_path / "theirs", documents, dtype, modes=modes)
    train, valid, _ = build(data_config(data_path=(prefix,), split="90,10"), tokenizer, (300, 30, 0))
    assert set(all_tokens(train, 300).flatten().tolist()) <= set(range(5400))
    assert set(all_tokens(valid, 30).flatten().tolist()) <= set(range(5400, 6000))
    ours = write_sequences(tmp_path / "ours", [part for document in documents for part in document], np.uint16)
    again = build(data_config(data_path=(ours,), split="90,10"), tokenizer, (300, 30, 0))[0]
    assert torch.equal(all_tokens(train, 300), all_tokens(again, 300))


def test_weighted_blend(shards, tokenizer):
    config = data_config(data_path=("0.25", shards[0], "0.75", shards[1]))
    train, valid, _ = build(config, tokenizer, (2000, 10, 0))  # several times what the shards hold
    first = all_tokens(train)
    from_b = (first.where(first != EOD, -1).max(dim=1).values >= 10_000).float().mean()
    assert from_b == pytest.approx(0.75, abs=0.002)
    # The validation split of the default takes a part of the 5,000 tokens of a shard.
    tokens_of_b = train.datasets[1].samples_per_epoch
    assert train.fresh_samples == pytest.approx(tokens_of_b / 0.75) and 280 < tokens_of_b < 5000 / 16
    assert len(valid) >= 10
    assert torch.equal(first, all_tokens(build(config, tokenizer, (2000, 10, 0))[0]))


def test_blend_without_weights_is_one_epoch_with_a_warning(shards, tokenizer):
    config = data_config(data_path=shards, split="1")
    train, _, _ = build(config, tokenizer, (600, 0, 0))
    assert len(train) >= 600
    with pytest.raises(DataError, match="624 samples, but 2000 .* weight"):
        build(config, tokenizer, (2000, 0, 0))


def test_shards_for_each_split(shards, tokenizer):
    config = data_config(train_data_path=(shards[0],), valid_data_path=("1.0", shards[1]))
    train, valid, test = build(config, tokenizer, (100, 20, 20))
    assert all_tokens(train).where(all_tokens(train) != EOD, 0).max() < 10_000
    assert documents_of(all_tokens(valid), 10_000) == set(range(100))
    assert test is None


def test_position_ids_and_loss_mask_at_documents_ends(shards, tokenizer):
    config = data_config(data_path=shards[:1], reset_position_ids=True, eod_mask_loss=True)
    train, _, _ = build(config, tokenizer, (30, 0, 0))
    ends = 0
    for number in range(30):
        item = train[number]
        positions = (item["tokens"] == EOD).nonzero().flatten().tolist()
        ends += len(positions)
        assert (item["loss_mask"] == 0).nonzero().flatten().tolist() == positions
        for position in positions:
            assert item["position_ids"][position + 1 : position + 2].tolist() in ([], [0])
    assert ends > 3


def test_document_starts_follow_ends_of_documents(shards, tokenizer):
    plain, _, _ = build(data_config(data_path=shards[:1]), tokenizer, (30, 0, 0))
    train, _, _ = build(data_config(data_path=shards[:1], reset_attention_mask=True), tokenizer, (30, 0, 0))
    ends = 0
    for number in range(30):
        item = train[number]
        starts = item["document_starts"].nonzero().flatten().tolist()
        positions = (item["tokens"] == EOD).nonzero().flatten().tolist()
        assert starts == [0, *(position + 1 for position in positions if position + 1 < len(item["tokens"]))]
        assert item.keys() - plain[number].keys() == {"document_starts"}
        assert all(torch.equal(item[key], plain[number][key]) for key in plain[number])
        ends += len(positions)
    assert ends > 3


def test_megatron_cores_tokenizer_gives_the_same_samples(tmp_path, documents):
    """It has a padding token, which megatron-core's dataset searches in the text. Ours has none."""
    pytest.importorskip("tiktoken")
    tokenizers = pytest.importorskip("megatron.core.tokenizers")
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps([
        {"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode(), "token_str": ""} for n in range(256)
    ]))  # fmt: skip
    theirs = tokenizers.MegatronTokenizer.from_pretrained(
        str(path), metadata_path={"library": "tiktoken", "model_type": "gpt"}, num_special_tokens=7, vocab_size=263
    )
    ours = build_tokenizer(
        DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(path), tiktoken_num_special_tokens=7), 263
    )
    assert (theirs.eod, ours.eod, theirs.pad) == (2, 2, 4)
    prefix = write_sequences(tmp_path / "s", [[*ids, ours.eod] for ids in ours.tokenize_batch(documents)])
    config = data_config(data_path=(prefix,), split="1", eod_mask_loss=True, reset_position_ids=True)
    of_ours, of_theirs = (build(config, tokenizer, (50, 0, 0))[0] for tokenizer in (ours, theirs))
    for number in range(50):
        mine, other = of_ours[number], of_theirs[number]
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_mock_data(tokenizer):
    train, valid, test = build(data_config(mock_data=True), tokenizer, (10, 10, 0))
    assert train[0]["tokens"].shape == (16,)
    assert int(all_tokens(valid, 10).max()) <= VOCAB_SIZE
    assert test is None


def test_file_reads_give_the_same_tokens_as_mapped_memory(shards, tokenizer):
    mapped, file = (
        all_tokens(build(data_config(data_path=shards[:1], mmap_bin_files=mapped), tokenizer, (20, 0, 0))[0], 20)
        for mapped in (True, False)
    )
    assert torch.equal(mapped, file)


@pytest.mark.parametrize(
    ("split", "counts", "message"),
    [
        ("90,10,0", (10, 10, 0), None),
        (
            "999,1,0",
            (10, 10, 0),
            r"validation part .* has 0 tokens \(documents 100 to 100 of 100\).*needs 301 .*999,1,0",
        ),
        ("96,4,0", (10, 10, 0), "validation part .* has 200 tokens.*--eval-iters 0"),
        ("96,4,0", (10, 0, 0), None),
        ("4,96,0", (10, 10, 0), "training part .* has 200 tokens"),
        ("94,6,0", (10, 10, 0), "has 300 tokens"),
    ],
)
def test_a_part_without_one_sample_is_refused(shards, tokenizer, split, counts, message):
    config = data_config(data_path=shards[:1], split=split, seq_length=300)
    if message is None:
        build(config, tokenizer, counts)
        return
    with pytest.raises(DataError, match=message):
        build(config, tokenizer, counts)


def test_one_document_is_not_divided_and_the_error_says_what_to_do(tmp_path, tokenizer):
    config = data_config(data_path=(write_shard(tmp_path / "one", num_documents=1),), split="50,50,0")
    with pytest.raises(DataError, match=r"0 tokens .*--text-separator.*--valid-data-path") as caught:
        build(config, tokenizer, (10, 10, 0))
    assert "Increase" not in str(caught.value)


def test_an_empty_test_split_of_the_default_is_omitted(shards, tokenizer):
    config = data_config(data_path=shards[:1])
    assert build(config, tokenizer, (10, 2, 10))[2] is None
    with pytest.raises(DataError, match="test part"):
        build(replace(config, split="969,30,1"), tokenizer, (10, 2, 10))


def test_damaged_and_foreign_shards_are_refused(shards, shard, tokenizer):
    with pytest.raises(DataError, match="a different tokenizer"):
        build(data_config(data_path=(shard,)), tokenizer, (10, 0, 0))
    allowed = data_config(data_path=(shard,), allow_other_tokenizer=True)
    assert build(allowed, tokenizer, (10, 0, 0))[0] is not None
    content = Path(f"{shards[0]}.bin").read_bytes()
    Path(f"{shards[0]}.bin").write_bytes(content[:-2])
    with pytest.raises(DataError, match="9998 bytes"):
        build(data_config(data_path=("1", shards[1], "1", shards[0])), tokenizer, (10, 0, 0))


def test_a_replaced_shard_does_not_meet_the_old_cache(tmp_path, tokenizer):
    prefix = write_shard(tmp_path / "a")
    config = data_config(data_path=(prefix,), data_cache_path=str(tmp_path / "cache"), split="1")
    before, _, _ = build(config, tokenizer, (300, 0, 0))
    write_shard(tmp_path / "a", num_documents=50)
    after, _, _ = build(config, tokenizer, (100, 0, 0))
    assert documents_of(all_tokens(before)) == set(range(100))
    assert documents_of(all_tokens(after)) == set(range(50))
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2
    assert len(read_index(prefix).sequence_lengths) == 50


@pytest.mark.parametrize("mmap_bin_files", [True, False])
def test_a_shard_rewritten_during_a_run_stops_it(tmp_path, tokenizer, mmap_bin_files):
    config = data_config(data_path=(write_shard(tmp_path / "a"),), mmap_bin_files=mmap_bin_files)
    train, _, _ = build(config, tokenizer, (50, 0, 0))
    assert train[0]["tokens"].shape == (16,)
    with open(tmp_path / "a.bin", "r+b") as stream:
        stream.truncate(4000)
    with pytest.raises(DataError, match="was modified while this run reads it"):
        train[1]


def test_incomplete_cache_is_rebuilt(tmp_path, shards, tokenizer):
    config = data_config(data_path=("1", shards[0], "2", shards[1]), data_cache_path=str(tmp_path / "cache"))
    expected = all_tokens(build(config, tokenizer, (50, 0, 0))[0], 50)
    files = sorted((tmp_path / "cache").rglob("*.npy"))
    assert len(files) == 8
    for number, path in enumerate(files):
        content = path.read_bytes()
        path.write_bytes(content[: (0, 20, len(content) // 2, len(content) - 1)[number % 4]])
    assert torch.equal(all_tokens(build(config, tokenizer, (50, 0, 0))[0], 50), expected)


def test_cache_location(tmp_path, shards, tokenizer):
    build(data_config(data_path=shards[:1]), tokenizer, (10, 0, 0), save=str(tmp_path / "run"))
    assert list((tmp_path / "run" / "data_cache").rglob("*.npy"))
    build(data_config(data_path=shards[:1]), tokenizer, (10, 0, 0))
    assert list((tmp_path / "data_cache").rglob("*.npy"))
    shutil.rmtree(tmp_path / "data_cache")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="--data-cache-path"):
        build(
            data_config(data_path=shards[:1], data_cache_path=str(tmp_path / "file" / "cache")), tokenizer, (10, 0, 0)
        )
