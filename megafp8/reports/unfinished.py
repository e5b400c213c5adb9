"""Runs that are not done: what a comparison says of them beside the figures of the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.errors import NumericsError
from megafp8.launch.run_state import judge
from megafp8.reports.load import recipe_folder, run_names


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A run of a recipe that did not come to its end.

    Attributes:
        recipe: that it is of; the folder above for runs that are called after a seed.
        name: as `load_runs` has it: `mxfp8/seed3`.
        is_diverged: it ended with numbers that are not finite, or spiked.
        has_figures: it is compared all the same, by what it has so far.
    """

    recipe: str
    name: str
    reason: str
    is_diverged: bool = False
    has_figures: bool = False

    def __str__(self) -> str:
        where = "in the figures with what it has so far" if self.has_figures else "not in the figures"
        return f"{self.name} is not done and {where}: {self.reason}"


def is_unfinished(folder: Path) -> bool:
    """Whether a run says of itself that it is not done. One of which there are the records alone does not."""
    state = judge(folder)
    return state is not None and state.state != "done"


def describe_unfinished(folder: Path, *, name: Optional[str] = None, has_figures: bool = False) -> Unfinished:
    """What is known of a run that is not done, from its folder.

    Args:
        name: of `run_names`; default that of a run alone.
    """
    state, name = judge(folder), name or run_names([folder])[0]
    reason = "it never began" if state is None else state.reason or f"{state.state} at step {state.step}"
    return Unfinished(
        recipe=recipe_folder(folder, name) or name,
        name=name,
        reason=" ".join(reason.split()),
        is_diverged=state is not None and state.exit_status == NumericsError.exit_status,
        has_figures=has_figures,
    )
