"""The process that tries micro-batch sizes for one rank: it builds the run and trains a few steps of made-up tokens.

Nothing of it is left when it has ended: the rank that started it builds its own run afterwards.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from typing import NoReturn, Optional

import torch
import torch.distributed as dist

from megafp8.config.precision_options import parse_schedule
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.device.platform import (
    Platform,
    compute_deterministically,
    detect_platform,
    join_ranks,
    order_kernels,
    resident_bytes,
)
from megafp8.mcore import cpu_patches
from megafp8.planning.micro_batch import with_size
from megafp8.training.micro_batch_search.messages import EXCEEDED, Answer, Failed, Measured, TooLarge, TrialSetup
from megafp8.utils.process import STOP_SIGNALS, end_with_starter

# The first step makes optimizer state and compiles kernels.
WARM_UP_STEPS = 2
REPEATS = 3
# Of a step that is timed; a longer one is put together from two that are no longer than needed.
TIMED_S = 1.0
POLL_S = 0.02
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def serve(setup: TrialSetup, pipe: Connection) -> NoReturn:
    """Answer each size that comes through the pipe, until None does; the first that does not fit is the last."""
    end_with_starter(signal.SIGKILL)  # which may have ended during the imports of this process
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the run's own processes handle them
    answer: Optional[Answer] = None
    try:
        trial_run: Optional[TrialRun] = None
        while not isinstance(answer, (TooLarge, Failed)) and (size := pipe.recv()) is not None:
            trial_run = trial_run or TrialRun(setup, size)
            answer = trial_run.measure(size)
            pipe.send(answer)
    except EOFError:
        pass  # the rank is gone
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        pipe.send(TooLarge(brief(text)) if is_out_of_memory(error) else Failed(traceback.format_exc()))
    os._exit(0)  # communicators whose other ends are gone may never close


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller size could have gone well."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in str(error) for words in OUT_OF_MEMORY
    )


def brief(text: str) -> str:
    """The first sentence of an error."""
    return text.splitlines()[0].split(". ")[0]


class TrialRun:
    """The run of one rank, in the sizes that are asked for.

    Args:
        size: the first of them.
    """

    def __init__(self, setup: TrialSetup, size: int):
        config = trial_config(setup.config, size)
        order_kernels(config.parallel.tensor_model_parallel_size)
        if config.precision.deterministic_mode:
            compute_deterministically()
        cpu_patches.install()
        # These import megatron-core, which has been made ready only now.
        from megafp8.training.extensions.statistics import StatisticsCollector
        from megafp8.training.setup import assemble

        self.setup = setup
        self.platform = detect_platform(config.parallel.distributed_backend)
        limit_memory(self.platform, setup.limit_bytes)
        store = None if setup.meeting is None else dist.PrefixStore(setup.name, dist.TCPStore(*setup.meeting))
        join_ranks(self.platform, config.parallel, store)
        self.run = assemble(config, self.platform, setup.implementation, has_data=False)
        has_statistics = config.logging.fp8_log_interval is not None
        self.collector = StatisticsCollector(self.run) if has_statistics else None
        self.kinds = kinds_of_steps(config)

    def measure(self, size: int) -> Answer:
        """Peak memory of steps of any kind, and time per sequence of the kind that most steps are of."""
        batch = self.setup.config.training.global_batch_size
        assert batch is not None
        num_microbatches = batch // (size * self.run.place.data_size)
        least = min(num_microbatches, 2 * self.run.config.parallel.pipeline_model_parallel_size)
        self.platform.forget_peak_memory()
        for number in reversed(self.kinds):
            for _ in range(WARM_UP_STEPS):
                self.step(size, least, number, has_statistics=True)
        counts = self.timed_counts(num_microbatches, self.slowest_s(self.step(size, least, self.kinds[0])))
        seconds = {count: min(self.step(size, count, self.kinds[0]) for _ in range(REPEATS)) for count in counts}
        peak_bytes = self.platform.peak_memory_bytes()
        if peak_bytes > self.setup.limit_bytes:
            return TooLarge(f"took {peak_bytes / 2**30:.2f} GiB")
        few, many = counts[0], counts[-1]
        step_s = seconds[many]
        if many < num_microbatches:  # each microbatch more takes as long as those did
            step_s += (num_microbatches - many) * max(0.0, seconds[many] - seconds[few]) / (many - few)
        return Measured(peak_bytes, 1000 * step_s / batch)

    def timed_counts(self, num_microbatches: int, least_s: float) -> tuple[int, ...]:
        """Microbatches of the steps that are timed: those of the run where that is short, else of two shorter steps.

        Args:
            least_s: time of a step of as many as fill a pipeline twice, or of the run's where that has fewer.
        """
        stages = self.run.config.parallel.pipeline_model_parallel_size
        many = stages * max(2, int(2 * TIMED_S / least_s))
        return (num_microbatches,) if many >= num_microbatches else (stages * (many // stages // 2), many)

    def slowest_s(self, seconds: float) -> float:
        """The longest time of all ranks, which they go by together."""
        longest = torch.tensor(seconds, dtype=torch.float64, device=self.platform.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    def step(self, size: int, num_microbatches: int, number: int, has_statistics: bool = False) -> float:
        """Train one step of a batch of so many microbatches, and its seconds.

        Args:
            number: of the step, whose precision the schedule knows.
            has_statistics: a statistics step, where the run has such steps: they take memory.
        """
        from megafp8.checkpoint.progress import Progress
        from megafp8.training.step import train_step

        run, batch = self.run, size * num_microbatches * self.run.place.data_size
        config = with_values(with_size(run.config, size), {"training.global_batch_size": batch})
        run = dataclasses.replace(run, config=config)
        batches = itertools.repeat(made_up_batch(run.vocab_size, config)) if run.place.needs_batches else None
        self.platform.synchronize()
        started = time.perf_counter()
        if has_statistics and self.collector is not None:
            with self.collector.step(self.collector.interval):
                is_eager = self.collector.is_collecting
                train_step(run, batches, Progress(number - 1), self.collector.before_update, is_eager)
            self.collector.take_records(self.collector.interval)
        else:
            train_step(run, batches, Progress(number - 1))
        self.platform.synchronize()
        return time.perf_counter() - started


def trial_config(config: RunConfig, size: int) -> RunConfig:
    """The run's settings for trials: a dynamic loss scale would start with steps that make no update."""
    fixed = {"optimizer.loss_scale": 1.0} if config.precision.fp16 and config.optimizer.loss_scale is None else {}
    return with_values(with_size(config, size), fixed)


