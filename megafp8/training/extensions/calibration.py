"""Amax calibration: initial scales for delayed scaling.

Delayed scaling computes a scale from the amax history of the tensor. A new run has no history, and Transformer Engine
starts with a scale of 1. Most initial weights are below 2^-6, where E4M3 has a spacing of 2^-9, and activations of a
trained model may be above its maximum of 448. The error of the first gradient is then several times that with
calibrated scales: three times in 16 layers (benchmarks/results/quality_pairs.md).

Calibration runs forward-backward on the first global batch without an update. The layers, emulated or Transformer
Engine's, record and reduce every amax as in a step. Weights, random state and the position in the data do not change.

Two iterations are run: where a scale of 1 rounds a whole tensor to zero, all tensors computed from it are zero in the
first iteration, and an amax of zero gives no scale.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.checkpoint.load import requantize_weights
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.state_dict import restore_rng_state, rng_state
from megafp8.config import derived
from megafp8.config.precision_schedule import is_quantized_at
from megafp8.metrics.records import EventRecord
from megafp8.metrics.timers import CALIBRATION
from megafp8.models.layer_runtime import layer_runtime
from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.training.evaluation import build_batches
from megafp8.training.extension import Extension, LoopState
from megafp8.training.extensions.precision_schedule import changes_at
from megafp8.training.run import Run
from megafp8.training.step import clear_gradients, forward_backward

NUM_ITERATIONS = 2


class AmaxCalibration(Extension):
    """Calibrates before the first quantized step, of a new run or after a checkpoint without scales.

    The first quantized step may be the first of this process or a change of precision by `--fp8-schedule`.
    """

    def open(self, state: LoopState) -> None:
        if not state.is_last:
            self.calibrate_if_due(state)

    def before_step(self, state: LoopState) -> None:
        if changes_at(state.run.config.precision, state.step + 1):
            self.calibrate_if_due(state)

    def calibrate_if_due(self, state: LoopState) -> None:
        """Calibrate if the next step is quantized and has no scales yet."""
        run, step = state.run, state.step + 1
        if is_quantized_at(run.config.precision, step) and needs_calibration(run, step):
            run.watchdog.enter("calibration")
            with run.timer.span(CALIBRATION):
                state.sinks.write(calibrate(run, state.progress))


def needs_calibration(run: Run, step: int = 1) -> bool:
    """Whether the run is to start a step with calibrated scales and has none, or in a new phase of `--fp8-schedule`
    lacks those of a linear. All ranks call it and get the same answer.
    """
    precision = run.config.precision
    if not derived.is_stateful(precision) or precision.fp8_delayed_start != "calibrated":
        return False
    scales = delayed_scales(run)
    # A pipeline stage may have no linear with delayed scaling. Transformer Engine's linears create their scales in the
    # first forward pass.
    needs_none = not (run.implementation.creates_scales_late or scales)
    has_some = any(bool((scale != 1).any()) for scale in scales)
    # A checkpoint of a run with BF16 attention has only the scales of linears, and one of a run with other experts none
    # of experts in one launch.
    lacks_some = layer_runtime(run.implementation).lacks_scales_of_attention(run.training_state.chunks) or any(
        state.num_linears is not None and not (state.quant_scale != 1).any() for state in delayed_states(run)
    )
    if changes_at(precision, step):
        run.set_precision(step)  # says which linears have scales
        lacks_some |= any(state.is_updated and not (state.quant_scale != 1).any() for state in delayed_states(run))
    has_scales = torch.tensor(float(needs_none or (has_some and not lacks_some)), device=run.platform.device)
    dist.all_reduce(has_scales, op=dist.ReduceOp.MIN)
    return not has_scales


def delayed_scales(run: Run) -> list[Tensor]:
    """The delayed scales of this rank's linears, FP32, all 1 before the first forward pass; may be empty."""
    runtime = layer_runtime(run.implementation)
    found = [scale for chunk in run.training_state.chunks for scale in runtime.delayed_scales(chunk)]
    return found + [state.quant_scale for state in delayed_states(run)]


def delayed_states(run: Run) -> list[DelayedState]:
    """The states of this rank's emulated linears, and of experts in one launch, which have `num_linears`."""
    modules = (module for chunk in run.training_state.chunks for module in chunk.modules())
    return [module for module in modules if isinstance(module, DelayedState)]


def calibrate(run: Run, progress: Progress) -> EventRecord:
    """Run forward-backward on the next global batch without an update; all ranks call it.

    The gradients are not cleared afterwards, since every training step clears them first.
    """
    started, samples = time.monotonic(), progress.consumed_samples
    random = rng_state()
    run.set_precision(progress.step + 1)
    for part in run.parts:
        part.begin(progress)
    for _ in range(NUM_ITERATIONS):
        clear_gradients(run)
        batches = build_batches(run, run.datasets[0], samples, samples + run.batch_size_at(samples), num_workers=0)
        forward_backward(run, batches, run.num_microbatches_at(samples), forward_only=False)
        requantize_weights(run.training_state)
    for part in run.parts:
        part.end_passes()
    restore_rng_state(random)
    seconds = time.monotonic() - started
    detail = f"delayed scales, from {NUM_ITERATIONS} iterations over the first batch in {seconds:.1f} s"
    return EventRecord(step=progress.step, name="calibrated", detail=detail)
