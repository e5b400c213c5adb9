"""Packed sequences have every token of every document once an epoch, and cut only what is longer than a sequence."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from shard_files import write_shard

from megafp8.config.batch_schedule import constant
from megafp8.config.schema import DataConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.loader import build_loader
from megafp8.data.packed_dataset import packing_text
from megafp8.data.packing import build_packed_epochs, pack_lengths
from megafp8.data.sample_hash import SampleHash, SampleHashChain
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.errors import DataError
from megafp8.utils.plain_data import from_plain

SEQ_LENGTH, EOD = 16, 60_000
ALL = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}


def random_lengths(seed: int, seq_length: int) -> np.ndarray:
    """Lengths from a distribution that the seed chooses, some of them 0 and some longer than two sequences."""
    generator = np.random.default_rng(seed)
    most, count = generator.integers(1, 3 * seq_length), generator.integers(1, 400)
    kinds = generator.integers(0, most + 1, count), generator.geometric(1 / most, count), np.full(count, most)
    return kinds[seed % 3].astype(np.int32)


def first_fit(pieces: np.ndarray, seq_length: int) -> int:
    """Sequences that first-fit takes for the pieces in their order."""
    rooms: list[int] = []
    for piece in pieces.tolist():
        number = next((number for number, room in enumerate(rooms) if room >= piece), len(rooms))
        rooms[number : number + 1] = [(rooms[number] if number < len(rooms) else seq_length) - piece]
    return len(rooms)


def best_fit(pieces: np.ndarray, seq_length: int) -> list[int]:
    """Rooms that remain after best-fit decreasing, one piece after the other."""
    rooms: list[int] = []
    for piece in sorted(pieces.tolist(), reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= piece]
        number = min(fitting, key=lambda number: rooms[number], default=len(rooms))
        rooms[number : number + 1] = [(rooms[number] if number < len(rooms) else seq_length) - piece]
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(60))
def test_packing_is_best_fit_decreasing(seed: int) -> None:
    seq_length = [1, 2, 7, 64, 1000][seed % 5]
    lengths = random_lengths(seed, seq_length)
    packing = pack_lengths(lengths, seq_length)
    rest = lengths % seq_length
    rooms = best_fit(rest[rest > 0], seq_length)
    assert packing.num_packed == len(rooms)
    assert np.repeat(np.arange(seq_length), packing.padding).tolist() == rooms
    assert packing.num_packed <= first_fit(rest[rest > 0], seq_length)
    assert packing.num_full == (lengths // seq_length).sum()
    assert packing.num_padding_tokens == sum(rooms) == packing.num_sequences * seq_length - lengths.sum()
    assert packing.num_cut == (lengths > seq_length).sum()
    pieces = np.sort(rest[rest > 0])[::-1]
    numbers = packing.sequence_of_pieces()
    assert np.bincount(numbers, weights=pieces, minlength=len(rooms)).max(initial=0) <= seq_length
    squares = packing.num_full * seq_length**2 + (rest.astype(int) ** 2).sum() + sum(room**2 for room in rooms)
    assert packing.squares == pytest.approx(squares)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_in_one_sequence_of_an_epoch(seed: int) -> None:
    seq_length = [1, 2, 7, 64, 1000][seed % 5]
    lengths = random_lengths(100 + seed, seq_length)
    documents = np.arange(len(lengths) // 4, len(lengths), dtype=np.int32)
    packing = pack_lengths(lengths[documents], seq_length)
    generators = [np.random.RandomState(number) for number in range(3)]
    arrays = build_packed_epochs(lengths[documents], documents, packing, generators)
    index, samples, order = arrays["document_index"], arrays["sample_index"], arrays["shuffle_index"]
    size = packing.num_sequences
    assert len(order) == 3 * size == len(samples) - 1
    for epoch in range(3):
        rows = order[epoch * size : (epoch + 1) * size]
        assert sorted(rows.tolist()) == list(range(epoch * size, (epoch + 1) * size))
        read: Counter[tuple[int, int]] = Counter()
        for row in rows:
            (first, offset), (last, _) = samples[row : row + 2].tolist()
            num_tokens = 0
            for place, document in enumerate(index[first:last].tolist()):
                begin = offset if place == 0 else lengths[document] // seq_length * seq_length
                end = min(begin + seq_length, lengths[document])
                read.update((document, token) for token in range(begin, end))
                num_tokens += end - begin
                if lengths[document] <= seq_length:
                    assert (begin, end) == (0, lengths[document])
            assert 0 < num_tokens <= seq_length
        expected = {(document, token) for document in documents.tolist() for token in range(lengths[document])}
        assert read.keys() == expected and set(read.values()) <= {1}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards in which only the end of document occurs twice; the last has short documents only."""
    folder, generator, first, prefixes = tmp_path_factory.mktemp("shards"), np.random.default_rng(0), 1, []
    for name, longest in (("a", 90), ("b", 25), ("c", 15)):
        documents = []
        for length in generator.integers(1, longest, 60):
            documents.append([*range(first, first + length), EOD])
            first += length
        prefixes.append(write_shard(folder / name, documents))
    return prefixes


