"""How far a study is, and how long the rest will take. The run-state file of each run is the judge."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.config import derived
from megafp8.launch.run_state import RunState, judge, last_recorded_step
from megafp8.planning.hardware import Gpu
from megafp8.planning.planned_run import PlannedRun
from megafp8.planning.step_time import step_time
from megafp8.studies.runs import StudyRun
from megafp8.studies.study import Study

STUDY_FILE = "study.json"
WAITING, QUEUED, RUNNING, DONE, STOPPED = "waiting", "queued", "running", "done", "stopped"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One run now.

    Attributes:
        state: as in `run_state.py`; `waiting` for a run that never began, `queued` for one that Slurm will start.
        step: last step done.
    """

    run: StudyRun
    state: str
    step: int
    reason: str = ""
    found: Optional[RunState] = None

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return derived.train_iters(self.run.config, self.run.world_size)

    @property
    def seconds(self) -> Optional[float]:
        """That the whole run took; None unless it was done in one start."""
        if self.state != DONE or self.found is None or self.found.starts > 1:
            return None
        return self.found.updated_at - self.found.started_at


def progress_of(run: StudyRun, queued: Collection[str] = ()) -> Progress:
    """Look at a run's folder.

    Args:
        queued: ids of runs that Slurm has.
    """
    found = judge(run.folder)
    state = WAITING if found is None else found.state
    if run.id in queued and state not in (DONE, RUNNING):
        state = QUEUED
    if found is None:
        return Progress(run=run, state=state, step=0)
    step = found.step if state == DONE else max(found.step, last_recorded_step(run.folder))
    return Progress(run=run, state=state, step=step, reason=found.reason, found=found)


def is_due(progress: Progress) -> bool:
    """Whether a run is to be started: neither done, nor running, nor about to be."""
    return progress.state not in (DONE, RUNNING, QUEUED)


def predicted_seconds(run: StudyRun, finished: Sequence[Progress], gpu: Optional[Gpu]) -> Optional[float]:
    """How long a whole run takes.

    By the planner for a kind of GPU; else at the FLOP/s of the finished run of the same recipe and ranks whose FLOPs
    are nearest; None without one.
    """
    if run.flops is None or run.padded_vocab is None:
        return None
    if gpu is not None:
        planned = PlannedRun(config=run.config, gpu=gpu, world_size=run.world_size, padded_vocab=run.padded_vocab)
        return step_time(planned).seconds * derived.train_iters(run.config, run.world_size)
    alike = [
        (one.run.flops, one.seconds) for one in finished
        if one.run.flops and one.seconds and (one.run.recipe, one.run.world_size) == (run.recipe, run.world_size)
    ]  # fmt: skip
    if not alike:
        return None
    flops, seconds = min(alike, key=lambda pair: abs(pair[0] - run.flops))
    return run.flops * seconds / flops


def status_text(every: Sequence[Progress]) -> str:
    """A line for each run, and how many are in which state."""
    width = max(len(one.run.label) for one in every)
    lines = [
        f"{one.state:<10} {one.run.label:<{width}}  {one.run.id}  step {one.step:,} of {one.steps:,}"
        + (f"  {one.reason.splitlines()[0]}" if one.reason and one.state != DONE else "")
        for one in every
    ]
    counts = Counter(one.state for one in every)
    return "\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items())])


def write_study_file(study: Study, runs: Sequence[StudyRun]) -> Path:
    """Write into the study's folder which runs it has: what a report reads beside their records."""
    content: dict[str, Any] = {
        "name": study.name,
        "runs": [
            {"id": run.id, "label": run.label, "folder": run.folder.name, "choice": dict(run.choice)} for run in runs
        ],
    }
    study.folder.mkdir(parents=True, exist_ok=True)
    path = study.folder / STUDY_FILE
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
