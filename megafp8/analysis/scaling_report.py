"""Scaling report: laws, gaps, shifts and speed of a study, as text and tables for terminal, Markdown and HTML."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Optional

from megafp8.analysis import scaling_laws, sweeps
from megafp8.analysis.findings import Difference, difference_sentences
from megafp8.analysis.percent import NOT_DETERMINED, count_text, is_wide
from megafp8.analysis.power_laws import Estimate
from megafp8.analysis.scaling_laws import BOTH, COMPUTE, PARAMETERS, Axis, CellRow, GapRow, SizeAgreement
from megafp8.analysis.seed_statistics import CONFIDENCE
from megafp8.analysis.study_points import SpeedRow, StudyPoints, speed_rows
from megafp8.analysis.tables import MIB, Table, optional
from megafp8.errors import DataError
from megafp8.utils.formatting import escape_markdown
from megafp8.utils.strict_json import to_strict_json

USUAL_BASELINE = "bf16"


@dataclass(frozen=True, kw_only=True)
class ScalingReport:
    """The results of a study.

    Attributes:
        recipes: the baseline first.
        arithmetic: of each recipe, from the records.
        replicates: fits without one seed, for the intervals of the laws; 0 without intervals.
        agreements: whether the gaps of each recipe agree over sizes; only those that do have a row over all sizes.
        notes: results that are missing and why, and configurations that were left out.
        is_validated: False: losses are those of training.
    """

    name: str
    baseline: str
    recipes: tuple[str, ...]
    arithmetic: tuple[str, ...]
    num_runs: int
    replicates: int
    cells: tuple[CellRow, ...]
    gaps: tuple[GapRow, ...]
    agreements: tuple[SizeAgreement, ...]
    axes: tuple[Axis, ...]
    speeds: tuple[SpeedRow, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    is_validated: bool = True

    @property
    def is_sweep(self) -> bool:
        """Whether runs of one size differ in hyperparameters, which are ranked."""
        return bool(sweeps.axes_of(self.cells))

    @property
    def loss_name(self) -> str:
        """What the losses are."""
        return "validation loss" if self.is_validated else "training loss"

    def axis(self, name: str) -> Optional[Axis]:
        """The laws over one axis; None if they could not be fitted."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def to_json(self) -> str:
        """The headline and all fields without the laws of the replicates; non-finite numbers are null."""
        plain = {"headline": headline(self)} | dataclasses.asdict(self)
        for axis in plain["axes"]:
            del axis["fits"]
        for cell in plain["cells"]:
            if not cell["tasks"]:
                del cell["tasks"]
        del plain["is_validated"]
        if self.is_sweep:
            plain |= {"loss": self.loss_name, "ranking": sweeps.ranking_rows(self.cells)}
        return to_strict_json(plain, indent=1)


def analyse(study: StudyPoints, *, baseline: Optional[str] = None) -> ScalingReport:
    """Analyse a study.

    Args:
        baseline: recipe to compare with; default `bf16` if there is one, else the first.

    Raises:
        DataError: the baseline is none of the study's recipes.
    """
    recipes = list(dict.fromkeys(point.recipe for point in study.points))
    if baseline is not None and baseline not in recipes:
        raise DataError(f"baseline {baseline!r} is none of the study's recipes {', '.join(recipes)}")
    baseline = baseline or (USUAL_BASELINE if USUAL_BASELINE in recipes else recipes[0])
    recipes.sort(key=lambda recipe: recipe != baseline)
    cells = scaling_laws.cell_rows(study.points)
    best = [cell for cell in cells if cell.is_best]
    notes = scaling_laws.skipped_cells_note(cells) + scaling_laws.selection_note(cells, recipes)
    # A sweep is for settings, which the ranking has all.
    laws = () if sweeps.axes_of(cells) else (COMPUTE, PARAMETERS, BOTH)
    axes = [scaling_laws.fit_axis(name, best, recipes, notes) for name in laws]
    gaps, agreements = scaling_laws.gap_rows(cells, recipes)
    replicates = max((len(axis.fits.left_out) for axis in axes if axis is not None), default=0)
    return ScalingReport(
        name=study.name, baseline=baseline, recipes=tuple(recipes), num_runs=len(study.points),
        replicates=replicates, cells=tuple(cells),
        arithmetic=tuple(next(one.arithmetic for one in study.points if one.recipe == recipe) for recipe in recipes),
        gaps=tuple(gaps), agreements=tuple(agreements), axes=tuple(axis for axis in axes if axis is not None),
        speeds=tuple(speed_rows(study.points, baseline)), missing=study.missing, notes=tuple(notes),
        is_validated=study.is_validated,
    )  # fmt: skip


