"""A run's step records as a pandas DataFrame."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from megafp8.analysis.runs import load_run
from megafp8.metrics.records import StepRecord

if TYPE_CHECKING:
    import pandas

LOSS_COLUMNS = {"valid": "valid_loss", "test": "test_loss"}


def read_records(folder: Union[str, Path]) -> pandas.DataFrame:
    """Read the steps of a run, one row for each optimizer step.

    Steps that were repeated after a restart appear once, as they counted in the end. What was not recorded is NaN or
    None. The columns:

    | column | content |
    |---|---|
    | `step` | the index, counted from 1 |
    | `consumed_samples`, `consumed_tokens` | trained on so far |
    | `loss`, `grad_norm`, `learning_rate` | mean loss over tokens in nats, global norm before clipping |
    | `valid_loss`, `test_loss` | of the evaluation after this step; NaN in steps without one |
    | `step_ms`, `tokens_per_second` | of the step, over all devices |
    | `model_tflops_per_device`, `mfu_fraction`, `memory_peak_bytes` | of each device, the last one so far |
    | `is_skipped`, `is_repeated` | whether the update was skipped, the step computed twice |
    | `num_non_finite_operands`, `num_saturated_operands` | values that quantization hides |
    | `timers_ms.NAME`, `between_ms.NAME` | parts of the step's time, and time between steps |

    and every other field of `megafp8.metrics.records.StepRecord`.

    Args:
        folder: the run's `--save` folder, or its records.jsonl.

    Raises:
        DataError: there are no records, or the file is damaged.
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("megafp8.read_records returns a pandas DataFrame: pip install pandas") from error
    run = load_run(folder)
    names = [field.name for field in dataclasses.fields(StepRecord)]
    rows = [_row(record) for record in run.steps]
    # Columns without a value in any row are there as well: the columns of all runs are the same, but for the timers.
    columns = dict.fromkeys([*names, *LOSS_COLUMNS.values(), *(name for row in rows for name in row)])
    frame = pandas.DataFrame(rows, columns=[name for name in columns if name not in NESTED]).set_index("step")
    for split, column in LOSS_COLUMNS.items():
        losses = {record.step: record.loss for record in run.evals_of(split)}
        frame[column] = pandas.Series(losses, dtype="float64").reindex(frame.index)
    return frame


NESTED = ("timers_ms", "between_ms")


def _row(record: StepRecord) -> dict[str, Any]:
    """The fields of a step, with an entry `field.name` for each part of its times."""
    row = dict(vars(record))
    for field in NESTED:
        parts: Mapping[str, float] = row.pop(field) or {}
        row |= {f"{field}.{name}": milliseconds for name, milliseconds in parts.items()}
    return row
