"""The extensions of the training loop, a module each, and their order."""

from __future__ import annotations

from megafp8.training.extension import Extension
from megafp8.training.extensions.attention_report import AttentionReport
from megafp8.training.extensions.calibration import AmaxCalibration
from megafp8.training.extensions.checkpoints import AsyncSaves, Checkpoints
from megafp8.training.extensions.heartbeat import Heartbeat
from megafp8.training.extensions.memory import GarbageCollection
from megafp8.training.extensions.precision_schedule import PrecisionSchedule
from megafp8.training.extensions.profiler import Profiler
from megafp8.training.extensions.replica_check import ReplicaCheck
from megafp8.training.extensions.rollback import Rollback
from megafp8.training.extensions.statistics import QuantizationStatistics
from megafp8.training.extensions.step_records import StepRecords
from megafp8.training.extensions.stop import StopConditions
from megafp8.training.extensions.stragglers import Stragglers
from megafp8.training.extensions.validation import Validation


def build_extensions() -> list[Extension]:
    """The extensions of a run, in the order in which the loop calls them. A new one gets its line here."""
    checkpoints = Checkpoints()
    return [
        PrecisionSchedule(),
        AmaxCalibration(),  # a change of precision may need scales
        StepRecords(),  # a step's record comes before all others of the step
        QuantizationStatistics(),
        Heartbeat(),  # the step is done before anything that may hang
        Stragglers(),  # the last before the step: what other extensions do is not a rank's own time
        AsyncSaves(checkpoints),
        ReplicaCheck(),  # before anything is saved
        AttentionReport(),  # slow attention is refused before the first validation and save
        Profiler(),
        Validation(),  # it agrees on signals
        StopConditions(),  # the last save ignores the interval
        Rollback(checkpoints),
        checkpoints,
        GarbageCollection(),  # last, at the same step on all ranks
    ]
