"""Asynchronous checkpoint saves: copy to host memory, then write in a background thread.

Ranks synchronize in the training thread only, at most once per step and with one scalar. Background threads never
call a collective, so theirs cannot interleave with those of training, and a rank whose write hangs is detected by the
other ranks' deadlines. A checkpoint is reported once it has its final name.
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

from megafp8.checkpoint.directory import Retention
from megafp8.checkpoint.progress import Progress, TrainingState
from megafp8.checkpoint.save import PreparedSave, ReusableSavePlan, WriteOutput, prepare_save, save_errors
from megafp8.config.schema import RunConfig
from megafp8.data.sample_hash import SampleHash
from megafp8.device.collective_errors import call_on_all_ranks, gather_on_rank_0
from megafp8.errors import CheckpointError, OutOfMemory
from megafp8.utils.process import in_thread


class AsyncSaver:
    """Starts saves one after the other, and keeps the plan and the host buffers between them.

    Args:
        timeout_s: a save that takes longer has failed.
        device: for the collective on which ranks agree.
    """

    def __init__(self, config: RunConfig, training_state: TrainingState, timeout_s: float, device: torch.device):
        self._config, self._training_state = config, training_state
        self._timeout_s, self._device = timeout_s, device
        self.forget()

    def forget(self) -> None:
        """Drop the plan and the buffers: a thread of a failed save may still use them."""
        self._copies = HostBuffers()
        self._plan: Optional[ReusableSavePlan] = None

    def begin(
        self,
        folder: Path,
        progress: Progress,
        samples: Optional[SampleHash] = None,
        *,
        keep: Optional[Retention] = None,
        is_divided: bool = False,
    ) -> AsyncSave:
        """Start a save with the arguments of `save_checkpoint`; all ranks call it after the previous save has ended.

        Raises:
            CheckpointError: on all ranks: the save cannot be started.
        """
        with save_errors(folder, progress.step, is_divided):
            save = prepare_save(
                folder, self._config, self._training_state, progress, samples,
                keep=keep, last=self._plan, is_written_later=True, is_divided=is_divided,
            )  # fmt: skip
        self._plan = save.plan
        copy = HostCopy(save.plan.items, save.planner, self._copies)
        # The optimizer calls this before it changes weights.
        self._training_state.pending_copies.append(lambda: copy.wait(self._timeout_s))
        return AsyncSave(save, copy, self._timeout_s, self._device)


class AsyncSave:
    """A save in progress.

    Attributes:
        progress: of the run when the save started.
    """

    def __init__(self, prepared: PreparedSave, copy: HostCopy, timeout_s: float, device: torch.device):
        self.progress = prepared.progress
        self._prepared, self._timeout_s, self._device = prepared, timeout_s, device
        self._deadline = time.monotonic() + timeout_s
        self._is_written = False

        def work() -> WriteOutput:
            copy.make()
            return prepared.write(copy.data)

        # The thread calls no collective: what it needs from other ranks was done in `prepare_save`.
        self._work: Future[Any] = in_thread(work)

    def poll(self, is_waiting: bool = False) -> Optional[Path]:
        """Return the checkpoint's folder once it has its final name, else None; all ranks call it.

        Args:
            is_waiting: block until then.

        Raises:
            CheckpointError: on all ranks: the save failed or timed out.
        """
        with save_errors(self._prepared.folder, self.progress.step, self._prepared.is_divided):
            while self._is_done_everywhere(is_waiting):
                # Twice: first all ranks have written their files, then rank 0 has written metadata and manifest.
                if self._is_written:
                    return call_on_all_ranks(self._result)[0]
                written = gather_on_rank_0(self._result)
                self._is_written = True
                self._work = in_thread(self._finish, written)
            return None

    def _finish(self, written: list[WriteOutput]) -> Optional[Path]:
        return self._prepared.finish(written) if dist.get_rank() == 0 else None

    def _is_done_everywhere(self, is_waiting: bool) -> bool:
        if is_waiting:
            wait([self._work], max(0.0, self._deadline - time.monotonic()))
        is_done = self._work.done() or time.monotonic() >= self._deadline
        flag = torch.tensor(int(is_done), device=self._device)
        # The minimum: done only if all ranks are. A rank whose write hangs is done at its deadline, and raises in
        # `_result`.
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def _result(self) -> Any:
        if not self._work.done():
            # The thread may still be blocked on the disk. It must not change the folder when the disk responds.
            self._prepared.lease.revoke()
            raise CheckpointError(f"writing takes longer than {self._timeout_s:g} s; raise --async-save-timeout")
        return self._work.result()


ItemData = Union[Tensor, io.BytesIO]


class HostBuffers:
    """Host memory for one copy of what this rank writes. One save at a time uses it."""

    def __init__(self) -> None:
        self._tensors: dict[MetadataIndex, Tensor] = {}

    def allocate(self, data: dict[MetadataIndex, ItemData]) -> dict[MetadataIndex, Tensor]:
        """Return a host tensor for each tensor, reusing those of the previous save; pinned if there is a GPU.

        Raises:
            OutOfMemory: the host has not enough free memory.
        """
        wanted = {index: value for index, value in data.items() if isinstance(value, Tensor)}
        reused = {}
        for index, value in wanted.items():
            buffer = self._tensors.get(index)
            if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
                reused[index] = buffer
        needed = sum(value.nbytes for index, value in wanted.items() if index not in reused)
        free = psutil.virtual_memory().available
        if needed > free:
            raise OutOfMemory(
                f"--async-save needs {needed / 1e9:.3f} GB of host memory for a copy of the state, but only "
                f"{free / 1e9:.3f} GB are free: remove --async-save, or use more ranks"
            )
        is_pinned = torch.cuda.is_available()
        for index, value in wanted.items():
            if index not in reused:
                reused[index] = torch.empty(value.shape, dtype=value.dtype, pin_memory=is_pinned)
        self._tensors = reused
        return self._tensors


class HostCopy:
    """A copy of what a rank writes, made in a thread during the next step's forward-backward.

    Weights and moments do not change until the next optimizer update. Whoever updates them calls `wait` first.

    Args:
        plan: the items to write.
        planner: resolves an item to its data.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, buffers: HostBuffers):
        self._plan, self._planner, self._buffers = plan, planner, buffers
        self._is_issued, self._is_abandoned = threading.Event(), False
        self._data: dict[MetadataIndex, ItemData] = {}
        self._stream = CopyStream() if torch.cuda.is_available() else None

    def make(self) -> None:
        """Copy everything. Runs in the background thread.

        Raises:
            OutOfMemory: the host has not enough memory.
            CheckpointError: `wait` has timed out.
        """
        try:
            data = {item.index: self._planner.resolve_data(item) for item in self._plan.items}
            copies = self._buffers.allocate(data)
            self._data = data | copies
            with self._stream.in_thread() if self._stream else nullcontext():
                for index, value in data.items():
                    if isinstance(value, Tensor):
                        copies[index].copy_(value.detach(), non_blocking=True)
        finally:
            self._is_issued.set()
        if self._stream:
            # The thread waits for the device, not the training thread.
            self._stream.copied.synchronize()
        if self._is_abandoned:
            raise CheckpointError("the copy to host memory was not complete before the weights changed")

    def wait(self, timeout_s: float) -> None:
        """Block until weights and moments may change. A copy that is not made in time is abandoned."""
        if not self._is_issued.wait(timeout_s):
            self._is_abandoned = True
        if self._stream:
            # The update waits on the device, also if the copies are not complete when the host comes here.
            torch.cuda.current_stream().wait_event(self._stream.copied)

    def data(self, item: WriteItem) -> ItemData:
        """Return the copy of an item of the plan."""
        return self._data[item.index]


class CopyStream:
    """Orders device-to-host copies after the computation so far and before the next update."""

    def __init__(self) -> None:
        self._device, self._computed, self.copied = torch.cuda.current_device(), torch.cuda.Event(), torch.cuda.Event()
        self._computed.record()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Run copies of the calling thread on a stream of their own."""
        torch.cuda.set_device(self._device)  # each thread has its own
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # What was computed when the save began. Later kernels of the step may run beside the copies.
            stream.wait_event(self._computed)
            yield
            self.copied.record(stream)