@pytest.fixture
def build(tmp_path):
    """`build((shard, ...), 200, split=...)`: training data, or all three data sets for several numbers."""

    def build(words, *counts, seed=7, **data):
        data = {"packing": "best-fit", "split": "1", **data}
        config = DataConfig(
            seq_length=SEQ_LENGTH, data_path=tuple(words), data_cache_path=str(tmp_path / "cache"), **data
        )
        tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), EOD)
        starts = (0, 40) if config.data_phases else ()
        found = build_datasets(config, tokenizer, (*counts, 0, 0)[:3], seed=seed, phase_starts=starts)
        return found if len(counts) > 1 else found[0]

    return build


def tokens_of(dataset, numbers):
    return [dataset[number]["tokens"].tolist() for number in numbers]


def documents_of(dataset, document):
    return dataset.dataset.get(document).tolist()


def test_samples_have_whole_documents(build, shards) -> None:
    dataset = build(shards[:1], 100, **ALL)
    size = dataset.packing.num_sequences
    read: list[int] = []
    for number in range(size):
        sample = dataset[number]
        used = sample["tokens"] > 0
        assert sample["tokens"].shape == sample["labels"].shape == sample["loss_mask"].shape == (SEQ_LENGTH,)
        starts = sample["document_starts"].nonzero().flatten().tolist()
        text = sample["tokens"].tolist()
        pieces = [text[first:last] for first, last in zip(starts, [*starts[1:], SEQ_LENGTH], strict=True)]
        assert starts[0] == 0
        assert [position for piece in pieces for position in range(len(piece))] == sample["position_ids"].tolist()
        if not used.all():
            assert set(pieces.pop()) == {0}
        for piece in pieces:
            assert piece[-1] == EOD or len(piece) == SEQ_LENGTH
            read += piece
        for token, label, weight in zip(text, sample["labels"].tolist(), sample["loss_mask"].tolist(), strict=True):
            assert weight == (0 < token < EOD)
            assert not weight or label in (token + 1, EOD)
    documents = [token for number in range(60) for token in documents_of(dataset, number)]
    assert sorted(read) == sorted(documents)


def test_the_end_of_a_document_predicts_the_next_one_but_no_rest_of_another(build, shards) -> None:
    dataset = build(shards[:1], 100)
    firsts = {documents_of(dataset, number)[0] for number in range(60)}
    seen = Counter()
    for number in range(dataset.packing.num_sequences):
        sample = dataset[number]
        assert sample.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
        assert sample["position_ids"].tolist() == list(range(SEQ_LENGTH))
        weights = zip(*(sample[key].tolist() for key in ("tokens", "labels", "loss_mask")), strict=True)
        for token, label, weight in weights:
            if token == EOD and label:
                assert weight == (label in firsts)
                seen[bool(weight)] += 1
            elif token in (0, EOD):
                assert not weight
            else:
                assert weight == 1
    assert seen[True] and seen[False]


def test_epochs_have_other_sequences_and_more_of_them_change_none(build, shards) -> None:
    short = build(shards[1:2], 1)
    size = len(short)
    assert size == short.packing.num_sequences and short.samples_per_epoch == size
    long = build(shards[1:2], 2 * size + 1)
    assert len(long) == 3 * size
    assert tokens_of(short, range(size)) == tokens_of(long, range(size))
    epochs = [tokens_of(long, range(size * epoch, size * (epoch + 1))) for epoch in range(3)]
    every = [sorted(token for sample in epoch for token in sample if token) for epoch in epochs]
    assert every[0] == every[1] == every[2]
    assert len({tuple(sorted(map(tuple, epoch))) for epoch in epochs}) == 3
    assert tokens_of(build(shards[1:2], 1), range(size)) == epochs[0]
    assert tokens_of(build(shards[1:2], 1, seed=8), range(size)) != epochs[0]


