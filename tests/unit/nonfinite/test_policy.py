"""What follows from a bad step, for each reason and each setting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import pytest

from megafp8.checkpoint.progress import NOT_FINITE, OPERAND, SPIKE, HighPrecisionFallback, Progress, SkipHistory
from megafp8.config import flags
from megafp8.errors import NumericsError
from megafp8.metrics.records import OperandCounts
from megafp8.metrics.step_totals import BAD_RANKS, LOSS, StepTotals
from megafp8.nonfinite.operands import NonfiniteOperands
from megafp8.nonfinite.policy import BadStep, BadStepPolicy, StepSamples

WORDS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --fp8-format hybrid"
SAMPLES = StepSamples(3, range(8, 16))
BAD = OperandCounts(non_finite=1, saturated=0)
INPUTS = NonfiniteOperands(2, 0, (("layers.0.linear_fc1.input.fprop", BAD), ("layers.1.linear_fc1.input.fprop", BAD)))
OUTPUT_GRADIENT = NonfiniteOperands(1, 0, (("layers.0.linear_fc1.grad_output.dgrad", BAD),))


def policy(words: str = "") -> BadStepPolicy:
    config = flags.parse(f"{WORDS} {words}".split()).config
    optimizer: Any = SimpleNamespace(chained_optimizers=[SimpleNamespace(grad_scaler=None)], grad_scaler=None)
    return BadStepPolicy(config.training, config.optimizer, optimizer, None, lambda: ["--lr 1"])


def found(words: str, operands: NonfiniteOperands, loss: float = 1.0, num_bad_ranks: int = 0) -> Optional[BadStep]:
    totals = StepTotals({LOSS: (loss, 1.0), BAD_RANKS: (float(num_bad_ranks),)})
    return policy(words).find(totals, operands, SAMPLES, lambda is_loss_finite: [f"rank 1: {is_loss_finite}"])


def test_only_the_chosen_reactions_make_operands_a_bad_step() -> None:
    assert found("", INPUTS) is None
    for reaction in ("stop", "skip"):
        step = found(f"--on-nonfinite-activation {reaction}", INPUTS)
        assert step is not None and (step.reason, step.fallbacks) == (OPERAND, ()) and "samples 8-15" in step.text


def test_all_linears_fall_back_or_only_the_first_where_others_follow_from_it() -> None:
    names = ("layers.0.linear_fc1", "layers.1.linear_fc1")
    for num_bad_ranks, moved in ((0, names), (1, names[:1])):
        step = found("--on-nonfinite-activation bf16", INPUTS, num_bad_ranks=num_bad_ranks)
        assert step is not None and step.fallbacks == tuple(HighPrecisionFallback(name, 3, OPERAND) for name in moved)


def test_output_gradients_follow_from_a_loss_that_is_not_finite() -> None:
    step = found("--on-nonfinite-activation skip", OUTPUT_GRADIENT, loss=float("nan"), num_bad_ranks=1)
    assert step is not None and step.reason == NOT_FINITE and "rank 1: False" in step.text
    assert "layers.0.linear_fc1.grad_output" in step.text


def test_without_the_check_only_operands_count() -> None:
    assert found("--no-check-for-nan-in-loss-and-grad", INPUTS, float("nan"), 1) is None


@pytest.mark.parametrize(
    ("reason", "words", "may_skip"),
    [
        (NOT_FINITE, "", True),
        (SPIKE, "--spike-policy rollback", False),
        (SPIKE, "--spike-policy skip", True),
        (OPERAND, "--on-nonfinite-activation stop", False),
        (OPERAND, "--on-nonfinite-activation skip", True),
        (OPERAND, "--on-nonfinite-activation bf16", True),
    ],
)
def test_an_update_is_skipped_up_to_the_limit(reason: str, words: str, may_skip: bool) -> None:
    two_at_most, step = policy(f"--max-skipped-steps 2 {words}"), BadStep(reason, "why")
    if may_skip:
        two_at_most.check_may_skip(Progress(4, 8, SkipHistory(num_in_row=1)), step)
    after = "after 2 consecutive skipped updates" if may_skip else "not updated\nfix: resume"
    with pytest.raises(NumericsError, match=f"step 5: why(.|\n)*{after}(.|\n)*--lr 1"):
        two_at_most.check_may_skip(Progress(4, 8, SkipHistory(num_in_row=2)), step)


def test_rollbacks_are_limited() -> None:
    rolls_back = policy("--spike-policy rollback --max-rollbacks 1")
    assert rolls_back.is_rollback_allowed(SkipHistory())
    assert not rolls_back.is_rollback_allowed(SkipHistory(num_rollbacks=1))
    assert not policy("--spike-policy skip").is_rollback_allowed(SkipHistory())
