"""A checkpoint that is written while training goes on.

Ranks agree in the training thread only, at most once a step and with one number: the threads beside it talk to no other
rank. So no collective of theirs can meet one of the training, and a rank that writes for ever is noticed by the others'
deadlines. A checkpoint is told of once it has its final name.

Copies of what a save writes, in memory of the host that is kept from one save to the next.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Optional, Union

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from megafp8.checkpoint.progress import Progress, Trainee
from megafp8.checkpoint.save import ReusableSavePlan, Save, Written, failure_explained, prepare_save
from megafp8.config.schema import RunConfig
from megafp8.data.sample_hash import SampleMark
from megafp8.device.collective_errors import call_on_all_ranks
from megafp8.errors import CheckpointError
from megafp8.utils.process import in_thread


class BackgroundSaves:
    """Begins saves, one after the other; keeps between them what they share.

    Args:
        timeout_s: a save that takes longer has failed.
        device: on which ranks agree.
    """

    def __init__(self, config: RunConfig, trainee: Trainee, timeout_s: float, device: torch.device):
        self._config, self._trainee = config, trainee
        self._timeout_s, self._device = timeout_s, device
        self.forget()

    def forget(self) -> None:
        """Share nothing with the next save: a thread that is left behind may still read and write it."""
        self._copies = HostCopies()
        self._plan: Optional[ReusableSavePlan] = None

    def begin(
        self, folder: Path, progress: Progress, samples: Optional[SampleMark] = None, *, keep: Optional[int] = None
    ) -> BackgroundSave:
        """Begin a save, with the arguments of `save_checkpoint`; all ranks call it, and the one before has ended.

        Raises:
            CheckpointError: on all ranks: it cannot be begun.
        """
        with failure_explained(folder, progress.step):
            save = prepare_save(
                folder, self._config, self._trainee, progress, samples,
                keep=keep, last=self._plan, is_written_later=True,
            )  # fmt: skip
        self._plan = save.plan
        copy = Copy(save.plan.items, save.planner, self._copies)
        self._trainee.being_copied.append(lambda: copy.wait(self._timeout_s))
        return BackgroundSave(save, copy, self._timeout_s, self._device)


class BackgroundSave:
    """A save that is under way.

    Attributes:
        progress: how far the run was when it began.
    """

    def __init__(self, save: Save, copy: Copy, timeout_s: float, device: torch.device):
        self.progress = save.progress
        self._save, self._timeout_s, self._device = save, timeout_s, device
        self._deadline = time.monotonic() + timeout_s
        self._is_written = False

        def work() -> Written:
            copy.make()
            return save.write(copy.data)

        self._work: Future[Any] = in_thread(work)

    def poll(self, is_waiting: bool = False) -> Optional[Path]:
        """The checkpoint's folder if it has its name, else None; all ranks call it.

        Args:
            is_waiting: return when it has.

        Raises:
            CheckpointError: on all ranks: it could not be written, or not in time.
        """
        with failure_explained(self._save.folder, self.progress.step):
            while self._is_done_everywhere(is_waiting):
                results = call_on_all_ranks(self._result)
                if self._is_written:
                    return results[0]
                self._is_written = True
                self._work = in_thread(self._finish, results)
            return None

    def _finish(self, written: list[Written]) -> Optional[Path]:
        return self._save.finish(written) if dist.get_rank() == 0 else None

    def _is_done_everywhere(self, is_waiting: bool) -> bool:
        if is_waiting:
            wait([self._work], max(0.0, self._deadline - time.monotonic()))
        is_over = self._work.done() or time.monotonic() >= self._deadline
        flag = torch.tensor(int(is_over), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def _result(self) -> Any:
        if not self._work.done():
            self._save.permit.revoke()  # the thread goes on, when its disk answers
            raise CheckpointError(
                f"it is not written after {self._timeout_s:g} s; --async-save-timeout gives it more time"
            )
        return self._work.result()


Data = Union[Tensor, io.BytesIO]


class HostCopies:
    """Memory for one copy of what this rank writes; one save at a time uses it."""

    def __init__(self) -> None:
        self._tensors: dict[MetadataIndex, Tensor] = {}

    def places_for(self, data: dict[MetadataIndex, Data]) -> dict[MetadataIndex, Tensor]:
        """A tensor on the host for each tensor; page-locked where there is a GPU, which then copies by itself.

        Raises:
            CheckpointError: the host has no room for them.
        """
        wanted = {index: value for index, value in data.items() if isinstance(value, Tensor)}
        kept = {
            index: place
            for index, value in wanted.items()
            if is_place_for(value, place := self._tensors.get(index))  # fmt: skip
        }
        needed = sum(value.nbytes for index, value in wanted.items() if index not in kept)
        free = psutil.virtual_memory().available
        if needed > free:
            raise CheckpointError(
                f"--async-save copies {needed / 1e9:.3f} GB to host memory and {free / 1e9:.3f} GB is free: save "
                "without it, or use more ranks"
            )
        is_pinned = torch.cuda.is_available()
        self._tensors = {
            index: kept[index] if index in kept else torch.empty(value.shape, dtype=value.dtype, pin_memory=is_pinned)
            for index, value in wanted.items()
        }
        return self._tensors


def is_place_for(value: Tensor, place: Optional[Tensor]) -> bool:
    """Whether a tensor on the host can take a value."""
    return place is not None and place.shape == value.shape and place.dtype == value.dtype


class Copy:
    """One copy of what a rank writes, made in a thread while the next step computes gradients.

    Weights and moments stay as they are until the optimizer's next update, so it is early enough if the copy is made
    by then: whoever changes them calls `wait` first.

    Args:
        plan: what is written.
        planner: knows where it is.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, places: HostCopies):
        self._plan, self._planner, self._places = plan, planner, places
        self._is_issued, self._is_given_up = threading.Event(), False
        self._data: dict[MetadataIndex, Data] = {}
        self._device = DeviceOrder() if torch.cuda.is_available() else None

    def make(self) -> None:
        """Copy everything; for another thread than the one that trains.

        Raises:
            CheckpointError: the host has no room, or `wait` has given the copy up.
        """
        try:
            data = {item.index: self._planner.resolve_data(item) for item in self._plan.items}
            self._data = data | self._places.places_for(data)
            with self._device.in_thread() if self._device else nullcontext():
                for index, value in data.items():
                    if isinstance(value, Tensor):
                        self._data[index].copy_(value.detach(), non_blocking=True)  # type: ignore[union-attr]
        finally:
            self._is_issued.set()
        if self._device:
            self._device.copied.synchronize()
        if self._is_given_up:
            raise CheckpointError("the copy to host memory was not made in time: weights have changed since")

    def wait(self, timeout_s: float) -> None:
        """Return when weights and moments may change. A copy that is not made in time is given up."""
        if not self._is_issued.wait(timeout_s):
            self._is_given_up = True
        if self._device:
            torch.cuda.current_stream().wait_event(self._device.copied)

    def data(self, item: WriteItem) -> Data:
        """The copy of an item of the plan."""
        return self._data[item.index]


class DeviceOrder:
    """The order of what a GPU does: copies come after what was computed before, and before the next update."""

    def __init__(self) -> None:
        self._device, self._computed, self.copied = torch.cuda.current_device(), torch.cuda.Event(), torch.cuda.Event()
        self._computed.record()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Within, in another thread, copies are put on a stream of their own."""
        torch.cuda.set_device(self._device)  # each thread has its own
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            stream.wait_event(self._computed)
            yield
            self.copied.record(stream)
