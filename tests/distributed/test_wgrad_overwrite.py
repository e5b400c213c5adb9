"""Weight gradients that the layer writes into `main_grad`: the first one of a step overwrites the old value."""

from __future__ import annotations

import dataclasses

import torch
from ranks import run_ranks
from small_run import PLAIN, build_run, small_config
from torch import Tensor

from megafp8.optimizer.gradient_communication import WgradOverwrite
from megafp8.training.evaluation import build_batches
from megafp8.training.step import clear_gradients, forward_backward
from megafp8.training.step_parts import OverwrittenBuffers

NUM_PASSES = 2  # the second step finds the gradients of the first
RELATIVE = 1e-5  # FP32 sums in another order


def gradients_of(in_layer: bool) -> dict[str, Tensor]:
    """All gradients of one global batch of two microbatches."""
    fusion = "" if in_layer else "--no-gradient-accumulation-fusion"
    run = build_run(small_config("llama", f"{PLAIN} {fusion}"))
    assert run.num_microbatches == 2
    (chunk,) = run.training_state.chunks
    if in_layer:
        weights = [chunk.module.output_layer.weight]
        overwrite = WgradOverwrite(run.training_state.chunks, lambda: weights)
        run = dataclasses.replace(run, parts=(OverwrittenBuffers(overwrite), *run.parts[1:]))
    for _ in range(NUM_PASSES):
        clear_gradients(run)
        batches = build_batches(run, run.datasets[0], 0, run.global_batch_size, num_workers=0)
        forward_backward(run, batches, run.num_microbatches, forward_only=False)
    return {name: parameter.main_grad.clone() for name, parameter in chunk.module.named_parameters()}


def test_wgrad_written_by_the_layer_equals_autograd() -> None:
    (expected,), (found,) = run_ranks(1, gradients_of, False), run_ranks(1, gradients_of, True)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=RELATIVE, atol=RELATIVE * gradient.abs().max().item())
