"""Where records go. One rank writes; it builds a `Sinks` and hands it every record.

`build_sinks` makes what the logging section asks for. The JSONL file is the record of truth and comes first; the
console, TensorBoard and Weights & Biases show the same records to people.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Optional, Protocol, TextIO

from megafp8.config.schema import LoggingConfig
from megafp8.metrics.records import RECORDS_FILE, Record
from megafp8.metrics.sinks.console import ConsoleSink
from megafp8.metrics.sinks.jsonl import JsonlSink, read_records
from megafp8.metrics.sinks.trackers import TensorBoardSink, WandbSink

__all__ = ["ConsoleSink", "JsonlSink", "Sink", "Sinks", "TensorBoardSink", "WandbSink", "build_sinks", "read_records"]


class Sink(Protocol):
    """Takes records of every kind and leaves alone those that it has no use for."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Hands each record to several sinks, in their order. Also a context manager, which closes them."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = tuple(sinks)

    def write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close every sink, also when one of them fails; the failure is raised afterwards."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self,
        error_type: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()


def build_sinks(
    logging: LoggingConfig, *, run_folder: Optional[str], total_steps: int, stream: Optional[TextIO] = None
) -> Sinks:
    """The sinks that the logging section asks for, on the rank that writes.

    Args:
        run_folder: the run's own folder (--save). It gets records.jsonl and, unless --tensorboard-dir names another
            place, tensorboard/. None: neither file is written.
        total_steps: step at which the run ends, for the progress display.
        stream: where console lines go; default standard output.

    Raises:
        CapabilityError: Weights & Biases is asked for and not installed.
    """
    sinks: list[Sink] = []
    if run_folder is not None:
        sinks.append(JsonlSink(Path(run_folder) / RECORDS_FILE))
    sinks.append(
        ConsoleSink(
            total_steps=total_steps,
            log_interval=logging.log_interval,
            progress_bar=logging.progress_bar,
            show_throughput=logging.log_throughput,
            stream=stream,
        )
    )
    tensorboard_folder = logging.tensorboard_dir or (run_folder and str(Path(run_folder) / "tensorboard"))
    if tensorboard_folder:
        sinks.append(
            TensorBoardSink(
                tensorboard_folder,
                log_interval=logging.tensorboard_log_interval,
                log_memory=logging.log_memory_to_tensorboard,
                log_timers=logging.log_timers_to_tensorboard,
            )
        )
    if logging.wandb_project:
        sinks.append(
            WandbSink(
                project=logging.wandb_project,
                entity=logging.wandb_entity,
                name=logging.wandb_exp_name,
                folder=logging.wandb_save_dir,
            )
        )
    return Sinks(sinks)
