"""From a configuration to a run that is ready to train: groups, data, model, optimizer, in that order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megafp8.checkpoint.folder import NON_PERSISTENT
from megafp8.checkpoint.state import Trainee
from megafp8.config import derived, precision_map
from megafp8.config.schema import RunConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.sample_chain import SampleChain
from megafp8.data.tokenizer import Tokenizer, build_tokenizer
from megafp8.device.platform import Platform, join_ranks, use_threads
from megafp8.errors import ConfigError
from megafp8.mcore_config import build_transformer_config
from megafp8.model.builder import add_gradient_buffers, build_model, build_optimizer
from megafp8.model.loss import build_forward_step
from megafp8.optim import one_pass
from megafp8.optim.finite import GradientWatch
from megafp8.optim.first_gradient import FirstGradient
from megafp8.optim.judged import JudgedOptimizer
from megafp8.optim.reduction import expose_to_faults
from megafp8.optim.schedule import build_schedule
from megafp8.optim.spikes import SpikeDetector
from megafp8.optim.traffic import ParameterTraffic, build_traffic
from megafp8.parallel.groups import Place, build_groups
from megafp8.telemetry.timers import StepTimer
from megafp8.training.cuda_graph import StepGraph, off_default_stream
from megafp8.training.delayed_memory import DelayedMemory
from megafp8.training.guard import Guard


@dataclass(frozen=True)
class Run:
    """Everything that a training step needs. What changes lies inside `trainee`; nothing here is replaced.

    Attributes:
        implementation: the layers in use: `transformer_engine`, `emulated` or `local`.
        vocab_size: rows of the embedding, padded.
        datasets: train, valid, test; None where there is none.
        forward_step: megatron-core's callback that runs one microbatch.
        first_gradient: begins the gradients of a step; None where their buffers are zeroed.
        spikes: looks for loss spikes; None where nobody asked for it.
        delayed: what delayed scaling remembers, to be taken back with a step and after a validation; None without it.
        watch: notes gradients that are not finite; None where that check is off, or the optimizer's norm tells it.
        traffic: counts the bytes of parameter gathers; None where every rank updates all weights, or a graph gathers.
        graph: launches the passes of a step at once; None where nobody asked for it.
        timer: measures steps; every step waits for the loss, so the device is never ahead by more than one update.
        guard: takes signals and watches the time; one that was not started does neither.
    """

    config: RunConfig
    platform: Platform
    place: Place
    implementation: str
    tokenizer: Tokenizer
    vocab_size: int
    datasets: tuple[Any, Any, Any]
    transformer_config: TransformerConfig
    trainee: Trainee
    forward_step: Callable[..., Any]
    first_gradient: Optional[FirstGradient]
    spikes: Optional[SpikeDetector]
    delayed: Optional[DelayedMemory]
    watch: Optional[GradientWatch]
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

    @cached_property
    def sample_chain(self) -> Optional[SampleChain]:
        """The hash of the training samples, the same on all ranks; None without training data."""
        dataset, config = self.datasets[0], self.config
        if dataset is None:
            return None
        assert config.data.seq_length is not None
        return SampleChain(dataset, config.data.seq_length, config.training.seed)


def assemble(config: RunConfig, platform: Platform, implementation: str, has_data: bool = True) -> Run:
    """Build a run; all ranks call it.

    The data comes before the model: wrong data should not have to wait for a large model.

    Args:
        has_data: False leaves the datasets out.
    """
    use_threads(config.training.num_threads)
    join_ranks(platform, config.parallel.distributed_timeout_minutes)
    place = build_groups(config)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    vocab_size = derived.padded_vocab_size(config, derived.vocabulary_size(config, tokenizer.vocab_size))
    num_samples = derived.dataset_samples(config, place.world_size)
    datasets = build_datasets(config, tokenizer, num_samples, on_progress=tell) if has_data else (None, None, None)
    transformer_config = build_transformer_config(config, implementation, platform.kind == "cuda")
    trainee = build_trainee(config, transformer_config, implementation, vocab_size, place.world_size, platform)
    watch = build_watch(config, trainee, platform.device)
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
        first_gradient=build_first_gradient(config, trainee, implementation),
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
        ConfigError: steps are to be captured, and the optimizer waits for the device.
    """
    model = build_model(config, transformer_config, implementation, vocab_size)
    with off_default_stream() if derived.has_step_graph(config) else nullcontext():
        chunks = add_gradient_buffers(config, transformer_config, model)
    optimizer = build_optimizer(config, transformer_config, chunks)
    obstacle = one_pass.obstacle(config, platform.kind == "cuda")
    if obstacle is not None and derived.has_step_graph(config):
        raise ConfigError(
            f"--cuda-graph-impl {config.training.cuda_graph_impl}: needs the one-pass optimizer, which does not go "
            f"with {obstacle} (megatron-core's waits for the number of tokens, which a graph cannot)"
        )
    if obstacle is None:
        optimizer = one_pass.OnePassOptimizer(optimizer, platform.device)
        transformer_config.finalize_model_grads_func = optimizer.finalize
    elif config.training.spike_policy != "off":
        optimizer = JudgedOptimizer(optimizer)
    return Trainee(chunks, optimizer, build_schedule(config, optimizer, world_size))


def tell(text: str) -> None:
    """Show what a person is waiting for before the first step; the caller is rank 0."""
    print(text, flush=True)


def build_first_gradient(config: RunConfig, trainee: Trainee, implementation: str) -> Optional[FirstGradient]:
    """What lets the first gradients of a step overwrite the buffers, where the layers can."""
    precision, stages = config.precision, config.parallel.pipeline_model_parallel_size
    is_fused = precision.gradient_overwrite and precision.gradient_accumulation_fusion
    if not is_fused or stages > 1 or implementation != "transformer_engine":
        return None
    from megafp8.model.te_layers import weights_with_fused_gradients  # needs Transformer Engine

    return FirstGradient(trainee.chunks, weights_with_fused_gradients(trainee.chunks))


def build_graph(config: RunConfig, trainee: Trainee, device: torch.device) -> Optional[StepGraph]:
    """What captures the steps' passes; None where they are launched kernel by kernel."""
    if not derived.has_step_graph(config):
        return None
    return StepGraph(trainee.chunks, config.training.cuda_graph_warmup_steps, device)


def build_watch(config: RunConfig, trainee: Trainee, device: torch.device) -> Optional[GradientWatch]:
    """The watch over each rank's own gradients; None where the norm, which is taken anyway, tells as much.

    Of data-parallel ranks it does if each has the whole model: other ranks bring no numbers into the gradients then.
    """
    data_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    tells_whose = data_size in (1, dist.get_world_size())
    is_known = isinstance(trainee.optimizer, one_pass.OnePassOptimizer) and tells_whose
    if is_known or not config.training.check_for_nan_in_loss_and_grad:
        return None
    return GradientWatch(trainee.chunks, device)


def build_spikes(config: RunConfig) -> Optional[SpikeDetector]:
    """What tells loss spikes from other steps; None where nobody asked for it."""
    training = config.training
    if training.spike_policy == "off":
        return None
    return SpikeDetector(training.spike_window, training.spike_sigma, training.spike_min_steps)


def build_delayed_memory(config: RunConfig, trainee: Trainee, implementation: str) -> Optional[DelayedMemory]:
    """What takes amax histories and scales back; None without delayed scaling."""
    is_delayed = "delayed" in precision_map.used_recipes(config.precision)
    return DelayedMemory(trainee.chunks, implementation) if is_delayed else None


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
