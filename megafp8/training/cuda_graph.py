"""Forward-backward of a step as one CUDA graph.

Launched kernel by kernel, the forward pass of a small model on Hopper waits for the host: a layer takes Python longer
than the GPU. A graph is captured once and replayed in one launch. It repeats the same kernels on the same memory, so
everything outside must leave that memory where it is: weights, gradients and scales stay in place in every step, the
batches are copied to where the captured ones lay, and what layers keep between iterations is allocated inside the
capture.

megatron-core has such a wrapper too (`full_cuda_graph.py`, release 0.16). It keeps one graph for the process, which it
also launches for another number of microbatches and after weights were replaced, and it cannot leave a step out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Optional

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megafp8.resilience import fault_injection

Batch = dict[str, Tensor]
ForwardBackward = Callable[[Iterator[Batch]], list[dict[str, Tensor]]]


class StepGraph:
    """The graph of one run's steps.

    Args:
        chunks: the model.
        warm_up_steps: that run without the graph before it is captured: kernels are compiled, communicators and delayed
            scales are made.
    """

    def __init__(self, chunks: list[Any], warm_up_steps: int, device: torch.device):
        self.chunks, self.warm_up_steps, self.device = chunks, warm_up_steps, device
        self.forget()

    def forget(self) -> None:
        """Drop the graph, as tensors may be replaced; the next steps warm up again."""
        self.steps_left = self.warm_up_steps
        self.graph: Optional[torch.cuda.CUDAGraph] = None
        self.inputs: list[Batch] = []
        self.reports: list[dict[str, Tensor]] = []

    def run(
        self, forward_backward: ForwardBackward, batches: Iterator[Batch], num_microbatches: int
    ) -> list[dict[str, Tensor]]:
        """Do what `forward_backward` does with the next microbatches, always the same number of them.

        Args:
            forward_backward: runs the microbatches forward and backward; returns the reports of their losses.

        Returns:
            The reports, valid until the next step.
        """
        if self.steps_left:
            self.steps_left -= 1
            return forward_backward(batches)
        self.load(batches, num_microbatches)
        if self.graph is None:
            self.capture(forward_backward)
        assert self.graph is not None
        self.graph.replay()
        return self.reports

    def load(self, batches: Iterator[Batch], num_microbatches: int) -> None:
        """Bring the next microbatches to where the graph reads them."""
        for index in range(num_microbatches):
            fault_injection.point("data.wait")
            batch = next(batches)
            if index == len(self.inputs):
                places = {name: torch.empty_like(tensor, device=self.device) for name, tensor in batch.items()}
                self.inputs.append(places)
            for name, tensor in batch.items():
                self.inputs[index][name].copy_(tensor, non_blocking=True)

    def capture(self, forward_backward: ForwardBackward) -> None:
        """Record the kernels without running them."""
        forget_kept_weights(self.chunks)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: loaders pin memory, and NCCL's watchdog asks for events.
        with without_random_states(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.reports = forward_backward(iter(self.inputs))
        self.graph = graph


@contextmanager
def off_default_stream() -> Iterator[None]:
    """Within, hooks on gradients are made on another stream: autograd runs them where they were made, and what is
    captured as a graph cannot go to the default one. torch would warn of that in every process."""
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # torch 2.11
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    stream, default = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(default)
    with torch.cuda.stream(stream):
        yield
    default.wait_stream(stream)


def forget_kept_weights(chunks: list[Any]) -> None:
    """Drop the codes of weights that Transformer Engine's layers keep between iterations: they allocate them again.

    Those of the capture are in the graph's memory, which stays when a forward pass without gradients takes others.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if kept := getattr(module, "_fp8_workspaces", None):
                kept.clear()


@contextmanager
def without_random_states() -> Iterator[None]:
    """Within, nothing exchanges the states of random generators, which a capture cannot.

    megatron-core does it around an embedding's dropout also where that is 0.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.fork = lambda *names: nullcontext()
    try:
        yield
    finally:
        del tracker.fork