def kinds_of_steps(config: RunConfig) -> list[int]:
    """A step of each precision that `--fp8-schedule` has, that of most steps first; step 1 without one."""
    if config.precision.fp8_schedule is None:
        return [1]
    first_of: dict[bool, int] = {}
    lengths: Counter[bool] = Counter()
    training, first = config.training, 1
    steps = training.train_iters or (training.train_samples or 0) // (training.global_batch_size or 1)
    for stretch in parse_schedule(config.precision.fp8_schedule):
        last = stretch.last_step or max(first, steps)
        first_of.setdefault(stretch.is_quantized, first)
        lengths[stretch.is_quantized] += last - first + 1
        first = last + 1
    return [first_of[is_quantized] for is_quantized, _ in lengths.most_common()]


def made_up_batch(vocab_size: int, config: RunConfig) -> dict[str, torch.Tensor]:
    """A microbatch as the loader makes them, of random tokens."""
    size, length = config.training.micro_batch_size, config.data.seq_length
    assert size is not None and length is not None
    tokens = torch.randint(vocab_size, (size, length + 1), generator=torch.Generator().manual_seed(0))
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(size, length),
        "position_ids": torch.arange(length).expand(size, length).contiguous(),
    }


def limit_memory(platform: Platform, limit_bytes: int) -> None:
    """Let nothing beyond the limit be allocated: a GPU's allocator then raises, a process on a CPU is ended."""
    if platform.kind == "cuda":
        total_bytes = platform.total_memory_bytes()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), platform.device)
    else:
        threading.Thread(target=end_beyond, args=(limit_bytes,), daemon=True).start()


def end_beyond(limit_bytes: int) -> NoReturn:
    """End this process, as the system does when memory is short, once it takes more."""
    while resident_bytes() <= limit_bytes:
        time.sleep(POLL_S)
    os._exit(EXCEEDED)
