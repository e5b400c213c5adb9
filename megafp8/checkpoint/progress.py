"""What a run remembers of bad numbers: the samples that changed no weight, and what it judges the next step by.

It is in the checkpoint, so that a resumed run decides as the one that was never stopped would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

NOT_FINITE, SPIKE, ROLLBACK = "not finite", "spike", "rollback"


@dataclass(frozen=True)
class SkippedSamples:
    """Samples of the run's order that no update was made from.

    Attributes:
        first, end: the first one and the one after the last.
        step: at which it was decided.
        reason: one of the words above.
    """

    first: int
    end: int
    step: int
    reason: str


@dataclass(frozen=True)
class History:
    """What is behind a run, as far as it decides what to do about bad numbers.

    Attributes:
        skipped: all samples that changed no weight, in their order.
        num_in_row: updates left out since the last one that was made.
        num_rollbacks: times that the run went back to a checkpoint.
        window: (loss, gradient norm) of the last updates, the newest last; empty where spikes are not looked for.
        num_overflows: updates that were left out while a loss scale was being found.
    """

    skipped: tuple[SkippedSamples, ...] = ()
    num_in_row: int = 0
    num_rollbacks: int = 0
    window: tuple[tuple[float, float], ...] = ()
    num_overflows: int = 0

    def after_skip(self, samples: SkippedSamples) -> History:
        """An update was left out."""
        return replace(self, skipped=(*self.skipped, samples), num_in_row=self.num_in_row + 1)

    def after_update(self, window: tuple[tuple[float, float], ...] = ()) -> History:
        """An update was made."""
        return replace(self, num_in_row=0, window=window) if self.num_in_row or window != self.window else self

    def after_overflow(self) -> History:
        """A loss scale was too high."""
        return replace(self, num_overflows=self.num_overflows + 1)

    def summary(self) -> str:
        """How much was skipped, and why; empty if nothing was."""
        parts = [self._skipped_samples()] if self.skipped else []
        if self.num_overflows:
            parts.append(f"{self.num_overflows} steps made no update because gradients overflowed at their loss scale")
        return "; ".join(parts)

    def _skipped_samples(self) -> str:
        numbers = {
            reason: sum(samples.end - samples.first for samples in self.skipped if samples.reason == reason)
            for reason in (NOT_FINITE, SPIKE, ROLLBACK)
        }
        parts = ", ".join(f"{number} {reason}" for reason, number in numbers.items() if number)
        ranges = ", ".join(f"{samples.first}-{samples.end - 1}" for samples in self.skipped)
        return f"{sum(numbers.values())} samples changed no weight ({parts}): {ranges}"

    def plain(self) -> dict[str, Any]:
        """Plain values, which `from_plain` takes."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> History:
        """The history again."""
        return cls(
            skipped=tuple(SkippedSamples(**samples) for samples in values["skipped"]),
            num_in_row=values["num_in_row"],
            num_rollbacks=values["num_rollbacks"],
            window=tuple((loss, norm) for loss, norm in values["window"]),
            num_overflows=values.get("num_overflows", 0),  # older checkpoints do not count them
        )


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps done, also those whose update was left out.
        consumed_samples: training sequences read or passed over; the whole state of the data loader.
        history: of bad numbers.
    """

    step: int = 0
    consumed_samples: int = 0
    history: History = History()


@dataclass(frozen=True)
class Trainee:
    """What training changes: the parts that a checkpoint saves and restores.

    Attributes:
        being_copied: how to wait for copies of weights and moments that are still being made.
    """

    chunks: list[Any]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    being_copied: list[Callable[[], None]] = field(default_factory=list)

    def wait_for_copies(self) -> None:
        """Return when weights and moments may change; whoever changes them calls it first."""
        while self.being_copied:
            self.being_copied.pop()()
