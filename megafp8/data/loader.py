"""Microbatches of one data-parallel rank.

Sample i of the run is `dataset[i]`, and global batch g is samples g*B to (g+1)*B. It is cut as Megatron's `single`
loader cuts it: microbatch m takes the next `micro_batch_size * data_parallel_size` samples, of which rank r has its
consecutive slice. So which samples a step sees depends neither on the layout nor on the loader's processes, and the
whole state of a loader is the number of samples consumed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from megafp8.errors import DataError
from megafp8.utils.process import STOP_SIGNALS, end_with_starter

KEYS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True, kw_only=True)
class MicrobatchSampler:
    """Sample indices of each microbatch of one rank, from a sample on; whole global batches only."""

    consumed_samples: int
    total_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    global_batch_size: int

    def __post_init__(self) -> None:
        assert 0 <= self.data_parallel_rank < self.data_parallel_size, (
            self.data_parallel_rank,
            self.data_parallel_size,
        )
        assert self.consumed_samples >= 0, self.consumed_samples
        assert self.global_batch_size % (self.micro_batch_size * self.data_parallel_size) == 0, self

    def __iter__(self) -> Iterator[list[int]]:
        slice_offset = self.data_parallel_rank * self.micro_batch_size
        for start in self._batch_starts():
            for chunk in range(start, start + self.global_batch_size, self.micro_batch_size * self.data_parallel_size):
                first = chunk + slice_offset
                yield list(range(first, first + self.micro_batch_size))

    def __len__(self) -> int:
        num_microbatches = self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)
        return len(self._batch_starts()) * num_microbatches

    def _batch_starts(self) -> range:
        return range(self.consumed_samples, self.total_samples - self.global_batch_size + 1, self.global_batch_size)


def samples_of_step(
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    global_batch_size: int,
) -> list[int]:
    """Numbers of the samples that one data-parallel rank reads in the step after `consumed_samples`, in their order."""
    sampler = MicrobatchSampler(
        consumed_samples=consumed_samples,
        total_samples=consumed_samples + global_batch_size,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        global_batch_size=global_batch_size,
    )
    return [sample for microbatch in sampler for sample in microbatch]


def describe_samples(numbers: Iterable[int]) -> str:
    """Rising numbers as ranges: "samples 4-7, 12-15"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return "samples " + ", ".join("-".join(map(str, ends)) for ends in ranges)


def build_loader(
    dataset: Any,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    global_batch_size: int,
    num_workers: int,
    total_samples: int,
    pin_memory: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """Iterate over this rank's microbatches from sample `consumed_samples` to `total_samples`, once.

    It takes nothing from the global random state and leaves it as it is.

    Args:
        dataset: one of `build_datasets`.
        consumed_samples: sequences that all ranks together have read before.
        num_workers: processes that read ahead; 0 reads in this process.
        total_samples: sequences of the run; a last global batch that they do not fill is left out.
        pin_memory: page-locked tensors, for asynchronous copies to a CUDA device.

    Returns:
        Iterator of dicts: tokens, labels, position_ids int64 [micro_batch_size, seq_length], loss_mask float32 of the
        same shape.

    Raises:
        DataError: the dataset holds fewer than `total_samples`; in iterating, a sample cannot be read.
    """
    if total_samples > len(dataset):
        raise DataError(f"{total_samples} samples are to be read, but the dataset holds {len(dataset)}.")
    sampler = MicrobatchSampler(
        consumed_samples=consumed_samples,
        total_samples=total_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        global_batch_size=global_batch_size,
    )
    loader = DataLoader(
        _Microbatches(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        worker_init_fn=_outlast_signals if num_workers else None,
        multiprocessing_context=_LoaderContext() if num_workers else None,
        # DataLoader draws a seed for its processes; from the global generator that would shift dropout on resume.
        generator=torch.Generator().manual_seed(0),
    )
    return _checked(iter(loader))


class _KilledPopen(Popen):
    """A loader process ignores SIGTERM, so what wants to end it (multiprocessing, as Python exits) must kill it."""

    terminate = Popen.kill


class _LoaderProcess(ForkProcess):
    """A process that ends when it is told to."""

    _Popen = _KilledPopen


class _LoaderContext(ForkContext):
    """Where DataLoader gets its processes from."""

    Process = _LoaderProcess


def _outlast_signals(worker: int) -> None:
    """In a loader process: leave signals to the training process, which needs more batches until it has saved; and end
    with it, however it ends."""
    end_with_starter(signal.SIGKILL)
    signal.set_wakeup_fd(-1)  # it is the training process's
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _Microbatches(TorchDataset):
    """Whole microbatches of a dataset. An error is handed over as a value: raised in a loader process, it would reach
    the user inside a traceback of torch's."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __getitems__(self, indices: list[int]) -> "dict[str, torch.Tensor] | DataError":
        try:
            return stack_samples([self._dataset[index] for index in indices])
        except DataError as error:
            return error


def _as_it_is(batch: Any) -> Any:
    return batch


def _checked(batches: Iterator[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """The batches, up to the first that could not be read."""
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except (ConnectionError, EOFError) as error:  # it died while it handed a batch over
        raise _death(error) from error
    finally:
        del batches  # ends the loader processes now; an error's traceback would hold them as long as it is held


@contextmanager
def loader_deaths_explained() -> Iterator[None]:
    """Within, the end of a loader process that nobody asked for is a DataError.

    torch raises it wherever the training process is at that moment.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise _death(error) from error


def _death(error: Exception) -> DataError:
    return DataError(
        f"A loader process ended by itself: {error} Out of memory or of shared memory (/dev/shm), or a shard was "
        "cut short while it was read. --num-workers 0 loads in the training process."
    )


def stack_samples(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack the tensors that training reads; a blend's dataset number, for example, is not one of them."""
    return {key: torch.stack([sample[key] for sample in samples]) for key in KEYS}
