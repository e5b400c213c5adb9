"""Fault injection at named points of a run, for tests of fault tolerance.

`MEGAFP8_FAULTS="kill:rank=1,step=7,at=save.before_rename;nan:rank=0,step=3,at=step.gradients"` is a plan. Each fault
fires at its point once (`times=N`: N times), on one rank (without `rank=`: on each) and at one step (without `step=`:
at the first that reaches the point). `MEGAFP8_FAULTS_FIRED` names a folder in which each fault leaves a file before it
fires, so that it does not fire again when the run is restarted.

Without a plan, `point` and `poison` do nothing. A process reads its plan on import of this module. The tables of points
and kinds are in docs/dev/reliability_internals.md.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.errors import ConfigError

FAULTS_VARIABLE, FIRED_VARIABLE = "MEGAFP8_FAULTS", "MEGAFP8_FAULTS_FIRED"

# Fault points and what follows each. The code contains exactly these.
POINTS = {
    "run.start": "the run, which has its model and optimizer, searches for a checkpoint",
    "load.begin": "the chosen checkpoint is read",
    "load.end": "the first step; everything is restored",
    "step.begin": "a step",
    "data.wait": "the next microbatch",
    "step.after_backward": "gradients are reduced; the ranks agree whether numbers are finite",
    "step.before_update": "the optimizer changes weights; all numbers were finite",
    "step.after_update": "the step's record is written; weights and moments are changed",
    "evaluation.begin": "the first batch of an evaluation",
    "evaluation.batch": "another batch of the evaluation, or its end",
    "save.begin": "a checkpoint's state is collected",
    "save.state_gathered": "the unfinished folder is created",
    "save.mid_shard": "one more tensor is written to this rank's files",
    "save.shards_written": "the ranks wait for each other; this rank's files are on disk",
    "save.before_manifest": "rank 0: the manifest is written; all ranks' files are on disk",
    "save.before_rename": "rank 0: the folder gets its final name",
    "save.between_renames": "rank 0: the new folder gets the name that an older checkpoint of this step had",
    "save.after_rename": "rank 0: the rename is synced to disk",
    "save.before_pointer": "rank 0: `latest_checkpointed_iteration.txt` is written",
    "save.after_pointer": "rank 0: replaced and too old checkpoints are deleted",
    "save.in_prune": "rank 0: the files of a renamed old checkpoint are deleted",
    "save.end": "training continues after a save",
}
# Tensors that can be corrupted.
POISONS = {
    "step.loss": "sum of this rank's losses",
    "step.gradients": "a bucket of this rank's gradients, before they are reduced",
    "step.amax": "the amax of a layer's input, or of its output's gradient, that delayed scaling is to remember",
    "step.weights": "a weight after the update",
}
# At these points no step has begun.
POINTS_BEFORE_STEPS = ("run.start", "load.begin", "load.end")

SIGNAL_KINDS = {
    "kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "usr1": signal.SIGUSR1,
    "int": signal.SIGINT, "hup": signal.SIGHUP,
}  # fmt: skip
ERROR_KINDS = {"full": errno.ENOSPC, "raise": errno.EIO}
LOCATIONS_BY_KIND = dict.fromkeys((*SIGNAL_KINDS, *ERROR_KINDS, "sleep"), POINTS) | dict.fromkeys(
    ("nan", "inf", "scale", "ulp"), POISONS
)
KEYS: dict[str, Callable[[str], Any]] = {
    "at": str, "rank": int, "step": int, "times": int, "seconds": float, "factor": float,
}  # fmt: skip
KIND_SPECIFIC_KEYS = {"seconds": "sleep", "factor": "scale"}


@dataclass(frozen=True)
class Fault:
    """One entry of a plan.

    Attributes:
        number: position in the plan, used in the names of its files.
        rank: None for every rank.
        step: None for the first step that reaches the point.
        seconds: duration of `sleep`.
        factor: multiplier of `scale`.
    """

    number: int
    kind: str
    at: str
    rank: Optional[int] = None
    step: Optional[int] = None
    times: int = 1
    seconds: float = 0.0
    factor: float = 1.0


def read_plan(text: str) -> list[Fault]:
    """Parse a plan.

    Raises:
        ConfigError: with all problems and the valid names.
    """
    entries = [entry.strip() for entry in text.split(";") if entry.strip()]
    problems = [f"{FAULTS_VARIABLE}: {problem} in {entry!r}" for entry in entries for problem in entry_problems(entry)]
    if problems:
        raise ConfigError(problems)
    return [
        Fault(number, kind, **{key: KEYS[key](value) for key, value in pairs.items()})
        for number, (kind, pairs) in enumerate(map(split_entry, entries))
    ]


def split_entry(entry: str) -> tuple[str, dict[str, str]]:
    """ "kill:rank=1,at=step.begin" -> "kill", {"rank": "1", "at": "step.begin"}."""
    kind, _, rest = entry.partition(":")
    pairs = (pair.partition("=") for pair in rest.split(",") if pair)
    return kind.strip(), {key.strip(): value.strip() for key, _, value in pairs}


def entry_problems(entry: str) -> list[str]:
    """Return what is wrong with one entry, as text."""
    kind, pairs = split_entry(entry)
    if kind not in LOCATIONS_BY_KIND:
        return [f"{kind!r} is none of the kinds {', '.join(LOCATIONS_BY_KIND)}"]
    problems, locations, at = [], LOCATIONS_BY_KIND[kind], pairs.get("at")
    if at not in locations:
        problems.append(f"at={at} is none of the places of {kind}: {', '.join(locations)}")
    if at in POINTS_BEFORE_STEPS and "step" in pairs:
        problems.append(f"no step has begun at {at}: leave out step=")
    for key, value in pairs.items():
        if key not in KEYS:
            problems.append(f"{key}= is none of the keys {', '.join(KEYS)}")
        elif KIND_SPECIFIC_KEYS.get(key, kind) != kind:
            problems.append(f"{key}= is for {KIND_SPECIFIC_KEYS[key]}")
        elif not is_valid_value(value, KEYS[key]):
            problems.append(f"{key}={value} is no number")
    problems += [f"{key}= is missing" for key, only in KIND_SPECIFIC_KEYS.items() if only == kind and key not in pairs]
    return problems


def is_valid_value(value: str, read: Callable[[str], Any]) -> bool:
    """Return whether a value can be parsed and is not negative."""
    try:
        return read is str or read(value) >= 0
    except ValueError:
        return False


class FaultPlan:
    """The faults of this process, and how many times each has fired.

    Args:
        faults: of all ranks.
        rank: of this process.
        fired: folder with the files of fired faults; None: they are forgotten when the process ends.
    """

    def __init__(self, faults: list[Fault], rank: int, fired: Optional[Path] = None):
        self.faults = [fault for fault in faults if fault.rank in (None, rank)]
        self.rank, self.fired = rank, fired
        self.step: Optional[int] = None
        # Faults that fired in previous processes of this rank left files.
        self.num_fired = {
            fault.number: len(list(fired.glob(f"{self.name(fault)}.*"))) if fired else 0 for fault in self.faults
        }

    def name(self, fault: Fault) -> str:
        """Return the name of a fault's files, without their number."""
        return f"{fault.number:04d}.{fault.kind}.{fault.at}.rank{self.rank}"

    def due(self, at: str, step: Optional[int]) -> list[Fault]:
        """Return the faults that fire now, and count them: some end the process at once."""
        due = [
            fault
            for fault in self.faults
            if fault.at == at and fault.step in (None, step) and self.num_fired[fault.number] < fault.times
        ]
        for fault in due:
            self.num_fired[fault.number] += 1
            if self.fired is not None:
                self.fired.mkdir(parents=True, exist_ok=True)
                (self.fired / f"{self.name(fault)}.{self.num_fired[fault.number]}").write_text(f"{step}\n")
        return due

    def point(self, name: str, step: Optional[int] = None) -> None:
        """Fire the faults of this point.

        Raises:
            OSError: for `full` and `raise`.
        """
        if name == "step.begin":
            self.step = step
        for fault in self.due(name, self.step if step is None else step):
            if fault.kind in SIGNAL_KINDS:
                os.kill(os.getpid(), SIGNAL_KINDS[fault.kind])
            elif fault.kind in ERROR_KINDS:
                number = ERROR_KINDS[fault.kind]
                raise OSError(number, f"{os.strerror(number)} (injected at {name})")
            else:
                time.sleep(fault.seconds)

    def poison(self, name: str, tensor: Any, step: Optional[int] = None) -> None:
        """Corrupt a tensor's first element, or all of it (`scale`)."""
        for fault in self.due(name, self.step if step is None else step):
            elements = tensor.detach().view(-1)
            if fault.kind == "scale":
                elements.mul_(fault.factor)
            elif fault.kind == "ulp":
                elements[:1] = elements[:1].nextafter(elements.new_full((1,), math.inf))
            else:
                elements[:1] = math.nan if fault.kind == "nan" else math.inf


def noop_point(name: str, step: Optional[int] = None) -> None:
    """Replace `point` without a plan."""


def noop_poison(name: str, tensor: Any, step: Optional[int] = None) -> None:
    """Replace `poison` without a plan."""


def from_environment() -> Optional[FaultPlan]:
    """Return this process's plan; None without one.

    Raises:
        ConfigError: it is invalid.
    """
    faults, fired = read_plan(os.environ.get(FAULTS_VARIABLE, "")), os.environ.get(FIRED_VARIABLE)
    return FaultPlan(faults, int(os.environ.get("RANK", "0")), Path(fired) if fired else None) if faults else None


_plan = from_environment()
# Without a `step` argument, a point belongs to the step that began last.
point = _plan.point if _plan else noop_point
poison = _plan.poison if _plan else noop_poison
