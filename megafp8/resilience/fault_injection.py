"""Faults on purpose, at named points of a run: how the tests show that a run survives them.

`MEGAFP8_FAULTS="kill:rank=1,step=7,at=save.before_rename;nan:rank=0,step=3,at=step.gradients"` is a plan: at each of
its points something goes wrong, once (`times=N`: N times), on one rank (without `rank=`: on each) and at one step
(without `step=`: at the first that gets there). `MEGAFP8_FAULTS_FIRED` names a folder in which a fault leaves a file
before it strikes, so that a run that is started again does not meet it again.

Without a plan `point` and `poison` are functions that do nothing. A process reads its plan when it imports this module.
docs/reliability.md has the tables for people.
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

VARIABLE, FIRED_VARIABLE = "MEGAFP8_FAULTS", "MEGAFP8_FAULTS_FIRED"

# Where a process can be hit, and what comes next there. Each is in the code, and nothing in the code is not here.
POINTS = {
    "run.start": "a run that is assembled looks for a checkpoint",
    "load.begin": "a chosen checkpoint is read",
    "load.end": "everything is restored, and nothing trained yet",
    "step.begin": "a step",
    "data.wait": "the next microbatch",
    "step.after_backward": "gradients are reduced; the ranks agree whether numbers are finite",
    "step.before_update": "they are; the optimizer changes weights",
    "step.after_update": "weights and moments are changed; the step's record",
    "evaluation.begin": "the first batch of an evaluation",
    "evaluation.batch": "another batch of it, or its end",
    "save.begin": "a checkpoint's state is collected",
    "save.state_gathered": "it is; the unfinished folder",
    "save.mid_shard": "one more tensor of this rank's files",
    "save.shards_written": "this rank's files are on the disk",
    "save.before_manifest": "rank 0: all ranks' files are; the manifest",
    "save.before_rename": "rank 0: the final name",
    "save.between_renames": "rank 0: an older checkpoint of this step has lost its name to the new one",
    "save.after_rename": "rank 0: the name is there, perhaps not on the disk",
    "save.before_pointer": "rank 0: the pointer file",
    "save.after_pointer": "rank 0: what was replaced, or is too old, is deleted",
    "save.in_prune": "rank 0: an old checkpoint has lost its name, and its files go",
    "save.end": "training goes on after a save",
}
# Numbers that can be made wrong.
POISONS = {
    "step.loss": "sum of this rank's losses",
    "step.gradients": "a bucket of this rank's gradients, before they are reduced",
    "step.amax": "the amax of a layer's input, or of its output's gradient, that delayed scaling is to remember",
    "step.weights": "a weight after the update",
}
# No step has begun here yet.
BEFORE_STEPS = ("run.start", "load.begin", "load.end")

SIGNALS = {
    "kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "usr1": signal.SIGUSR1,
    "int": signal.SIGINT, "hup": signal.SIGHUP,
}  # fmt: skip
ERRORS = {"full": errno.ENOSPC, "raise": errno.EIO}
PLACES_OF_KINDS = dict.fromkeys((*SIGNALS, *ERRORS, "sleep"), POINTS) | dict.fromkeys(
    ("nan", "inf", "scale", "ulp"), POISONS
)
KEYS: dict[str, Callable[[str], Any]] = {
    "at": str, "rank": int, "step": int, "times": int, "seconds": float, "factor": float,
}  # fmt: skip
KEYS_OF_ONE_KIND = {"seconds": "sleep", "factor": "scale"}


@dataclass(frozen=True)
class Fault:
    """One entry of a plan.

    Attributes:
        number: its place in the plan, which names the files it leaves.
        rank: None for every rank.
        step: None for the first that comes.
        seconds: that `sleep` takes.
        factor: that `scale` multiplies by.
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
    """The faults of a plan's text.

    Raises:
        ConfigError: with everything that is wrong with it, and the names that there are.
    """
    entries = [entry.strip() for entry in text.split(";") if entry.strip()]
    problems = [f"{VARIABLE}: {problem} in {entry!r}" for entry in entries for problem in problems_of(entry)]
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


