"""Snapshots of GPU memory on request: a rank that gets SIGUSR2 writes one after its step (`--memory-snapshot-path`)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megafp8.config.schema import RunConfig
from megafp8.training.extension import Extension, LoopState
from megafp8.training.memory_report import snapshot_path, write_snapshot
from megafp8.training.step import StepResult
from megafp8.utils.best_effort import warn


@contextmanager
def early_requests_ignored(config: RunConfig) -> Iterator[None]:
    """Ignore the signal where no `MemorySnapshots` is open, as in setup and in the last evaluation: its default is to
    end the process. Without snapshots it keeps its meaning."""
    if snapshot_path(config, 0) is None:
        yield
        return
    previous = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, previous)


class MemorySnapshots(Extension):
    """Handles the signal, which each rank gets by itself; stop signals are the watchdog's."""

    is_requested = False

    def open(self, state: LoopState) -> None:
        self.path = snapshot_path(state.run.config, state.run.rank_position.rank)
        if self.path is None:
            return
        if state.run.platform.kind != "cuda":
            warn("--memory-snapshot-path and --record-memory-history have no effect: only GPUs have snapshots")
            self.path = None
            return
        self.previous = signal.signal(signal.SIGUSR2, self._request)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        if self.is_requested:
            self.is_requested = False
            write_snapshot(self.path)
            print(f"step {state.step}: memory snapshot {self.path}", flush=True)

    def close(self, state: LoopState, error: BaseException | None) -> None:
        if self.path is not None:
            signal.signal(signal.SIGUSR2, self.previous)

    def _request(self, *_: Any) -> None:
        self.is_requested = True
