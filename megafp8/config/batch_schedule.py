"""The global batch size of each step, as a function of the samples that the run has read before it.

The rules are those of megatron-core's `num_microbatches_calculator.py`. Release 0.16 has the ramp-up and release 0.19
the step schedule, but no release has both, and this module must not import torch. Therefore the rules are repeated
here, and `tests/unit/config/test_batch_schedule.py` compares them with megatron-core's.

A schedule depends on the number of consumed samples only, so it needs no state in a checkpoint.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Optional

from megafp8.config.schema.setting import INT64_MAX
from megafp8.errors import ConfigError
from megafp8.utils.numbers import is_number

MAX_INCREMENTS = 100_000
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchPhase:
    """A global batch size, from a number of consumed samples on."""

    start_sample: int
    batch_size: int


@dataclass(frozen=True)
class BatchSchedule:
    """The phases of the global batch size. The first starts at sample 0, and starts increase."""

    phases: tuple[BatchPhase, ...]

    @property
    def last_batch_size(self) -> int:
        """The global batch size of the last phase."""
        return self.phases[-1].batch_size

    @property
    def is_constant(self) -> bool:
        """Whether all steps have the same batch size."""
        return len(self.phases) == 1

    def batch_size_at(self, consumed_samples: int) -> int:
        """Sequences of the step after so many samples."""
        index = bisect_right(self.phases, consumed_samples, key=lambda phase: phase.start_sample)
        return self.phases[max(0, index - 1)].batch_size

    def segments(self, start_sample: int = 0) -> Iterator[tuple[int, int, Optional[int]]]:
        """The steps from a sample on: (first sample, batch size, number of steps); the last number is None: no end.

        A phase that lies within one batch of the phase before has no step.
        """
        first = start_sample
        for phase, following in pairwise(self.phases):
            missing = following.start_sample - first
            if missing > 0:
                num_steps = -(-missing // phase.batch_size)
                yield first, phase.batch_size, num_steps
                first += num_steps * phase.batch_size
        yield first, self.last_batch_size, None

    def num_steps(self, end_sample: int, start_sample: int = 0) -> int:
        """Number of complete global batches between two samples."""
        total = 0
        for first, batch_size, num_steps in self.segments(start_sample):
            fitting = max(0, end_sample - first) // batch_size
            if num_steps is None or fitting < num_steps:
                return total + fitting
            total += num_steps
        raise AssertionError("the last segment has no end")

    def advance(self, num_steps: int, start_sample: int = 0) -> int:
        """The consumed samples after so many steps from a sample on."""
        for first, batch_size, length in self.segments(start_sample):
            if length is None or num_steps <= length:
                return first + num_steps * batch_size
            num_steps -= length
        raise AssertionError("the last segment has no end")

    def steps_until(self, sample: float) -> float:
        """Number of steps up to a sample, with a fraction if it is within a batch."""
        total = 0
        for first, batch_size, length in self.segments():
            if length is None or sample <= first + length * batch_size:
                return total + (sample - first) / batch_size
            total += length
        raise AssertionError("the last segment has no end")

    def rounded_down(self, multiple: int) -> BatchSchedule:
        """The schedule with each batch size rounded down to a multiple (`--decrease-batch-size-if-needed`).

        Raises:
            ConfigError: a batch size is less than the multiple.
        """
        if small := [phase.batch_size for phase in self.phases if phase.batch_size < multiple]:
            raise ConfigError(
                f"--decrease-batch-size-if-needed: a global batch of {small[0]} has less than --micro-batch-size x "
                f"data-parallel size = {multiple} sequences: use fewer ranks, a smaller micro-batch or a larger batch"
            )
        return merged(BatchPhase(phase.start_sample, phase.batch_size // multiple * multiple) for phase in self.phases)


def constant(batch_size: int) -> BatchSchedule:
    """A schedule of one batch size."""
    return BatchSchedule((BatchPhase(0, batch_size),))


def merged(phases: Iterator[BatchPhase]) -> BatchSchedule:
    """A schedule of phases, of which neighbors with equal batch sizes become one."""
    remaining: list[BatchPhase] = []
    for phase in phases:
        if not remaining or remaining[-1].batch_size != phase.batch_size:
            remaining.append(phase)
    return BatchSchedule(tuple(remaining))


def ramp_up(words: tuple[int, ...], last_batch_size: int) -> BatchSchedule:
    """The schedule of `--rampup-batch-size START INCREMENT SAMPLES`: equal increments over `SAMPLES` samples.

    Args:
        words: the three numbers.
        last_batch_size: `--global-batch-size`, reached at `SAMPLES`.

    Raises:
        ConfigError: they are no ramp.
    """
    flag = f"--rampup-batch-size {' '.join(map(str, words))}"
    if len(words) != 3 or min(words) < 1:
        raise ConfigError(f"{flag}: needs three numbers of at least 1: START INCREMENT SAMPLES")
    start, increment, samples = words
    missing = last_batch_size - start
    if missing <= 0:
        raise ConfigError(
            f"{flag}: the ramp starts at {start} sequences, which is not below the global batch of {last_batch_size}: "
            "lower START, or remove the flag"
        )
    if missing % increment:
        raise ConfigError(
            f"{flag}: {last_batch_size} - {start} = {missing} sequences are not a multiple of the increment {increment}"
        )
    num_increments = missing // increment
    if num_increments > MAX_INCREMENTS:
        raise ConfigError(
            f"{flag}: {missing} / {increment} = {num_increments} increments; at most {MAX_INCREMENTS} are supported: "
            "use a larger INCREMENT"
        )
    # A float, as in megatron-core: the phases then start at the same samples.
    samples_per_increment = samples / num_increments
    starts = [_ramp_sample(number, samples, samples_per_increment) for number in range(num_increments + 1)]
    # A short ramp may skip increments: the last phase that starts at a sample is the one that counts.
    by_start = {first: start + number * increment for number, first in enumerate(starts)}
    return BatchSchedule(tuple(BatchPhase(*item) for item in by_start.items()))


def _ramp_sample(number: int, samples: int, samples_per_increment: float) -> int:
    """The first sample of an increment: the lowest `c` with `int(c / samples_per_increment) >= number`.

    megatron-core rounds this quotient in floating point, so the exact quotient is only a first guess. After `samples`
    it has the last batch size without a quotient.
    """
    sample = math.ceil(number * samples_per_increment)
    while sample > 0 and int((sample - 1) / samples_per_increment) >= number:
        sample -= 1
    while int(sample / samples_per_increment) < number:
        sample += 1
    return min(sample, samples + 1)


def step_schedule(text: str, seq_length: int) -> BatchSchedule:
    """The schedule of `--step-batch-size-schedule "THRESHOLD:SIZE THRESHOLD:SIZE ..."`.

    Args:
        text: entries between blanks or commas, in any order. Thresholds are tokens, as in Megatron-LM's command line.
            Thresholds and sizes may have a suffix of `SUFFIXES`.
        seq_length: tokens per sequence; a threshold is rounded down to complete sequences.

    Raises:
        ConfigError: an entry cannot be read, no entry starts at 0, two start at the same sample, or sizes decrease.
    """
    flag = f"--step-batch-size-schedule {text!r}"
    entries = sorted(_read_entry(flag, word) for word in text.replace(",", " ").split())
    phases = [BatchPhase(tokens // seq_length, size) for tokens, size in entries]
    if not phases or phases[0].start_sample != 0:
        raise ConfigError(f"{flag}: the first threshold must be 0, for example '0:384 200B:768'")
    for before, after in pairwise(phases):
        if after.start_sample == before.start_sample:
            raise ConfigError(
                f"{flag}: sizes {before.batch_size} and {after.batch_size} both start at sample {after.start_sample}, "
                f"since thresholds are rounded down to sequences of {seq_length} tokens: keep one"
            )
        if after.batch_size < before.batch_size:
            raise ConfigError(
                f"{flag}: the size decreases from {before.batch_size} to {after.batch_size} at sample "
                f"{after.start_sample}: sizes must increase"
            )
    return merged(iter(phases))


def _read_entry(flag: str, word: str) -> tuple[int, int]:
    """(threshold in tokens, batch size) of an entry."""
    threshold, colon, size = word.partition(":")
    try:
        if not colon:
            raise ValueError
        values = _read_number(threshold), _read_number(size)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{flag}: {word!r} is not THRESHOLD:SIZE, two numbers that may end with {', '.join(SUFFIXES)}"
        ) from None
    if values[0] < 0 or values[1] < 1 or max(values) > INT64_MAX:
        raise ConfigError(
            f"{flag}: {word!r}: the threshold must be at least 0, the size at least 1, and both at most {INT64_MAX:,}"
        )
    return values


def _read_number(text: str) -> int:
    """The value of a number with an optional suffix, rounded down as in megatron-core."""
    number = text.strip().upper()
    factor = SUFFIXES.get(number[-1:], 1)
    digits = number[:-1] if factor > 1 else number
    if not is_number(digits):
        raise ValueError
    return int(float(digits) * factor)
