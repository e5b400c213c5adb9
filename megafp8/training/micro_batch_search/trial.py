"""The trial process of one rank: it builds the run and times a few steps on synthetic data in each micro-batch size."""

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
from typing import NoReturn

import torch
import torch.distributed as dist

from megafp8.config import iterations
from megafp8.config.layer_backends import LAYER_BACKENDS
from megafp8.config.micro_batch_sizes import last_batch_size, with_constant_batch, with_size
from megafp8.config.precision_schedule import parse_schedule
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.config.stages import microbatch_group_size
from megafp8.device import platform as device_platform
from megafp8.mcore import cpu_patches
from megafp8.training.micro_batch_search.messages import MEMORY_EXCEEDED_STATUS, TrialResult, TrialSetup
from megafp8.utils.memory import is_out_of_memory
from megafp8.utils.process import STOP_SIGNALS, set_worker_death_signal

# The first step creates optimizer state and compiles kernels.
WARM_UP_STEPS = 2
REPEATS = 3
# Target duration of a timed step. The time of a longer step is extrapolated from two shorter ones.
TIMED_S = 1.0
POLL_S = 0.02


def serve(setup: TrialSetup, pipe: Connection) -> NoReturn:
    """Measure each size that comes through the pipe, until one does not fit or fails or the rank is gone."""
    set_worker_death_signal(signal.SIGKILL)  # if the rank ended during the imports of this process
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the ranks handle stop signals
    fits, trial_run = True, None
    try:
        while fits:
            size = pipe.recv()
            trial_run = trial_run or TrialRun(setup, size)
            result = trial_run.measure(size)
            pipe.send(result)
            fits = result.ms_per_sample is not None
    except EOFError:
        pass  # the rank is gone
    except BaseException as error:
        too_large = first_sentence(f"{type(error).__name__}: {error}") if is_out_of_memory(error) else ""
        pipe.send(TrialResult(too_large=too_large, error="" if too_large else traceback.format_exc()))
    os._exit(0)  # closing communicators may hang if a rank is gone


def first_sentence(text: str) -> str:
    """The first sentence of an error."""
    return text.splitlines()[0].split(". ")[0]


