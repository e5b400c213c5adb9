"""Figures and files of a scaling report: HTML page, Markdown, JSON, and the points that it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import numpy as np

from megafp8.analysis import scaling_report, sweeps
from megafp8.analysis.html import PageFigure, PageSection, render, standalone_svg, to_svg, write_files
from megafp8.analysis.percent import count_text
from megafp8.analysis.plot_comparison import UPRIGHT_GAP_LABEL, WIDTH_INCHES, add_legend
from megafp8.analysis.plotting import COLORS as RECIPE_COLORS
from megafp8.analysis.plotting import INK, PAGE_STYLE, new_figure, plot_style, use_si_prefixes
from megafp8.analysis.scaling_laws import COMPUTE, PARAMETERS, X_OF
from megafp8.analysis.scaling_report import ScalingReport, analyse
from megafp8.analysis.study_points import POINTS_FILE, load_points
from megafp8.analysis.tables import to_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (INK, *RECIPE_COLORS)
BAND_POINTS = 80
PICTURE_FILE, SWEEP_PICTURE_FILE = "laws.svg", "sweep.svg"
PANEL_INCHES = 4.2  # of one of two figures side by side
LABELS = {COMPUTE: "training compute, FLOPs", PARAMETERS: "parameters"}


@plot_style(PAGE_STYLE)
def plot_laws(report: ScalingReport, names: Sequence[str] = (COMPUTE, PARAMETERS)) -> Figure:
    """Loss over compute or parameters, one column each, with the fitted laws; below, the gaps to the baseline."""
    has_gaps = bool(report.gaps)
    heights = (3, 2) if has_gaps else (3,)
    figure = new_figure(PANEL_INCHES * len(names), 1.3 * sum(heights))
    grid = figure.subplots(len(heights), len(names), squeeze=False, sharex="col", height_ratios=heights)
    for column, name in enumerate(names):
        draw_losses(grid[0, column], report, name)
        if has_gaps:
            draw_gaps(grid[1, column], report, name)
        grid[-1, column].set_xlabel(LABELS[name])
    return figure


def draw_losses(axes: Axes, report: ScalingReport, name: str) -> None:
    """Losses of the runs as points, means of the cells as circles, laws as lines with their bands."""
    fitted = report.axis(name)
    for number, recipe in enumerate(report.recipes):
        color = COLORS[number % len(COLORS)]
        cells = [cell for cell in report.cells if cell.is_best and cell.recipe == recipe]
        x = np.array([X_OF[name](cell)[0] for cell in cells])
        for cell_x, cell in zip(x, cells, strict=True):
            axes.plot([cell_x] * len(cell.losses), cell.losses, ".", color=color, markersize=4, alpha=0.5)
        axes.plot(x, [cell.mean for cell in cells], "o", color=color, markersize=6, fillstyle="none", label=recipe)
        if fitted is not None:
            points = spaced(x)
            laws = (fitted.fits.laws[number], *fitted.fits.replicates[number])
            curves = [law.loss(points[:, None]) for law in laws]
            axes.plot(points, curves[0], color=color, linewidth=1.5)
            draw_band(axes, points, fitted.fits.interval(curves, [number]), color)
    axes.set_yscale("log")
    style_log_x(axes, f"Loss over {name}")
    positions = {X_OF[name](cell)[0] for cell in report.cells if cell.is_best}
    if len(positions) == 1:  # matplotlib finds no limits for a single point on a logarithmic axis
        (position,) = positions
        axes.set_xlim(position / 2, 2 * position)
    axes.set_ylabel("validation loss, nats a token")
    plain_ticks(axes)
    axes.legend()


def draw_gaps(axes: Axes, report: ScalingReport, name: str) -> None:
    """Gaps in percent: means over the seeds with their intervals, and the gaps of the laws with their bands."""
    fitted = report.axis(name)
    x_of_cell = {(cell.parameters, cell.tokens): X_OF[name](cell)[0] for cell in report.cells}
    axes.axhline(0, color=INK, linewidth=1)
    for number, recipe in enumerate(report.recipes[1:], start=1):
        color = COLORS[number % len(COLORS)]
        rows = [row for row in report.gaps if row.recipe == recipe]
        cells = [((row.parameters, row.tokens), row.gap) for row in rows if row.parameters and row.tokens]
        if not cells:
            continue
        x = np.array([x_of_cell[cell] for cell, _ in cells])
        means = np.array([100 * gap.value for _, gap in cells])
        lows = [100 * gap.low for _, gap in cells if gap.low is not None]
        if len(lows) == len(means):
            axes.errorbar(x, means, means - lows, fmt="o", color=color, capsize=3, markersize=5)
        else:
            axes.plot(x, means, "o", color=color, markersize=5)
        if fitted is not None:
            points = spaced(x)
            curves = [
                100 * (law.loss(points[:, None]) / base.loss(points[:, None]) - 1)
                for law, base in fitted.fits.pairs(number)
            ]
            axes.plot(points, curves[0], color=color)
            draw_band(axes, points, fitted.fits.interval(curves, [number, 0]), color)
    style_log_x(axes, f"Gap to {report.baseline}, seed by seed")
    axes.set_ylabel(UPRIGHT_GAP_LABEL)


def draw_band(axes: Axes, x: np.ndarray, ends: Optional[tuple[np.ndarray, np.ndarray]], color: str) -> None:
    """The interval of a curve; nothing without one."""
    if ends:
        axes.fill_between(x, *ends, color=color, alpha=0.15, linewidth=0)


@plot_style(PAGE_STYLE)
def plot_speed(report: ScalingReport) -> Optional[Figure]:
    """Tokens/s over devices, with perfect scaling as a dotted line; None if all runs used the same number."""
    if len({row.world_size for row in report.speeds}) < 2:
        return None
    figure = new_figure(WIDTH_INCHES, 3.8)
    left, right = figure.subplots(1, 2)
    sizes = sorted({row.parameters for row in report.speeds})
    for number, recipe in enumerate(report.recipes):
        for size, marker in zip(sizes, "osD^v<>ph*" * len(sizes), strict=False):
            rows = [row for row in report.speeds if (row.recipe, row.parameters) == (recipe, size)]
            counts, color = [row.world_size for row in rows], COLORS[number % len(COLORS)]
            if not rows:
                continue
            first = rows[0].tokens_per_second / rows[0].world_size
            left.plot(counts, [row.tokens_per_second for row in rows], marker=marker, color=color,
                      label=f"{recipe}, {count_text(size)}")  # fmt: skip
            left.plot(counts, [first * count for count in counts], ":", color=color, linewidth=1)
            right.plot(counts, [100 * row.efficiency for row in rows], marker=marker, color=color)
    left.set_yscale("log")
    use_si_prefixes(left.yaxis)
    for axes, title in ((left, "Tokens/s (dotted: perfect)"), (right, "Efficiency, % of the fewest devices'")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row.world_size for row in report.speeds}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("devices")
        axes.set_title(title)
    right.set_ylim(bottom=0)
    add_legend(left)
    return figure


@plot_style(PAGE_STYLE)
def plot_sweeps(report: ScalingReport) -> Optional[Figure]:
    """Mean loss over the values of each swept flag, one line per recipe and options; None without a sweep."""
    sweeps = {axis: lines for axis in swept_axes(report) if (lines := sweep_lines(report, axis))}
    if not sweeps:
        return None
    from matplotlib.ticker import NullFormatter

    figure = new_figure(WIDTH_INCHES, 3.8 * len(sweeps))
    for axes, (axis, lines) in zip(figure.subplots(len(sweeps), 1, squeeze=False)[:, 0], sweeps.items(), strict=True):
        for (recipe, name), points in lines.items():
            values, losses, spreads = zip(*sorted(points), strict=True)
            color = COLORS[report.recipes.index(recipe) % len(COLORS)]
            label = ", ".join(filter(None, (recipe, name)))
            axes.errorbar(values, losses, spreads, marker="o", color=color, capsize=3, linewidth=1, label=label)
        swept = sorted({value for points in lines.values() for value, *_ in points})
        if swept[0] > 0:
            axes.set_xscale("log")
        axes.set_xticks(swept, [f"{value:g}" for value in swept])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        axes.set_xlabel(axis)
        axes.set_ylabel("validation loss, nats a token")
        axes.set_title(f"Loss over {axis}, with the spread of seeds")
    return figure


def swept_axes(report: ScalingReport) -> list[str]:
    """Study axes, besides the seed, on which runs of one recipe, size and length differ."""
    seen: dict[tuple[str, int, int], dict[str, set[str]]] = {}
    for cell in report.cells:
        options = seen.setdefault((cell.recipe, cell.parameters, cell.tokens), {})
        for axis, option in cell.options.items():
            options.setdefault(axis, set()).add(option)
    return list(dict.fromkeys(axis for group in seen.values() for axis, found in group.items() if len(found) > 1))


def sweep_lines(report: ScalingReport, axis: str) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """Value, mean loss and spread of the cells, by recipe and all other options; empty if no option is a number."""
    lines: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for cell in report.cells:
        try:
            value = float(cell.options[axis].removeprefix(axis))
        except (KeyError, ValueError):
            continue
        others = ", ".join(option for name, option in cell.options.items() if name != axis)
        lines.setdefault((cell.recipe, others), []).append((value, cell.mean, cell.spread or 0.0))
    return {line: points for line, points in lines.items() if len(points) > 1}


def spaced(x: np.ndarray) -> np.ndarray:
    """Points from the smallest x to twice the largest, evenly spaced in the logarithm."""
    return np.geomspace(min(x), 2 * max(x), BAND_POINTS)


def style_log_x(axes: Axes, title: str) -> None:
    """Style axes with compute or size on a logarithmic x axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    use_si_prefixes(axes.xaxis)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title)


