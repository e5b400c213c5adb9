"""Weights & Biases, for those who have it."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from megafp8.errors import CapabilityError
from megafp8.telemetry.records import EvalRecord, EventRecord, QuantizationRecord, Record, RunRecord
from megafp8.telemetry.scalars import exponent_edges, scalars


class WandbSink:
    """Logs every step, look at quantization and evaluation to one W&B run; the run record becomes its configuration."""

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
        self._run = wandb.init(project=project, entity=entity, name=name, dir=folder)

    def write(self, record: Record) -> None:
        if isinstance(record, EventRecord):
            return
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

    def close(self) -> None:
        self._run.finish()
