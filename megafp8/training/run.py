"""A run of this process: its settings, and everything that was built from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megafp8.checkpoint.directory import NON_PERSISTENT
from megafp8.checkpoint.progress import Trainee
from megafp8.config import derived
from megafp8.config.precision_options import is_quantized_at
from megafp8.config.schema import RunConfig
from megafp8.data.sample_hash import SampleChain
from megafp8.data.tokenizers.build import Tokenizer
from megafp8.device.platform import Platform
from megafp8.mcore.process_groups import RankPosition
from megafp8.metrics.timers import StepTimer
from megafp8.optimizer.gradient_checks import NonFiniteGradientMonitor
from megafp8.optimizer.gradient_communication import ParameterTraffic, WgradOverwrite
from megafp8.optimizer.skip_update import SpikeDetector
from megafp8.resilience.watchdog import Guard
from megafp8.training.cuda_graph import StepGraph
from megafp8.training.precision import DelayedMemory, high_precision


@dataclass(frozen=True)
class Run:
    """Everything that a training step needs. `trainee` holds what training changes; no attribute is replaced.

    Attributes:
        implementation: the layers in use: `transformer_engine`, `emulated` or `local`.
        vocab_size: rows of the embedding, padded.
        datasets: train, valid, test; None where there is none.
        forward_step: megatron-core's callback that runs one microbatch.
        first_gradient: lets the first gradients of a step overwrite their buffers; None where these are zeroed.
        spikes: detects loss spikes; None without `--spike-policy`.
        delayed: saves and restores the amax histories of delayed scaling; None without it.
        watch: notes gradients that are not finite; None where that check is off, or the optimizer's norm shows it.
        traffic: counts the bytes of parameter gathers; None where every rank updates all weights, or a graph gathers.
        graph: the CUDA graph of forward and backward; None where kernels are launched one by one.
        timer: measures steps; every step waits for the loss, so the device is never ahead by more than one update.
        guard: handles signals and time limits; one that was not started does neither.
    """

    config: RunConfig
    platform: Platform
    place: RankPosition
    implementation: str
    tokenizer: Tokenizer
    vocab_size: int
    datasets: tuple[Any, Any, Any]
    transformer_config: TransformerConfig
    trainee: Trainee
    forward_step: Callable[..., Any]
    first_gradient: Optional[WgradOverwrite]
    spikes: Optional[SpikeDetector]
    delayed: Optional[DelayedMemory]
    watch: Optional[NonFiniteGradientMonitor]
    traffic: Optional[ParameterTraffic]
    graph: Optional[StepGraph]
    timer: StepTimer
    guard: Guard = field(default_factory=Guard)

    @property
    def num_microbatches(self) -> int:
        """Forward passes of this rank in one step."""
        return derived.num_microbatches(self.config, self.place.world_size)

    @property
    def global_batch_size(self) -> int:
        """Sequences in one step."""
        return derived.global_batch_size(self.config, self.place.world_size)

    def precision_at(self, step: int) -> AbstractContextManager[None]:
        """Within, the run computes as `--fp8-schedule` says for a step; the first is 1."""
        if is_quantized_at(self.config.precision, max(1, step)):
            return nullcontext()
        return high_precision(self.transformer_config, self.trainee.chunks)

    @cached_property
    def sample_chain(self) -> Optional[SampleChain]:
        """The hash of the training samples, the same on all ranks; None without training data."""
        dataset, config = self.datasets[0], self.config
        if dataset is None:
            return None
        assert config.data.seq_length is not None
        return SampleChain(dataset, config.data.seq_length, config.training.seed)


def run_folder(config: RunConfig) -> Optional[Path]:
    """Where the run keeps its records and checkpoints."""
    return Path(config.checkpoint.save) if config.checkpoint.save else None


def non_persistent_folder(config: RunConfig) -> Optional[Path]:
    """Where the run keeps the newest of its checkpoints of the second kind; None if it writes none."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or checkpoint.non_persistent_save_interval is None:
        return None
    return Path(checkpoint.non_persistent_global_ckpt_dir or Path(checkpoint.save) / NON_PERSISTENT)


def to_device_sum(reports: list[dict[str, torch.Tensor]]) -> Optional[torch.Tensor]:
    """(loss sum, tokens) over the microbatches of a step; None on a rank that sees no loss."""
    return torch.stack([report["loss"] for report in reports]).sum(0) if reports else None
