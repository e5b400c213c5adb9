import multiprocessing
import os
import signal

import pytest
import torch

from megafp8.config.batch_schedule import constant, ramp_up
from megafp8.data.loader import build_loader, describe_samples, loader_exits_as_data_errors, samples_of_step
from megafp8.errors import DataError

SEQ_LENGTH = 4
GLOBAL_BATCH = 8


class Numbered:
    """Sample i consists of the number i; one epoch is `epoch` samples."""

    def __init__(self, length, epoch=None):
        self.length, self.epoch = length, epoch or length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        value = torch.full((SEQ_LENGTH,), index % self.epoch)
        return {
            "dataset_id": 3,
            "tokens": value,
            "labels": value + 1,
            "loss_mask": torch.ones(SEQ_LENGTH),
            "position_ids": torch.arange(SEQ_LENGTH),
        }


def loader(length=80, *, consumed=0, micro=2, rank=0, size=1, workers=0, total=None, dataset=None, batch=GLOBAL_BATCH):
    return build_loader(
        dataset or Numbered(length),
        consumed_samples=consumed,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=size,
        batch_schedule=constant(batch),
        num_workers=workers,
        total_samples=length if total is None else total,
    )


def samples(batches):
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def global_batches(size, **options):
    """The samples of each global batch, combined from all ranks."""
    ranks = [samples(loader(rank=rank, size=size, **options)) for rank in range(size)]
    per_step = GLOBAL_BATCH // (options.get("micro", 2) * size)
    num_steps = len(ranks[0]) // per_step
    assert all(len(microbatches) == num_steps * per_step for microbatches in ranks)
    return [
        sorted(sum((sum(rank[step * per_step : (step + 1) * per_step], []) for rank in ranks), []))
        for step in range(num_steps)
    ]


def test_one_rank_reads_in_order():
    assert samples(loader(16)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]


def test_ranks_take_consecutive_slices_as_megatron_does():
    assert samples(loader(16, size=2, rank=0)) == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert samples(loader(16, size=2, rank=1)) == [[2, 3], [6, 7], [10, 11], [14, 15]]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_every_layout_sees_the_same_global_batches(size, micro):
    expected = [list(range(start, start + GLOBAL_BATCH)) for start in range(0, 80, GLOBAL_BATCH)]
    assert global_batches(size, micro=micro) == expected


@pytest.mark.parametrize("consumed", range(0, 81, GLOBAL_BATCH))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_resume_continues_exactly_in_any_layout(consumed, size):
    assert global_batches(size, consumed=consumed) == global_batches(1)[consumed // GLOBAL_BATCH :]


def test_resume_with_another_batch_size_skips_and_repeats_nothing():
    before = sum(samples(loader())[:3], [])  # six samples with batches of two
    after = sum(samples(loader(consumed=6, micro=1, batch=4, total=30)), [])
    assert before + after == list(range(30))


@pytest.mark.parametrize("consumed", [0, 8, 16, 24, 40])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_batch_schedule_reads_the_same_samples_in_order(size, consumed):
    """Sizes 8, 16 and 24 from samples 0, 15 and 30: steps end at 8, 16, 32, 56 and 80, and one is incomplete."""
    schedule = ramp_up((8, 8, 30), 24)
    ranks = [
        samples(
            build_loader(
                Numbered(100), consumed_samples=consumed, micro_batch_size=2, data_parallel_rank=rank,
                data_parallel_size=size, batch_schedule=schedule, num_workers=0, total_samples=100,
            )
        )
        for rank in range(size)
    ]  # fmt: skip
    read = [sample for microbatches in zip(*ranks, strict=True) for microbatch in microbatches for sample in microbatch]
    assert read == list(range(consumed, schedule.advance(schedule.num_steps(100, consumed), consumed)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sample_numbers_of_a_step_are_known_without_reading(size):
    for rank in range(size):
        options = {"micro_batch_size": 2, "data_parallel_rank": rank, "data_parallel_size": size}
        told = samples_of_step(consumed_samples=24, global_batch_size=GLOBAL_BATCH, **options)
        assert told == sum(samples(loader(consumed=24, rank=rank, size=size, total=24 + GLOBAL_BATCH)), [])


def test_samples_as_text():
    assert describe_samples([4, 5, 6, 9, 12, 13]) == "samples 4-6, 9, 12-13"


def test_two_epochs():
    dataset = Numbered(40, epoch=20)
    assert sum(samples(loader(40, dataset=dataset)), []) == list(range(20)) * 2
    assert sum(samples(loader(40, dataset=dataset, consumed=16)), []) == [16, 17, 18, 19, *range(20)]


def test_an_incomplete_last_batch_is_dropped():
    assert sum(samples(loader(80, total=23)), []) == list(range(16))
    assert samples(loader(80, total=7)) == []
    assert samples(loader(80, consumed=80)) == []


def test_batch_has_the_tensors_of_training_only():
    batch = next(loader())
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "tokens": ((2, SEQ_LENGTH), torch.int64),
        "labels": ((2, SEQ_LENGTH), torch.int64),
        "loss_mask": ((2, SEQ_LENGTH), torch.float32),
        "position_ids": ((2, SEQ_LENGTH), torch.int64),
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_reading_ahead_changes_nothing(workers):
    assert samples(loader(workers=workers)) == samples(loader())


def test_global_random_state_is_unchanged():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(loader())
    next(loader(workers=1))
    assert torch.equal(torch.get_rng_state(), before)


class Bad(Numbered):
    """Sample 5 cannot be read."""

    def __getitem__(self, index):
        if index == 5:
            raise DataError("Shard s: sample 5 is no good.")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_bad_sample_is_one_error_after_the_good_ones(workers):
    batches = loader(dataset=Bad(80), workers=workers)
    assert samples(next(batches) for _ in range(2)) == [[0, 1], [2, 3]]
    with pytest.raises(DataError) as raised:
        next(batches)
    assert str(raised.value) == "Shard s: sample 5 is no good."


class Deadly(Numbered):
    """Reading sample 5 kills the reading process, as for a mapped shard that is truncated."""

    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGBUS)
        return super().__getitem__(index)


def test_a_dying_loader_process_is_an_error():
    def read():
        try:
            with loader_exits_as_data_errors():
                samples(loader(dataset=Deadly(80), workers=1))
        except DataError as error:
            os._exit(7 if "A data loader process died" in str(error) else 1)

    # torch may raise again at any time until the loader is deleted: not in this process.
    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    child.join(30)
    assert child.exitcode == 7


def test_a_programming_error_is_not_wrapped():
    class Wrong(Numbered):
        def __getitem__(self, index):
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        next(loader(dataset=Wrong(80)))
    with pytest.raises(RuntimeError, match="a mistake"), loader_exits_as_data_errors():
        raise RuntimeError("a mistake")


def test_too_few_samples_is_an_error():
    with pytest.raises(DataError, match="81 .* has 80"):
        loader(80, total=81)


def test_an_indivisible_batch_is_an_assertion():
    with pytest.raises(AssertionError):
        loader(micro=3)
