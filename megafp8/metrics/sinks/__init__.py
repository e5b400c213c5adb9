"""Sinks that write the records of a run: records.jsonl, console, TensorBoard, Weights & Biases, MLflow and Prometheus.

One rank writes. It builds a `Sinks` and passes it every record. records.jsonl comes first, since reports are made from
it; the other sinks show the same records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Optional, Protocol, TextIO

from megafp8.config.schema import LoggingConfig
from megafp8.metrics.records import RECORDS_FILE, Record
from megafp8.metrics.sinks.console import ConsoleSink
from megafp8.metrics.sinks.jsonl import JsonlSink, read_records
from megafp8.metrics.sinks.prometheus import PrometheusSink
from megafp8.metrics.sinks.trackers import MlflowSink, TensorBoardSink, WandbSink

__all__ = [
    "ConsoleSink", "JsonlSink", "MlflowSink", "PrometheusSink", "Sink", "Sinks", "TensorBoardSink", "WandbSink",
    "build_sinks", "read_records",
]  # fmt: skip


class Sink(Protocol):
    """Accepts records of every kind, and ignores those that it does not show."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Passes each record to several sinks, in their order. As a context manager it closes them.

    Records that take the host long are deferred, and made while the device computes the next step.
    """

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = tuple(sinks)
        self._deferred: list[Callable[[], Iterable[Record]]] = []

    def write(self, record: Record) -> None:
        """Write a record, after those that were deferred before it."""
        try:
            self.flush()
        finally:
            self._pass_on(record)

    def defer(self, make: Callable[[], Iterable[Record]]) -> None:
        """Make and write records at the next `flush`, `write` or `close`."""
        self._deferred.append(make)

    def flush(self) -> None:
        """Make and write the deferred records."""
        while self._deferred:
            for record in self._deferred.pop(0)():
                self._pass_on(record)

    def show_evaluation(self, step: int, split: str, num_done: int, num_batches: int, batch_size: int) -> None:
        """Show on the console how far an evaluation is; records are about finished ones only."""
        for sink in self._sinks:
            if isinstance(sink, ConsoleSink):
                sink.show_evaluation(step, split, num_done, num_batches, batch_size)

    def close(self) -> None:
        """Close every sink, even if one of them raises; the exception is raised afterwards."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)
            stack.callback(self.flush)

    def _pass_on(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_sinks(
    logging: LoggingConfig,
    *,
    run_folder: Optional[str],
    total_steps: int,
    total_samples: Optional[int] = None,
    stream: Optional[TextIO] = None,
) -> Sinks:
    """Build the sinks of the logging section, on the rank that writes.

    Args:
        run_folder: the run's folder (--save), for records.jsonl, the IDs of the W&B and MLflow runs and, unless
            --tensorboard-dir is given, tensorboard/. None: none of them is written.
        total_steps: step at which the run ends, for the progress display.
        total_samples: consumed samples at which it ends, for its ETA; None: the ETA counts steps.
        stream: of the console; default standard output.

    Raises:
        CapabilityError: a package that a sink needs is not installed.
    """
    sinks: list[Sink] = []
    if logging.metrics_port is not None:
        sinks.append(PrometheusSink(logging.metrics_port))
    if run_folder is not None:
        sinks.append(JsonlSink(Path(run_folder) / RECORDS_FILE))
    sinks.append(ConsoleSink(logging, total_steps=total_steps, total_samples=total_samples, stream=stream))
    tensorboard_folder = logging.tensorboard_dir or (run_folder and str(Path(run_folder) / "tensorboard"))
    if tensorboard_folder:
        sinks.append(TensorBoardSink(tensorboard_folder, logging))
    if logging.wandb_project:
        sinks.append(WandbSink(logging, run_folder))
    if logging.mlflow_experiment and run_folder is not None:
        sinks.append(MlflowSink(logging, run_folder, total_steps))
    return Sinks(sinks)
