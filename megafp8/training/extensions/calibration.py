"""Scales for delayed scaling before the first step.

Delayed scaling takes a tensor's scale from the amaxes that it had before. A run that starts has none, and Transformer
Engine then lets every scale be 1. E4M3 has steps of 2^-9 below 2^-6, which is where most initial weights lie, and
nothing above 448, where activations of a trained model may be. The first gradient is then farther from that of high
precision than with scales that fit, three times as far in 16 layers (benchmarks/RESULTS.md).

So the first global batch runs forward and backward beforehand, without an update. Every amax on the way is noted and
reduced as in a step, by the emulated layers as by Transformer Engine's, and the first step finds scales. All else is as
it was: weights, random state and the position in the data.

There are two iterations. Where scale 1 rounds a complete tensor to zero, what follows from it is zero in the first one,
and an amax of zero leaves no scale.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.checkpoint.load import requantize_weights
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.state_dict import random_state, restore_random_state
from megafp8.config import derived
from megafp8.config.precision_options import is_quantized_at
from megafp8.metrics.records import EventRecord
from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.training.evaluation import build_batches
from megafp8.training.extension import Extension, LoopState
from megafp8.training.extensions.precision_schedule import changes_at
from megafp8.training.precision import awaits_attention
from megafp8.training.run import Run
from megafp8.training.step import clear_gradients, forward_backward

NUM_ITERATIONS = 2


class AmaxCalibration(Extension):
    """Calibrates before the first quantized step of this process, and wherever `--fp8-schedule` changes the precision.

    A checkpoint may have no scales either.
    """

    def open(self, state: LoopState) -> None:
        if not state.is_last:
            self.calibrate_if_due(state)

    def before_step(self, state: LoopState) -> None:
        if changes_at(state.run.config.precision, state.step + 1):
            self.calibrate_if_due(state)

    def calibrate_if_due(self, state: LoopState) -> None:
        """Calibrate before a quantized step whose scales are not there yet."""
        run = state.run
        if is_quantized_at(run.config.precision, state.step + 1) and needs_calibration(run):
            run.guard.enter("calibration")
            state.sinks.write(calibrate(run, state.progress))


def needs_calibration(run: Run) -> bool:
    """Whether the run is to start with calibrated scales and has none, be it new or from a checkpoint without them.

    All ranks call it, and agree.
    """
    precision = run.config.precision
    if not derived.is_stateful(precision) or precision.fp8_delayed_start != "calibrated":
        return False
    scales = delayed_scales(run)
    # A pipeline stage may have no linear with delayed scaling. Transformer Engine's have no scales before they ran.
    has_none_to_find = run.implementation == "emulated" and not scales
    has_some = any(bool((scale != 1).any()) for scale in scales)
    # A checkpoint of a run with attention in BF16 has those of its linears alone.
    lacks_some = any(awaits_attention(chunk, run.implementation) for chunk in run.trainee.chunks)
    has_scales = torch.tensor(float(has_none_to_find or (has_some and not lacks_some)))
    has_scales = has_scales.to(run.platform.device)
    dist.all_reduce(has_scales, op=dist.ReduceOp.MIN)
    return not has_scales


def delayed_scales(run: Run) -> list[Tensor]:
    """The scales that this rank's linears remember: FP32 tensors, all 1 before the first pass, or none."""
    if run.implementation == "transformer_engine":
        from megafp8.te import layers  # needs Transformer Engine

        return [scale for chunk in run.trainee.chunks for scale in layers.delayed_scales(chunk)]
    modules = (module for chunk in run.trainee.chunks for module in chunk.modules())
    return [module.quant_scale for module in modules if isinstance(module, DelayedState)]


def calibrate(run: Run, progress: Progress) -> EventRecord:
    """Run the next global batch forward and backward without an update; all ranks call it.

    Gradients are left behind: a training step clears them first.
    """
    started, samples = time.monotonic(), progress.consumed_samples
    random = random_state()
    for _ in range(NUM_ITERATIONS):
        clear_gradients(run)
        # In this process: starting loader processes for one batch would take longer than reading it.
        batches = build_batches(run, run.datasets[0], samples, samples + run.global_batch_size, num_workers=0)
        forward_backward(run, batches, run.num_microbatches, forward_only=False)
        requantize_weights(run.trainee)
    if run.traffic is not None:
        run.traffic.take()  # none of it is the first step's
    restore_random_state(random.data)
    detail = f"delayed scales, from {NUM_ITERATIONS} passes over the first batch in {time.monotonic() - started:.1f} s"
    return EventRecord(step=progress.step, name="calibrated", detail=detail)
