"""Console output: one line every few steps, and on a terminal a progress bar below the lines."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Optional, TextIO

from megafp8.config.schema import LoggingConfig
from megafp8.metrics.records import (
    VALID,
    VALID_EMA,
    VALID_HIGH_PRECISION,
    EvalRecord,
    EventRecord,
    Record,
    RunRecord,
    SampleRecord,
    StepRecord,
    TaskScores,
)
from megafp8.utils.formatting import duration_text

ETA_WINDOW_STEPS = 50
SETUP_EVENTS = frozenset(("micro-batch size", "optimizer", "parameter gather"))
"""Events about how a run was built, which the console shows under `--verbose` only."""
SHORT_EVAL_S = 10.0
"""Evaluations that take less are not announced."""
EVAL_LINE_INTERVAL_S = 15.0
SILENT_S = 60.0
FORWARD_FRACTION = 1 / 3
"""Of the time of a step; backward takes twice as long."""


class ConsoleSink:
    """Prints ` step 120/400 | loss 3.1234  | grad norm   1.23 | lr 3.00e-04 | 410 ms | 12.3k tok/s | ETA ...`.

    A line is printed at the first step of the process, at every multiple of `log_interval` and at the last step, and on
    slow machines after a minute without one. Loss, time and rates are means over the steps since the previous line, the
    loss over those with an update if there are any; gradient norm and learning rate are those of the last step. The ETA
    uses wall-clock time, so evaluations and checkpoints count.
    """

    def __init__(
        self,
        logging: LoggingConfig,
        *,
        total_steps: int,
        total_samples: Optional[int] = None,
        stream: Optional[TextIO] = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            logging: with `--log-throughput` the lines have TFLOP/s and MFU, with `--verbose` also `SETUP_EVENTS`.
                Without `--progress-bar` or its opposite, the bar shows if `stream` is a terminal.
            total_steps: step at which the run ends.
            total_samples: consumed samples at which it ends. The ETA then assumes that a step takes a time in
                proportion to its samples, since the batch size may change. None: that all steps take the same time.
            stream: default standard output.
            clock: seconds; replaced in tests.
        """
        self._logging, self._total_steps, self._total_samples = logging, total_steps, total_samples
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._pending: list[StepRecord] = []
        self._is_first_step = True
        self._run: Optional[RunRecord] = None
        self._eval_ms: dict[str, float] = {}
        self._eval_shown_at = self._printed_at = 0.0
        self._step_times: deque[float] = deque(maxlen=ETA_WINDOW_STEPS + 1)
        self._step_samples: deque[int] = deque(maxlen=ETA_WINDOW_STEPS)
        show_bar = self._stream.isatty() if logging.progress_bar is None else logging.progress_bar
        self._bar = _build_bar(total_steps, self._stream) if show_bar else None

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._write_step(record)
        elif isinstance(record, RunRecord):
            self._run = record
            self._print(describe_run(record))
        elif isinstance(record, EvalRecord):
            self._eval_ms[record.split] = record.eval_ms
            self._print(f"{self._position(record.step)} | {describe_eval(record)}")
        elif isinstance(record, SampleRecord):
            self._print(f"{self._position(record.step)} | sample {record.prompt!r} -> {record.text!r}")
        elif isinstance(record, EventRecord) and not self._is_hidden(record):
            detail = f": {record.detail}" if record.detail else ""
            self._print(f"{self._position(record.step)} | {record.name}{detail}")

    def show_evaluation(self, step: int, split: str, num_done: int, num_batches: int, batch_size: int) -> None:
        """Show that an evaluation begins, unless it is short, or how far it is."""
        name, now = split_name(split), self._clock()
        if num_done == 0:
            seconds, self._eval_shown_at = self._eval_seconds(split, num_batches * batch_size), now
            if seconds is None or seconds >= SHORT_EVAL_S:
                about = "" if seconds is None else f", about {duration_text(seconds)}"
                self._print(f"{self._position(step)} | {name}: {num_batches} batches of {batch_size} samples{about}")
        elif self._bar is not None:
            self._bar.set_postfix_str(f"{name} {num_done}/{num_batches}")
        elif now - self._eval_shown_at >= EVAL_LINE_INTERVAL_S and num_done < num_batches:
            self._eval_shown_at = now
            self._print(f"{self._position(step)} | {name}: {num_done} of {num_batches} batches")

    def _eval_seconds(self, split: str, num_samples: int) -> Optional[float]:
        """Of the evaluation before it, else from the time of the steps; None before both."""
        if split in self._eval_ms:
            return self._eval_ms[split] / 1000
        num_intervals = len(self._step_times) - 1
        if num_intervals < 1:
            return None
        seconds = self._step_times[-1] - self._step_times[0]
        return FORWARD_FRACTION * seconds * num_samples / sum(list(self._step_samples)[-num_intervals:])

    def _is_hidden(self, event: EventRecord) -> bool:
        if self._logging.verbose:
            return False
        # On a CPU there is one kernel, and the line of chosen settings names it.
        return event.name in SETUP_EVENTS or (event.name == "attention" and self._is_on_cpu)

    @property
    def _is_on_cpu(self) -> bool:
        return self._run is not None and is_on_cpu(self._run)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _write_step(self, record: StepRecord) -> None:
        self._pending.append(record)
        now = self._clock()
        self._step_times.append(now)
        self._step_samples.append(record.global_batch_size or 1)
        is_logged = record.step % self._logging.log_interval == 0
        is_silent = self._bar is None and now - self._printed_at >= SILENT_S
        if self._is_first_step or is_logged or is_silent or record.step >= self._total_steps:
            self._printed_at = now
            show_throughput = self._logging.log_throughput and not self._is_on_cpu
            memory = self._run.device_memory_bytes if self._run is not None else None
            line = describe_steps(self._pending, show_throughput=show_throughput, device_memory_bytes=memory)
            self._print(f"{self._position(record.step)} | {line}{self._eta(record, ' | ETA ')}")
            self._pending.clear()
            self._is_first_step = False
        if self._bar is not None:
            speed = f"{format_count(record.tokens_per_second)} tok/s"
            self._bar.set_postfix_str(f"loss {record.loss:.4f}, {speed}{self._eta(record, ', ETA ')}", refresh=False)
            self._bar.update(record.step - self._bar.n)

    def _eta(self, record: StepRecord, prefix: str) -> str:
        """The remaining time; nothing after the last step, and after the first one, which is a warm-up."""
        num_intervals = len(self._step_times) - 1
        if num_intervals < 1:
            return ""
        seconds_per_step = (self._step_times[-1] - self._step_times[0]) / num_intervals
        if self._total_samples is None or record.global_batch_size is None:
            seconds = seconds_per_step * (self._total_steps - record.step)
        else:
            samples_per_step = sum(list(self._step_samples)[-num_intervals:]) / num_intervals
            seconds = seconds_per_step * (self._total_samples - record.consumed_samples) / samples_per_step
        return f"{prefix}{duration_text(seconds)}" if seconds > 0 else ""

    def _position(self, step: int) -> str:
        return f" step {step:>{len(str(self._total_steps))}}/{self._total_steps}"

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)