def test_splits_blends_and_phases_are_packed(build, shards) -> None:
    train, valid, test = build(("1", shards[0], "2", shards[1]), 300, 20, 5, split="70,20,10")
    read = [
        {token for sample in tokens_of(part, range(len(part))) for token in sample} for part in (train, valid, test)
    ]
    assert all(one & other <= {0, EOD} for one, other in combinations(read, 2))
    assert len(train) == 300
    assert [source.documents for source in train.sources] == [(0, 42)] * 2
    both = build(shards[:2], 20)
    assert len(both) == 20
    phases = ("web 0samples 1 " + " 2 ".join(shards[:2]), f"end 40samples {shards[2]}")
    phased = build((), 90, data_phases=phases, split=None)
    assert tokens_of(phased, range(40)) == tokens_of(build(("1", shards[0], "2", shards[1]), 90), range(40))
    assert tokens_of(phased, range(40, 60)) == tokens_of(build(shards[2:], 50), range(20))
    assert f"(epochs 0.00 to {50 / build(shards[2:], 1).packing.num_sequences:.2f})" in str(phased.datasets[1])


def test_ids_locate_the_first_token_of_a_sequence(build, shards) -> None:
    dataset = build(shards[:1], 300)
    for number, (_, document, offset) in enumerate(dataset.sample_ids(np.arange(300))):
        assert dataset[number]["tokens"][0] == dataset.dataset.get(document, int(offset), 1)[0]


def test_the_hash_names_the_packing(build, shards) -> None:
    dataset = build(shards[:1], 100)
    packed, cut = (SampleHashChain(dataset, SEQ_LENGTH, 7, kind).record(20) for kind in ("best-fit", "cut"))
    assert from_plain(SampleHash, packed.plain()) == packed
    assert "packing" not in cut.plain() and cut == SampleHashChain(dataset, SEQ_LENGTH, 7).record(20)
    assert packed.sha256 != cut.sha256
    assert cut.differences(packed) == ["--packing: cut -> best-fit"]


def test_resume_at_any_sample_keeps_the_order(build, shards) -> None:
    """Each part is rebuilt, on other ranks, and for a longer run."""
    words, total, batch = ("1", shards[0], "2", shards[1]), 240, 8

    def chain(start: int, ranks: int, more: int) -> list[str]:
        dataset = build(words, total + more, **ALL)
        loaders = [
            build_loader(
                dataset, consumed_samples=start, micro_batch_size=2, data_parallel_rank=rank,
                data_parallel_size=ranks, batch_schedule=constant(batch), num_workers=0, total_samples=total,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        found = []
        for _ in range((total - start) // 2 // ranks):
            found += [next(loader) for loader in loaders]
        return [
            hashlib.sha256(b"".join(part[key].numpy().tobytes() for key in sorted(part))).hexdigest() for part in found
        ]

    unbroken = chain(0, 1, 0)
    for start, ranks, more in ((8, 1, 0), (64, 2, 0), (120, 4, 500), (232, 1, 1)):
        assert chain(start, ranks, more) == unbroken[start // 2 :]


def test_mock_documents_are_packed(build) -> None:
    dataset = build((), 50, mock_data=True, **ALL)
    assert len(dataset) >= 50 and dataset[0]["document_starts"][0]
    assert dataset.packing.num_documents == 100_000


def test_bad_ids_are_refused(tmp_path, build, monkeypatch) -> None:
    prefix = write_shard(tmp_path / "bad", [[1, 2, EOD + 1, EOD]] * 30)
    monkeypatch.setattr("megafp8.data.shard_verification._check_token_range", lambda *args: None)
    with pytest.raises(DataError, match="has the id 60001, but the vocabulary size is 60001"):
        tokens_of(build([prefix], 10), range(5))


def test_the_text_counts_each_shard_once(build, shards) -> None:
    assert packing_text(build(shards[:1], 5, packing="cut")) == packing_text(None) == ""
    packings = [build([shard], 1).packing for shard in shards[:2]]
    sequences, padding = (
        sum(getattr(each, name) for each in packings) for name in ("num_sequences", "num_padding_tokens")
    )
    phases = (f"web 0samples {shards[0]}", f"end 40samples 1 {shards[0]} 1 {shards[1]}")
    for dataset in (build(shards[:2], 5), build((), 90, data_phases=phases, split=None)):
        assert packing_text(dataset) == (
            f"{sequences} sequences an epoch, {padding / sequences / SEQ_LENGTH:.3%} of their tokens are padding; "
            f"{packings[0].num_cut + packings[1].num_cut} of 120 documents are longer than a sequence and cut"
        )
