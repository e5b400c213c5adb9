"""Small runs on one GPU, one after another in this process."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gpu_sizes import FP8_RECIPES, RECIPES, SIZES
from small_run import Curve, build_run, train, weights
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megafp8.config import flags, rules
from megafp8.config.schema.model import ParallelConfig
from megafp8.device import capability, platform
from megafp8.mcore import cpu_patches

__all__ = [
    "FP8_RECIPES", "GRAPH", "RECIPES", "SIZES", "check_graph_equals_launched_kernels", "gap", "gpu_curve", "gpu_run",
    "unbroken_and_resumed",
]  # fmt: skip
GRAPH = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
cpu_patches.install()
platform.enable_determinism()  # equal runs give equal bits

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.mcore.process_groups import destroy_process_groups
from megafp8.training.run import Run


@contextmanager
def gpu_run(extra: str, precision: str = "--bf16") -> Iterator[Run]:
    """A run on Python source. Its process groups and Transformer Engine's global state end with it."""
    config = flags.parse(f"{SIZES} {precision} {extra}".split()).config
    found = [*rules.problems(config, 1), *capability.capability_problems(config, capability.detect_target())]
    assert not found, found
    platform.init_distributed(
        platform.detect_platform(), ParallelConfig()
    )  # once: starting NCCL takes longer than a run
    environment = dict(os.environ)
    run = build_run(config)
    try:
        yield run
    finally:
        run.graph.reset()  # before its communicators end, and not during the capture of the next run
        del run
        gc.collect()
        # megatron-core sets the attention backends that Transformer Engine may use, and refuses another choice later.
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        destroy_process_groups()
        FP8GlobalStateManager.reset()
        torch.cuda.empty_cache()


def check_graph_equals_launched_kernels(extra: str) -> None:
    """Seven steps of a run as a CUDA graph have the losses, gradient norms and weights of launched kernels, bitwise."""
    found = []
    for graph in ("", GRAPH):
        with gpu_run(f"{extra} {graph}") as run:
            found.append((train(run, 7), weights(run)))
            assert run.graph.is_captured == bool(graph)
    (plain, plain_weights), (captured, captured_weights) = found
    assert captured == plain
    assert not [name for name in plain_weights if not torch.equal(plain_weights[name], captured_weights[name])]


@functools.cache
def gpu_curve(extra: str, num_steps: int) -> Curve:
    """The first steps of a run; the same one is trained once."""
    with gpu_run(extra) as run:
        return train(run, num_steps)


def gap(one: Curve, other: Curve) -> float:
    """Largest relative difference of the losses."""
    return max(abs(a - b) / b for a, b in zip(one.losses, other.losses, strict=True))


def gap_to_emulated(flags: str, num_steps: int) -> float:
    """That of a run to the same one with emulated layers."""
    found = gap(gpu_curve(flags, num_steps), gpu_curve(f"{flags} --transformer-impl emulated", num_steps))
    print(f"\n{flags}: gap {found:.2e}")
    return found


def unbroken_and_resumed(extra: str, steps: int, folder: Path) -> tuple[Curve, Curve]:
    """The last steps of an unbroken run, and of one that resumed from a checkpoint in the middle."""
    with gpu_run(extra) as run:
        train(run, steps)
        path = save_checkpoint(folder, run.config, run.training_state, Progress(steps, steps * run.global_batch_size))
        unbroken = train(run, steps, first_step=steps + 1)
    with gpu_run(extra) as run:
        load_checkpoint(path, run.config, run.training_state)
        return unbroken, train(run, steps, first_step=steps + 1)
