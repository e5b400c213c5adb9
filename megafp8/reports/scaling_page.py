"""A scaling report as files: one HTML page that needs nothing else, Markdown, JSON, and the points it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from megafp8.reports.html import alone, render, to_svg
from megafp8.reports.laws import REPLICATES
from megafp8.reports.plot_scaling import plot_laws, plot_speed, plot_sweeps
from megafp8.reports.scaling import ScalingReport, analyse
from megafp8.reports.scaling_text import ALT_TEXT, conditions, headline, method, remarks, tables, to_markdown
from megafp8.reports.study_points import POINTS_FILE, load_points

PICTURE_FILE = "laws.svg"


def publish_study(
    study: Path, output: Optional[Path], *, baseline: Optional[str] = None, replicates: int = REPLICATES
) -> tuple[ScalingReport, list[Path]]:
    """Analyse a study and, with an output folder, write report.html, report.md, laws.svg, report.json and points.json.

    Args:
        study: its folder, or the points.json of an earlier report.

    Raises:
        DataError: no study, no finished run, an unknown baseline.
    """
    points = load_points(study)
    report = analyse(points, baseline=baseline, replicates=replicates)
    if output is None:
        return report, []
    output.mkdir(parents=True, exist_ok=True)
    contents = {
        "report.html": render_page(report), "report.md": to_markdown(report, PICTURE_FILE),
        PICTURE_FILE: alone(to_svg(plot_laws(report), ALT_TEXT)), "report.json": report.to_json(),
        POINTS_FILE: points.to_json(),
    }  # fmt: skip
    for name, text in contents.items():
        (output / name).write_text(text, encoding="utf-8")
    return report, [output / name for name in contents]


def render_page(report: ScalingReport) -> str:
    """The page."""
    pictures = {"Speed over devices": plot_speed(report), "Swept flags": plot_sweeps(report)}
    return render(
        "scaling.html.jinja",
        title=f"Scaling study {report.name}", headline=headline(report), conditions=conditions(report),
        remarks=remarks(report),
        laws=to_svg(plot_laws(report), ALT_TEXT),
        pictures={name: to_svg(figure, name) for name, figure in pictures.items() if figure is not None},
        tables=tables(report), method=method(report),
    )  # fmt: skip
