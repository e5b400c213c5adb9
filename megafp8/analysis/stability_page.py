"""Files of a stability suite: a self-contained page with verdicts, intervals and pictures, and its content as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from megafp8.analysis import plot_comparison, plot_stability
from megafp8.analysis.comparison_page import facts, run_warnings
from megafp8.analysis.html import PageSection, page_figure, render, write_files
from megafp8.analysis.percent import NOT_DETERMINED, is_wide, rounded, signed, signed_interval
from megafp8.analysis.plot_stability import drawn_recipes
from megafp8.analysis.seed_statistics import BEYOND, BLIND, CONFIDENCE, CONTROL, WITHIN
from megafp8.analysis.stability import SuiteReport, build_report
from megafp8.analysis.stability_gaps import WORSE, SuiteGap
from megafp8.analysis.stability_runs import losses_by_seed
from megafp8.analysis.stability_sweep import AS_WIDE, NARROWER, WIDER, SweepRow, divergence_limit
from megafp8.analysis.tables import Table
from megafp8.config.variants import BASELINE
from megafp8.utils.strict_json import to_strict_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Stability of recipes"
GOOD = (WITHIN, WORSE, AS_WIDE, WIDER)  # of a control, worse is what the suite has to find
BAD = (BEYOND, NARROWER)
CROSSES = "A cross on the right is of runs that diverged, one on the left of what they are compared with."
CLASSES = {**dict.fromkeys(GOOD, "within"), **dict.fromkeys(BAD, "beyond")}


def publish_suite(folder: Path) -> tuple[SuiteReport, list[Path]]:
    """Write report/stability.html and report/stability.json of a suite.

    Raises:
        DataError: the folder has no suite.
    """
    report = build_report(folder)
    contents = {"stability.html": render_page(report), "stability.json": to_strict_json(report.to_plain())}
    return report, write_files(folder / "report", contents)


def render_page(report: SuiteReport) -> str:
    """The HTML page."""
    loaded = [run.run for run in report.runs if run.run is not None]
    parameters = next((run.info.num_parameters for run in loaded if run.info.num_parameters), None)
    model = "" if parameters is None else f"{parameters / 1e6:,.3g}M parameters, "
    has_pairs = report.pairs or report.controls or report.continuation
    seeds = f", {report.info['seeds']} paired seeds" if has_pairs else ""
    device = "" if not loaded else f", {loaded[0].info.world_size} x {loaded[0].info.device_name}"
    unfinished = f"without a result: {'; '.join(report.problems[:5])}"
    return render(
        title=TITLE,
        headline=headline(report),
        conditions=f"{model}size {report.info['size']}{seeds}{device}",
        warnings=[*run_warnings(loaded), *([unfinished] if report.problems else [])],
        sections=sections(report, has_figures=True),
        facts=facts(loaded[0]) if loaded else [],
    )


def headline(report: SuiteReport) -> str:
    """The verdicts in sentences."""
    sentences = []
    if report.is_blind:
        sentences.append("Blind: none of the known-bad controls came out worse, so there is no verdict on gaps.")
    if (num_diverged := baseline_divergences(report)) is not None:
        sentences.append(f"{num_diverged}.")
    for row in report.pairs:
        if row.verdict not in (CONTROL, BLIND):
            sentences.append(f"{row.name}: gap against bf16's own spread over seeds: {row.verdict}.")
    sentences += [f"{row.name}: stable range of learning rates {row.verdict}." for row in report.sweep if row.verdict]
    if report.controls:
        found = sum(row.verdict == WORSE for row in report.controls)
        sentences.append(f"{found} of {len(report.controls)} known-bad controls came out worse than their good forms.")
    sentences += [
        f"{row.name}: gap after continuation against bf16's spread: {row.verdict}."
        for row in report.continuation
        if row.verdict != BLIND
    ]
    return " ".join(sentences) or "No part has a result yet."


def baseline_divergences(report: SuiteReport) -> Optional[str]:
    """How often the baseline of the pairs diverged; None if it never did."""
    losses = losses_by_seed(report.of_part("pairs"), BASELINE).values()
    num_diverged = sum(map(math.isinf, losses))
    return f"{BASELINE} itself diverged in {num_diverged} of {len(losses)} seeds" if num_diverged else None


def sections(report: SuiteReport, *, has_figures: bool = False) -> list[PageSection]:
    """The parts that have rows, in order."""
    parts = (pairs_section, sweep_section, controls_section, continuation_section)
    found = [part(report, has_figures) for part in parts]
    return [section for section in found if section.table and section.table.rows]


def verdict_section(
    name: str,
    title: str,
    text: str,
    header: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    figures: Sequence[tuple[str, Optional[Figure], str]],
) -> PageSection:
    """A part of the page.

    Args:
        rows: the first cell of each is a name, the second a verdict.
        figures: title, figure and caption of each; a figure may be None.
    """
    table = Table(title=title, header=header, rows=tuple(rows))
    return PageSection(
        name=name, title=title, text=text, table=table,
        classes=[CLASSES.get(row[1], "not-decided") for row in table.rows],
        figures=[page_figure(title, figure, caption) for title, figure, caption in figures if figure is not None],
    )  # fmt: skip


def to_text(report: SuiteReport) -> str:
    """Verdicts for the terminal."""
    parts = [headline(report)]
    for table in (section.table for section in sections(report) if section.table):
        parts += [table.title, table.to_text()]
    return "\n\n".join([*parts, *report.problems])


def pairs_section(report: SuiteReport, has_figures: bool) -> PageSection:
    """Part (a): gaps compared with the baseline's spread."""
    spread = report.spread_fraction
    drawn = drawn_recipes(report.of_part("pairs")) if has_figures else []
    figures = [] if not drawn else [
        (
            "Validation loss and gap to bf16",
            plot_comparison.plot_validation(drawn, confidence=CONFIDENCE),
            "Means over the seeds, through the decay of the learning rate. Below: the gap to bf16 of the same seed, "
            "with the interval of its mean.",
        ),
        (
            "Gaps and spread", plot_stability.plot_gap_rows(report.pairs, spread_fraction=spread),
            "A dot is a pair, the bar the 95% interval of the mean, the dashed line bf16's own spread over "
            f"seeds. {CROSSES}",
        ),
    ]  # fmt: skip
    divergences = baseline_divergences(report)
    unknown = f"unknown, as {divergences}" if divergences else "unknown"
    shown = unknown if spread is None else rounded(spread)
    return verdict_section(
        name="pairs", title="Paired runs through the decay",
        text=f"Final validation loss against bf16's of the same seed. The bound is bf16's own spread over its seeds, "
        f"a standard deviation of {shown}, and is itself an estimate: within means that the 95% interval of gap minus "
        "spread lies below zero, beyond that it lies above. A recipe that diverges is beyond; where bf16 itself does, "
        "only if the recipe does in more seeds, by a sign test.",
        header=SPREAD_HEADER, rows=map(spread_cells, report.pairs),
        figures=figures,
    )  # fmt: skip


