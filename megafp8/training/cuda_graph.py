"""CUDA graphs of the forward-backward of a step, and of the forward passes of an evaluation.

The forward pass of a small model on Hopper is bound by the host: launching the kernels of a layer from Python takes
longer than running them. A CUDA graph is captured once and replayed in one launch. A replay runs the same kernels on
the same addresses. Therefore weights, gradients and scales are updated in place, each batch is copied into the input
tensors of the capture, and what layers cache between iterations is allocated within the capture.

On a pipeline stage, the graph holds the whole schedule with all messages. All ranks capture in the same step, because
a communicator of NCCL must be captured by all of its ranks or by none. The steps before have created the communicators
and what layers cache for the whole run (rotary embeddings, lengths of sequences).

An evaluation has a graph of its own in the memory of the step's, and so has a step with hooks, with the kernels
of the hooks: one of them runs at a time, and every replay writes what it reads, but for its inputs and reports,
which stay allocated.

The settings that do not go with a CUDA graph are rules of `config/rules/cuda_graph.py`.

megatron-core has a similar wrapper (`full_cuda_graph.py`, release 0.16). It keeps one graph for the process, replays it
also for another number of microbatches and after weights were replaced, and cannot run a single step without it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.resilience import fault_injection

RANDOM_STATE_MODULES = ("megatron.core.tensor_parallel.random", "transformer_engine.pytorch.distributed")
RANDOM_STATE_FUNCTIONS = ("_get_cuda_rng_state", "_set_cuda_rng_state")
Batch = dict[str, Tensor]
Batches = Optional[Iterator[Batch]]
Passes = Callable[[Batches], list[dict[str, Tensor]]]
"""Runs passes over an iterator of microbatches, and returns the reports of the losses."""


def do_nothing() -> None:
    """A default; hooks are compared by their functions."""


@dataclass(frozen=True)
class StepHooks:
    """Hooks that compute statistics in the passes of a step.

    Their results are on the device, at the same addresses each time, so that the replay of a CUDA graph that was
    captured with the hooks writes them.

    Attributes:
        attached: the context in which they are attached to the model.
        generator: from which they draw random numbers; None if they draw none.
        restart: drops what they have collected in the step, which is repeated.
    """

    attached: Callable[[], AbstractContextManager[None]]
    generator: Optional[torch.Generator] = None
    restart: Callable[[], None] = do_nothing


class PassGraph:
    """One CUDA graph, captured in its first run.

    Args:
        chunks: the model.
        counters: of the bytes that the passes receive. They count in Python, which a replay does not run.
        noises: from which the passes draw the random numbers of stochastic rounding.

    Attributes:
        graph: None before the capture.
        received_bytes: of a replay, by counter.
        draws_per_replay: number by noise. A linear that was moved to BF16 draws nothing, and an evaluation less.
    """

    def __init__(
        self,
        chunks: list[Any],
        device: torch.device,
        counters: Sequence[ReceivedBytes] = (),
        noises: Sequence[RoundingNoise] = (),
    ):
        self.chunks, self.device, self.counters, self.noises = chunks, device, counters, noises
        self.graph: Optional[torch.cuda.CUDAGraph] = None
        self.received_bytes: list[int] = []
        self.draws_per_replay: list[int] = []
        self.inputs: list[Batch] = []
        self.reports: list[dict[str, Tensor]] = []

    def run(
        self,
        passes: Passes,
        batches: Batches,
        num_microbatches: int,
        pool: Any = None,
        generators: Sequence[torch.Generator] = (),
    ) -> list[dict[str, Tensor]]:
        """Run the passes on the next microbatches, which are as many each time.

        Args:
            pool: of the memory of a graph that does not run at the same time; None for an own one.
            generators: from which the passes draw, beside those of dropout.
        """
        if batches is not None:
            self.copy_inputs(batches, num_microbatches)
        if self.graph is None:
            self.capture(passes, batches is not None, pool, generators)  # counts for the first replay
        else:
            # Python does not run in a replay: add what the capture counted.
            for counter, received in zip(self.counters, self.received_bytes, strict=True):
                counter.received_bytes += received
        assert self.graph is not None
        for noise, number in zip(self.noises, self.draws_per_replay, strict=True):
            # Likewise for seeds of stochastic rounding, which are drawn in Python.
            noise.seed_draws(number)
        self.graph.replay()
        return self.reports

    def copy_inputs(self, batches: Iterator[Batch], num_microbatches: int) -> None:
        """Copy the next microbatches into the input tensors of the graph."""
        for index in range(num_microbatches):
            fault_injection.point("data.wait")
            batch = next(batches)
            if index == len(self.inputs):
                self.inputs.append(
                    {name: torch.empty_like(tensor, device=self.device) for name, tensor in batch.items()}
                )
            for name, tensor in batch.items():
                # The graph reads these addresses. The copy is on the stream of the replay, and so before it.
                self.inputs[index][name].copy_(tensor, non_blocking=True)

    def capture(self, passes: Passes, reads_batches: bool, pool: Any, generators: Sequence[torch.Generator]) -> None:
        """Capture the graph; its kernels do not run yet."""
        clear_cached_weights(self.chunks)
        graph = torch.cuda.CUDAGraph()
        tracker = tensor_parallel.get_cuda_rng_tracker()
        draws = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
        noises = (generator for noise in self.noises for generator in noise.generators)
        for state in (*(tracker.get_states().values() if draws else ()), *generators, *noises):
            # A replay advances the states of registered generators, as its passes would without a graph.
            graph.register_generator_state(state)
        # Not "global": other threads use the device meanwhile. Loaders pin memory, and NCCL's watchdog queries events.
        captured = torch.cuda.graph(graph, pool=pool, stream=capture_stream(), capture_error_mode="thread_local")
        # The passes count while they are captured, although no kernel runs.
        before = [counter.received_bytes for counter in self.counters]
        with nullcontext() if draws else fixed_random_states(), captured:
            self.reports = passes(iter(self.inputs) if reads_batches else None)
        self.received_bytes = [
            counter.received_bytes - start for counter, start in zip(self.counters, before, strict=True)
        ]
        self.draws_per_replay = [noise.draw_index or 0 for noise in self.noises]
        self.graph = graph


class EagerPasses:
    """Runs the passes of steps and evaluations kernel by kernel.

    Attributes:
        has_graphs: whether passes may be replayed. A replay calls no hooks and cannot be timed within.
        is_captured: whether steps are replayed now.
    """

    has_graphs = False

    @property
    def is_captured(self) -> bool:
        return False

    def reset(self) -> None:
        """Drop what was captured, since tensors may be replaced."""

    def take_last_batches(self) -> Batches:
        """The microbatches of the last replay, as it is to be repeated; its graphs are dropped."""
        raise RuntimeError("no step was replayed")

    def run(
        self, forward_backward: Passes, batches: Batches, num_microbatches: int, step_hooks: Sequence[StepHooks] = ()
    ) -> list[dict[str, Tensor]]:
        """Run forward-backward on the next microbatches.

        Args:
            forward_backward: runs forward-backward over an iterator of microbatches; returns the reports of the losses.
            batches: None on a pipeline stage that reads none.
            num_microbatches: the same in every step.
            step_hooks: which `forward_backward` attaches.

        Returns:
            The reports, valid until the next step.
        """
        return forward_backward(batches)

    def evaluate(self, forward: Passes, batches: Batches, num_microbatches: int) -> list[dict[str, Tensor]]:
        """The same for the forward passes of an evaluation."""
        return forward(batches)


class StepGraph(EagerPasses):
    """The CUDA graphs of a run.

    Args:
        chunks: the model.
        warm_up_steps: steps before the capture, in which kernels are compiled, communicators are created and delayed
            scaling gets its scales.
        has_evaluation: whether evaluations have a graph, too.
        counters: of the bytes that the passes receive.
    """

    def __init__(
        self,
        chunks: list[Any],
        warm_up_steps: int,
        device: torch.device,
        has_evaluation: bool = False,
        counters: Sequence[ReceivedBytes] = (),
    ):
        self.chunks, self.device, self.counters = chunks, device, counters
        self.warm_up_steps, self.has_evaluation = warm_up_steps, has_evaluation
        modules = (module for chunk in chunks for module in chunk.modules())
        self.noises = [module for module in modules if isinstance(module, RoundingNoise)]
        self.reset()

    def reset(self) -> None:
        """Drop the graphs, since tensors may be replaced. The next steps warm up again."""
        self.steps_left = self.warm_up_steps
        self.is_evaluation_warm = False
        self.step, self.evaluation = self.new_graph(), self.new_graph()
        self.by_hooks: dict[tuple[StepHooks, ...], PassGraph] = {(): self.step}

    def new_graph(self) -> PassGraph:
        """One that is not captured yet."""
        return PassGraph(self.chunks, self.device, self.counters, self.noises)

    @property
    def pool(self) -> Any:
        """The memory of the graphs of steps; None before the first capture."""
        graphs = (each.graph for each in self.by_hooks.values())
        return next((graph.pool() for graph in graphs if graph is not None), None)

    has_graphs = True
    last_inputs: Optional[list[Batch]] = None

    def take_last_batches(self) -> Batches:
        inputs, self.last_inputs = self.last_inputs, None
        self.reset()
        return None if inputs is None else iter(inputs)

    @property
    def is_captured(self) -> bool:
        return self.step.graph is not None

    def run(
        self, forward_backward: Passes, batches: Batches, num_microbatches: int, step_hooks: Sequence[StepHooks] = ()
    ) -> list[dict[str, Tensor]]:
        """Eager while warming up and for the first step with these hooks, then from the graph of the hooks."""
        key = tuple(step_hooks)
        if self.steps_left or key not in self.by_hooks:
            self.steps_left = max(0, self.steps_left - 1)
            self.by_hooks.setdefault(key, self.new_graph())
            return forward_backward(batches)
        generators = [each.generator for each in step_hooks if each.generator is not None]
        self.last_inputs = None if batches is None else self.by_hooks[key].inputs
        # With the memory of the graphs so far, as only one of them runs at a time.
        return self.by_hooks[key].run(forward_backward, batches, num_microbatches, self.pool, generators)

    def evaluate(self, forward: Passes, batches: Batches, num_microbatches: int) -> list[dict[str, Tensor]]:
        """The same for the forward passes of an evaluation.

        The first one is eager, and so are all before there is a graph of the steps, which has the memory.
        """
        if not self.has_evaluation or self.step.graph is None or not self.is_evaluation_warm:
            self.is_evaluation_warm = True
            return forward(batches)
        return self.evaluation.run(forward, batches, num_microbatches, self.pool)


def build_step_graph(
    config: RunConfig, chunks: list[Any], device: torch.device, counters: Sequence[ReceivedBytes]
) -> EagerPasses:
    """The CUDA graphs of a run, or passes kernel by kernel.

    Args:
        counters: of the bytes that a step receives.
    """
    if not derived.uses_cuda_graph(config):
        return EagerPasses()
    training = config.training
    has_evaluation = bool(training.cuda_graph_evaluation)
    return StepGraph(chunks, training.cuda_graph_warmup_steps, device, has_evaluation, counters)


def check_graph_optimizer(config: RunConfig, problem: Optional[str]) -> None:
    """Refuse a CUDA graph with an optimizer that waits for the device.

    Args:
        problem: why the run does not have the fused optimizer.

    Raises:
        ConfigError: it does not, and has a CUDA graph.
    """
    if problem is not None and derived.uses_cuda_graph(config):
        raise ConfigError(
            f"--cuda-graph-impl {config.training.cuda_graph_impl}: CUDA graphs need the one-pass optimizer, which does "
            f"not support {problem}"
        )


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """The stream of every capture."""
    return torch.cuda.Stream()


@contextmanager
def side_stream() -> Iterator[None]:
    """Create gradient hooks on the stream of the captures.

    Autograd runs a hook on the stream on which it was created, and a capture may not use the default stream. A gradient
    that is used on another stream than the one it was allocated on is not freed before the end of the capture: the
    graph would hold a gradient of every weight for each microbatch. torch's warning about the streams is turned off.
    """
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # torch 2.11
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    stream, default = capture_stream(), torch.cuda.current_stream()
    # What the default stream has launched comes before, and what it launches after the context comes later.
    stream.wait_stream(default)
    with torch.cuda.stream(stream):
        yield
    default.wait_stream(stream)


def clear_cached_weights(chunks: list[Any]) -> None:
    """Clear the quantized weights that layers cache, so that the capture allocates new ones.

    Those are then in the memory pool of the graph, which keeps them when an eager forward pass caches others.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if workspaces := getattr(module, "_fp8_workspaces", None):
                workspaces.clear()
            if isinstance(module, GroupedExperts):
                module.codes = None


@contextmanager
def fixed_random_states() -> Iterator[None]:
    """Leave the GPU's random states as they are, since a capture cannot read or set them as tensors.

    megatron-core changes them around the dropout of the embedding even if the rate is 0. Recomputation saves and
    restores them, in megatron-core and in Transformer Engine. For a step that draws no random number.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    modules = (sys.modules.get(name) for name in RANDOM_STATE_MODULES)
    patched = [(module, name) for module in modules if module is not None for name in RANDOM_STATE_FUNCTIONS]
    originals = [getattr(module, name) for module, name in patched]
    tracker.fork = lambda *names: nullcontext()
    for module, name in patched:
        setattr(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        del tracker.fork
        for (module, name), original in zip(patched, originals, strict=True):
            setattr(module, name, original)
