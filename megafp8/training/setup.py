"""Setup of a run from its configuration: process groups, data, model and optimizer, in that order."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Optional

from megatron.core.transformer.transformer_config import TransformerConfig

from megafp8.checkpoint.progress import TrainingState
from megafp8.checkpoint.state_dict import chained_optimizers
from megafp8.config import derived, dimensions, iterations, multi_token
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.muon import is_layer_wise
from megafp8.config.schema import RunConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.device.platform import Platform, init_distributed, local_rank, set_num_threads
from megafp8.errors import ConfigError
from megafp8.mcore.config import build_transformer_config
from megafp8.mcore.process_groups import build_process_groups
from megafp8.metrics.timers import StepTimer
from megafp8.models.builder import add_gradient_buffers, build_model, build_optimizer
from megafp8.models.grouped_moe import grouped_weights
from megafp8.models.layer_runtime import layer_runtime
from megafp8.models.loss import build_forward_step
from megafp8.models.router import ExpertBiasSnapshot
from megafp8.optimizer import fused_adam
from megafp8.optimizer.fp8_reduction import build_fp8_reduction
from megafp8.optimizer.gradient_communication import (
    WgradOverwrite,
    build_gradient_traffic,
    build_traffic,
    inject_gradient_faults,
)
from megafp8.optimizer.schedules import build_schedule
from megafp8.optimizer.skip_update import SkipUpdateOptimizer
from megafp8.training.bad_steps import build_gradient_monitor, build_spike_detector
from megafp8.training.cuda_graph import build_step_graph, check_graph_optimizer, side_stream
from megafp8.training.nonfinite_operands import build_operand_monitor
from megafp8.training.precision import DelayedScalingSnapshot
from megafp8.training.run import Run

REPORT_INTERVAL_S = 60.0
"""Between messages about the preparation of the data, without `--verbose`."""


def build_training_run(
    config: RunConfig, platform: Platform, implementation: LayerBackend, has_data: bool = True
) -> Run:
    """Build a run; all ranks call it.

    Data is opened before the model is built, so that an error in it is reported early.

    Args:
        has_data: False builds no datasets.
    """
    set_num_threads(config.training.num_threads, derived.useful_threads(config))
    init_distributed(platform, config.parallel)
    rank_position = build_process_groups(config)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    num_ids = dimensions.vocabulary_size(config, tokenizer.vocab_size)
    vocab_size = dimensions.padded_vocab_size(config, num_ids)
    if vocab_size < num_ids:
        raise ConfigError(f"--padded-vocab-size {vocab_size} is less than the {num_ids} ids of the tokenizer")
    num_samples = iterations.dataset_samples(config, rank_position.world_size)
    datasets: tuple[Any, Any, Any] = (None, None, None)
    if has_data:
        report = print_at_intervals(0.0 if config.logging.verbose else REPORT_INTERVAL_S)
        datasets = build_datasets(config, tokenizer, num_samples, report, is_first_of_machine=local_rank() == 0)
    transformer_config = build_transformer_config(config, implementation, platform.kind == "cuda")
    training_state = build_training_state(
        config, transformer_config, implementation, vocab_size, rank_position.world_size, platform
    )
    fp8_reduction = build_fp8_reduction(config, training_state.chunks, platform.device)
    if fp8_reduction is not None:
        training_state.gradient_residuals.extend(fp8_reduction.residuals)
    parameter_traffic = (
        training_state.optimizer if is_layer_wise(config) else build_traffic(config, training_state.chunks)
    )
    gradient_traffic = build_gradient_traffic(config, training_state.chunks)
    gradient_monitor = build_gradient_monitor(
        config, training_state, platform.device
    )  # its checks come before the reduction
    # After the monitor, which is then called on gradients with the injected faults.
    inject_gradient_faults(training_state.chunks)
    is_delayed = derived.is_stateful(config.precision)
    run = Run(
        config=config,
        platform=platform,
        rank_position=rank_position,
        implementation=implementation,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        datasets=datasets,
        transformer_config=transformer_config,
        training_state=training_state,
        forward_step=build_forward_step(platform.device, config.parallel.context_parallel_size),
        wgrad_overwrite=build_wgrad_overwrite(config, training_state, implementation),
        spike_detector=build_spike_detector(config),
        delayed_snapshot=DelayedScalingSnapshot(training_state.chunks, implementation) if is_delayed else None,
        bias_snapshot=ExpertBiasSnapshot(training_state.chunks) if config.model.moe_router_enable_expert_bias else None,
        gradient_monitor=gradient_monitor,
        operand_monitor=build_operand_monitor(config, training_state.chunks, implementation, platform.device),
        parameter_traffic=parameter_traffic,
        gradient_traffic=gradient_traffic,
        fp8_reduction=fp8_reduction,
        graph=None,
        timer=StepTimer(),
    )
    graph = build_step_graph(config, training_state.chunks, platform.device, run.byte_counters)
    return dataclasses.replace(run, graph=graph)


def print_at_intervals(interval_s: float) -> Callable[[str], None]:
    """A function that prints its first message, and later ones at least `interval_s` after the last printed one."""
    last_s = -math.inf

    def report(text: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= interval_s:
            last_s = time.monotonic()
            print(text, flush=True)

    return report


def build_training_state(
    config: RunConfig,
    transformer_config: TransformerConfig,
    implementation: LayerBackend,
    vocab_size: int,
    world_size: int,
    platform: Platform,
) -> TrainingState:
    """Model, optimizer and schedule at step 0.

    Raises:
        ConfigError: `--cuda-graph-impl` with an optimizer that waits for the device.
    """
    model = build_model(config, transformer_config, implementation, vocab_size)
    with side_stream() if derived.uses_cuda_graph(config) else nullcontext():
        chunks = add_gradient_buffers(config, transformer_config, implementation, model)
    optimizer = build_optimizer(config, transformer_config, implementation, chunks)
    layer_runtime(implementation).set_optimizer_state(config, chained_optimizers(optimizer))
    problem = fused_adam.problem(config, platform.kind == "cuda")
    check_graph_optimizer(config, problem)
    if problem is None:
        num_copies = config.parallel.num_distributed_optimizer_instances if config.parallel.use_torch_fsdp2 else 1
        optimizer = fused_adam.FusedAdamOptimizer(optimizer, platform.device, num_copies)
        transformer_config.finalize_model_grads_func = optimizer.finalize
    elif config.training.spike_policy != "off" and not isinstance(optimizer, SkipUpdateOptimizer):
        optimizer = SkipUpdateOptimizer(optimizer)
    return TrainingState(chunks, optimizer, build_schedule(config, optimizer, world_size))


def build_wgrad_overwrite(
    config: RunConfig, training_state: TrainingState, implementation: LayerBackend
) -> Optional[WgradOverwrite]:
    """Overwriting of the gradient buffers by the first wgrad of a step; None where the layers do not support it."""
    precision, stages = config.precision, config.parallel.pipeline_model_parallel_size
    is_fused = precision.gradient_overwrite and precision.gradient_accumulation_fusion
    if not is_fused or stages > 1 or not implementation.overwrites_gradients:
        return None
    if multi_token.num_depths(config.model):
        return None  # the output layer has several wgrads in a microbatch, of which only the first may overwrite
    fused_weights = layer_runtime(implementation).weights_with_fused_gradients
    return WgradOverwrite(
        training_state.chunks, lambda: [*fused_weights(training_state.chunks), *grouped_weights(training_state.chunks)]
    )
