"""Host memory of a rank for checkpoints, beside what it has while it trains.

resume   a tensor as it was saved: a rank reads all of what one rank wrote, even if it needs a part
save     what is written: at most a tensor and `MAX_LAG_BYTES` for each of the files that are written at once. With
         --async-save a copy of all that this rank writes, which is kept. With --use-precision-aware-optimizer
         master weights and moments in FP32, and with --fp8-param-gather the weights in the format of `--bf16`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.config import derived, dimensions
from megafp8.config.activations import is_gated
from megafp8.config.checkpoint_size import FILES_PER_RANK, MAX_LAG_BYTES
from megafp8.config.optimizers import updates_matrices
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.resources.memory import MemoryEstimate, updated_parameters
from megafp8.resources.micro_batch import gib
from megafp8.resources.mixture_memory import BYTES, expert_parameters_on_stage

STATE_BYTES = 3 * BYTES["fp32"]
"""Master weight and two moments of a parameter, in a checkpoint."""


@dataclass(frozen=True)
class CheckpointMemory:
    """Bytes of host memory of one rank while it resumes and while it saves, beside those while it trains."""

    resume_bytes: int
    save_bytes: int


def checkpoint_memory(
    config: RunConfig, world_size: int, padded_vocab: int, estimate: MemoryEstimate, saved: Optional[RunConfig] = None
) -> CheckpointMemory:
    """Estimate the host memory for checkpoints of the rank that writes most: the first data-parallel one.

    Args:
        padded_vocab: vocabulary size after padding.
        estimate: of device memory, for the rank's pipeline stage.
        saved: settings of the checkpoint that the run resumes from; None: one of the same layout.
    """
    weights_bytes = estimate.parameters * BYTES[derived.params_dtype(config.precision)]
    sizes = run_sizes(config, world_size, padded_vocab)
    experts = expert_parameters_on_stage(sizes, estimate.stage)
    state_bytes = STATE_BYTES * updated_parameters(sizes, estimate.parameters, experts)
    if config.checkpoint.no_save_optim:
        state_bytes = 0
    elif updates_matrices(config.optimizer):
        state_bytes = estimate.optimizer_bytes
    if config.checkpoint.no_save_optim or not updates_matrices(config.optimizer):  # the estimate has the moving average
        updated = updated_parameters(sizes, estimate.parameters, experts)
        state_bytes += derived.ema_bytes(config.optimizer) * updated
    copied_bytes = state_bytes if config.optimizer.use_precision_aware_optimizer else 0
    copied_bytes += weights_bytes if config.precision.fp8_param_gather else 0
    largest_bytes = largest_tensor_bytes(config, padded_vocab)
    if config.checkpoint.async_save:
        save_bytes = copied_bytes + weights_bytes + state_bytes
    else:
        save_bytes = copied_bytes + min(
            FILES_PER_RANK * (MAX_LAG_BYTES + largest_bytes), weights_bytes + state_bytes - copied_bytes
        )
    return CheckpointMemory(largest_tensor_bytes(saved or config, padded_vocab), save_bytes)


def host_memory_text(memories: Sequence[CheckpointMemory]) -> str:
    """The largest of the memory of some ranks, as text."""
    resume_bytes, save_bytes = max(each.resume_bytes for each in memories), max(each.save_bytes for each in memories)
    return f"{gib(resume_bytes)} GiB to resume, {gib(save_bytes)} GiB to save"


def largest_tensor_bytes(config: RunConfig, padded_vocab: int) -> int:
    """Bytes in FP32 of a rank's part of the embedding, or of the first matrix of an MLP if that is larger."""
    assert config.model.hidden_size is not None
    channels = dimensions.ffn_hidden_size(config.model) * (2 if is_gated(config.model) else 1)
    rows = max(padded_vocab, channels) // config.parallel.tensor_model_parallel_size
    return BYTES["fp32"] * rows * config.model.hidden_size
