"""Steps that are replayed from a CUDA graph record the bytes of launched ones, with a graph that runs on CPU ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import pytest
import torch
from ranks import run_ranks
from small_run import FP8, SourceSamples, build_run, small_config

from megafp8.checkpoint.progress import Progress
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.training import cuda_graph
from megafp8.training.cuda_graph import Passes, build_step_graph
from megafp8.training.evaluation import build_batches, evaluate
from megafp8.training.run import Run
from megafp8.training.step import train_step

SHARDED = "--use-distributed-optimizer --ddp-bucket-size 20000"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
TENSOR = "--grad-reduce-fp8-scaling tensor --grad-reduce-fp8-error-feedback"
FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
LAYOUTS = [
    pytest.param(2, SHARDED, id="dp2"),
    pytest.param(2, OVERLAP, id="dp2-overlap"),
    pytest.param(2, f"{OVERLAP} --fp8-param-gather", id="dp2-overlap-codes"),
    pytest.param(2, "--ddp-bucket-size 20000", id="dp2-replicas"),
    pytest.param(2, FSDP, id="fsdp2"),
    pytest.param(2, f"{OVERLAP} --grad-reduce-in-fp8", id="dp2-grad-codes"),
    pytest.param(2, f"{OVERLAP} --grad-reduce-in-fp8 {TENSOR}", id="dp2-tensor-scales"),
    pytest.param(4, f"{SHARDED} --grad-reduce-in-fp8 --grad-reduce-fp8-intra-node bf16", id="two-nodes"),
]
NUM_STEPS, LAUNCHED, VALIDATED = 8, 6, (2, 5)
"""Steps, the one that is launched among replays as a statistics step is, and those before a validation."""
NUM_LINEARS = 8  # of two layers
LOCAL = {"training.cuda_graph_impl": "local", "training.cuda_graph_warmup_steps": 2}


class Replays:
    """A graph as the host sees it: the capture runs its passes, and a replay runs them again, unseen by counters."""

    has_graphs = True

    def __init__(self, run: Run):
        self.graph, self.counters = run.graph, byte_counters(run)
        self.passes: Optional[Passes] = None
        self.num_replays = 0

    def __call__(self) -> "Replays":
        """Stands in for `torch.cuda.CUDAGraph()`."""
        return self

    @contextmanager
    def capture(self, graph: Any, **_: Any) -> Iterator[None]:
        yield
        self.is_fresh = True

    def pool(self) -> None:
        """Of no memory."""

    def replay(self) -> None:
        self.num_replays += 1
        if self.is_fresh:  # the capture has run the passes
            self.is_fresh = False
            return
        counted = [counter.received_bytes for counter in self.counters]
        for old, new in zip(self.graph.step.reports, self.passes(iter(self.graph.step.inputs)), strict=True):
            for name, tensor in old.items():
                tensor.copy_(new[name])
        for counter, received in zip(self.counters, counted, strict=True):
            counter.received_bytes = received

    def run(self, passes: Passes, *arguments: Any) -> list[dict[str, torch.Tensor]]:
        self.passes = passes
        return self.graph.run(passes, *arguments)

    def evaluate(self, *arguments: Any) -> list[dict[str, torch.Tensor]]:
        return self.graph.evaluate(*arguments)


def byte_counters(run: Run) -> list[ReceivedBytes]:
    """What counts bytes in the passes of a run."""
    return [counter for part in run.parts for counter in part.byte_counters()]


def with_graph(run: Run) -> Run:
    """The run with the graph that `--cuda-graph-impl local` gives it."""
    graph = build_step_graph(
        with_values(run.config, LOCAL), run.training_state.chunks, torch.device("cpu"), byte_counters(run)
    )
    return dataclasses.replace(run, graph=graph)


def bytes_of_steps(config: RunConfig, has_graph: bool) -> list[tuple[Optional[int], ...]]:
    """Of weights, gradients, and gradients within a node, and the loss, of each step."""
    if config.precision.grad_reduce_fp8_intra_node is not None:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    run = build_run(config)
    with pytest.MonkeyPatch.context() as patch:
        if has_graph:
            run = with_graph(run)
            replays = Replays(run)
            patch.setattr(torch.cuda, "CUDAGraph", replays)
            patch.setattr(torch.cuda, "graph", replays.capture)
            patch.setattr(cuda_graph, "capture_stream", lambda: None)
            run = dataclasses.replace(run, graph=replays)
        samples, size = SourceSamples(run.config.data.seq_length), run.global_batch_size
        batches = build_batches(run, samples, 0, NUM_STEPS * size, num_workers=0)
        found = []
        for step in range(1, NUM_STEPS + 1):
            progress = Progress(step - 1, (step - 1) * size)
            result = train_step(run, batches, progress, is_eager=step == LAUNCHED)
            received = (*map(result.metrics.get, ("param_gather_bytes", "grad_reduce_bytes", "grad_intra_node_bytes")),)
            found.append((*received, result.loss))
            if step in VALIDATED:
                evaluate(run, "valid", samples, step, 0)
        if has_graph:
            assert replays.num_replays == NUM_STEPS - LOCAL["training.cuda_graph_warmup_steps"] - 1
    return found


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS)
def test_replayed_steps_record_the_bytes_of_launched_ones(world_size: int, flags: str) -> None:
    """Where gathers overlap, a validation gathers the weights before it, and a graph gathers them again."""
    config = small_config("llama", f"--bf16 {FP8} --micro-batch-size 2 {flags}", world_size)
    eager, replayed = (run_ranks(world_size, bytes_of_steps, config, has_graph) for has_graph in (False, True))
    amaxes = 4 * NUM_LINEARS if config.precision.fp8_param_gather else 0  # exchanged in the update, and not again
    repeated = [step + 1 for step in VALIDATED] if config.parallel.overlap_param_gather else []
    for rank_eager, rank_replayed in zip(eager, replayed, strict=True):
        expected = [
            (2 * gathered - amaxes if step in repeated else gathered, *others)
            for step, (gathered, *others) in enumerate(rank_eager, start=1)
        ]
        assert rank_replayed == expected
    gathered, reduced, within_node, _ = eager[0][-1]
    assert reduced and bool(gathered) == ("--use-" in flags) and bool(within_node) == ("intra-node" in flags)