def sweep_section(report: SuiteReport, has_figures: bool) -> PageSection:
    """Part (b): stable ranges of the learning rate."""
    limit = divergence_limit(report.of_part("sweep"))
    figures = [] if not (has_figures and report.sweep) else [
        (
            "Loss over the learning rate", plot_stability.plot_sweep(report.sweep, limit),
            "A dot is a run; a cross ended with non-finite numbers. Above the dashed line a run counts as diverged.",
        )
    ]  # fmt: skip
    shown = "" if not math.isfinite(limit) else f", here {limit:.3f} nats"
    return verdict_section(
        name="sweep",
        title="Learning rates to divergence",
        text="The largest learning rate up to which no run diverged. A run diverged if it ended with non-finite "
        f"numbers, or lost more than a tenth of what the best run learned{shown}. The ratio to bf16's range is paired "
        "by seed; its 95% interval is widened by a step of the grid. A seed without a stable rate counts as one step "
        "below the first rate.",
        header=("recipe", "verdict", "largest stable rate", "ratio to bf16", "95% interval", "seeds"),
        rows=map(sweep_cells, report.sweep),
        figures=figures,
    )


def sweep_cells(row: SweepRow) -> tuple[str, ...]:
    """Cells of a recipe in the sweep."""
    edges = sorted({edge for edge in row.edges.values() if edge is not None})
    shown = " to ".join(f"{edge:g}" for edge in dict.fromkeys((edges[0], edges[-1]))) if edges else ""
    if row.num_unstable:
        shown = ", ".join(filter(None, (shown, f"none in {row.num_unstable} of {len(row.edges)} seeds")))
    ratio = "-" if row.octaves is None else ratio_text(row.octaves.mean)
    interval = "-"
    if row.octaves is not None and row.octaves.low is not None and row.octaves.high is not None:
        is_undetermined = is_wide(2**row.octaves.low, 2**row.octaves.high)
        interval = f"{ratio_text(row.octaves.low)} to {ratio_text(row.octaves.high)}"
        interval = NOT_DETERMINED if is_undetermined else interval
    open_end = " (end of the sweep)" if row.is_open else ""
    return row.name, row.verdict or "baseline", shown + open_end or "-", ratio, interval, str(len(row.edges))