class TrialRun:
    """The run of one rank, whose steps are measured in several micro-batch sizes.

    Args:
        size: the first of them.
    """

    def __init__(self, setup: TrialSetup, size: int):
        config = trial_config(setup.config, size)
        device_platform.limit_device_connections(config.parallel.tensor_model_parallel_size)
        if config.precision.deterministic_mode:
            device_platform.enable_determinism()
        cpu_patches.install()
        # They import megatron-core, which must be patched before.
        from megafp8.training.extensions.statistics import StatisticsCollector
        from megafp8.training.setup import build_training_run

        self.setup = setup
        self.platform = device_platform.detect_platform(config.parallel.distributed_backend)
        limit_memory(self.platform, setup.limit_bytes - setup.outside_bytes)
        store = None
        if setup.store_address is not None:
            store = dist.PrefixStore(setup.store_prefix, dist.TCPStore(*setup.store_address))
        device_platform.init_distributed(self.platform, config.parallel, store)
        self.run = build_training_run(config, self.platform, LAYER_BACKENDS[setup.implementation], has_data=False)
        has_statistics = config.logging.fp8_log_interval is not None
        self.collector = StatisticsCollector(self.run) if has_statistics else None
        self.kinds = step_kinds(config, self.run.rank_position.world_size)

    def measure(self, size: int) -> TrialResult:
        """The peak memory over all kinds of steps, and the time per sequence of the most frequent kind."""
        batch = last_batch_size(self.setup.config)
        assert batch is not None
        num_microbatches = batch // (size * self.run.rank_position.data_size)
        least = min(num_microbatches, 2 * microbatch_group_size(self.run.config.parallel))
        self.platform.reset_peak_memory()
        for number in reversed(self.kinds):
            for _ in range(WARM_UP_STEPS):
                self.step(size, least, number, has_statistics=True)
        counts = self.timed_counts(num_microbatches, self.slowest_s(self.step(size, least, self.kinds[0])))
        seconds = {count: min(self.step(size, count, self.kinds[0]) for _ in range(REPEATS)) for count in counts}
        peak_bytes = self.platform.peak_memory_bytes() + self.setup.outside_bytes
        if peak_bytes > self.setup.limit_bytes:
            return TrialResult(too_large=f"took {peak_bytes / 2**30:.2f} GiB")
        few, many = counts[0], counts[-1]
        step_s = seconds[many]
        if many < num_microbatches:  # extrapolate: each further microbatch takes as long as the measured ones
            step_s += (num_microbatches - many) * max(0.0, seconds[many] - seconds[few]) / (many - few)
        return TrialResult(peak_bytes, 1000 * step_s / batch)

    def timed_counts(self, num_microbatches: int, least_s: float) -> tuple[int, ...]:
        """The numbers of microbatches of the timed steps: the run's if its step is short, else two smaller numbers.

        Args:
            least_s: time of a step with two groups of microbatches, one per pipeline stage by default, or with the
                run's number if it is lower.
        """
        group = microbatch_group_size(self.run.config.parallel)
        many = group * max(2, int(2 * TIMED_S / least_s))
        return (num_microbatches,) if many >= num_microbatches else (group * (many // group // 2), many)

    def slowest_s(self, seconds: float) -> float:
        """The longest time of all ranks."""
        longest = torch.tensor(seconds, dtype=torch.float64, device=self.platform.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    def step(self, size: int, num_microbatches: int, number: int, has_statistics: bool = False) -> float:
        """Train one step, and return its time in seconds.

        Args:
            number: of the step, which determines its precision under `--fp8-schedule`.
            has_statistics: make it a statistics step, which takes more memory, if the run has such steps.
        """
        from megafp8.checkpoint.progress import Progress
        from megafp8.training.step import train_step

        run, batch = self.run, size * num_microbatches * self.run.rank_position.data_size
        config = with_constant_batch(with_size(run.config, size), batch)
        run = dataclasses.replace(run, config=config)
        batches = itertools.repeat(synthetic_batch(run.vocab_size, config)) if run.rank_position.needs_batches else None
        self.platform.synchronize()
        started = time.perf_counter()
        if has_statistics and self.collector is not None:
            step_hooks = self.collector.start_if_due(self.collector.interval)
            train_step(run, batches, Progress(number - 1), self.collector.before_update, step_hooks=step_hooks)
            if self.collector.is_collecting:  # not where the interval falls on a step in high precision
                self.collector.end_step(self.collector.interval)
        else:
            train_step(run, batches, Progress(number - 1))
        self.platform.synchronize()
        return time.perf_counter() - started


def trial_config(config: RunConfig, size: int) -> RunConfig:
    """The configuration for trials: with a fixed loss scale, since a dynamic one would skip the first updates."""
    fixed = {"optimizer.loss_scale": 1.0} if config.precision.fp16 and config.optimizer.loss_scale is None else {}
    return with_values(with_size(config, size), fixed)


def step_kinds(config: RunConfig, world_size: int) -> list[int]:
    """A step number for each precision of `--fp8-schedule`, the most frequent first; step 1 without a schedule."""
    if config.precision.fp8_schedule is None:
        return [1]
    first_of: dict[tuple[str, ...], int] = {}
    lengths: Counter[tuple[str, ...]] = Counter()
    first, steps = 1, iterations.train_iters(config, world_size)
    for phase in parse_schedule(config.precision.fp8_schedule):
        last = phase.last_step or max(first, steps)
        kind = phase.precision, *phase.entries
        first_of.setdefault(kind, first)
        lengths[kind] += last - first + 1
        first = last + 1
    return [first_of[kind] for kind, _ in lengths.most_common()]


def synthetic_batch(vocab_size: int, config: RunConfig) -> dict[str, torch.Tensor]:
    """A microbatch of random tokens, in the format of the data loader."""
    size, length = config.training.micro_batch_size, config.data.seq_length
    assert size is not None and length is not None
    tokens = torch.randint(vocab_size, (size, length + 1), generator=torch.Generator().manual_seed(0))
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(size, length),
        "position_ids": torch.arange(length).expand(size, length).contiguous(),
    }
    if config.data.reset_attention_mask:
        batch["document_starts"] = batch["position_ids"] == 0  # one document is the most work
    return batch


def limit_memory(platform: device_platform.Platform, limit_bytes: int) -> None:
    """Enforce the memory limit: the GPU's allocator raises beyond it, and a process on a CPU exits."""
    if platform.kind == "cuda":
        total_bytes = platform.total_memory_bytes()
        torch.cuda.set_per_process_memory_fraction(min(max(0.0, limit_bytes / total_bytes), 1.0), platform.device)
    else:
        threading.Thread(target=exit_above_limit, args=(limit_bytes,), daemon=True).start()


def exit_above_limit(limit_bytes: int) -> NoReturn:
    """Exit with `MEMORY_EXCEEDED_STATUS` once this process uses more memory than the limit."""
    while device_platform.resident_bytes() <= limit_bytes:
        time.sleep(POLL_S)
    os._exit(MEMORY_EXCEEDED_STATUS)
