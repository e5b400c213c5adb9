"""The training data of a run with phases: each sample is where the phases say, and nothing is read twice too early."""

from __future__ import annotations

import numpy as np
import pytest
from shard_files import write_shard

from megafp8.config.schema import DataConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.sample_hash import SampleHash, SampleHashChain
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.utils.plain_data import from_plain

SEQ_LENGTH, EOD = 16, 30_000
TOTAL, START = 200, 90


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards of about 110 samples, in which only the end of document occurs twice."""
    folder, generator, first, prefixes = tmp_path_factory.mktemp("shards"), np.random.default_rng(0), 0, []
    for name in "abc":
        documents = []
        for length in generator.integers(1, 90, 40):
            documents.append([*range(first, first + length), EOD])
            first += length
        prefixes.append(write_shard(folder / name, documents))
    return prefixes


@pytest.fixture
def build(tmp_path, shards):
    """`build({0: "1 a 3 b", 90: "c"}, 200)`: training, validation and test data."""
    named = dict(zip("abc", shards, strict=True))

    def build(phases, total=TOTAL, held_out=0, **data):
        words = [" ".join(named.get(word, word) for word in blend.split()) for blend in phases.values()]
        entries = tuple(f"p{number} {start}samples {text}" for number, (start, text) in
                        enumerate(zip(phases, words, strict=True)))  # fmt: skip
        data = {"data_phases": entries, **data}
        config = DataConfig(seq_length=SEQ_LENGTH, data_cache_path=str(tmp_path / "cache"), **data)
        tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), EOD)
        starts = tuple(phases) if data["data_phases"] else ()
        return build_datasets(config, tokenizer, (total, held_out, 0), seed=7, phase_starts=starts)

    return build


def tokens_of(dataset, numbers):
    return [dataset[number]["tokens"].tolist() for number in numbers]


def chain(dataset):
    return SampleHashChain(dataset, SEQ_LENGTH, 7)


def test_the_first_phase_reads_what_a_run_without_phases_reads(build, shards) -> None:
    phased = build({0: "1 a 3 b", START: "c"})[0]
    assert len(phased) == TOTAL
    plain = build({}, data_path=("1", shards[0], "3", shards[1]), split="1")[0]
    assert tokens_of(phased, range(START)) == tokens_of(plain, range(START))
    assert chain(phased).hash(START) == chain(plain).hash(START)
    assert chain(phased).hash(START + 1) != chain(plain).hash(START + 1)
    one = build({0: "a", START: "c"})[0], build({}, data_path=(shards[0],), split="1")[0]
    assert chain(one[0]).record(START) == chain(one[1]).record(START)


def test_a_shard_goes_on_where_the_phase_before_left_it(build) -> None:
    phased = build({0: "a", 40: "1 a 1 b", 80: "a"}, total=105)[0]
    plain = build({0: "a"}, total=105)[0]
    of_blend = phased.datasets[1]
    from_a = [40 + index for index in range(40) if of_blend._draws(np.array([index]))[0][0] == 0]
    assert len(from_a) == 20
    expected = tokens_of(plain, range(85))
    assert tokens_of(phased, [*range(40), *from_a, *range(80, 105)]) == expected
    read = [token for sample in tokens_of(phased, range(105)) for token in sample if token != EOD]
    assert len(read) == len(set(read)), "no token twice within an epoch"
    assert "epochs 0.00 to 0.3" in str(phased.datasets[0]) and "from sample 80" in str(phased.datasets[2])


def test_ids_locate_the_samples_of_every_phase(build) -> None:
    phased = build({0: "1 a 3 b", 37: "c", 91: "1 c 1 a"}, total=150)[0]
    ids = phased.sample_ids(np.arange(150))
    assert ids.shape == (150, 3) and ids.dtype == np.int64
    by_content = {}
    for number, (source, document, offset) in enumerate(ids):
        phase = next(each for each in reversed(phased.datasets) if number >= each.first_sample)
        chosen = int(phase._draws(np.array([number - phase.first_sample]))[0][0])
        assert phased[number]["tokens"][0] == phase.datasets[chosen].dataset.get(document, int(offset), 1)[0]
        if phase.first_sample:
            assert (
                by_content.setdefault(source, phase.datasets[chosen].dataset_path)
                == phase.datasets[chosen].dataset_path
            )
    assert len(by_content) == 2 and min(by_content) >= 1 << 62
    assert np.array_equal(phased.sample_ids(np.arange(30, 100)), ids[30:100])
    assert phased.sample_ids(np.arange(0)).shape == (0, 3)


def test_later_phases_and_the_length_of_the_run_change_no_sample_before(build) -> None:
    phases = {0: "1 a 1 b", 40: "1 b 2 c", 90: "c"}
    longest = build(phases, total=400)[0]
    others = [build(phases)[0], build({**phases, 90: "1 a 1 b"})[0], build({0: "1 a 1 b", 40: "1 b 2 c"})[0]]
    for other in others:
        assert tokens_of(other, range(90)) == tokens_of(longest, range(90))
        for count in (1, 40, 41, 90):
            assert chain(other).record(count) == chain(longest).record(count)
    moved = build({0: "1 a 1 b", 30: "1 b 2 c"})[0]
    assert chain(moved).hash(30) == chain(longest).hash(30) and chain(moved).hash(31) != chain(longest).hash(31)


def test_a_record_names_what_differs(build) -> None:
    before, now = (chain(build({0: "a", start: blend})[0]).record(100) for start, blend in ((40, "b"), (50, "c")))
    assert from_plain(SampleHash, before.plain()) == before
    assert "first_sample" not in before.plain()["sources"][0]
    assert any("from sample 40 -> 50" in line for line in before.differences(now))
    alone = chain(build({0: "a"})[0]).record(100)
    assert "(from sample 40)" in before.differences(alone)[0]


def test_the_split_divides_the_shards_of_every_phase(build, shards) -> None:
    train, valid, _ = build({0: "a", 50: "1 a 1 c"}, 100, 10, data_path=(shards[0],), split="80,20,0")
    assert {source.documents for source in train.sources} == {(0, 32)}
    assert [source.documents for source in valid.sources] == [(32, 40)]
    train, valid, _ = build({0: "a", 50: "b"}, 100, 10, valid_data_path=(shards[2],))
    assert {source.documents for source in train.sources} == {(0, 40)}
    assert [source.shard for source in valid.sources] == [shards[2]]
    assert build({0: "a"}, 100, 10)[1] is None