def ratio_text(octaves: float) -> str:
    """A ratio from its octaves: 0.50x; beyond 100 in either direction the limit."""
    ratio = 2**octaves
    return "<0.01x" if ratio < 0.01 else ">100x" if ratio > 100 else f"{ratio:.2f}x"


def controls_section(report: SuiteReport, has_figures: bool) -> PageSection:
    """Part (c): known-bad controls."""
    figures = [] if not (has_figures and report.controls) else [
        (
            "Known-bad controls", plot_stability.plot_gap_rows(report.controls),
            "Gap of each control to its own good form; a dot is a pair, the bar the 95% interval of the mean. "
            f"{CROSSES}",
        )
    ]  # fmt: skip
    return verdict_section(
        name="controls", title="Known-bad controls",
        text="Settings that are known to be worse, each against its own good form: forks of runs in BF16, compared at "
        "their last step; a pair is the mean over the forks of a run. A suite that cannot tell them apart "
        "says so, and what it would take: the paired seeds that would show the observed gap with a probability of "
        "80%, and the smallest gap that these seeds would show so. With divergences, of either form, a sign test "
        "decides.",
        header=("control", "verdict", "good form", "gap", "95% interval", "seeds needed", "smallest gap", "pairs"),
        rows=(
            (row.name, row.verdict, row.reference, gap_text(row), signed_interval(row.gap), needed_text(row),
             "-" if row.detectable_fraction is None else rounded(row.detectable_fraction), str(len(row.gaps_fraction)))
            for row in report.controls
        ),
        figures=figures,
    )  # fmt: skip


def continuation_section(report: SuiteReport, has_figures: bool) -> PageSection:
    """Part (d): a checkpoint continued in every recipe."""
    drawn = drawn_recipes(report.of_part("continuation")) if has_figures else []
    figures = [] if not drawn else [
        (
            "Continued from the checkpoint", plot_comparison.plot_validation(drawn, confidence=CONFIDENCE),
            "Validation loss of the continued runs; below, the gap to bf16.",
        )
    ]  # fmt: skip
    return verdict_section(
        name="continuation", title="Continuation of a checkpoint",
        text="The weights of one checkpoint continued in bf16 and in each recipe, with a new optimizer state and the "
        "schedule of the suite; verdicts as for the paired runs.",
        header=SPREAD_HEADER, rows=map(spread_cells, report.continuation),
        figures=figures,
    )  # fmt: skip


SPREAD_HEADER = ("recipe", "verdict", "gap", "95% interval", "gap minus spread", "pairs")


def spread_cells(row: SuiteGap) -> tuple[str, ...]:
    """Cells of a recipe that is compared with the baseline's spread, under SPREAD_HEADER."""
    intervals = signed_interval(row.gap), signed_interval(row.excess)
    return row.name, row.verdict, gap_text(row), *intervals, str(len(row.gaps_fraction))


def gap_text(row: SuiteGap) -> str:
    """Mean gap, or the numbers of divergences."""
    if row.num_diverged or row.num_reference_diverged:
        own = f"{row.num_diverged} of {len(row.gaps_fraction)} diverged"
        return f"{own}, {row.reference} in {row.num_reference_diverged}" if row.num_reference_diverged else own
    return "-" if row.gap is None else signed(row.gap.mean)


def needed_text(row: SuiteGap) -> str:
    """Seeds that would show the observed gap; - where it is shown, or not above zero."""
    return "-" if row.verdict == WORSE or row.seeds_needed is None else str(row.seeds_needed)