ALT_TEXT = "Loss over compute and over parameters, the laws, and the gaps between recipes"
PERCENT, PLAIN = "{:+.2%}", "{:.3f}"


def headline(report: ScalingReport) -> str:
    """The findings: gaps over all pairs, whether a recipe shifts the law over compute, and runs that are not done."""
    sentences = [sweeps.headline(report.cells, report.loss_name)] if report.is_sweep else []
    if len(report.recipes) == 1 and not sentences:
        return f"There is no baseline: {report.recipes[0]} is the only recipe."
    overall = [
        Difference(
            name=row.recipe, mean=row.gap.value, low=row.gap.low, high=row.gap.high,
            sample=f"{row.num_pairs} pairs of runs",
        )
        for row in report.gaps if row.parameters is None
    ]  # fmt: skip
    sentences += difference_sentences(overall, report.baseline)
    sentences += [disagreement_sentence(report, each) for each in report.agreements if not each.may_pool]
    if axis := report.axis(COMPUTE):
        sentences += [factor_sentence(recipe, factor, report.baseline) for recipe, factor in axis.factors]
    if report.missing:
        sentences.append(f"{missing_text(report)}.")
    return " ".join(sentences) or f"No other recipe has a run of the same size, length and seed as {report.baseline}."


def title(report: ScalingReport) -> str:
    """Of the page."""
    return f"{'Sweep' if report.is_sweep else 'Scaling study'} {report.name}"


def alt_text(report: ScalingReport) -> str:
    """Of the figure in a file."""
    return sweeps.ALT_TEXT if report.is_sweep else ALT_TEXT


def disagreement_sentence(report: ScalingReport, agreement: SizeAgreement) -> str:
    """The range of gaps that differ by size, or that no test compares; they have no common gap."""
    gaps = [row.gap.value for row in report.gaps if row.recipe == agreement.recipe]
    ends = f"from {min(gaps):+.2%} to {max(gaps):+.2%}"
    if agreement.p_value is None:
        return (
            f"The gap of {agreement.recipe} is {ends} over {agreement.num_sizes} sizes and lengths and is not pooled: "
            "a test of whether they agree needs two of them with two pairs each."
        )
    return f"The gap of {agreement.recipe} differs by size, {ends} (p = {agreement.p_value:.2g}), so it is not pooled."


def agreement_text(agreement: SizeAgreement) -> str:
    """The test of a recipe's gaps over sizes in words."""
    if agreement.num_sizes == 1:
        return f"{agreement.recipe} has a single size"
    if agreement.p_value is None:
        return f"{agreement.recipe} not pooled, as there is no test (it needs two sizes with two pairs each)"
    verdict = "pooled" if agreement.may_pool else "not pooled"
    single = agreement.num_sizes - agreement.num_tested
    left_out = f", without {single} of {agreement.num_sizes} sizes, which have a single pair" if single else ""
    return f"{agreement.recipe} p = {agreement.p_value:.2g}, {verdict}{left_out}"


def factor_sentence(recipe: str, factor: Estimate, baseline: str) -> str:
    """What the compute of a recipe is worth, and whether that is a shift of the law."""
    if factor.low is None or factor.high is None:
        return f"Compute in {recipe} is worth {factor.value:.0%} of compute in {baseline}, without an interval."
    if is_wide(factor.low, factor.high):
        return f"What compute in {recipe} is worth is {NOT_DETERMINED}: its interval spans more than a factor of 10."
    worth = f"Compute in {recipe} is worth {factor.low:.0%} to {factor.high:.0%} of compute in {baseline}"
    if factor.low <= 1 <= factor.high:
        return f"{worth}: no shift of the scaling law is found."
    return f"{worth}: {recipe} needs {'more' if factor.high < 1 else 'less'} compute for the same loss."


def missing_text(report: ScalingReport) -> str:
    """How many runs are not done."""
    number, total = len(report.missing), report.num_runs + len(report.missing)
    return f"{number} of {total} runs {'is' if number == 1 else 'are'} not done"


def conditions(report: ScalingReport) -> str:
    """Number of runs, and the arithmetic of the recipes."""
    named = [
        recipe if recipe == arithmetic else f"{recipe}: {arithmetic}"
        for recipe, arithmetic in zip(report.recipes, report.arithmetic, strict=True)
    ]
    return f"{report.num_runs} runs. " + "; ".join(named)


