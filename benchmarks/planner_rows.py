"""The planner's errors for the rows that `gpu_layouts.py --json` wrote: `planner_accuracy.py --rows FILE`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_layout_rows import LAYOUTS, PEER, Row, median_rows
from benchmarks.gpu_train import COMMON, MODES, SHAPES
from benchmarks.planner_measurements import run_of
from megafp8.config.flags import parse
from megafp8.config.run_sizes import run_sizes
from megafp8.device import capability
from megafp8.device.gpus import GPUS, find_gpu
from megafp8.errors import ConfigError
from megafp8.planning.step_time import step_time
from megafp8.resources.automatic import choose
from megafp8.resources.memory import estimate_stages
from megafp8.utils.formatting import markdown_table

GIB = 2**30


@dataclass(frozen=True)
class Predicted:
    """A measured row, and what the planner says of its configuration on its GPU."""

    row: Row
    gpu: str
    step_ms: float
    peak_gib: float


def read_rows(path: Path) -> list[Row]:
    """One row for each mode under a layout, the median of its rounds."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(median_rows([Row(**json.loads(line)) for line in lines]))


def predict(row: Row) -> Predicted:
    """Predict a row, with the settings that the command chooses on its GPU.

    Raises:
        ConfigError: the planner knows no such GPU, has no time for the recipe, or the row is megatron-core's.
    """
    gpu = find_gpu(row.device)
    if gpu is None:
        raise ConfigError([f"{row.label} {row.recipe}: the planner knows {', '.join(GPUS)}, not {row.device!r}"])
    if row.software == PEER:
        raise ConfigError([f"{row}: megatron-core's settings are those of its own loop, which have no command line"])
    if row.recipe not in MODES:
        raise ConfigError([f"{row.label} {row.recipe}: the planner's recipes are {', '.join(MODES)}"])
    batch = f"--global-batch-size {LAYOUTS[row.layout].global_batch(row.shape)} --train-iters 1000"
    given = parse(f"{SHAPES[row.shape]} {COMMON} {MODES[row.recipe]} {batch} {row.extra}".split()).config
    config, _ = choose(given, gpu.target, row.num_gpus)
    run = run_of(config, gpu.name, row.num_gpus)
    implementation = capability.layer_backend(config.model, config.precision, gpu.target)
    estimates = estimate_stages(run_sizes(config, row.num_gpus, run.padded_vocab), implementation=implementation)
    peak_bytes = max(estimate.total_bytes for estimate in estimates)
    return Predicted(row, gpu.name, step_time(run).seconds * 1e3, peak_bytes / GIB)


def table(predictions: Sequence[Predicted]) -> str:
    """Errors are (predicted - measured) / measured."""
    header = ("shape", "layout", "recipe", "GPU", "step ms", "predicted", "error", "peak GiB", "predicted", "error")
    cells = []
    for found in predictions:
        row = found.row
        cells.append((
            row.shape, row.label, row.recipe, found.gpu,
            f"{row.step_ms:.1f}", f"{found.step_ms:.1f}", f"{found.step_ms / row.step_ms - 1:+.1%}",
            f"{row.peak_gib:.1f}", f"{found.peak_gib:.1f}", f"{found.peak_gib / row.peak_gib - 1:+.1%}",
        ))  # fmt: skip
    return markdown_table(header, cells, "llllrrrrrr")


def report(path: Path) -> tuple[str, list[str]]:
    """The table of a file's rows, and why others have no prediction."""
    predictions, problems = [], list[str]()
    for row in read_rows(path):
        try:
            predictions.append(predict(row))
        except ConfigError as error:
            problems += error.problems
    return table(predictions), problems
