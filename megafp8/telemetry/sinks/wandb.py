"""Weights & Biases, for those who have it."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from megafp8.errors import CapabilityError
from megafp8.telemetry.records import EvalRecord, EventRecord, QuantizationRecord, Record, RunRecord
from megafp8.telemetry.scalars import exponent_edges, scalars
from megafp8.utils.best_effort import Outage


class WandbSink:
    """Logs every step, look at quantization and evaluation to one W&B run; the run record becomes its configuration.

    Best effort: the service, the network and the disk may fail in ways that only wandb knows, so every exception of it
    is reported and counted.
    """

    def __init__(
        self, *, project: str, entity: Optional[str] = None, name: Optional[str] = None, folder: Optional[str] = None
    ):
        """
        Raises:
            CapabilityError: wandb is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise CapabilityError(
                f"--wandb-project {project} needs the package wandb, which is not importable ({error}): "
                "pip install wandb, or leave the flag out (records.jsonl and TensorBoard hold the same numbers)"
            ) from error
        self._histogram = wandb.Histogram
        self._outage = Outage("Weights & Biases", "records")
        self._run: Any = None
        try:
            self._run = wandb.init(project=project, entity=entity, name=name, dir=folder)
        except Exception as error:
            self._outage.failed(error)

    def write(self, record: Record) -> None:
        if isinstance(record, EventRecord):
            return
        if self._run is None:  # another attempt would hold training up until it times out
            self._outage.lose(1)
            return
        try:
            self._log(record)
        except Exception as error:
            self._outage.failed(error, num_lost=1)
        else:
            self._outage.ended()

    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._outage.failed(error)
        self._outage.close()

    def _log(self, record: Record) -> None:
        if isinstance(record, RunRecord):
            self._run.config.update(dataclasses.asdict(record), allow_val_change=True)
            return
        # W&B keeps a row open until a later step arrives, so an evaluation joins the row of its step.
        values: dict[str, Any] = dict(scalars(record))
        if isinstance(record, QuantizationRecord):
            values |= {
                f"fp8/exponents/{name}": self._histogram(np_histogram=(stats.exponent_counts, exponent_edges(stats)))
                for name, stats in record.tensors.items()
            }
        self._run.log(values, step=record.step)
        if isinstance(record, EvalRecord):
            self._run.summary[f"final {record.split} loss"] = record.loss
