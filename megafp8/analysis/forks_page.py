"""Files of a comparison by forks: a self-contained page, Markdown, JSON and a figure."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from megafp8.analysis.comparison_page import facts, run_warnings
from megafp8.analysis.forks import COSTS, DIVERGED, GAINS, NOISE, ForkCost, ForkReport, read_forks
from megafp8.analysis.html import PageSection, page_figure, render, standalone_svg, to_svg, write_files
from megafp8.analysis.percent import signed, signed_interval
from megafp8.analysis.plot_comparison import UPRIGHT_GAP_LABEL, WIDTH_INCHES, add_legend, color_of
from megafp8.analysis.plotting import INK, PAGE_STYLE, new_figure, plot_style
from megafp8.analysis.tables import Table
from megafp8.config.variants import BASELINE
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


def publish_forks(folder: Path) -> tuple[ForkReport, list[Path]]:
    """Write report/forks.html, .md, .json, .csv and .svg of the forks in a folder.

    Raises:
        DataError: there are no finished forks of the baseline.
    """
    report = read_forks(folder)
    contents = {
        "forks.html": render_page(report), "forks.md": to_markdown(report), "forks.json": to_json(report),
        "forks.csv": to_csv(report), "forks.svg": standalone_svg(to_svg(plot_costs(report), TITLE)),
    }  # fmt: skip
    return report, write_files(folder / "report", contents)


def sentences(report: ForkReport) -> list[str]:
    """The verdicts in words."""
    return [sentence(cost, report.length) for cost in report.costs]


def sentence(cost: ForkCost, length: int) -> str:
    """The verdict on one recipe."""
    if cost.verdict == DIVERGED:
        return f"{cost.name} diverged within {length} steps."
    half = "" if cost.half_width is None else f" +-{cost.half_width:.2%}"
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
            "verdict": [cost.verdict for cost in costs],
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
        classes=[CLASSES.get(cost.verdict, "not-decided") for cost in report.costs], warnings=warnings(report),
    )  # fmt: skip
    caption = "Means over trunks; bands are 95% intervals. Dashed: the validation in BF16 arithmetic."
    course = PageSection(title="Course", figures=[page_figure("Cost after the fork", plot_costs(report), caption)])
    return render(
        "page.html.jinja", title=TITLE, headline=" ".join(sentences(report)), conditions=conditions(report),
        warnings=(), sections=[verdicts, course], facts=facts(report.info),
    )  # fmt: skip


def to_text(report: ForkReport) -> str:
    """For a terminal."""
    return "\n".join([table_of(report).to_text(), "", *sentences(report), *warnings(report)])


def to_markdown(report: ForkReport) -> str:
    """The same as a file."""
    table = table_of(report)
    lines = [f"# {TITLE}", MEANING, " ".join(sentences(report)), conditions(report)]
    return "\n\n".join([*lines, escaped_markdown_table(table.header, table.rows), *warnings(report)]) + "\n"


def to_json(report: ForkReport) -> str:
    """All numbers."""
    return to_strict_json({
        "length": report.length,
        "points": [dataclasses.asdict(point) for point in report.points],
        "costs": [
            dataclasses.asdict(cost) | {"verdict": cost.verdict, "course": cost.course} for cost in report.costs
        ],
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
