"""Files of a comparison of recipes: self-contained HTML report, Markdown, JSON and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional, Union

from megafp8.analysis import plot_comparison, tables
from megafp8.analysis.compare import BOUND_FRACTION, WARMUP_STEPS, Comparison, compare_runs, find_baseline
from megafp8.analysis.findings import headline
from megafp8.analysis.html import PageSection, page_figure, render, standalone_svg, write_files
from megafp8.analysis.pairing import group_runs, is_control, pairs_of, recipe_of
from megafp8.analysis.percent import percent
from megafp8.analysis.plot_comparison import GIB, DrawnRecipe, color_of, plot_loss_curves
from megafp8.analysis.runs import (
    LoadedRun,
    Unfinished,
    describe_unfinished,
    folder_of,
    has_steps,
    is_unfinished,
    load_runs,
    run_names,
)
from megafp8.analysis.seed_statistics import BEYOND, CONFIDENCE, WITHIN
from megafp8.analysis.tables import Table

TITLE = "Comparison of recipes"
# Of the table in the terminal, those that the page has between gap and memory.
PAGE_COLUMNS = ("seeds", "validation loss", "perplexity", "tokens/s", "speed")


def render_page(comparison: Comparison, runs: Sequence[LoadedRun], *, title: str) -> str:
    """The HTML page of a comparison of these runs."""
    recipes = drawn_recipes(comparison, runs)
    verdicts = PageSection(
        name="verdicts",
        table=verdict_table(comparison),
        colors=[
            "var(--ink)" if row.name == comparison.baseline else color
            for row, color in zip(comparison.recipes, table_colors(comparison, recipes), strict=True)
        ],
        classes=[row.verdict.replace(" ", "-") for row in comparison.recipes],
        warnings=[*comparison.warnings, *run_warnings(runs)],
    )  # fmt: skip
    notes = [text for text in (tables.verdict_note(comparison), tables.control_note(comparison)) if text]
    equal_loss, tasks = tables.equal_loss_table(comparison), tables.task_table(comparison)
    sections = [verdicts, *figures(comparison, recipes)]
    if notes:
        sections.insert(2, PageSection(title="What the verdicts mean", notes=notes))
    if tasks is not None:
        sections.append(PageSection(title=tasks.title, table=tasks))
    if equal_loss is not None:
        sections.append(
            PageSection(title=equal_loss.title, table=equal_loss, notes=[tables.equal_loss_note(comparison)])
        )
    return render(
        title=title,
        headline=headline(comparison),
        conditions=conditions(recipes[0].runs[0], comparison),
        sections=sections,
        facts=facts(recipes[0].runs[0]),
        baseline=comparison.baseline,
        differences=comparison.differences,
        runs=tables.run_table(comparison),
    )


def drawn_recipes(comparison: Comparison, runs: Sequence[LoadedRun]) -> list[DrawnRecipe]:
    """The recipes that have figures, in the order of the table, the baseline first."""
    groups = group_runs(runs)
    base = find_baseline(groups, comparison.baseline)
    compared = {row.name for row in comparison.drawn}
    ordered = [base, *(recipe for recipe in groups if recipe is not base and recipe.name in compared)]
    drawn: list[DrawnRecipe] = []
    index = 0
    for recipe in ordered:
        color = color_of(recipe.name, index, is_baseline=recipe is base)
        index += recipe is not base and not is_control(recipe.name)
        drawn.append(DrawnRecipe(name=recipe.name, pairs=tuple(pairs_of(base, recipe)), color=color))
    return drawn


def table_colors(comparison: Comparison, recipes: Sequence[DrawnRecipe]) -> list[str]:
    """Colours of the table rows; "none" for a recipe that is not drawn."""
    colors = {recipe.name: recipe.color for recipe in recipes}
    return [colors.get(row.name, "none") for row in comparison.recipes]


def conditions(run: LoadedRun, comparison: Comparison) -> str:
    """Model size, training tokens, seeds and devices in one line."""
    info, seeds = run.info, max(len(row.seeds) for row in comparison.recipes)
    model = f"{info.num_parameters / 1e6:,.3g}M parameters, " if info.num_parameters else ""
    repetition = f" ({run.repetition})" if run.repetition else ""
    return (
        f"{model}{comparison.drawn[0].consumed_tokens:,} training tokens{repetition}, {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}, {info.world_size} x {info.device_name}"
    )


def run_warnings(runs: Sequence[LoadedRun]) -> list[str]:
    """Warnings about what the numbers do not show."""
    if not any("emulated" in recipe_of(run) for run in runs):
        return []
    return [
        "Recipes were emulated: codes, scales and losses are those of the format, but speed and memory are not "
        "those of hardware that has it."
    ]


BATCH_SETTINGS = ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule", "micro_batch_size")


def facts(run: LoadedRun) -> list[tuple[str, str]]:
    """The run's model, batch, optimizer and versions, as (name, text) pairs."""
    info = run.info

    def settings(section: str, *names: str) -> str:
        values = info.config.get(section, {})
        return ", ".join(
            f"{name.replace('_', ' ')} {values[name]}" for name in names if values.get(name) not in (None, [], ())
        )

    batch = settings("training", *BATCH_SETTINGS) + ", " + settings("data", "seq_length")
    found = [
        ("model", settings("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")),
        ("batch", batch),
        ("steps", settings("training", "train_iters", "train_samples", "eval_interval", "eval_iters")),
        ("optimizer", settings("optimizer", "optimizer", "lr", "min_lr", "lr_decay_style", "lr_warmup_fraction",
                               "weight_decay", "clip_grad")),
        ("versions", ", ".join(f"{name} {version}" for name, version in info.versions.items())),
        ("started", info.started_at),
    ]  # fmt: skip
    return [(name, value.strip(", ")) for name, value in found if value.strip(", ")]


