"""Stragglers: detection of ranks that the others wait for.

The gradient reduction ends a step at the same time on all ranks. What differs is the local time: from the start of a
step until the rank's first gradient bucket is ready for the reduction, without waits for gathered parameters. Its mean
is exchanged at the steps that are logged, and compared among the ranks of a pipeline stage. Tensor- and
context-parallel ranks wait for each other in every layer, so that a slow rank makes its group appear slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from megafp8.mcore.process_groups import bucket_groups
from megafp8.metrics.records import EventRecord
from megafp8.optimizer.gradient_communication import add_grad_sync_hook
from megafp8.training.extension import Extension, LoopState
from megafp8.training.step import StepResult

SLOW_FACTOR = 1.5
Timestamp = Union[float, torch.cuda.Event]


class Stragglers(Extension):
    """Measures the local time of this rank's steps, and records slow ranks at the steps that are logged."""

    def open(self, state: LoopState) -> None:
        run = state.run
        self.on_cuda = run.platform.kind == "cuda"
        self.started: Optional[Timestamp] = None
        self.ready: Optional[Timestamp] = None
        self.waits: list[tuple[Timestamp, Timestamp]] = []
        self.total_ms, self.num_steps = 0.0, 0
        # A CUDA graph calls no hooks.
        for chunk in run.trainee.chunks if run.graph is None else ():
            for group in bucket_groups(chunk):
                add_grad_sync_hook(group, self.record_ready)
                group.finish_param_sync = self.timed_wait(group.finish_param_sync)

    def before_step(self, state: LoopState) -> None:
        self.started, self.ready = self.now(), None
        self.waits.clear()

    def after_step(self, state: LoopState, result: StepResult) -> None:
        """Add up the local time; at a step that is logged, compare the mean since the last one with other ranks'."""
        run = state.run
        if self.ready is not None and self.started is not None:
            waited_ms = sum(elapsed_ms(*wait) for wait in self.waits)
            self.total_ms += elapsed_ms(self.started, self.ready) - waited_ms
            self.num_steps += 1
        if state.step % run.config.logging.log_interval:
            return
        row = [self.total_ms / max(1, self.num_steps), run.place.pipeline_rank]
        local = torch.tensor(row, dtype=torch.float64, device=run.platform.device)
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local)
        self.total_ms, self.num_steps = 0.0, 0
        for text in slow_ranks(torch.stack(gathered)):
            state.sinks.write(EventRecord(step=state.step, name="straggler", detail=text))

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


def slow_ranks(times: torch.Tensor) -> list[str]:
    """A line for each rank whose local time is far above the median of its pipeline stage.

    Args:
        times: [ranks, 2], FP64: milliseconds and pipeline stage.
    """
    rows = [(rank, own_ms, stage) for rank, (own_ms, stage) in enumerate(times.tolist())]
    found = []
    for rank, own_ms, stage in rows:
        usual_ms = statistics.median_low(ms for _, ms, other in rows if other == stage)
        if own_ms > SLOW_FACTOR * usual_ms > 0:
            ratio = own_ms / usual_ms
            found.append(
                f"rank {rank} needs {own_ms:.0f} ms per step until its gradients are ready, {ratio:.1f} times the "
                f"median of {usual_ms:.0f} ms"
            )
    return found