def is_on_cpu(record: RunRecord) -> bool:
    """Whether a run trains on CPUs."""
    return record.device_memory_bytes is None and record.peak_flops is None


def describe_run(record: RunRecord) -> str:
    """One line about the run: recipe, devices, the parallel axes that are divided, and model size."""
    axes = " ".join(f"{axis} {size}" for axis, size in record.layout.items() if size > 1)
    threads, parameters, step = record.num_threads, record.num_parameters, record.resumed_from_step
    peak = (record.peak_flops or {}).get(record.mfu_dtype or "")
    many = record.world_size > 1
    parts = [
        f" run {record.config_hash[:8]}",
        record.recipe,
        f"{record.world_size} x {record.device_name} ({axes})" if many else record.device_name,
        "" if threads is None else f"{threads} thread{'s' if threads > 1 else ''}{' per rank' if many else ''}",
        "" if parameters is None else f"{format_count(parameters)} parameters",
        "" if step is None else f"resumed from step {step}",
        f"MFU relative to {peak / 1e12:g} TFLOP/s {record.mfu_dtype} ({record.peak_source})" if peak else "",
        "no MFU: the peak of the device is unknown" if not peak and not is_on_cpu(record) else "",
    ]
    return " | ".join(filter(None, parts))


def describe_steps(
    records: list[StepRecord], *, show_throughput: bool, device_memory_bytes: Optional[int] = None
) -> str:
    """One line about consecutive steps, with the means that `ConsoleSink` describes.

    Args:
        device_memory_bytes: memory of a GPU; None: the line has no memory.
    """
    last = records[-1]
    total_ms = sum(record.step_ms for record in records)

    def mean_rate(name: str) -> Optional[float]:
        rates = [getattr(record, name) for record in records]
        if any(rate is None for rate in rates) or total_ms == 0:
            return None
        return sum(rate * record.step_ms for rate, record in zip(rates, records, strict=True)) / total_ms

    tokens_per_second, tflops = mean_rate("tokens_per_second"), mean_rate("model_tflops_per_device")
    mfu_fraction = mean_rate("mfu_fraction")
    peak_bytes = last.memory_peak_bytes if device_memory_bytes else None
    trained = [record for record in records if not record.is_skipped] or records  # the loss of a skipped one may be NaN
    num_skipped, num_repeated = sum(record.is_skipped for record in records), sum(r.is_repeated for r in records)
    parts = [
        f"loss {sum(record.loss for record in trained) / len(trained):<7.4f}",
        f"mtp loss {mean_losses(trained)}" if last.mtp_losses else "",
        "" if last.grad_norm is None else f"grad norm {last.grad_norm:>6.3g}",
        f"lr {last.learning_rate:.2e}",
        "" if last.loss_scale is None else f"loss scale {last.loss_scale:g}",
        f"{total_ms / len(records):>6.{0 if total_ms >= 100 * len(records) else 1}f} ms",
        "" if tokens_per_second is None else f"{format_count(tokens_per_second):>5} tok/s",
        f"{format_count(last.consumed_tokens):>5} tokens",
        f"{peak_bytes / 2**30:.1f} GiB ({peak_bytes / device_memory_bytes:.0%})"
        if peak_bytes and device_memory_bytes
        else "",
        f"{tflops:.3g} TFLOP/s per device" if show_throughput and tflops is not None else "",
        f"MFU {mfu_fraction:.1%}" if show_throughput and mfu_fraction is not None else "",
        "" if last.joules_per_token is None else f"{last.joules_per_token:.3g} J/token",
        "" if last.watts_per_device is None else f"{last.watts_per_device:.0f} W per device",
        f"{num_skipped} skipped" if num_skipped else "",
        f"{num_repeated} computed twice" if num_repeated else "",
    ]
    return " | ".join(filter(None, parts))


