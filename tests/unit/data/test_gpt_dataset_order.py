"""Every configuration reads the same global batches: any data-parallel size, resume point and number of workers."""

import hashlib
import random

import numpy as np
import pytest
from shard_files import write_shard

from megafp8.config.batch_schedule import constant
from megafp8.config.schema import DataConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.loader import build_loader
from megafp8.data.tokenizers.build import build_tokenizer

pytest.importorskip("megatron.core")

VOCAB_SIZE = 30_000
BATCH = 8
NUM_BATCHES = 60
NUM_SAMPLES = BATCH * NUM_BATCHES


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """`build(num_samples)`: a blend that repeats its first shard over several epochs."""
    folder, generator = tmp_path_factory.mktemp("order"), np.random.default_rng(0)
    prefixes = []
    for name, count in (("a", 20), ("b", 200)):
        documents = [generator.integers(0, VOCAB_SIZE, size) for size in generator.integers(1, 60, count)]
        prefixes.append(write_shard(folder / name, documents))
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), VOCAB_SIZE)
    data = DataConfig(data_path=("1", prefixes[0], "2", prefixes[1]), split="1", seq_length=16)

    def build(num_samples):
        return build_datasets(data, tokenizer, (num_samples, 0, 0), seed=1234)[0]

    return build


def batches_of(dataset, consumed, size, workers, micro=1, num_samples=NUM_SAMPLES):
    """The global batches from a sample on, each combined from the microbatches of all ranks."""
    ranks = [
        build_loader(
            dataset, consumed_samples=consumed, micro_batch_size=micro, data_parallel_rank=rank,
            data_parallel_size=size, batch_schedule=constant(BATCH), num_workers=workers, total_samples=num_samples,
        )
        for rank in range(size)
    ]  # fmt: skip
    microbatches = BATCH // (micro * size)
    for _ in range((num_samples - consumed) // BATCH):
        parts = [[next(rank) for rank in ranks] for _ in range(microbatches)]
        yield [part for parts_of_ranks in parts for part in parts_of_ranks]
    assert all(next(rank, None) is None for rank in ranks)


def extend(chain, batches):
    """The chain of hashes of the model's inputs after each global batch."""
    for batch in batches:
        content = b"".join(np.stack([part[key].numpy() for key in sorted(part)], 1).tobytes() for part in batch)
        chain = hashlib.sha256(chain + content).digest()
        yield chain


@pytest.fixture(scope="module")
def unbroken(build):
    """The chain of an unbroken run on one rank, before the first and after each global batch."""
    return [b"", *extend(b"", batches_of(build(NUM_SAMPLES), 0, size=1, workers=0))]


def test_the_run_crosses_epochs(build):
    first, second = build(NUM_SAMPLES).datasets
    assert first._get_num_epochs(first._get_num_tokens_per_epoch()) >= 3
    assert second._get_num_epochs(second._get_num_tokens_per_epoch()) == 1


def test_resume_at_a_hundred_points_keeps_the_order(build, unbroken):
    """Each resumed run is rebuilt on 1, 2 or 4 ranks, for a run as long or longer, and continues to the end."""
    generator = random.Random(1)
    for kill in sorted(generator.choices(range(NUM_BATCHES), k=100)):
        size, micro = generator.choice([1, 2, 4]), generator.choice([1, 2])
        dataset = build(NUM_SAMPLES + generator.choice([0, 0, 1, 700]))
        *_, last = extend(unbroken[kill], batches_of(dataset, kill * BATCH, size, 0, micro))
        assert last == unbroken[-1], (kill, size, micro)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_loader_processes_change_nothing(build, unbroken, size, workers):
    for kill in (0, 31):
        resumed = list(extend(unbroken[kill], batches_of(build(NUM_SAMPLES), kill * BATCH, size, workers)))
        assert resumed == unbroken[kill + 1 :]


def test_different_orders_have_different_hashes(build, unbroken):
    batches = list(batches_of(build(NUM_SAMPLES), 0, size=1, workers=0))
    batches[3], batches[4] = batches[4], batches[3]
    changed = list(extend(b"", batches))
    assert changed[:3] == unbroken[1:4] and changed[-1] != unbroken[-1]