def plain_ticks(axes: Axes) -> None:
    """Label the losses on a logarithmic y axis as plain numbers."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def publish_study(
    study: Path, output: Optional[Path], *, baseline: Optional[str] = None
) -> tuple[ScalingReport, list[Path]]:
    """Analyse a study and, with an output folder, write report.html, report.md, laws.svg, report.json and points.json.

    A sweep has sweep.svg and ranking.csv in place of laws.svg.

    Args:
        study: folder of the study, or the points.json of an earlier report.

    Raises:
        DataError: there is no study or no finished run, or the baseline is unknown.
    """
    points = load_points(study)
    report = analyse(points, baseline=baseline)
    if output is None:
        return report, []
    if report.is_sweep:
        picture, figure = SWEEP_PICTURE_FILE, sweeps.plot_coordinates(report.cells, report.loss_name)
    else:
        picture, figure = PICTURE_FILE, plot_laws(report)
    contents = {
        "report.html": render_page(report), "report.md": scaling_report.to_markdown(report, picture),
        picture: standalone_svg(figure, scaling_report.alt_text(report)), "report.json": report.to_json(),
        POINTS_FILE: points.to_json(),
    }  # fmt: skip
    if report.is_sweep:
        contents["ranking.csv"] = to_csv(sweeps.ranking_rows(report.cells))
    return report, write_files(output, contents)


def laws_caption(report: ScalingReport) -> str:
    """What the figures of the laws show."""
    has_laws, has_bands = report.axis(COMPUTE) is not None, report.replicates > 0
    lines = f"; lines are the fitted laws{' with their 95% bands' if has_bands else ''}" if has_laws else ""
    text = f"Dots are runs, rings the means over seeds{lines}."
    if report.gaps:
        distance = f", and the distance of the laws{' with its band' if has_bands else ''}" if has_laws else ""
        text += f" Below: gaps of the same seed with Student's 95% interval{distance}."
    return text


def main_figure(report: ScalingReport) -> PageFigure:
    """The laws, or the parallel coordinates of a sweep."""
    if report.is_sweep:
        picture = to_svg(sweeps.plot_coordinates(report.cells, report.loss_name), sweeps.ALT_TEXT)
        return PageFigure(pictures={sweeps.ALT_TEXT: {"picture": picture}}, caption=f"{sweeps.ALT_TEXT}.")
    titles = {name: f"Loss over {name}" for name in (COMPUTE, PARAMETERS)}
    laws = {title: {"picture": to_svg(plot_laws(report, [name]), title)} for name, title in titles.items()}
    return PageFigure(pictures=laws, caption=laws_caption(report), has_panels=True)


def render_page(report: ScalingReport) -> str:
    """The HTML page."""
    sections = [PageSection(title="Settings" if report.is_sweep else "Loss", figures=[main_figure(report)])]
    for title, figure in (("Speed over devices", plot_speed(report)), ("Swept flags", plot_sweeps(report))):
        if figure is not None:
            picture = PageFigure(pictures={title: {"picture": to_svg(figure, title)}})
            sections.append(PageSection(title=title, figures=[picture]))
    sections += [PageSection(title=each.title, table=each, notes=[each.note]) for each in scaling_report.tables(report)]
    return render(
        title=scaling_report.title(report),
        headline=scaling_report.headline(report),
        conditions=scaling_report.conditions(report),
        warnings=scaling_report.warnings(report),
        sections=[*sections, PageSection(title="Method", text=scaling_report.method(report))],
    )