def figures(comparison: Comparison, recipes: Sequence[DrawnRecipe]) -> list[PageSection]:
    """A section for every figure that has something to draw."""
    colors = table_colors(comparison, recipes)
    has_seeds = max(len(recipe.pairs) for recipe in recipes) > 1
    mean = "Lines are means over the seeds, bands what the seeds span." if has_seeds else ""
    interval = f", with {plot_comparison.band_text(recipes, comparison.confidence)}" if has_seeds else ""
    bound, baseline = percent(comparison.bound_fraction), comparison.baseline
    drawn = [
        (
            "Gap to " + baseline, plot_comparison.plot_gaps(comparison, colors) if comparison.has_gaps else None,
            f"Final validation loss against {baseline}'s of the same seed. A dot is a seed, the upright their mean, "
            f"the pale bar its {comparison.confidence:.0%} interval, the dashed line the bound of {bound}.",
        ),
        (
            "Validation against tokens", plot_comparison.plot_validation(recipes, confidence=comparison.confidence),
            f"{mean} Below: the gap to {baseline} of the same seed{interval}.",
        ),
        (
            "Validation against time", plot_comparison.plot_time(recipes),
            f"{mean} Time is the sum of step times; start, validations and checkpoints are left out.",
        ),
        (
            "Training loss", plot_comparison.plot_training(recipes),
            " ".join(filter(None, ("Running means over a twenty-fifth of the run.", mean, last_gaps(comparison)))),
        ),
        ("Gradient norm", plot_comparison.plot_grad_norms(recipes), f"Before clipping, running means. {mean}"),
        (
            "Speed and memory", plot_comparison.plot_speed_and_memory(comparison, colors),
            f"Median speed after the first {comparison.warmup_steps} steps; largest memory of any step.",
        ),
    ]  # fmt: skip
    return [
        PageSection(title=title, figures=[page_figure(title, figure, caption)])
        for title, figure, caption in drawn
        if figure is not None
    ]


def last_gaps(comparison: Comparison) -> str:
    """Gaps of the training losses at the end of the runs; empty if nothing is compared."""
    gaps = {row.name: tables.shown_training_gap(row, comparison.baseline) for row in comparison.drawn if row.verdict}
    found = ", ".join(f"{name} {gap}" for name, gap in gaps.items() if gap != "-")
    return f"Gap over the last tenth of the steps: {found}." if found else ""


