"""Messages between a rank and its trial process. This module does not import torch, so that the process starts fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional

from megafp8.config.schema import RunConfig

MEMORY_EXCEEDED_STATUS = 99
"""Exit status of a trial process that exceeds its memory limit."""


@dataclass(frozen=True, kw_only=True)
class TrialSetup:
    """What all trials of a search have in common.

    Attributes:
        config: of the run, without a micro-batch size.
        implementation: the name of the layers in use.
        limit_bytes: memory limit of a rank.
        outside_bytes: the part of it that torch does not allocate; 0 on a CPU, where a peak is that of the process.
        store_address: host and port of the store for the rendezvous of the trial processes; None for one rank.
        store_prefix: of the keys of this set of processes.
    """

    config: RunConfig
    implementation: str
    limit_bytes: int
    outside_bytes: int = 0
    store_address: Optional[tuple[str, int]] = None
    store_prefix: str = ""


class TrialResult(NamedTuple):
    """What a trial has found: the measured numbers of a size that fits, or one of the two texts.

    Attributes:
        too_large: why the size does not fit, in a few words.
        error: another error: its traceback, or what is known of it.
    """

    peak_bytes: Optional[int] = None
    ms_per_sample: Optional[float] = None
    too_large: str = ""
    error: str = ""