def problems_of(entry: str) -> list[str]:
    """What is wrong with one entry, in words."""
    kind, pairs = split_entry(entry)
    if kind not in PLACES_OF_KINDS:
        return [f"{kind!r} is none of the kinds {', '.join(PLACES_OF_KINDS)}"]
    problems, places, at = [], PLACES_OF_KINDS[kind], pairs.get("at")
    if at not in places:
        problems.append(f"at={at} is none of the places of {kind}: {', '.join(places)}")
    if at in BEFORE_STEPS and "step" in pairs:
        problems.append(f"no step has begun at {at}: leave out step=")
    for key, value in pairs.items():
        if key not in KEYS:
            problems.append(f"{key}= is none of the keys {', '.join(KEYS)}")
        elif KEYS_OF_ONE_KIND.get(key, kind) != kind:
            problems.append(f"{key}= is for {KEYS_OF_ONE_KIND[key]}")
        elif not is_number(value, KEYS[key]):
            problems.append(f"{key}={value} is no number")
    problems += [f"{key}= is missing" for key, only in KEYS_OF_ONE_KIND.items() if only == kind and key not in pairs]
    return problems


def is_number(value: str, read: Callable[[str], Any]) -> bool:
    """Whether a value is what its key takes, not below zero."""
    try:
        return read is str or read(value) >= 0
    except ValueError:
        return False


class FaultPlan:
    """The faults of this process, and how often each has struck.

    Args:
        faults: also those of other ranks.
        rank: of this process.
        fired: folder that outlives it; None: struck faults are forgotten when the process ends.
    """

    def __init__(self, faults: list[Fault], rank: int, fired: Optional[Path] = None):
        self.faults = [fault for fault in faults if fault.rank in (None, rank)]
        self.rank, self.fired = rank, fired
        self.step: Optional[int] = None
        self.struck = {fault.number: self.times_before(fault) for fault in self.faults}

    def times_before(self, fault: Fault) -> int:
        """How often a fault struck this rank in processes before."""
        return 0 if self.fired is None else len(list(self.fired.glob(f"{self.name(fault)}.*")))

    def name(self, fault: Fault) -> str:
        """What a fault's files are called, up to a number."""
        return f"{fault.number:04d}.{fault.kind}.{fault.at}.rank{self.rank}"

    def due(self, at: str, step: Optional[int]) -> list[Fault]:
        """The faults that strike now. They count as struck, since some leave no time to count afterwards."""
        due = [
            fault
            for fault in self.faults
            if fault.at == at and fault.step in (None, step) and self.struck[fault.number] < fault.times
        ]
        for fault in due:
            self.struck[fault.number] += 1
            if self.fired is not None:
                self.fired.mkdir(parents=True, exist_ok=True)
                (self.fired / f"{self.name(fault)}.{self.struck[fault.number]}").write_text(f"{step}\n")
        return due

    def point(self, name: str, step: Optional[int] = None) -> None:
        """Let the faults of this point happen.

        Raises:
            OSError: of `full` and `raise`.
        """
        if name == "step.begin":
            self.step = step
        for fault in self.due(name, self.step if step is None else step):
            if fault.kind in SIGNALS:
                os.kill(os.getpid(), SIGNALS[fault.kind])
            elif fault.kind in ERRORS:
                number = ERRORS[fault.kind]
                raise OSError(number, f"{os.strerror(number)} (injected at {name})")
            else:
                time.sleep(fault.seconds)

    def poison(self, name: str, tensor: Any, step: Optional[int] = None) -> None:
        """Let the faults of this place change a tensor's first element, or all of it (`scale`)."""
        for fault in self.due(name, self.step if step is None else step):
            elements = tensor.detach().view(-1)
            if fault.kind == "scale":
                elements.mul_(fault.factor)
            elif fault.kind == "ulp":
                elements[:1] = elements[:1].nextafter(elements.new_full((1,), math.inf))
            else:
                elements[:1] = math.nan if fault.kind == "nan" else math.inf


def no_point(name: str, step: Optional[int] = None) -> None:
    """Without a plan: nothing."""


def no_poison(name: str, tensor: Any, step: Optional[int] = None) -> None:
    """Without a plan: nothing."""


def from_environment() -> Optional[FaultPlan]:
    """This process's plan; None without one.

    Raises:
        ConfigError: it cannot be read.
    """
    faults, fired = read_plan(os.environ.get(VARIABLE, "")), os.environ.get(FIRED_VARIABLE)
    return FaultPlan(faults, int(os.environ.get("RANK", "0")), Path(fired) if fired else None) if faults else None


_plan = from_environment()
# A point that is not told its step is in the one that began last.
point = _plan.point if _plan else no_point
poison = _plan.poison if _plan else no_poison
