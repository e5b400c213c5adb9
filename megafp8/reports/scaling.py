"""What a study says: loss over compute and size, each recipe's law, whether a recipe shifts it, speed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Optional

from megafp8.errors import DataError
from megafp8.reports.laws import REPLICATES
from megafp8.reports.scaling_cells import CellRow, GapRow, cell_rows, gap_rows, passed_over
from megafp8.reports.scaling_laws import BOTH, COMPUTE, PARAMETERS, Axis, fit_axis
from megafp8.reports.scaling_speed import SpeedRow, speed_rows
from megafp8.reports.study_points import StudyPoints
from megafp8.utils.strict_json import to_strict_json

USUAL_BASELINE = "bf16"


@dataclass(frozen=True, kw_only=True)
class ScalingReport:
    """Everything that the page shows.

    Attributes:
        recipes: the baseline first.
        arithmetic: of each recipe, as records have it.
        replicates: resamples behind the intervals of the laws; 0 without intervals.
        notes: what could not be said and why, and what was passed over.
    """

    name: str
    baseline: str
    recipes: tuple[str, ...]
    arithmetic: tuple[str, ...]
    num_runs: int
    replicates: int
    cells: tuple[CellRow, ...]
    gaps: tuple[GapRow, ...]
    axes: tuple[Axis, ...]
    speeds: tuple[SpeedRow, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    def axis(self, name: str) -> Optional[Axis]:
        """The laws over one axis; None where they could not be fitted."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def to_json(self) -> str:
        """All fields but the replicates' laws; null for what is infinite (effective compute, say) or no number."""
        plain = dataclasses.asdict(self)
        for axis in plain["axes"]:
            del axis["fits"]
        return to_strict_json(plain, indent=1)


def analyse(
    study: StudyPoints, *, baseline: Optional[str] = None, replicates: int = REPLICATES, seed: int = 0
) -> ScalingReport:
    """Work out a report.

    Args:
        baseline: recipe that others are compared with; default `bf16` if there is one, else the first.
        replicates: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        DataError: the baseline is none of the study's recipes.
    """
    recipes = list(dict.fromkeys(point.recipe for point in study.points))
    if baseline is not None and baseline not in recipes:
        raise DataError(f"baseline {baseline!r} is none of the study's recipes {', '.join(recipes)}")
    baseline = baseline or (USUAL_BASELINE if USUAL_BASELINE in recipes else recipes[0])
    recipes.sort(key=lambda recipe: recipe != baseline)
    cells = cell_rows(study.points)
    best = [cell for cell in cells if cell.is_best]
    notes = passed_over(cells)
    axes = [fit_axis(name, best, recipes, notes, replicates, seed) for name in (COMPUTE, PARAMETERS, BOTH)]
    drawn = max((len(axis.fits.replicates[0]) for axis in axes if axis is not None), default=0)
    return ScalingReport(
        name=study.name, baseline=baseline, recipes=tuple(recipes), num_runs=len(study.points),
        replicates=drawn, cells=tuple(cells),
        arithmetic=tuple(next(one.arithmetic for one in study.points if one.recipe == recipe) for recipe in recipes),
        gaps=tuple(gap_rows(best, recipes)), axes=tuple(axis for axis in axes if axis is not None),
        speeds=tuple(speed_rows(study.points, baseline)), missing=study.missing, notes=tuple(notes),
    )  # fmt: skip