def tables(report: ScalingReport) -> list[Table]:
    """The tables of a report that have rows, in order."""
    found = [sweeps.ranking_table(report.cells, report.loss_name)] if report.is_sweep else []
    found.append(gap_table(report))
    for axis in report.axes:
        found.append(law_table(axis))
        if axis.shifts:
            found.append(shift_table(axis, report.baseline))
    found += [task_table(report), speed_table(report), *([] if report.is_sweep else [cell_table(report)])]
    return [table.without_empty_columns() for table in found if table.rows]


def gap_table(report: ScalingReport) -> Table:
    """Gaps to the baseline's runs of the same seeds."""
    rows = tuple(
        (
            row.recipe, "all" if row.parameters is None else count_text(row.parameters),
            "" if row.tokens is None else count_text(row.tokens), str(row.num_pairs), row.gap.text(PERCENT),
        )
        for row in report.gaps
    )  # fmt: skip
    return Table(
        title=f"Gap to {report.baseline}", header=("recipe", "parameters", "tokens", "pairs", "gap"), rows=rows,
        note="Validation loss against the baseline's of the same seed (initial weights, order of samples), with "
        f"Student's {CONFIDENCE:.0%} interval over seeds. No law has a part in it. Sizes are "
        "pooled in the row 'all' only where they agree, by Welch's analysis of variance at the 5% level: "
        f"{'; '.join(map(agreement_text, report.agreements))}.",
    )  # fmt: skip


def positive_text(estimate: Estimate) -> str:
    """A number above zero with its interval, unless that is too wide to say anything."""
    return NOT_DETERMINED if is_wide(estimate.low, estimate.high) else estimate.text(PLAIN)


def law_table(axis: Axis) -> Table:
    """Parameters of the laws over an axis."""
    symbols = {COMPUTE: ("C",), PARAMETERS: ("N",), BOTH: ("N", "D")}[axis.name]
    header = ["recipe", "E"]
    for symbol in symbols:
        header += [f"A of {symbol}", f"exponent of {symbol}"]
    rows = []
    for law in axis.laws:
        cells = [law.recipe, positive_text(law.floor)]
        for coefficient, exponent in zip(law.coefficients, law.exponents, strict=True):
            cells += [positive_text(coefficient), positive_text(exponent)]
        rows.append((*cells, f"{law.worst_residual:.2%}", str(law.num_cells)))
    formula = " + ".join(
        f"A ({symbol} / {count_text(reference)})^-exponent"
        for symbol, reference in zip(symbols, axis.laws[0].references, strict=True)
    )
    differences = [
        f"{recipe} minus {axis.recipes[0]}: E {floor.text('{:+.3f}')}, exponent {exponent.text('{:+.3f}')}."
        for recipe, floor, exponent in axis.differences
    ]
    return Table(
        title=f"Law over {axis.name}", header=(*header, "worst residual", "cells"), rows=tuple(rows),
        note=f"loss = E + {formula}, fitted to the logarithm of the loss. Intervals: {CONFIDENCE:.0%} of a jackknife "
        "over seeds, each left out of all recipes at once; what a law misses beyond the noise of seeds is the worst "
        "residual. " + " ".join(differences),
    )  # fmt: skip


def shift_table(axis: Axis, baseline: str) -> Table:
    """Gaps of the laws to the baseline's, and effective x."""
    rows = [(row.recipe, count_text(row.x), row.gap.text(PERCENT), positive_text(row.effective)) for row in axis.shifts]
    rows += [(recipe, "common law", "", positive_text(factor)) for recipe, factor in axis.factors]
    what = "FLOPs" if axis.name == COMPUTE else "parameters"
    return Table(
        title=f"Is the law over {axis.name} shifted?",
        header=("recipe", what, "gap of the laws", f"effective {axis.name}"), rows=tuple(rows),
        note=f"Effective {axis.name}: the share of it at which {baseline} comes to the same loss; 0.9 is as if a tenth "
        "were lost. In the last lines all recipes have one E and one exponent, and the share takes their place.",
    )  # fmt: skip


def task_table(report: ScalingReport) -> Table:
    """Scores of questions, by task and configuration."""
    names = dict.fromkeys(name for cell in report.cells for name in cell.tasks)
    found = [(name, cell, cell.tasks[name]) for name in names for cell in report.cells if name in cell.tasks]
    rows = tuple(
        (
            name, cell.recipe, ", ".join(cell.options.values()), count_text(cell.parameters), count_text(cell.tokens),
            f"{task.bits_per_byte:.4f}", optional(task.accuracy, "{:.2%}"),
            optional(task.normalized_accuracy, "{:.2%}"), str(len(cell.seeds)),
        )
        for name, cell, task in found
    )  # fmt: skip
    return Table(
        title="Scores of questions",
        header=("task", "recipe", "options", "parameters", "tokens", "bits/byte", "accuracy", "per byte", "seeds"),
        rows=rows, sides="lll", note="At the last validation, means over seeds; bits/byte are of the right answers.",
    )  # fmt: skip


