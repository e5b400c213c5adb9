"""Builds a run from its settings: process groups, data, model and optimizer, in that order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megafp8.checkpoint.progress import Trainee
from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.device.platform import Platform, join_ranks, use_threads
from megafp8.errors import ConfigError
from megafp8.mcore.config import build_transformer_config
from megafp8.mcore.process_groups import build_groups
from megafp8.metrics.timers import StepTimer
from megafp8.models.builder import add_gradient_buffers, build_model, build_optimizer
from megafp8.models.loss import build_forward_step
from megafp8.optimizer import fused_adam
from megafp8.optimizer.gradient_checks import NonFiniteGradientMonitor
from megafp8.optimizer.gradient_communication import WgradOverwrite, build_traffic, expose_to_faults
from megafp8.optimizer.schedules import build_schedule
from megafp8.optimizer.skip_update import SkipUpdateOptimizer, SpikeDetector
from megafp8.training.cuda_graph import StepGraph, off_default_stream
from megafp8.training.precision import DelayedMemory
from megafp8.training.run import Run


def assemble(config: RunConfig, platform: Platform, implementation: str, has_data: bool = True) -> Run:
    """Build a run; all ranks call it.

    The data comes before the model: wrong data should not have to wait for a large model.

    Args:
        has_data: False leaves the datasets out.
    """
    use_threads(config.training.num_threads, derived.useful_threads(config))
    join_ranks(platform, config.parallel)
    place = build_groups(config)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    vocab_size = derived.padded_vocab_size(config, derived.vocabulary_size(config, tokenizer.vocab_size))
    num_samples = derived.dataset_samples(config, place.world_size)
    datasets: tuple[Any, Any, Any] = (None, None, None)
    if has_data:
        datasets = build_datasets(config, tokenizer, num_samples, on_progress=print_progress)
    transformer_config = build_transformer_config(config, implementation, platform.kind == "cuda")
    trainee = build_trainee(config, transformer_config, implementation, vocab_size, place.world_size, platform)
    watch = build_gradient_monitor(config, trainee, platform.device)
    expose_to_faults(trainee.chunks)  # after the watch was set up, so that it sees what they do
    return Run(
        config=config,
        platform=platform,
        place=place,
        implementation=implementation,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        datasets=datasets,
        transformer_config=transformer_config,
        trainee=trainee,
        forward_step=build_forward_step(platform.device, config.parallel.context_parallel_size),
        first_gradient=build_wgrad_overwrite(config, trainee, implementation),
        spikes=build_spikes(config),
        delayed=build_delayed_memory(config, trainee, implementation),
        watch=watch,
        traffic=build_traffic(config, trainee.chunks),
        graph=build_graph(config, trainee, platform.device),
        timer=StepTimer(),
    )


def build_trainee(
    config: RunConfig,
    transformer_config: TransformerConfig,
    implementation: str,
    vocab_size: int,
    world_size: int,
    platform: Platform,
) -> Trainee:
    """Model, optimizer and schedule at step 0.

    Raises:
        ConfigError: a CUDA graph is asked for, and the optimizer waits for the device.
    """
    model = build_model(config, transformer_config, implementation, vocab_size)
    with off_default_stream() if derived.has_step_graph(config) else nullcontext():
        chunks = add_gradient_buffers(config, transformer_config, model)
    optimizer = build_optimizer(config, transformer_config, chunks)
    obstacle = fused_adam.obstacle(config, platform.kind == "cuda")
    if obstacle is not None and derived.has_step_graph(config):
        raise ConfigError(
            f"--cuda-graph-impl {config.training.cuda_graph_impl}: needs the one-pass optimizer, which does not go "
            f"with {obstacle} (megatron-core's waits for the number of tokens, which a graph cannot)"
        )
    if obstacle is None:
        optimizer = fused_adam.FusedAdamOptimizer(optimizer, platform.device)
        transformer_config.finalize_model_grads_func = optimizer.finalize
    elif config.training.spike_policy != "off":
        optimizer = SkipUpdateOptimizer(optimizer)
    return Trainee(chunks, optimizer, build_schedule(config, optimizer, world_size))


def print_progress(text: str) -> None:
    """Show what a person is waiting for before the first step; the caller is rank 0."""
    print(text, flush=True)


def build_wgrad_overwrite(config: RunConfig, trainee: Trainee, implementation: str) -> Optional[WgradOverwrite]:
    """What lets the first gradients of a step overwrite their buffers; None where the layers cannot."""
    precision, stages = config.precision, config.parallel.pipeline_model_parallel_size
    is_fused = precision.gradient_overwrite and precision.gradient_accumulation_fusion
    if not is_fused or stages > 1 or implementation != "transformer_engine":
        return None
    from megafp8.te.layers import weights_with_fused_gradients  # needs Transformer Engine

    return WgradOverwrite(trainee.chunks, weights_with_fused_gradients(trainee.chunks))


def build_graph(config: RunConfig, trainee: Trainee, device: torch.device) -> Optional[StepGraph]:
    """The CUDA graph of forward and backward; None where kernels are launched one by one."""
    if not derived.has_step_graph(config):
        return None
    return StepGraph(trainee.chunks, config.training.cuda_graph_warmup_steps, device)


def build_gradient_monitor(
    config: RunConfig, trainee: Trainee, device: torch.device
) -> Optional[NonFiniteGradientMonitor]:
    """The watch over each rank's own gradients; None where the norm, which is taken anyway, shows as much.

    Of data-parallel ranks it does if each has the complete model: other ranks bring no numbers into the gradients then.
    """
    data_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    shows_whose = data_size in (1, dist.get_world_size())
    is_known = isinstance(trainee.optimizer, fused_adam.FusedAdamOptimizer) and shows_whose
    if is_known or not config.training.check_for_nan_in_loss_and_grad:
        return None
    return NonFiniteGradientMonitor(trainee.chunks, device)


def build_spikes(config: RunConfig) -> Optional[SpikeDetector]:
    """The detector of loss spikes; None without `--spike-policy`."""
    training = config.training
    if training.spike_policy == "off":
        return None
    return SpikeDetector(training.spike_window, training.spike_sigma, training.spike_min_steps)


def build_delayed_memory(config: RunConfig, trainee: Trainee, implementation: str) -> Optional[DelayedMemory]:
    """What saves and restores amax histories and scales; None without delayed scaling."""
    is_delayed = derived.is_stateful(config.precision)
    return DelayedMemory(trainee.chunks, implementation) if is_delayed else None
