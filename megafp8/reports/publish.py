"""From run folders to the files that people look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional, Union

from megafp8.reports import tables
from megafp8.reports.compare import BOUND_FRACTION, WARMUP_STEPS, Comparison, compare_runs
from megafp8.reports.intervals import CONFIDENCE
from megafp8.reports.load import Run, folder_of, has_steps, load_runs, run_names
from megafp8.reports.unfinished import Unfinished, describe_unfinished, is_unfinished

TITLE = "Comparison of recipes"


def publish_comparison(
    folders: Sequence[Union[str, Path]],
    *,
    baseline: Optional[str] = None,
    output_folder: Optional[Union[str, Path]] = None,
    warmup_steps: int = WARMUP_STEPS,
    bound_fraction: float = BOUND_FRACTION,
    confidence: float = CONFIDENCE,
    title: str = TITLE,
    unfinished: Sequence[Unfinished] = (),
    include_unfinished: bool = False,
) -> tuple[Comparison, list[Path]]:
    """Compare runs that are done and, with an output folder, write report.html, comparison.md, comparison.json,
    gaps.svg (where there are gaps) and loss_curves.png into it.

    Args:
        folders: what each run had as --save. Those whose state says that they are not done have no figures.
        baseline: folder or name of a run, or name of a recipe, to compare with; default the first.
        bound_fraction, confidence: what the verdicts go by.
        unfinished: further runs of the recipes.
        include_unfinished: compare runs that are not done by what they have so far, once they have a step; nothing is
            decided then.

    Returns:
        The comparison and the files written.

    Raises:
        DataError: a folder without run, a run that is done without validation or steps, an unknown baseline or one that
            is not done.
    """
    left = {
        folder.resolve(): describe_unfinished(
            folder, name=name, has_figures=include_unfinished and has_steps(folder)
        )
        for folder, name in zip(map(folder_of, folders), run_names(folders), strict=True)
        if is_unfinished(folder)
    }
    unfinished = [*unfinished, *left.values()]
    runs = load_runs(folders, left_out=[folder for folder, each in left.items() if not each.has_figures])
    baseline = _name_of(folders[0] if baseline is None and folders else baseline, runs, left)
    comparison = compare_runs(
        runs, baseline=baseline, warmup_steps=warmup_steps, bound_fraction=bound_fraction, confidence=confidence,
        unfinished=unfinished,
    )  # fmt: skip
    if output_folder is None:
        return comparison, []
    # Drawing needs matplotlib, a table does not.
    from megafp8.reports.html import alone, to_svg
    from megafp8.reports.page import drawn_recipes, render_page, table_colors
    from megafp8.reports.plot import plot_loss_curves
    from megafp8.reports.plot_recipes import plot_gaps

    folder = Path(output_folder)
    folder.mkdir(parents=True, exist_ok=True)
    recipes = drawn_recipes(comparison, runs)
    first_seed = [recipe.runs[0] for recipe in recipes]
    picture = plot_loss_curves(first_seed, folder / "loss_curves.png", title=title)
    written = {
        folder / "report.html": render_page(comparison, runs, title=title),
        folder / "comparison.md": tables.to_markdown(comparison),
        folder / "comparison.json": tables.to_json(comparison),
    }
    if comparison.has_gaps:
        gaps = to_svg(plot_gaps(comparison, table_colors(comparison, recipes)), "gaps of the validation loss")
        written[folder / "gaps.svg"] = alone(gaps)
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    return comparison, [*written, picture]


def _name_of(
    baseline: Union[str, Path, None], runs: Sequence[Run], left: Mapping[Path, Unfinished]
) -> Optional[str]:
    """A folder's run name, or the recipe of one that is not done; anything else is taken for a name already."""
    if baseline is None:
        return None
    folder = folder_of(baseline).resolve()
    for run in runs:
        if run.folder.resolve() == folder:
            return run.name
    return left[folder].recipe if folder in left else str(baseline)
