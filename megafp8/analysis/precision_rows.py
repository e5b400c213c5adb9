"""The table of precisions: speed, memory, loss and largest micro-batch of one model in each precision."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.analysis.runs import LoadedRun, load_run
from megafp8.errors import DataError
from megafp8.utils.formatting import escape_markdown, escaped_markdown_table
from megafp8.utils.strict_json import finite_or_null, read_json

WARM_UP_FRACTION = 0.2
"""Share of the first steps whose time does not count: they compile, allocate and measure less steady clocks."""
GIB = 2**30
SIZES_FILE = "micro_batch_size.json"


@dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """One precision.

    Attributes:
        name: of the precision.
        recipe: formats of the linears, and whether they are emulated.
        tokens_per_second: median over the steps after warm-up, at the micro-batch size that all precisions share.
        peak_bytes: of that run; of the device on a GPU, of the process on a CPU.
        loss: of its last step.
        largest_size: the largest micro-batch size that fits, a divisor of the search's batch.
        is_capped: whether it is the complete batch of the search, so that a larger one may fit.
        fastest_size, fastest_tokens_per_second: the fastest of the sizes that were tried.
        problems: runs that are not done, with the reason.
    """

    name: str
    recipe: str = ""
    steps: int = 0
    tokens_per_second: Optional[float] = None
    peak_bytes: Optional[int] = None
    loss: Optional[float] = None
    largest_size: Optional[int] = None
    is_capped: bool = False
    fastest_size: Optional[int] = None
    fastest_tokens_per_second: Optional[float] = None
    problems: tuple[str, ...] = ()


def read_row(name: str, training: Optional[Path], search: Optional[Path], problems: Sequence[str]) -> PrecisionRow:
    """The row of a precision.

    Args:
        training, search: folders of the finished runs; None for one that is not done.
        problems: a line for each that is not.

    Raises:
        DataError: a folder cannot be read.
    """
    row = PrecisionRow(name=name, problems=tuple(problems))
    if training is not None:
        run = load_run(training)
        row = dataclasses.replace(
            row, recipe=run.info.recipe, steps=len(run.steps), tokens_per_second=speed_after_warm_up(run),
            peak_bytes=run.memory_peak_bytes, loss=run.steps[-1].loss,
        )  # fmt: skip
    if search is not None:
        row = with_sizes(row, load_run(search), read_json(search / SIZES_FILE))
    return row


def speed_after_warm_up(run: LoadedRun) -> float:
    """Median tokens per second of the steps after warm-up."""
    steps = run.steps[min(round(WARM_UP_FRACTION * len(run.steps)), len(run.steps) - 1) :]
    return statistics.median(step.tokens_per_second for step in steps)


def with_sizes(row: PrecisionRow, run: LoadedRun, sizes: Any) -> PrecisionRow:
    """The row with the results of a search for the micro-batch size.

    Raises:
        DataError: the file of the search has another form.
    """
    config = run.info.config
    try:
        fitting = {
            trial["size"]: trial["ms_per_sample"] for trial in sizes["trials"] if trial["ms_per_sample"] is not None
        }
        fastest = min(fitting, key=lambda size: fitting[size])
        speed = config["data"]["seq_length"] * 1000 / fitting[fastest]
        return dataclasses.replace(
            row, recipe=row.recipe or run.info.recipe, largest_size=max(fitting),
            is_capped=max(fitting) * run.info.layout["data"] >= config["training"]["global_batch_size"],
            fastest_size=fastest, fastest_tokens_per_second=speed,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{run.folder / SIZES_FILE}: not the result of a search: {error!r}") from None


def table_markdown(rows: Sequence[PrecisionRow], title: str, facts: Sequence[str]) -> str:
    """The table with its facts, and what is not done."""
    header = (
        "precision", "linears", "tokens/s", "to the first", "peak GiB", "loss", "largest micro-batch",
        "fastest micro-batch", "tokens/s there",
    )  # fmt: skip
    base = rows[0].tokens_per_second if rows else None
    cells = [cells_of(row, base) for row in rows]
    lines = [f"# {escape_markdown(title)}", "", *(f"- {escape_markdown(fact)}" for fact in facts), ""]
    lines += [escaped_markdown_table(header, cells, "ll")]
    problems = [f"- NOT DONE: {row.name}: {escape_markdown(problem)}" for row in rows for problem in row.problems]
    return "\n".join([*lines, *([""] * bool(problems)), *problems]) + "\n"


def cells_of(row: PrecisionRow, base: Optional[float]) -> list[str]:
    """The cells of one row; empty where nothing was measured."""

    def text(value: Optional[float], pattern: str) -> str:
        return "" if value is None else pattern.format(value)

    ratio = row.tokens_per_second / base if row.tokens_per_second is not None and base else None
    peak = None if row.peak_bytes is None else row.peak_bytes / GIB
    largest = text(row.largest_size, "{:,}")
    return [
        row.name, row.recipe, text(row.tokens_per_second, "{:,.0f}"), text(ratio, "{:.2f}"), text(peak, "{:.2f}"),
        text(row.loss, "{:.4f}"), f"at least {largest}" if row.is_capped else largest, text(row.fastest_size, "{:,}"),
        text(row.fastest_tokens_per_second, "{:,.0f}"),
    ]  # fmt: skip


def table_data(rows: Sequence[PrecisionRow], title: str, facts: Sequence[str]) -> dict[str, Any]:
    """The same for JSON; numbers that are not finite are None."""
    return finite_or_null({"title": title, "facts": list(facts), "rows": [dataclasses.asdict(row) for row in rows]})


def facts_of(training: Optional[Path]) -> list[str]:
    """Device, model and versions of a finished run; empty without one."""
    if training is None:
        return []
    run = load_run(training)
    config, info = run.info.config, run.info
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    return [
        f"device: {info.world_size} x {info.device_name}",
        f"model: {info.num_parameters:,} parameters, sequences of {config['data']['seq_length']} tokens",
        f"speed, memory and loss: micro-batch {config['training']['micro_batch_size']}, {len(run.steps)} steps of "
        f"{config['training']['global_batch_size']} sequences; speed is the median after the first "
        f"{WARM_UP_FRACTION:.0%} of the steps",
        f"versions: {versions}",
    ]
