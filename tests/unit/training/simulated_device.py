"""A simulated device that captures kernels as CUDA does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch

from megafp8.training.cuda_graph import StepGraph

WARM_UP, MICROBATCHES = 2, 3
Kernel = Callable[[], Any]


class Device:
    """CUDA's handling of kernels: it runs them, or records them for replays during a capture."""

    def __init__(self) -> None:
        self.graphs: list[Device.Graph] = []
        self.captured: Optional[Device.Graph] = None
        self.streams: list[Any] = []  # of the captures
        self.pools: list[Any] = []

    class Graph:
        def __init__(self) -> None:
            self.kernels: list[Kernel] = []
            self.num_replays = 0
            self.random_states: list[Any] = []

        def register_generator_state(self, state: Any) -> None:
            self.random_states.append(state)

        def pool(self) -> Any:
            return self

        def replay(self) -> None:
            self.num_replays += 1
            for kernel in self.kernels:
                kernel()

    @contextmanager
    def capture(self, graph: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.graphs.append(graph)
        self.pools.append(pool)
        self.streams.append(stream)
        self.captured = graph
        yield
        self.captured = None

    def launch(self, kernel: Kernel) -> None:
        kernel() if self.captured is None else self.captured.kernels.append(kernel)


class Stream:
    """A stream that waits for nothing."""

    def wait_stream(self, other: Any) -> None:
        pass


def graph_of(*chunks: torch.nn.Module, has_evaluation: bool = True) -> StepGraph:
    return StepGraph(list(chunks), WARM_UP, torch.device("cpu"), has_evaluation)