def verdict_table(comparison: Comparison) -> Table:
    """The page's table of recipes: verdicts first, without what only the page's table of runs has."""
    columns, rows = tables.recipe_columns(comparison), comparison.recipes
    bound = percent(comparison.bound_fraction)
    texts = {"": "baseline", WITHIN: f"within {bound}", BEYOND: f"beyond {bound}"}
    shown = {"recipe": columns["run"], "verdict": [texts.get(row.verdict, row.verdict) for row in rows]}
    for name in ("gap", f"{comparison.confidence:.0%} interval"):
        cells = zip(columns[name], rows, strict=True)
        shown[name] = ["" if row.name == comparison.baseline else cell for cell, row in cells]
    for name in PAGE_COLUMNS:
        shown[name] = columns[name]
    peaks = [row.memory_peak_bytes and row.memory_peak_bytes / GIB for row in rows]
    shown["peak memory"] = [tables.optional(peak, "{:.3g} GiB") for peak in peaks]
    return Table.of_columns("Table of recipes", shown)


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
    has_csv: bool = False,
) -> tuple[Comparison, list[Path]]:
    """Compare finished runs and write the files of the comparison.

    With an output folder these are report.html, comparison.md, comparison.json, loss_curves.png and, if there are gaps,
    gaps.svg.

    Args:
        folders: the --save folders of the runs. Runs whose state is not "done" have no figures.
        baseline: folder or name of a run, or name of a recipe, to compare with; default the first.
        bound_fraction, confidence: bound and confidence level of the verdicts.
        unfinished: further unfinished runs of the recipes.
        include_unfinished: also compare unfinished runs that have at least one step, by their records so far. Their
            recipes then have no verdict.
        has_csv: also write runs.csv and steps.csv.

    Returns:
        The comparison and the files written.

    Raises:
        DataError: a folder has no run, a finished run has no validation or no steps, or the baseline is unknown or not
            finished.
    """
    left_out = {
        folder.resolve(): describe_unfinished(folder, name=name, has_figures=include_unfinished and has_steps(folder))
        for folder, name in zip(map(folder_of, folders), run_names(folders), strict=True)
        if is_unfinished(folder)
    }
    unfinished = [*unfinished, *left_out.values()]
    runs = load_runs(folders, left_out=[folder for folder, run in left_out.items() if not run.has_figures])
    baseline = baseline_name(folders[0] if baseline is None and folders else baseline, runs, left_out)
    comparison = compare_runs(
        runs, baseline=baseline, warmup_steps=warmup_steps, bound_fraction=bound_fraction, confidence=confidence,
        unfinished=unfinished,
    )  # fmt: skip
    if output_folder is None:
        return comparison, []
    folder = Path(output_folder)
    recipes = drawn_recipes(comparison, runs)
    contents = {
        "report.html": render_page(comparison, runs, title=title),
        "comparison.md": tables.to_markdown(comparison),
        "comparison.json": tables.to_json(comparison),
    }
    if has_csv:
        contents |= {"runs.csv": tables.runs_csv(comparison), "steps.csv": tables.steps_csv(runs)}
    if comparison.has_gaps:
        gaps = plot_comparison.plot_gaps(comparison, table_colors(comparison, recipes))
        contents["gaps.svg"] = standalone_svg(gaps, "gaps of the validation loss")
    picture = plot_loss_curves(recipes, folder / "loss_curves.png", title)
    return comparison, [*write_files(folder, contents), picture]


def baseline_name(
    baseline: Union[str, Path, None], runs: Sequence[LoadedRun], left_out: Mapping[Path, Unfinished]
) -> Optional[str]:
    """Name of the run in a folder, or the recipe of an unfinished one; anything else is already a name."""
    if baseline is None:
        return None
    folder = folder_of(baseline).resolve()
    for run in runs:
        if run.folder.resolve() == folder:
            return run.name
    return left_out[folder].recipe if folder in left_out else str(baseline)
