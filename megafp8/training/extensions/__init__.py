"""The extensions of the training loop, one module each, and the order in which the loop calls them."""

from __future__ import annotations

from megafp8.training.extension import Extension
from megafp8.training.extensions.attention_report import AttentionReport
from megafp8.training.extensions.calibration import AmaxCalibration
from megafp8.training.extensions.checkpoints import AsyncSaves, Checkpoints
from megafp8.training.extensions.data_phases import DataPhases
from megafp8.training.extensions.every_run import GarbageCollection, Heartbeat, StopConditions, Validation
from megafp8.training.extensions.expert_load import ExpertLoads
from megafp8.training.extensions.guard import LayerGuard
from megafp8.training.extensions.memory_snapshots import MemorySnapshots
from megafp8.training.extensions.precision_schedule import PrecisionSchedule
from megafp8.training.extensions.profiler import Profiler
from megafp8.training.extensions.replica_check import ReplicaCheck
from megafp8.training.extensions.rollback import Rollback
from megafp8.training.extensions.statistics import QuantizationStatistics
from megafp8.training.extensions.step_records import StepRecords
from megafp8.training.extensions.stragglers import Stragglers
from megafp8.training.extensions.text_samples import TextSamples


def build_extensions() -> list[Extension]:
    """The extensions of a run, in the order of the calls. A new extension gets its line here."""
    checkpoints = Checkpoints()
    return [
        PrecisionSchedule(),
        AmaxCalibration(),  # after a change of precision, which may need scales
        StepRecords(),  # the step record is the first of a step
        DataPhases(),
        ExpertLoads(),
        QuantizationStatistics(),  # after those that write a record of many steps: its own waits for the next step
        LayerGuard(),
        Heartbeat(),  # ends the step phase before anything else that may hang
        Stragglers(),  # the last before the step: other extensions are not part of the local step time
        AsyncSaves(checkpoints),
        ReplicaCheck(),  # before anything is saved
        AttentionReport(),  # refuses slow attention before the first validation and save
        Profiler(),
        MemorySnapshots(),
        Validation(),  # agrees on stop signals
        TextSamples(),  # agrees on them, too
        StopConditions(),  # before checkpoints: the last save ignores the interval
        Rollback(checkpoints),
        checkpoints,
        GarbageCollection(),  # last: nothing after it may allocate much
    ]
