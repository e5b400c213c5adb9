"""Stragglers: detection of ranks that the others wait for.

The gradient reduction ends a step at the same time on all ranks. What differs is the local time: from the start of a
step until the rank's first gradient bucket is ready for the reduction, without waits for gathered parameters. At the
steps that are logged, rank 0 gets the means of all ranks and compares those of a pipeline stage. Tensor- and
context-parallel ranks wait for each other in every layer, so that a slow rank makes its group appear slow. A CUDA graph
calls no hooks, so that there is nothing to compare.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from megafp8.config.topology import layout_of
from megafp8.mcore.process_groups import bucket_groups
from megafp8.metrics.records import EventRecord
from megafp8.metrics.timers import RECORDS
from megafp8.optimizer.gradient_communication import add_grad_sync_hook
from megafp8.training.extension import Extension, LoopState
from megafp8.training.step import StepResult

SLOW_FACTOR = 1.5
MAX_NAMED = 8  # ranks
Timestamp = Union[float, torch.cuda.Event]


class Stragglers(Extension):
    """Measures the local time of this rank's steps, and records slow ranks at the steps that are logged."""

    span = RECORDS

    def open(self, state: LoopState) -> None:
        run = state.run
        self.is_active = not run.graph.has_graphs and run.rank_position.world_size > 1
        if not self.is_active:
            return
        layout, is_first = layout_of(run.config, run.rank_position.world_size), run.rank_position.rank == 0
        self.stages = [layout.coordinates(rank).pipeline for rank in range(layout.world_size)] if is_first else []
        self.on_cuda = run.platform.kind == "cuda"
        self.started: Optional[Timestamp] = None
        self.ready: Optional[Timestamp] = None
        self.waits: list[tuple[Timestamp, Timestamp]] = []
        self.total_ms, self.num_steps = 0.0, 0
        for chunk in run.training_state.chunks:
            for group in bucket_groups(chunk):
                add_grad_sync_hook(group, self.record_ready)
                group.finish_param_sync = self.timed_wait(group.finish_param_sync)

    def before_step(self, state: LoopState) -> None:
        if self.is_active:
            self.started, self.ready = self.now(), None
            self.waits.clear()

    def after_step(self, state: LoopState, result: StepResult) -> None:
        """Add up the local time; at a step that is logged, compare the mean since the last one with other ranks'."""
        if not self.is_active:
            return
        run = state.run
        if self.ready is not None and self.started is not None:
            waited_ms = sum(elapsed_ms(*wait) for wait in self.waits)
            self.total_ms += elapsed_ms(self.started, self.ready) - waited_ms
            self.num_steps += 1
        if state.step % run.config.logging.log_interval:
            return
        times = torch.zeros(run.rank_position.world_size, dtype=torch.float64, device=run.platform.device)
        times[run.rank_position.rank] = self.total_ms / max(1, self.num_steps)
        # NCCL reduces to all ranks along a tree. It gathers, and reduces to one rank, along a ring of all ranks.
        dist.all_reduce(times)
        self.total_ms, self.num_steps = 0.0, 0
        if run.rank_position.rank == 0:
            step, times_ms = state.step, times.tolist()
            found = slow_ranks(times_ms, self.stages)
            state.sinks.defer(lambda: (EventRecord(step=step, name="straggler", detail=text) for text in found))

    def timed_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Time a wait for gathered parameters, which does not count as local time."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self.now()
            result = wait(*args, **kwargs)
            if self.ready is None:
                self.waits.append((started, self.now()))
            return result

        return timed

    def record_ready(self) -> None:
        """Record the start of the first reduction of a step."""
        if self.ready is None:
            self.ready = self.now()

    def now(self) -> Timestamp:
        """A timestamp: of the host, or on CUDA an event on the current stream."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def elapsed_ms(start: Any, end: Any) -> float:
    """Milliseconds between two timestamps. The device has passed both, since the step has ended."""
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1000 * (end - start)


def slow_ranks(times_ms: Sequence[float], stages: Sequence[int]) -> Iterator[str]:
    """Lines about the ranks whose local time is far above the median of their pipeline stage, the slowest first.

    Args:
        times_ms: by rank.
        stages: the pipeline stage of each rank.
    """
    by_stage: dict[int, list[float]] = {}
    for own_ms, stage in zip(times_ms, stages, strict=True):
        by_stage.setdefault(stage, []).append(own_ms)
    usual_ms = {stage: statistics.median_low(times) for stage, times in by_stage.items()}
    slow = [
        (own_ms / usual_ms[stage], rank, own_ms, usual_ms[stage])
        for rank, (own_ms, stage) in enumerate(zip(times_ms, stages, strict=True))
        if own_ms > SLOW_FACTOR * usual_ms[stage] > 0
    ]
    for ratio, rank, own_ms, median_ms in sorted(slow, reverse=True)[:MAX_NAMED]:
        yield (
            f"rank {rank} needs {own_ms:.0f} ms per step until its gradients are ready, {ratio:.1f} times the "
            f"median of {median_ms:.0f} ms"
        )
    if len(slow) > MAX_NAMED:
        yield f"{len(slow) - MAX_NAMED} more ranks need more than {SLOW_FACTOR:g} times the median of their stage"
