"""Setup of a run from its configuration: process groups, data, model and optimizer, in that order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megafp8.checkpoint.progress import TrainingState
from megafp8.checkpoint.state_dict import chained_optimizers
from megafp8.config import derived, dimensions, iterations, multi_token
from megafp8.config.data_phases import first_samples
from megafp8.config.fused_adam import fused_adam_problem
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.lr_schedule import schedule_samples
from megafp8.config.model_plan import plan_model
from megafp8.config.schema import RunConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.task_files import load_tasks, truncations
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.device.platform import Platform, init_distributed, local_rank, set_num_threads
from megafp8.errors import ConfigError
from megafp8.fsdp.runtime import FsdpRuntime
from megafp8.mcore.config import build_ddp_config, build_optimizer_config, build_transformer_config
from megafp8.mcore.mixture_patches import gather_weights_once
from megafp8.mcore.process_groups import build_process_groups, seed_rank
from megafp8.metrics.timers import StepTimer
from megafp8.models.builder import build_model
from megafp8.models.grouped_moe import grouped_weights
from megafp8.models.layer_runtime import layer_runtime
from megafp8.models.loss import DocumentRoom
from megafp8.optimizer import fused_adam
from megafp8.optimizer.build import build
from megafp8.optimizer.data_parallel import DDP, runtime_of
from megafp8.optimizer.gradient_communication import WgradOverwrite
from megafp8.optimizer.schedules import build_schedule
from megafp8.optimizer.skip_update import SkipUpdateOptimizer
from megafp8.optimizer.weight_ema import WeightEma
from megafp8.quantization.fp8_parameter import quantize_assigned_weights
from megafp8.training.cuda_graph import build_step_graph, check_graph_optimizer, side_stream
from megafp8.training.run import Run
from megafp8.training.step_parts import (
    OverwrittenBuffers,
    StepPart,
    ZeroedBuffers,
    build_bad_step_detector,
    reduction_parts,
    state_parts,
)

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
    rank_position = build_process_groups(config.model, config.parallel, config.data.reset_attention_mask)
    captures_dropout = derived.uses_cuda_graph(config) and derived.has_dropout(config.model)
    seed_rank(config.training.seed, captures_dropout)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    num_ids = dimensions.vocabulary_size(config.model, config.data, tokenizer.vocab_size)
    vocab_size = dimensions.padded_vocab_size(config, num_ids)
    if vocab_size < num_ids:
        raise ConfigError(f"--padded-vocab-size {vocab_size} is less than the {num_ids} ids of the tokenizer")
    tasks = load_tasks(config.training.eval_tasks, tokenizer, config.data.seq_length or 0)
    if rank_position.rank == 0:
        print(*(f"warning: {line}\n" for line in truncations(tasks)), sep="", end="", flush=True)
    num_samples = iterations.dataset_samples(config, rank_position.world_size)
    datasets: tuple[Any, Any, Any] = (None, None, None)
    if has_data:
        report = print_at_intervals(0.0 if config.logging.verbose else REPORT_INTERVAL_S)
        datasets = build_datasets(
            config.data, tokenizer, num_samples, seed=config.training.seed, save=config.checkpoint.save,
            phase_starts=first_samples(config, rank_position.world_size),
            on_progress=report, is_first_of_machine=local_rank() == 0,
        )  # fmt: skip
        if tasks and datasets[1] is None:
            raise ConfigError(
                "--eval-tasks is for validations, and the run has no validation data: give --valid-data-path, or a "
                "--split with some"
            )
    transformer_config = build_transformer_config(config, implementation, platform.kind == "cuda")
    training_state = build_training_state(
        config, transformer_config, implementation, vocab_size, rank_position.world_size, platform
    )
    device = platform.device
    documents_room = DocumentRoom(device, derived.uses_cuda_graph(config))
    reductions = tuple(reduction_parts(config, training_state, device))
    detector = build_bad_step_detector(config, training_state, implementation, device)
    # After the detector, whose checks are then called on gradients with the injected faults.
    runtime_of(training_state.chunks[0]).inject_faults(training_state.chunks)
    parts = (
        build_gradient_buffers(config, training_state, implementation),
        detector,
        *state_parts(config, training_state, implementation, device, rank_position.reports_loss, documents_room),
        *reductions,
    )
    counters = [counter for part in parts for counter in part.byte_counters()]
    return Run(
        config=config,
        platform=platform,
        rank_position=rank_position,
        implementation=implementation,
        vocab_size=vocab_size,
        datasets=datasets,
        training_state=training_state,
        parts=parts,
        bad_steps=detector,
        graph=build_step_graph(config, training_state.chunks, device, counters),
        timer=StepTimer(),
        documents_room=documents_room,
        tasks=tasks,
    )


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
    if config.parallel.tp_comm_overlap:
        start_userbuffers(config, transformer_config)
    model = build_model(plan_model(config), transformer_config, implementation, vocab_size)
    layers = layer_runtime(implementation)
    data_parallel = FsdpRuntime() if config.parallel.shards_weights else DDP
    codes = partial(layers.codes_to_gather, config.model, config.precision)
    with side_stream() if derived.uses_cuda_graph(config) else nullcontext():
        chunks = data_parallel.wrap(transformer_config, build_ddp_config(config), config.parallel, model, codes)
    optimizer = build_optimizer(config, transformer_config, implementation, chunks)
    layers.set_optimizer_state(config.optimizer, chained_optimizers(optimizer))
    problem = fused_adam_problem(config) or fused_adam.device_problem(config.optimizer, platform.kind == "cuda")
    check_graph_optimizer(config, problem)
    if problem is None:
        num_replicas = config.parallel.num_replicas
        optimizer = fused_adam.FusedAdamOptimizer(optimizer, platform.device, num_replicas)
        transformer_config.finalize_model_grads_func = optimizer.finalize
    elif config.training.spike_policy != "off" and not isinstance(optimizer, SkipUpdateOptimizer):
        optimizer = SkipUpdateOptimizer(optimizer)
    settings, ema = config.optimizer, None
    if settings.ema_decay is not None:
        ema = WeightEma(optimizer, chunks, settings.ema_decay, settings.ema_interval, settings.ema_dtype)
    schedule = build_schedule(settings, schedule_samples(config, world_size), config.checkpoint, optimizer)
    return TrainingState(chunks, optimizer, schedule, weight_ema=ema)


def start_userbuffers(config: RunConfig, transformer_config: TransformerConfig) -> None:
    """Allocate the buffers of `--tp-comm-overlap`."""
    from megafp8.te import userbuffers  # needs Transformer Engine

    length, micro_batch_size = config.data.seq_length, config.training.micro_batch_size
    assert length is not None and micro_batch_size is not None
    modes = userbuffers.quantization_modes(config.precision, config.training)
    userbuffers.start(config.parallel, transformer_config, length * micro_batch_size, modes)


def build_optimizer(
    config: RunConfig, transformer_config: TransformerConfig, implementation: LayerBackend, chunks: list[Any]
) -> MegatronOptimizer:
    """Build the optimizer, and set the functions that megatron-core's pipeline schedules call."""
    core_config = build_optimizer_config(config, implementation)
    optimizer = build(config, core_config, chunks)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    gather_weights_once(parts)
    runtime_of(chunks[0]).finish_optimizers(parts)
    quantize_assigned_weights(chunks)  # after the master weights are copied
    transformer_config.grad_scale_func = optimizer.scale_loss
    transformer_config.finalize_model_grads_func = finalize_model_grads  # the fused Adam replaces it
    is_interleaved = len(chunks) > 1
    parallel = config.parallel
    transformer_config.no_sync_func = [chunk.no_sync for chunk in chunks] if is_interleaved else chunks[0].no_sync
    if is_interleaved and parallel.overlap_grad_reduce:
        transformer_config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if is_interleaved and parallel.overlap_param_gather:
        transformer_config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return optimizer


def build_gradient_buffers(config: RunConfig, training_state: TrainingState, implementation: LayerBackend) -> StepPart:
    """The gradient buffers: the first wgrad of a step overwrites them where the layers support it."""
    precision, stages = config.precision, config.parallel.pipeline_model_parallel_size
    is_fused = precision.gradient_overwrite and precision.gradient_accumulation_fusion
    if not is_fused or stages > 1 or not implementation.overwrites_gradients:
        return ZeroedBuffers(training_state)
    if multi_token.num_depths(config.model):
        # The output layer has several wgrads in a microbatch, of which only the first may overwrite.
        return ZeroedBuffers(training_state)
    fused_weights = layer_runtime(implementation).weights_with_fused_gradients
    chunks = training_state.chunks
    return OverwrittenBuffers(WgradOverwrite(chunks, lambda: [*fused_weights(chunks), *grouped_weights(chunks)]))
