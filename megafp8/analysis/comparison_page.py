"""A comparison as one HTML page that needs nothing else: table of verdicts, pictures, what was run.

From run folders to the files that people look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from megafp8.analysis import tables
from megafp8.analysis.compare import BOUND_FRACTION, WARMUP_STEPS, Comparison, RecipeRow, compare_runs, find_baseline
from megafp8.analysis.html import render, to_svg
from megafp8.analysis.pairing import group_runs, is_control, pairs_of, recipe_of
from megafp8.analysis.plot_comparison import (
    Drawn,
    color_of,
    plot_gaps,
    plot_grad_norms,
    plot_speed_and_memory,
    plot_time,
    plot_training,
    plot_validation,
)
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
from megafp8.analysis.seed_statistics import BEYOND, CONFIDENCE, CONTROL, UNDECIDED, WITHIN

GIB = 2**30


def render_page(comparison: Comparison, runs: Sequence[LoadedRun], *, title: str) -> str:
    """The page of a comparison.

    Args:
        runs: those that were compared.
    """
    recipes = drawn_recipes(comparison, runs)
    run_header, run_rows = tables.run_cells(comparison)
    return render(
        "report.html.jinja",
        title=title,
        headline=headline(comparison),
        conditions=conditions(recipes[0].runs[0], comparison),
        confidence=f"{comparison.confidence:.0%}",
        baseline=comparison.baseline,
        recipes=[
            _table_row(row, comparison, color)
            for row, color in zip(comparison.recipes, table_colors(comparison, recipes), strict=True)
        ],
        notes=tables.notes(comparison),
        warnings=[*comparison.warnings, *cautions(runs)],
        figures=[figure for figure in figures(comparison, recipes) if figure["svg"]],
        facts=facts(recipes[0].runs[0]),
        differences=comparison.differences,
        run_header=run_header,
        run_rows=run_rows,
    )


def drawn_recipes(comparison: Comparison, runs: Sequence[LoadedRun]) -> list[Drawn]:
    """The recipes in the order of the table, the baseline first."""
    groups = group_runs(runs)
    base = find_baseline(groups, comparison.baseline)
    compared = {row.name for row in comparison.drawn}
    ordered = [base, *(recipe for recipe in groups if recipe is not base and recipe.name in compared)]
    drawn: list[Drawn] = []
    index = 0
    for recipe in ordered:
        color = color_of(recipe.name, index, is_baseline=recipe is base)
        index += recipe is not base and not is_control(recipe.name)
        drawn.append(Drawn(name=recipe.name, pairs=tuple(pairs_of(base, recipe)), color=color))
    return drawn


def table_colors(comparison: Comparison, recipes: Sequence[Drawn]) -> list[str]:
    """The colours of the rows of the table; none for a recipe that is not drawn."""
    colors = {recipe.name: recipe.color for recipe in recipes}
    return [colors.get(row.name, "none") for row in comparison.recipes]


def headline(comparison: Comparison) -> str:
    """The result in a sentence or three."""
    rows = [row for row in comparison.recipes if row.verdict not in ("", CONTROL)]
    bound = tables.percent(comparison.bound_fraction)
    said = {
        WITHIN: f"stay within {bound} of {comparison.baseline}'s validation loss",
        BEYOND: f"lie beyond {bound}",
        UNDECIDED: "are not decided",
    }
    parts = []
    for verdict, words in said.items():
        if names := [row.name for row in rows if row.verdict == verdict]:
            if len(names) == 1:
                words = words.replace("stay", "stays", 1).replace("lie ", "lies ", 1).replace("are", "is", 1)
            parts.append(f"{_listed(names)} {words}.")
    return " ".join(parts) or "One recipe alone: there is nothing to compare it with."


def conditions(run: LoadedRun, comparison: Comparison) -> str:
    """Model, length and machine in a line."""
    info, seeds = run.info, max(len(row.seeds) for row in comparison.recipes)
    model = f"{info.num_parameters / 1e6:,.3g}M parameters, " if info.num_parameters else ""
    return (
        f"{model}{comparison.drawn[0].consumed_tokens:,} training tokens, {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}, {info.world_size} x {info.device_name}"
    )


def cautions(runs: Sequence[LoadedRun]) -> list[str]:
    """What the numbers do not say."""
    found = []
    if any("emulated" in recipe_of(run) for run in runs):
        found.append(
            "Recipes were emulated: codes, scales and losses are those of the format, but speed and memory are not "
            "those of hardware that has it."
        )
    return found


def facts(run: LoadedRun) -> list[tuple[str, str]]:
    """The baseline's model, data and versions, by name."""
    info, config = run.info, run.info.config
    model, training, data = (config.get(section, {}) for section in ("model", "training", "data"))
    optimizer = config.get("optimizer", {})

    def listed(section: dict[str, Any], *names: str) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {section[name]}" for name in names if section.get(name) is not None)

    found = [
        ("model", listed(model, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")),
        ("batch", listed(training, "global_batch_size", "micro_batch_size") + ", " + listed(data, "seq_length")),
        ("steps", listed(training, "train_iters", "eval_interval", "eval_iters")),
        (
            "optimizer",
            listed(
                optimizer,
                "optimizer",
                "lr",
                "min_lr",
                "lr_decay_style",
                "lr_warmup_fraction",
                "weight_decay",
                "clip_grad",
            ),
        ),  # fmt: skip
        ("versions", ", ".join(f"{name} {version}" for name, version in info.versions.items())),
        ("started", info.started_at),
    ]
    return [(name, value) for name, value in found if value.strip(", ")]


def figures(comparison: Comparison, recipes: Sequence[Drawn]) -> list[dict[str, str]]:
    """Title, picture and caption of every figure; the picture is empty where there is nothing to draw."""
    colors = table_colors(comparison, recipes)
    several = max(len(recipe.pairs) for recipe in recipes) > 1
    mean = "Lines are means over the seeds, bands what the seeds span." if several else ""
    interval = ", with the interval of its mean" if several else ""
    bound, baseline = tables.percent(comparison.bound_fraction), comparison.baseline
    drawn = [
        (
            "Gap to " + baseline, plot_gaps(comparison, colors) if comparison.has_gaps else None,
            f"A dot is a seed, the upright their mean, the pale bar its {comparison.confidence:.0%} interval, the "
            f"dashed line the bound of {bound}. Left of zero is better than {baseline}.",
        ),
        (
            "Validation against tokens", plot_validation(recipes, confidence=comparison.confidence),
            f"{mean} Below: the gap to {baseline} of the same seed{interval}.",
        ),
        (
            "Validation against time", plot_time(recipes),
            f"{mean} Time is the sum of step times; start, validations and checkpoints are left out.",
        ),
        (
            "Training loss", plot_training(recipes),
            " ".join(filter(None, ("Running means over a twenty-fifth of the run.", mean, last_gaps(comparison)))),
        ),
        ("Gradient norm", plot_grad_norms(recipes), f"Before clipping, running means. {mean}"),
        (
            "Speed and memory", plot_speed_and_memory(comparison, colors),
            f"Median over the steps after the first {comparison.warmup_steps}; the largest memory of any step.",
        ),
    ]  # fmt: skip
    return [
        {"title": title, "svg": "" if figure is None else to_svg(figure, title), "caption": caption.strip()}
        for title, figure, caption in drawn
    ]


def last_gaps(comparison: Comparison) -> str:
    """How far training losses lie apart at the end; empty where nothing is compared."""
    gaps = {row.name: tables.shown_training_gap(row, comparison.baseline) for row in comparison.drawn if row.verdict}
    found = ", ".join(f"{name} {gap}" for name, gap in gaps.items() if gap != "-")
    return f"Gap over the last tenth of the steps: {found}." if found else ""


def _table_row(row: RecipeRow, comparison: Comparison, color: str) -> dict[str, str]:
    is_baseline = row.name == comparison.baseline
    bound = tables.percent(comparison.bound_fraction)
    verdict = {WITHIN: f"within {bound}", BEYOND: f"beyond {bound}"}.get(row.verdict, row.verdict)
    return {
        "name": row.name,
        "color": "var(--ink)" if is_baseline else color,
        "verdict": "baseline" if is_baseline else verdict,
        "verdict_class": row.verdict.replace(" ", "-"),
        "gap": "" if is_baseline else tables.shown_gap(row, comparison.baseline),
        "interval": "" if is_baseline else tables.shown_interval(row, comparison.baseline),
        "seeds": tables.shown_seeds(row),
        "loss": tables.optional(row.validation_loss, "{:.4f}"),
        "perplexity": tables.optional(row.perplexity, "{:.2f}"),
        "speed": tables.optional(row.tokens_per_second, "{:,.0f}"),
        "ratio": tables.optional(row.speed_ratio, "{:.2f}x"),
        "memory": tables.optional(row.memory_peak_bytes and row.memory_peak_bytes / GIB, "{:.3g} GiB"),
    }


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


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
        folder.resolve(): describe_unfinished(folder, name=name, has_figures=include_unfinished and has_steps(folder))
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
    from megafp8.analysis.html import alone, to_svg
    from megafp8.analysis.plot_comparison import plot_gaps
    from megafp8.analysis.plots import plot_loss_curves

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
    baseline: Union[str, Path, None], runs: Sequence[LoadedRun], left: Mapping[Path, Unfinished]
) -> Optional[str]:
    """A folder's run name, or the recipe of one that is not done; anything else is taken for a name already."""
    if baseline is None:
        return None
    folder = folder_of(baseline).resolve()
    for run in runs:
        if run.folder.resolve() == folder:
            return run.name
    return left[folder].recipe if folder in left else str(baseline)