def speed_table(report: ScalingReport) -> Table:
    """Speed, efficiency and memory by layout."""
    rows = tuple(
        (
            row.recipe, row.device, row.layout, count_text(row.parameters), str(row.world_size),
            f"{row.tokens_per_second:,.0f}", f"{row.efficiency:.0%}",
            optional(row.speedup, "{:.2f}x"), optional(row.model_tflops_per_device, "{:.3g}"),
            optional(row.mfu_fraction, "{:.1%}"),
            optional(row.memory_peak_bytes and row.memory_peak_bytes / MIB, "{:,.0f}"),
        )
        for row in report.speeds
    )  # fmt: skip
    return Table(
        title="Speed",
        header=("recipe", "device", "layout", "parameters", "devices", "tokens/s", "efficiency",
                f"against {report.baseline}", "TFLOP/s a device", "MFU", "peak MiB"),
        rows=rows, sides="lll",
        note="Medians over steps after warm-up and over seeds, with the fastest layout. Efficiency is tokens/s of a "
        "device over that with the fewest devices in the study.",
    )  # fmt: skip


def cell_table(report: ScalingReport) -> Table:
    """All configurations."""
    rows = tuple(
        (
            cell.recipe, ", ".join(cell.options.values()), "yes" if cell.is_best else "", count_text(cell.parameters),
            count_text(cell.tokens), count_text(cell.flops), f"{cell.mean:.4f}",
            optional(cell.spread, "{:.4f}"), str(len(cell.losses)),
        )
        for cell in report.cells
    )  # fmt: skip
    return Table(
        title="Runs",
        header=("recipe", "options", "stands for its size", "parameters", "tokens", "FLOPs", "mean loss",
                "spread over seeds", "seeds"),
        rows=rows, sides="lll",
        note="Parameters with embeddings; FLOPs of the model, forward and backward; loss of the last validation in "
        "nats a token.",
    )  # fmt: skip


def warnings(report: ScalingReport) -> list[str]:
    """Limits of the results: notes, emulation, unfinished runs."""
    found = list(report.notes)
    if not report.is_validated:
        found.append("Not all runs were validated: losses are means of the last 5% of the training steps.")
    tokens = sorted({cell.tokens for cell in report.cells})
    if report.is_sweep and len(tokens) > 1:
        found.append(
            f"Settings differ in their training tokens, from {count_text(tokens[0])} to {count_text(tokens[-1])}, for "
            "which the ranking does not correct."
        )
    if any("emulated" in text for text in report.arithmetic):
        found.append(
            "Recipes were emulated: the losses are those of the format, speed and memory are not those of hardware "
            "that has it."
        )
    if report.missing:
        found.append(f"{missing_text(report)}: {', '.join(report.missing)}")
    return found


def method(report: ScalingReport) -> str:
    """How the intervals were computed."""
    if report.is_sweep:
        return f"Settings are ranked by their mean {report.loss_name} over seeds."
    if not report.replicates:
        return "The laws have no intervals: these come from seeds, and every size and length needs two."
    return (
        f"Jackknife of {report.replicates} fits, each without one seed of one size and length. Intervals are Student's "
        "with Satterthwaite's degrees of freedom (megafp8/analysis/power_laws.py). They cover the noise of seeds, not "
        "whether a law of this form holds, nor anything beyond the range that was trained."
    )


def to_markdown(report: ScalingReport, picture: str) -> str:
    """The report as Markdown, with a link to the file of its figure."""
    parts = [
        f"# {escape_markdown(title(report))}",
        escape_markdown(headline(report)),
        escape_markdown(conditions(report)),
    ]
    parts += [f"- {escape_markdown(text)}" for text in warnings(report)] + [f"![{alt_text(report)}]({picture})"]
    for table in tables(report):
        parts += [f"## {escape_markdown(table.title)}", table.to_markdown(), escape_markdown(table.note)]
    return "\n\n".join([*filter(None, parts), "## Method", method(report)]) + "\n"


def to_text(report: ScalingReport) -> str:
    """The report for a terminal."""
    parts = [f"{report.name}: {headline(report)}", conditions(report), *warnings(report)]
    parts += [f"{table.title}\n{table.to_text()}" for table in tables(report)]
    return "\n\n".join(parts)
