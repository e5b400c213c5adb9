"""From run folders to the files that people look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

from megafp8.reports.compare import WARMUP_STEPS, Comparison, compare_runs
from megafp8.reports.load import Run, load_runs


def publish_comparison(
    folders: Sequence[Union[str, Path]],
    *,
    baseline: Optional[str] = None,
    output_folder: Optional[Union[str, Path]] = None,
    warmup_steps: int = WARMUP_STEPS,
    title: str = "Training loss",
) -> tuple[Comparison, list[Path]]:
    """Compare runs and, with an output folder, write comparison.md, comparison.json and loss_curves.png into it.

    Args:
        folders: what each run had as --save.
        baseline: folder or name of the run to compare with; default the first.

    Returns:
        The comparison and the files written.

    Raises:
        DataError: a folder without run, a run without validation or steps, an unknown baseline.
    """
    runs = load_runs(folders)
    if baseline is not None:
        baseline = _name_of(baseline, runs)
    comparison = compare_runs(runs, baseline=baseline, warmup_steps=warmup_steps)
    if output_folder is None:
        return comparison, []
    # Drawing needs matplotlib, a table does not.
    from megafp8.reports.plot import plot_loss_curves

    folder = Path(output_folder)
    folder.mkdir(parents=True, exist_ok=True)
    picture = plot_loss_curves(runs, folder / "loss_curves.png", baseline=baseline, title=title)
    markdown, data = folder / "comparison.md", folder / "comparison.json"
    markdown.write_text(comparison.to_markdown(), encoding="utf-8")
    data.write_text(comparison.to_json(), encoding="utf-8")
    return comparison, [markdown, data, picture]


def _name_of(baseline: str, runs: Sequence[Run]) -> str:
    """A folder's run name; anything else is taken for a name already."""
    return next((run.name for run in runs if run.folder.resolve() == Path(baseline).resolve()), baseline)
