"""Files of a comparison by forks: a self-contained page, Markdown, JSON and a figure."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from megafp8.analysis.comparison_page import facts, run_warnings
from megafp8.analysis.forks import COSTS, DIVERGED, GAINS, NOISE, ForkCost, ForkReport, is_found, read_forks
from megafp8.analysis.html import PageSection, page_figure, render, standalone_svg, write_files
from megafp8.analysis.percent import signed, signed_interval
from megafp8.analysis.plot_comparison import UPRIGHT_GAP_LABEL, WIDTH_INCHES, add_legend, color_of
from megafp8.analysis.plotting import INK, PAGE_STYLE, new_figure, plot_style
from megafp8.analysis.tables import Table
from megafp8.config.variants import BASELINE
from megafp8.recipes.known_bad import KNOWN_BAD
from megafp8.utils.formatting import escaped_markdown_table
from megafp8.utils.strict_json import to_strict_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "What switching to a recipe costs"
CLASSES = {COSTS: "beyond", DIVERGED: "beyond", GAINS: "within"}
MEANING = (
    "From checkpoints of runs in BF16 each recipe and BF16 train the same batches. The cost is the difference of their "
    "validation losses some steps later: that of switching, at this phase of the learning rate, not of a whole run."
)

CONTROLS = (
    "Settings that are known to be worse, each against its good form, emulated. Where none is found, the comparison is "
    "blind: that a recipe is not found to cost anything says nothing."
)


def publish_forks(folder: Path) -> tuple[ForkReport, list[Path]]:
    """Write report/forks.html, .md, .json, .csv and .svg of the forks in a folder.

    Raises:
        DataError: there are no finished forks of the baseline.
    """
    report = read_forks(folder)
    contents = {
        "forks.html": render_page(report), "forks.md": to_markdown(report), "forks.json": to_json(report),
        "forks.csv": to_csv(report), "forks.svg": standalone_svg(plot_costs(report), TITLE),
    }  # fmt: skip
    return report, write_files(folder / "report", contents)


def sentences(report: ForkReport) -> list[str]:
    """The verdicts in words."""
    if report.is_blind:
        names = ", ".join(control.name for control in report.controls)
        return [
            f"Blind: of {names}, which are known to be worse, none was found. There is no verdict: give more --seeds, "
            "or longer forks."
        ]
    found = [control.name for control in report.controls if is_found(control)]
    count = f"{len(found)} of {len(report.controls)} known-bad controls found: {', '.join(found)}."
    return [*(sentence(cost, report.length) for cost in report.costs), *([count] if report.controls else [])]


def sentence(cost: ForkCost, length: int) -> str:
    """The verdict on one recipe."""
    if cost.verdict == DIVERGED:
        return f"{cost.name} diverged within {length} steps."
    half = "" if cost.half_width is None else f" \u00b1{cost.half_width:.2%}"
    amount = f"{signed(cost.cost.mean)}{half}"
    if cost.verdict == NOISE:
        return f"Another order of summation: {amount} after {length} steps."
    if cost.verdict in (COSTS, GAINS):
        return f"Switching to {cost.name} {cost.verdict} {amount} after {length} steps, {cost.course}."
    return f"Switching to {cost.name} makes no difference that {cost.num_forks} forks show: {amount}."


def conditions(report: ForkReport) -> str:
    """Model, trunks, forks and device in one line."""
    info, trunks = report.info.info, {point.seed for point in report.points}
    steps = sorted({point.step for point in report.points})
    model = f"{info.num_parameters / 1e6:,.3g}M parameters, " if info.num_parameters else ""
    return (
        f"{model}{len(trunks)} trunks in BF16, forks at steps {', '.join(map(str, steps))}, {report.length} steps "
        f"each, {', '.join(filter(None, (report.info.repetition, f'{info.world_size} x {info.device_name}')))}"
    )


def table_of(report: ForkReport) -> Table:
    """A line for each recipe."""
    costs = report.costs
    return Table.of_columns(
        "Cost of switching",
        {
            "recipe": [cost.name for cost in costs],
            "verdict": [report.verdict_on(cost) for cost in costs],
            f"cost after {report.length} steps": [signed(cost.cost.mean) for cost in costs],
            "95% interval": [signed_interval(cost.cost) for cost in costs],
            "course": [cost.course for cost in costs],
            "in BF16 arithmetic": [signed(cost.plain[-1].mean) if cost.plain else "" for cost in costs],
            "its interval": [signed_interval(cost.plain[-1]) if cost.plain else "" for cost in costs],
            "second half": [signed(cost.growth.mean) for cost in costs],
            "trunks": [str(len(cost.by_trunk)) for cost in costs],
            "forks": [str(cost.num_forks) for cost in costs],
            "whole runs": [signed_interval(cost.full) for cost in costs],
        },
    )


def control_table(report: ForkReport) -> Table:
    """A line for each known-bad control against its good form."""
    controls = report.controls
    return Table.of_columns(
        "Known-bad controls",
        {
            "recipe": [control.name for control in controls],
            "verdict": ["worse" if is_found(control) else "not found" for control in controls],
            "good form": [KNOWN_BAD[control.name][0] for control in controls],
            f"cost after {report.length} steps": [signed(control.cost.mean) for control in controls],
            "95% interval": [signed_interval(control.cost) for control in controls],
            "forks": [str(control.num_forks) for control in controls],
        },
    )


def warnings(report: ForkReport) -> list[str]:
    """What the table does not say."""
    found = run_warnings([report.info])
    if report.unfinished:
        found.append(f"{len(report.unfinished)} forks have no result: {', '.join(report.unfinished[:5])}")
    found += [
        f"{cost.name}: forks ({signed_interval(cost.cost)}) and whole runs ({signed_interval(cost.full)}) disagree: "
        "they measure different things, and neither stands for the other here"
        for cost in report.costs
        if cost.disagrees
    ]
    if len({point.seed for point in report.points}) < 2:
        found.append("One trunk gives no interval: give --seeds 4 or more")
    return found


def render_page(report: ForkReport) -> str:
    """The HTML page."""
    colors = colors_of(report)
    verdicts = PageSection(
        name="verdicts", text=MEANING, table=table_of(report), colors=[colors[cost.name] for cost in report.costs],
        classes=[CLASSES.get(report.verdict_on(cost), "not-decided") for cost in report.costs],
        warnings=warnings(report),
    )  # fmt: skip
    caption = "Means over trunks; bands are 95% intervals. Dashed: the validation in BF16 arithmetic."
    course = PageSection(title="Course", figures=[page_figure("Cost after the fork", plot_costs(report), caption)])
    sections = [verdicts, course, *([controls_section(report)] if report.controls else [])]
    return render(
        title=TITLE, headline=" ".join(sentences(report)), conditions=conditions(report), sections=sections,
        facts=facts(report.info),
    )  # fmt: skip


def controls_section(report: ForkReport) -> PageSection:
    """The part of the page about known-bad controls."""
    return PageSection(
        title="Known-bad controls", text=CONTROLS, table=control_table(report),
        classes=["within" if is_found(control) else "not-decided" for control in report.controls],
    )  # fmt: skip


def to_text(report: ForkReport) -> str:
    """For a terminal."""
    controls = [control_table(report).to_text(), ""] if report.controls else []
    return "\n".join([table_of(report).to_text(), "", *controls, *sentences(report), *warnings(report)])


def to_markdown(report: ForkReport) -> str:
    """The same as a file."""
    lines = [f"# {TITLE}", MEANING, " ".join(sentences(report)), conditions(report)]
    tables = [table_of(report), *([control_table(report)] if report.controls else [])]
    texts = [escaped_markdown_table(table.header, table.rows) for table in tables]
    return "\n\n".join([*lines, *texts, *warnings(report)]) + "\n"


def to_json(report: ForkReport) -> str:
    """All numbers."""

    def plain(cost: ForkCost) -> dict[str, Any]:
        return dataclasses.asdict(cost) | {"verdict": report.verdict_on(cost), "course": cost.course}

    return to_strict_json({
        "length": report.length, "is_blind": report.is_blind,
        "points": [dataclasses.asdict(point) for point in report.points],
        "costs": list(map(plain, report.costs)), "controls": list(map(plain, report.controls)),
        "unfinished": report.unfinished,
    })  # fmt: skip


def to_csv(report: ForkReport) -> str:
    """A line for each recipe and offset."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("recipe", "arithmetic", "steps after the fork", "cost", "low", "high"))
    for cost in report.costs:
        for arithmetic, intervals in (("own", cost.own), (BASELINE, cost.plain)):
            for offset, found in zip(cost.offsets, intervals, strict=False):
                writer.writerow((cost.name, arithmetic, offset, found.mean, found.low, found.high))
    return stream.getvalue()