def mean_losses(records: list[StepRecord]) -> str:
    """Mean losses of multi-token prediction over some steps, by depth: `3.1234 3.4567`."""
    steps = [record.mtp_losses for record in records if record.mtp_losses is not None]
    return " ".join(f"{sum(losses) / len(losses):.4f}" for losses in zip(*steps, strict=True))


def describe_eval(record: EvalRecord) -> str:
    """One line about an evaluation."""
    tasks = (f"{name} {describe_scores(scores)}" for name, scores in (record.tasks or {}).items())
    return " | ".join(
        (
            f"{split_name(record.split)} loss {record.loss:.4f}",
            f"perplexity {record.perplexity:.4g}",
            f"{format_count(record.num_tokens)} tokens",
            *tasks,
            f"{record.eval_ms / 1000:.1f} s",
        )
    )


def describe_scores(scores: TaskScores) -> str:
    """The scores of a task: `45.0% (normalized 50.0%), 1.234 bits/byte`."""
    bits = f"{scores.bits_per_byte:.3f} bits/byte"
    if scores.accuracy is None or scores.normalized_accuracy is None:
        return bits
    return f"{scores.accuracy:.1%} (normalized {scores.normalized_accuracy:.1%}), {bits}"


def split_name(split: str) -> str:
    """The name of a split of the data as users know it."""
    names = {VALID: "validation", VALID_HIGH_PRECISION: "validation (high precision)", VALID_EMA: "validation (EMA)"}
    return names.get(split, split)


def format_count(value: float) -> str:
    """Three significant digits with k, M, G or T: 12345 -> 12.3k."""
    for suffix in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g}T"


def _build_bar(total_steps: int, stream: TextIO) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=total_steps,
        file=stream,
        unit="step",
        dynamic_ncols=True,
        leave=False,
        bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
    )
