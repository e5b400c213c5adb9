"""Messages between a rank and the process that tries sizes for it. No torch: such a process starts with these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from megafp8.config.schema import RunConfig

EXCEEDED = 99
"""Exit status of a trial whose process takes more memory than it may."""


@dataclass(frozen=True, kw_only=True)
class TrialSetup:
    """What all trials have in common.

    Attributes:
        config: of the run, without a size.
        implementation: its layers.
        limit_bytes: that a rank may take.
        meeting: host and port of the store where the ranks' processes meet; None for a lone rank.
        name: of this set of processes, in that store.
    """

    config: RunConfig
    implementation: str
    limit_bytes: int
    meeting: Optional[tuple[str, int]] = None
    name: str = ""


@dataclass(frozen=True)
class Measured:
    """A size fits."""

    peak_bytes: int
    ms_per_sample: float


@dataclass(frozen=True)
class TooLarge:
    """It does not; why, in a few words."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """Something else went wrong: the traceback, or what is known."""

    reason: str


Answer = Union[Measured, TooLarge, Failed]