def colors_of(report: ForkReport) -> dict[str, str]:
    """The colour of each recipe, gray for the control."""
    colored = [cost.name for cost in report.costs if cost.verdict != NOISE]
    return {
        cost.name: color_of(cost.name, colored.index(cost.name) if cost.name in colored else 0, is_baseline=False)
        for cost in report.costs
    }


@plot_style(PAGE_STYLE)
def plot_costs(report: ForkReport) -> Figure:
    """Cost over the steps after the fork."""
    figure = new_figure(WIDTH_INCHES, 3.2)
    axes, colors = figure.subplots(), colors_of(report)
    axes.axhline(0, color=INK, linewidth=1)
    for cost in report.costs:
        means = [100 * found.mean for found in cost.own]
        axes.plot(cost.offsets, means, "o-", color=colors[cost.name], markersize=3.5, label=cost.name)
        low, high = ([percent_or(getattr(found, end), found.mean) for found in cost.own] for end in ("low", "high"))
        axes.fill_between(cost.offsets, low, high, color=colors[cost.name], alpha=0.15, linewidth=0)
        if cost.plain and cost.verdict != NOISE:
            plain = [100 * found.mean for found in cost.plain]
            axes.plot(cost.offsets, plain, color=colors[cost.name], linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlabel("steps after the fork")
    axes.set_ylabel(UPRIGHT_GAP_LABEL)
    add_legend(axes)
    return figure


def percent_or(value: Optional[float], other: float) -> float:
    """In percent; the other one where there is no value."""
    return 100 * (other if value is None else value)
