"""Data loader: the microbatches of one data-parallel rank.

Sample i of the run is `dataset[i]`, and global batches hold consecutive samples: their sizes, constant or under a batch
schedule, do not change the order. A global batch is divided as by Megatron's `single` loader: microbatch m takes the
next `micro_batch_size * data_parallel_size` samples, of which rank r takes its consecutive slice. The samples of a step
depend neither on the parallel layout nor on the number of loader processes, and the complete state of a loader is the
number of consumed samples.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from megafp8.config.batch_schedule import BatchSchedule, constant
from megafp8.errors import DataError
from megafp8.utils.process import STOP_SIGNALS, set_worker_death_signal

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "document_starts")


@dataclass(frozen=True, kw_only=True)
class MicrobatchSampler:
    """Sample indices of each microbatch of one rank, from `consumed_samples` on; complete global batches only."""

    consumed_samples: int
    total_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    batch_schedule: BatchSchedule

    def __post_init__(self) -> None:
        assert 0 <= self.data_parallel_rank < self.data_parallel_size, self
        assert self.consumed_samples >= 0, self
        sequences = self.micro_batch_size * self.data_parallel_size
        assert not any(phase.batch_size % sequences for phase in self.batch_schedule.phases), self

    def __iter__(self) -> Iterator[list[int]]:
        for start in self._starts():
            first = start + self.data_parallel_rank * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))

    def __len__(self) -> int:
        return len(self._starts())

    def _starts(self) -> range:
        """First sample of each microbatch, over all ranks."""
        num_batches = self.batch_schedule.num_steps(self.total_samples, self.consumed_samples)
        stop = self.batch_schedule.advance(num_batches, self.consumed_samples)
        return range(self.consumed_samples, stop, self.micro_batch_size * self.data_parallel_size)


def samples_of_step(
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    global_batch_size: int,
) -> list[int]:
    """Return the samples that one data-parallel rank reads in the step after `consumed_samples`, in order."""
    sampler = MicrobatchSampler(
        consumed_samples=consumed_samples,
        total_samples=consumed_samples + global_batch_size,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        batch_schedule=constant(global_batch_size),
    )
    return [sample for microbatch in sampler for sample in microbatch]


def describe_samples(numbers: Iterable[int]) -> str:
    """Format increasing numbers as ranges: "samples 4-7, 12-15"."""
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
    batch_schedule: BatchSchedule,
    num_workers: int,
    total_samples: int,
    pin_memory: bool = False,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Iterate once over this rank's microbatches, from sample `consumed_samples` to `total_samples`.

    The global random state is neither used nor changed.

    Args:
        dataset: one of `build_datasets`.
        consumed_samples: sequences that all ranks together have read before.
        batch_schedule: sizes of the global batches, multiples of micro-batch x data-parallel size.
        num_workers: processes that read ahead; 0 reads in this process.
        total_samples: sequences of the run; an incomplete last global batch is left out.
        pin_memory: return page-locked tensors, for asynchronous copies to a CUDA device.

    Returns:
        Generator, whose `close` ends the processes, of dicts with tokens, labels and position_ids, int64
        [micro_batch_size, seq_length], and loss_mask, float32 of the same shape; with `--reset-attention-mask` also
        document_starts, bool of the same shape.

    Raises:
        DataError: the dataset holds fewer than `total_samples`; while iterating, a sample cannot be read.
    """
    if total_samples > len(dataset):
        raise DataError(f"{total_samples} samples are needed, but the dataset has {len(dataset)}.")
    sampler = MicrobatchSampler(
        consumed_samples=consumed_samples,
        total_samples=total_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        batch_schedule=batch_schedule,
    )
    loader = DataLoader(
        _Microbatches(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_identity,
        pin_memory=pin_memory,
        worker_init_fn=_init_worker if num_workers else None,
        multiprocessing_context=_LoaderContext() if num_workers else None,
        # DataLoader draws a seed for its processes. Drawn from the global generator, it would change dropout on resume.
        generator=torch.Generator().manual_seed(0),
    )
    return _raise_errors(iter(loader))


class _KillingPopen(Popen):
    """Ends a loader process with SIGKILL, since it ignores SIGTERM."""

    terminate = Popen.kill


class _LoaderProcess(ForkProcess):
    _Popen = _KillingPopen


class _LoaderContext(ForkContext):
    """The multiprocessing context of DataLoader."""

    Process = _LoaderProcess


def _init_worker(worker: int) -> None:
    """Make a loader process ignore signals and end with the training process.

    On a signal, the training process needs more batches until it has saved.
    """
    set_worker_death_signal(signal.SIGKILL)
    signal.set_wakeup_fd(-1)  # the inherited one belongs to the training process
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _Microbatches(TorchDataset):
    """Complete microbatches of a dataset.

    Errors are returned as values. Raised in a loader process, they would reach the user inside a traceback of torch's.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __getitems__(self, indices: list[int]) -> "dict[str, torch.Tensor] | DataError":
        try:
            samples = [self._dataset[index] for index in indices]
        except DataError as error:
            return error
        return stack_samples(samples)


def stack_samples(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The batch of some samples: each of their `BATCH_KEYS`, with the samples along a new first dimension."""
    keys = [key for key in BATCH_KEYS if key in samples[0]]
    return {key: torch.stack([sample[key] for sample in samples]) for key in keys}


def _identity(batch: Any) -> Any:
    return batch


def _raise_errors(batches: Iterator[Any]) -> Generator[dict[str, torch.Tensor], None, None]:
    """Yield the batches up to the first that could not be read, and raise its error."""
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except (ConnectionError, EOFError) as error:  # the process died while it sent a batch
        raise _loader_exit_error(error) from error
    finally:
        del batches  # ends the loader processes now; the traceback of an error would keep them alive


@contextmanager
def loader_exits_as_data_errors() -> Iterator[None]:
    """Convert the error that torch raises when a loader process dies to a DataError.

    torch raises it at whatever point the training process is.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise _loader_exit_error(error) from error


def _loader_exit_error(error: Exception) -> DataError:
    return DataError(
        f"A data loader process died: {error} The machine may be out of memory or shared memory (/dev/shm), or a shard "
        "was truncated while it was read. --num-workers 0 loads data in the training process."
    )
