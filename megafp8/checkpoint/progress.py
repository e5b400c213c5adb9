"""Training state and progress that a checkpoint saves: skip-update history, step, consumed samples.

The history is part of the checkpoint, so a resumed run takes the same skip-update decisions as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Optional

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megafp8.optimizer.weight_ema import WeightEma

NOT_FINITE, SPIKE, ROLLBACK, OPERAND = "not finite", "spike", "rollback", "non-finite operand"
HIGH_PRECISION, SMOOTHED = "high precision", "smoothed"
# Of the guard, which has them in its own state now. Checkpoints keep the names, so that their hashes stay the same.
FORMER_FIELDS = ("layer_trends", "warnings")


@dataclass(frozen=True)
class SkippedSamples:
    """A range of samples that no update was made from.

    Attributes:
        first, end: half-open range in the run's sample order.
        step: optimizer step at which they were skipped.
        reason: `NOT_FINITE`, `SPIKE`, `ROLLBACK` or `OPERAND`.
    """

    first: int
    end: int
    step: int
    reason: str


@dataclass(frozen=True)
class HighPrecisionFallback:
    """A linear that the run changed for the rest of it.

    Attributes:
        name: `layers.3.linear_fc2`.
        step: the last step before the change.
        reason: text.
        form: HIGH_PRECISION, or SMOOTHED, which has a scale for each input channel.
    """

    name: str
    step: int
    reason: str
    form: str = HIGH_PRECISION


@dataclass(frozen=True)
class SkipHistory:
    """Skipped updates and rollbacks, and the window by which loss spikes are detected.

    Attributes:
        skipped: all samples that changed no weight, in order.
        num_in_row: updates skipped since the last one that was made.
        num_rollbacks: rollbacks to a checkpoint.
        window: (loss, grad norm) of recent updates, newest last; empty without spike detection.
        num_overflows: updates skipped because gradients overflowed at their loss scale.
        moved_linears: linears that the run moved to high precision or smoothed, in the order of the changes.
    """

    skipped: tuple[SkippedSamples, ...] = ()
    num_in_row: int = 0
    num_rollbacks: int = 0
    window: tuple[tuple[float, float], ...] = ()
    num_overflows: int = 0
    moved_linears: tuple[HighPrecisionFallback, ...] = ()

    def after_skip(self, samples: SkippedSamples) -> SkipHistory:
        """Return the history after a skipped update."""
        return replace(self, skipped=(*self.skipped, samples), num_in_row=self.num_in_row + 1)

    def after_update(self, window: tuple[tuple[float, float], ...] = ()) -> SkipHistory:
        """Return the history after an update that was made."""
        return replace(self, num_in_row=0, window=window) if self.num_in_row or window != self.window else self

    def after_overflow(self) -> SkipHistory:
        """Return the history after an overflow at the current loss scale."""
        return replace(self, num_overflows=self.num_overflows + 1)

    def after_fallback(self, linears: Sequence[HighPrecisionFallback]) -> SkipHistory:
        """Return the history after linears were moved to high precision, or smoothed."""
        known = {(linear.name, linear.form) for linear in self.moved_linears}
        new = tuple(linear for linear in linears if (linear.name, linear.form) not in known)
        return replace(self, moved_linears=(*self.moved_linears, *new)) if new else self

    def summary(self) -> str:
        """Return what was skipped and why, as text; empty if nothing was."""
        parts = []
        if self.skipped:
            counts = {
                reason: sum(samples.end - samples.first for samples in self.skipped if samples.reason == reason)
                for reason in (NOT_FINITE, SPIKE, ROLLBACK, OPERAND)
            }
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
            ranges = ", ".join(f"{samples.first}-{samples.end - 1}" for samples in self.skipped)
            parts.append(f"{sum(counts.values())} samples were consumed without an update ({reasons}): {ranges}")
        if self.num_overflows:
            parts.append(f"{self.num_overflows} steps had no update because gradients overflowed at their loss scale")
        return "; ".join(parts)

    def plain(self) -> dict[str, Any]:
        """Return plain values for `utils.plain_data.from_plain`."""
        return {**asdict(self), **dict.fromkeys(FORMER_FIELDS, ())}


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps done, skipped updates included.
        consumed_samples: samples read or skipped; the complete state of the data loader.
        history: skipped updates.
        grad_factor: automatic factor of the scales of FP8 gradients.
        origin: JSON text of the model that the run started from, which a conversion wrote; None if there is none.
        extensions: state of the loop's extensions by name, as a checkpoint has it; not kept up to date in the loop.
    """

    step: int = 0
    consumed_samples: int = 0
    history: SkipHistory = SkipHistory()
    grad_factor: float = 1.0
    origin: Optional[str] = None
    extensions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class TrainingState:
    """The model chunks, optimizer and scheduler that training changes and a checkpoint saves.

    Attributes:
        pending_copies: each call waits for an unfinished copy of weights and moments.
        gradient_residuals: errors of this rank's FP8 gradients in the last step; empty without error feedback.
        weight_ema: moving average of the weights; None without --ema-decay.
    """

    chunks: list[Any]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    pending_copies: list[Callable[[], None]] = field(default_factory=list)
    gradient_residuals: list[Tensor] = field(default_factory=list)
    weight_ema: Optional[WeightEma] = None

    def wait_for_copies(self) -> None:
        """Block until weights and moments may change. Call it before changing them."""
        while self.pending_copies:
            self.pending_copies.pop()()
