"""Bad steps: numbers that are not finite, or spikes, and whether the run may skip their update.

A step whose update is skipped changes nothing: weights, moments, learning-rate schedule and delayed scaling's amax
histories stay the same to the bit. Its samples count as read and its random numbers as drawn. All ranks decide alike,
since they decide by numbers that they have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megafp8.checkpoint.progress import NOT_FINITE, SPIKE, Progress, SkippedSamples
from megafp8.data.loader import describe_samples, samples_of_step
from megafp8.errors import NumericsError
from megafp8.metrics.health_advice import Case, advice, of_bad_numbers
from megafp8.optimizer.schedules import current_loss_scale, describe_overflow
from megafp8.training.checks import machine_problems
from megafp8.training.run import Run


@dataclass(frozen=True)
class BadNumbers:
    """Why an update is skipped, the same on all ranks.

    Attributes:
        reason: NOT_FINITE or SPIKE.
        text: what was seen, where, and which samples.
    """

    reason: str
    text: str


def not_finite(run: Run, progress: Progress, ranks: list[str]) -> BadNumbers:
    """The finding of `optim.finite.bad_ranks`, with what a loss scale has to do with it."""
    loss_scale = current_loss_scale(run.trainee.optimizer)
    scaling = [] if loss_scale is None else [describe_overflow(run.config.optimizer, loss_scale)]
    lines = "\n".join(f"  {line}" for line in [*ranks, *scaling])
    return BadNumbers(NOT_FINITE, f"loss or gradients are not finite ({samples_of_batch(run, progress)}):\n{lines}")


class SpikeCheck:
    """Allows an update unless loss or gradient norm spike, and keeps what it found.

    Args:
        progress: before the step.
        loss: of the step.
    """

    def __init__(self, run: Run, progress: Progress, loss: float):
        self.run, self.progress, self.loss = run, progress, loss
        self.finding: Optional[BadNumbers] = None

    def allows(self, grad_norm: float) -> bool:
        """Whether the update may be made."""
        if self.run.spikes is not None:
            text = self.run.spikes.spike(self.progress.history.window, self.loss, grad_norm)
            if text is not None:
                self.finding = BadNumbers(SPIKE, f"{text} ({samples_of_batch(self.run, self.progress)})")
        return self.finding is None


def check_may_skip(run: Run, progress: Progress, finding: BadNumbers) -> None:
    """Allow the update of a step to be skipped, or stop the run.

    Raises:
        NumericsError: `--max-skipped-steps` were skipped in a row, or spikes are not to be skipped.
    """
    training = run.config.training
    is_skippable = finding.reason == NOT_FINITE or training.spike_policy == "skip"
    num_before = progress.history.num_in_row
    if is_skippable and num_before < training.max_skipped_steps:
        return
    limit = ""
    if is_skippable and num_before:
        limit = f", after {num_before} left out in a row (--max-skipped-steps {training.max_skipped_steps})"
    case = Case(run.config, run.place.world_size, of_machine=machine_problems)
    raise NumericsError(
        f"step {progress.step + 1}: {finding.text}\nthe weights were not updated{limit}\n"
        "mend: resume from the last checkpoint with other data (--override-sample-order), or try one of: "
        f"{advice(case, of_bad_numbers)}; another schedule goes with --override-opt_param-scheduler, other number "
        "formats with --override-precision"
    )


def samples_of_batch(run: Run, progress: Progress) -> str:
    """The samples of the next step on all ranks, in words."""
    first = progress.consumed_samples
    return describe_samples(range(first, first + run.global_batch_size))


def samples_of_rank(run: Run, progress: Progress) -> str:
    """Those that this rank reads."""
    assert run.config.training.micro_batch_size is not None
    return describe_samples(
        samples_of_step(
            consumed_samples=progress.consumed_samples,
            micro_batch_size=run.config.training.micro_batch_size,
            data_parallel_rank=run.place.data_rank,
            data_parallel_size=run.place.data_size,
            global_batch_size=run.global_batch_size,
        )
    )


def next_progress(
    run: Run, progress: Progress, finding: Optional[BadNumbers], numbers: Optional[tuple[float, float]]
) -> Progress:
    """The progress after a step.

    Args:
        numbers: loss and gradient norm of an update that was made; None where a loss scale overflowed.
    """
    step, consumed, history = progress.step + 1, progress.consumed_samples + run.global_batch_size, progress.history
    if finding is not None:
        history = history.after_skip(SkippedSamples(progress.consumed_samples, consumed, step, finding.reason))
    elif numbers is not None:
        window = () if run.spikes is None else run.spikes.after_update(history.window, *numbers)
        history = history.after_update(window)
    else:
        history = history.after_overflow()
    return Progress(step, consumed, history)
