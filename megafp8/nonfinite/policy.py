"""What a run does about a bad step: one with non-finite losses, gradients or operands, or with a spike.

    loss, gradients  skip the update up to `--max-skipped-steps` times in a row; `--no-check-for-nan...` goes on
    operands         `--on-nonfinite-activation`: `warn` records them, `stop`, `skip`, and `bf16` also computes the
                     linears in high precision from the next step on
    spike            `--spike-policy`: `skip`, or `rollback` to a checkpoint (`training/extensions/rollback.py`)

What may not be skipped or rolled back stops the run. An overflow under a loss scale that can still fall is no bad step:
the optimizer finds it itself, skips the update and lowers the scale.

A skipped update changes nothing: weights, moments, learning-rate schedule, the biases of experts and the amax histories
of delayed scaling stay bitwise the same. The samples of the step count as consumed, and its random numbers as drawn.
All ranks take the same decision, since they decide by values that were reduced over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megafp8.checkpoint.progress import (
    HIGH_PRECISION,
    NOT_FINITE,
    OPERAND,
    SMOOTHED,
    SPIKE,
    HighPrecisionFallback,
    Progress,
    SkipHistory,
)
from megafp8.config import precision_map
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.schema import OptimizerConfig, TrainingConfig
from megafp8.data.loader import describe_samples
from megafp8.errors import NumericsError
from megafp8.metrics.step_totals import BAD_RANKS, LOSS, StepTotals
from megafp8.models.grouped_moe import named_mixtures
from megafp8.models.layer_runtime import layer_runtime
from megafp8.nonfinite.operands import FORWARD_OPERANDS, MAX_NAMED, NonfiniteOperands
from megafp8.optimizer.schedules import can_lower_loss_scale, current_loss_scale, describe_overflow
from megafp8.optimizer.skip_update import SpikeDetector
from megafp8.quantization.delayed_scaling import OPERANDS

SUM_OVERFLOWS = "gradients overflow in the sum over all ranks"


@dataclass(frozen=True)
class BadStep:
    """Why a step must not update the weights; the same on all ranks.

    Attributes:
        reason: NOT_FINITE, SPIKE or OPERAND.
        text: the values, the ranks and the samples.
        fallbacks: linears that are in high precision from the next step on.
    """

    reason: str
    text: str
    fallbacks: tuple[HighPrecisionFallback, ...] = ()


@dataclass(frozen=True)
class StepSamples:
    """A step and its samples, to name them.

    Attributes:
        step: counted from 1.
        batch: those of the global batch.
    """

    step: int
    batch: range

    def __str__(self) -> str:
        return describe_samples(self.batch)


@dataclass(frozen=True)
class BadStepPolicy:
    """Decides whether a step is bad, and what follows.

    Attributes:
        training, settings: of the run.
        optimizer: has the loss scale.
        spikes: None without `--spike-policy`.
        suggestions: gives what to try against non-finite values.
    """

    training: TrainingConfig
    settings: OptimizerConfig
    optimizer: MegatronOptimizer
    spikes: Optional[SpikeDetector]
    suggestions: Callable[[], Iterable[str]]

    def find(
        self, totals: StepTotals, nonfinite: NonfiniteOperands, samples: StepSamples, ranks: Callable[[bool], list[str]]
    ) -> Optional[BadStep]:
        """The bad step of a loss, gradients or operands that are not finite.

        Args:
            ranks: gives a line for each rank whose loss or gradients are not finite, if told whether the loss of all
                ranks is. Collective.
        """
        if not totals.number(BAD_RANKS) or not self.training.check_for_nan_in_loss_and_grad:
            return self.of_operands(nonfinite, samples)
        is_loss_finite = math.isfinite(totals[LOSS][0])
        if is_loss_finite and can_lower_loss_scale(self.optimizer):
            return None
        causes = ranks(is_loss_finite)
        if bad_step := self.of_operands(nonfinite, samples, causes, is_loss_finite):
            return bad_step
        if nonfinite.non_finite_operands():
            causes.append(f"operands of quantized linears: {nonfinite.describe()}")
        return self.of_numbers(samples, causes)

    def of_numbers(self, samples: StepSamples, causes: Sequence[str]) -> BadStep:
        """A step with non-finite loss or gradients, from a line for each cause. So is a loss scale that cannot fall."""
        loss_scale = current_loss_scale(self.optimizer)
        scaling = [] if loss_scale is None else [describe_overflow(self.settings, loss_scale)]
        lines = "\n".join(f"  {line}" for line in [*causes, *scaling])
        return BadStep(NOT_FINITE, f"loss or gradients are not finite ({samples}):\n{lines}")

    def of_operands(
        self, nonfinite: NonfiniteOperands, samples: StepSamples, ranks: Sequence[str] = (), is_loss_finite: bool = True
    ) -> Optional[BadStep]:
        """The bad step of non-finite operands under `--on-nonfinite-activation`; None if there are none, or under
        `warn`.

        Where loss or gradients are not finite, the operands after the first one follow from it, so that the first one
        is named and its linear moved. Output gradients also follow from a loss that is not finite, and do not count
        then.

        Args:
            ranks: a line for each rank whose loss or gradients are not finite.
            is_loss_finite: whether the loss of all ranks is.
        """
        policy = self.training.on_nonfinite_activation
        operands = OPERANDS if is_loss_finite else FORWARD_OPERANDS
        found = list(nonfinite.non_finite_operands(operands))
        if policy == "warn" or not found:
            return None
        text = nonfinite.describe(operands, 1 if ranks else MAX_NAMED)
        fallbacks: tuple[HighPrecisionFallback, ...] = ()
        if policy == "bf16":
            linears = dict.fromkeys(tensor.rpartition(".")[0] for tensor in (found[:1] if ranks else found))
            fallbacks = tuple(HighPrecisionFallback(linear, samples.step, OPERAND) for linear in linears)
        lines = "".join(f"\n  {line}" for line in ("loss or gradients are not finite either:", *ranks)) if ranks else ""
        return BadStep(OPERAND, f"operands of quantized linears are not finite ({samples}): {text}{lines}", fallbacks)

    def of_spike(self, history: SkipHistory, loss: float, grad_norm: float, samples: StepSamples) -> Optional[BadStep]:
        """The spike of a step's loss or gradient norm, if there is one.

        Args:
            history: before the step.
        """
        text = self.spikes.find_spike(history.window, loss, grad_norm) if self.spikes else None
        return None if text is None else BadStep(SPIKE, f"{text} ({samples})")

    def check_may_skip(self, progress: Progress, bad_step: BadStep) -> None:
        """Return if the update may be skipped.

        Args:
            progress: before the step.

        Raises:
            NumericsError: `--max-skipped-steps` were skipped in a row, or bad steps of this kind are not to be skipped.
        """
        training = self.training
        reactions = {NOT_FINITE: "skip", SPIKE: training.spike_policy, OPERAND: training.on_nonfinite_activation}
        is_skippable, num_before = reactions[bad_step.reason] in ("skip", "bf16"), progress.history.num_in_row
        if is_skippable and num_before < training.max_skipped_steps:
            return
        most = f"--max-skipped-steps {training.max_skipped_steps}"
        limit = f", after {num_before} consecutive skipped updates ({most})" if is_skippable and num_before else ""
        raise NumericsError(
            f"step {progress.step + 1}: {bad_step.text}\nthe weights were not updated{limit}\nfix: resume from the "
            "last checkpoint with other data (--override-sample-order), or try one of: "
            f"{'; '.join(self.suggestions())}; a different schedule needs --override-opt_param-scheduler, a different "
            "precision --override-precision"
        )

    def is_rollback_allowed(self, history: SkipHistory) -> bool:
        """Whether a run whose step failed may roll back to a checkpoint."""
        return self.training.spike_policy == "rollback" and history.num_rollbacks < self.training.max_rollbacks


def fall_back(chunks: Sequence[Any], linears: Sequence[HighPrecisionFallback], implementation: LayerBackend) -> None:
    """Compute linears in high precision, or with a scale per channel, from now on; those of this rank."""
    names = [linear.name for linear in linears if linear.form == HIGH_PRECISION]
    move_grouped_experts(chunks, names)
    smoothed = [linear.name for linear in linears if linear.form == SMOOTHED]
    layer_runtime(implementation).change_linears(unwrap_model(list(chunks)), names, smoothed)


def move_grouped_experts(chunks: Sequence[Any], names: Sequence[str]) -> None:
    """Compute experts in one launch in high precision from now on, if a linear of one of them is named."""
    fallbacks = {precision_map.name_of_all_experts(name) for name in names}
    for prefix, mixture in (named for chunk in unwrap_model(list(chunks)) for named in named_mixtures(chunk)):
        if f"{prefix}{precision_map.MLP_LINEARS[0]}" in fallbacks:
            mixture.experts.rule = mixture.experts.codes = None
            for state in mixture.experts.quantizer_state.values():  # the others' updates do not wait for it
                mixture.experts.exchange.leave(state)
