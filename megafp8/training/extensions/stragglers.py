"""Stragglers: which rank the others wait for.

Every step ends at the same time on all ranks, since they add up gradients. What tells them apart is when each has its
own gradients ready: the time from the start of a step until its first bucket is given to the reduction, without waits
for gathered parameters. It is exchanged with the lines of the log. Ranks are compared that do the same on other data.
Tensor- and context-parallel ranks wait for each other in every layer, so that a slow one makes the others look as slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from megafp8.metrics.records import EventRecord
from megafp8.optimizer.gradient_communication import on_reduction
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import Run
from megafp8.training.step import StepResult

SLOW_FACTOR = 1.5
Moment = Union[float, torch.cuda.Event]


class Stragglers(Extension):
    """Records ranks that are slow, at the steps that are logged."""

    def open(self, state: LoopState) -> None:
        self.times = OwnTimes(state.run)

    def before_step(self, state: LoopState) -> None:
        self.times.start()

    def after_step(self, state: LoopState, result: StepResult) -> None:
        for event in self.times.found(state.step):
            state.sinks.write(event)


class OwnTimes:
    """Times one rank's own part of its steps, and compares it with that of others."""

    def __init__(self, run: Run):
        self.on_cuda, self.interval = run.platform.kind == "cuda", run.config.logging.log_interval
        self.device, self.stage = run.platform.device, run.place.pipeline_rank
        self.started: Optional[Moment] = None
        self.ready: Optional[Moment] = None
        self.waits: list[tuple[Moment, Moment]] = []
        self.total_ms, self.num_steps = 0.0, 0
        # A graph shows no moment within a step.
        for chunk in run.trainee.chunks if run.graph is None else ():
            for group in chunk.bucket_groups:
                on_reduction(group, self.note_ready)
                group.finish_param_sync = self.waiting(group.finish_param_sync)

    def waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """A wait for parameters that others updated, whose time is theirs."""

        def wait_noted(*args: Any, **kwargs: Any) -> Any:
            started = self.now()
            result = wait(*args, **kwargs)
            if self.ready is None:
                self.waits.append((started, self.now()))
            return result

        return wait_noted

    def note_ready(self) -> None:
        """A reduction starts: note the first of a step."""
        if self.ready is None:
            self.ready = self.now()

    def now(self) -> Moment:
        """A moment; on CUDA one of the device, which runs behind."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """A step starts."""
        self.started, self.ready = self.now(), None
        self.waits.clear()

    def found(self, step: int) -> list[EventRecord]:
        """A step has ended: at one that is logged, events on ranks that were slow since the last. All ranks call it."""
        if self.ready is not None and self.started is not None:
            waited_ms = sum(milliseconds(*wait) for wait in self.waits)
            self.total_ms += milliseconds(self.started, self.ready) - waited_ms
            self.num_steps += 1
        if step % self.interval:
            return []
        mine = torch.tensor([self.total_ms / max(1, self.num_steps), self.stage], dtype=torch.float64)
        mine = mine.to(self.device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        self.total_ms, self.num_steps = 0.0, 0
        return [EventRecord(step=step, name="straggler", detail=text) for text in slow_ranks(torch.stack(gathered))]


def milliseconds(start: Any, end: Any) -> float:
    """From one moment to another; the device has passed both, as the step has ended."""
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1000 * (end - start)


def slow_ranks(times: torch.Tensor) -> list[str]:
    """A line for each rank that took much longer than the others of its pipeline stage.

    Args:
        times: float64 [ranks, 2]: milliseconds and stage.
    """
    rows = [(rank, own_ms, stage) for rank, (own_ms, stage) in enumerate(times.tolist())]
    found = []
    for rank, own_ms, stage in rows:
        usual_ms = statistics.median_low(ms for _, ms, other in rows if other == stage)
        if own_ms > SLOW_FACTOR * usual_ms > 0:
            ratio = own_ms / usual_ms
            found.append(
                f"rank {rank} takes {own_ms:.0f} ms a step until its gradients are ready, {ratio:.1f} times the median "
                f"of {usual_ms:.0f} ms"
            )
    return found
