"""Copies of what a save writes, in memory of the host that is kept from one save to the next."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Optional, Union

import psutil
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from megafp8.errors import CheckpointError

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
