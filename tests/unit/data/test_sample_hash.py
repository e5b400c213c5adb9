"""One hash of the samples that a run has read: of nothing else, and of everything that determines them."""

import dataclasses
import json

import numpy as np
import pytest

from megafp8.data.gpt_dataset import ShardSource
from megafp8.data.sample_hash import BLOCK_SAMPLES, LOOKUP_SAMPLES, SampleHash, SampleHashChain
from megafp8.utils.plain_data import from_plain

SOURCES = (ShardSource("a", "key of a", (0, 10), 0.25), ShardSource("b", "key of b", (0, 20), 0.75))


class Numbers:
    """Sample i is (0, i * step, i)."""

    def __init__(self, sources=SOURCES, step=3, length=10**9):
        self.sources, self.step, self.length, self.num_requested = sources, step, length, 0

    def __len__(self):
        return self.length

    def sample_ids(self, indices):
        self.num_requested += len(indices)
        return np.stack([np.zeros_like(indices), indices * self.step, indices], axis=1)


def chain(*args, seq_length=16, seed=1, **options):
    return SampleHashChain(Numbers(*args, **options), seq_length, seed)


@pytest.mark.parametrize(
    "count",
    [
        0,
        1,
        BLOCK_SAMPLES - 1,
        BLOCK_SAMPLES,
        BLOCK_SAMPLES + 1,
        3 * BLOCK_SAMPLES,
        LOOKUP_SAMPLES + 2 * BLOCK_SAMPLES + 5,
    ],
)
def test_sample_hash_does_not_depend_on_batches(count):
    expected = chain().hash(count)
    stepwise = chain()
    for number in range(0, count, max(1, count // 7)):
        stepwise.hash(number)
    assert stepwise.hash(count) == expected
    stepwise.hash(count + 5 * BLOCK_SAMPLES)
    assert stepwise.hash(count) == expected, "also backwards"
    assert chain(length=count).hash(count) == expected, "for any later samples"
    assert chain().hash(count + 1) != expected


@pytest.mark.parametrize("index", [0, 5, BLOCK_SAMPLES - 1, BLOCK_SAMPLES, 2 * BLOCK_SAMPLES + 1])
def test_every_sample_changes_the_hash(index):
    class Changed(Numbers):
        def sample_ids(self, indices):
            ids = super().sample_ids(indices)
            ids[indices == index, 2] += 1
            return ids

    changed = SampleHashChain(Changed(), 16, 1)
    assert changed.hash(index) == chain().hash(index)
    assert changed.hash(index + 1) != chain().hash(index + 1)
    assert changed.hash(index + 2 * BLOCK_SAMPLES) != chain().hash(index + 2 * BLOCK_SAMPLES)


def test_contents_and_length_change_the_hash_but_paths_do_not():
    moved = tuple(dataclasses.replace(source, shard=f"elsewhere/{source.shard}") for source in SOURCES)
    replaced = (SOURCES[0], dataclasses.replace(SOURCES[1], content="another key"))
    assert chain(moved).hash(5) == chain().hash(5)
    others = [chain(replaced), chain(SOURCES[::-1]), chain(seq_length=32), chain(SOURCES[:1])]
    assert chain().hash(0) not in {other.hash(0) for other in others}
    assert len({other.hash(5) for other in others}) == 4


def test_extending_a_hash_reads_only_new_samples():
    followed = chain()
    followed.hash(100 * BLOCK_SAMPLES)
    before = followed._dataset.num_requested
    for number in range(1, 11):
        followed.hash(100 * BLOCK_SAMPLES + number)
    assert followed._dataset.num_requested - before == sum(range(1, 11))


def test_a_mark_survives_plain_values():
    mark = chain().record(7)
    assert (mark.num_samples, mark.sha256) == (7, chain().hash(7))
    assert from_plain(SampleHash, mark.plain()) == mark
    json.dumps(mark.plain())
    assert mark.differences(mark) == []


@pytest.mark.parametrize(
    ("other", "lines"),
    [
        (chain(seed=2), ["--seed: 1 -> 2"]),
        (chain(seq_length=32, seed=3), ["--seq-length: 16 -> 32", "--seed: 1 -> 3"]),
        (chain(SOURCES[:1]), ["shards: a b -> a"]),
        (chain((SOURCES[0], dataclasses.replace(SOURCES[1], content="new"))), ["shard b: different content"]),
        (chain((SOURCES[0], dataclasses.replace(SOURCES[1], shard="c"))), []),
        (
            chain((SOURCES[0], dataclasses.replace(SOURCES[1], shard="c", content="x"))),
            ["shard b -> c: different content"],
        ),
        (
            chain(tuple(dataclasses.replace(source, weight=0.5, documents=(0, 9)) for source in SOURCES)),
            [
                "shard a: weight 0.25 -> 0.5", "shard a: documents 0 to 9 -> 0 to 8",
                "shard b: weight 0.75 -> 0.5", "shard b: documents 0 to 19 -> 0 to 8",
            ],
        ),
    ],
)  # fmt: skip
def test_differences_are_named(other, lines):
    assert chain().record(7).differences(other.record(7)) == lines
