"""The run of this process: its configuration and everything that was built from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megafp8.checkpoint.directory import NON_PERSISTENT
from megafp8.checkpoint.progress import HighPrecisionFallback, Progress, TrainingState
from megafp8.config import derived, iterations
from megafp8.config.batch_schedule import BatchSchedule
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.lr_schedule import schedule_samples
from megafp8.config.schema import RunConfig
from megafp8.data.sample_hash import SampleHashChain
from megafp8.data.task_files import Task
from megafp8.device.platform import Platform
from megafp8.mcore.process_groups import RankPosition
from megafp8.metrics.timers import StepTimer
from megafp8.models.graph_room import GraphRoom
from megafp8.models.loss import build_forward_step
from megafp8.nonfinite.policy import fall_back
from megafp8.resilience.watchdog import Watchdog
from megafp8.training.cuda_graph import EagerPasses
from megafp8.training.precision import PrecisionPhases
from megafp8.training.step_parts import BadStepDetector, StepPart


@dataclass(frozen=True)
class Run:
    """Everything that a training step needs. Training changes the contents of `training_state`, but replaces no
    attribute.

    Attributes:
        rank_position: position of this rank in the parallel layout.
        implementation: the layers in use.
        vocab_size: rows of the embedding, padded.
        datasets: train, valid, test; None where there is none.
        training_state: model chunks, optimizer and schedule.
        parts: what features add to a step, in order; `bad_steps` is one of them.
        bad_steps: finds non-finite numbers and spikes.
        graph: runs the passes, from CUDA graphs or kernel by kernel.
        timer: measures steps. Every step waits for the loss, so the device is at most one update behind the host.
        documents_room: decides on the number of documents in the shapes of a microbatch.
        tasks: questions of `--eval-tasks`.
        watchdog: watches the steps and handles signals; one that was not started does nothing.
    """

    config: RunConfig
    platform: Platform
    rank_position: RankPosition
    implementation: LayerBackend
    vocab_size: int
    datasets: tuple[Any, Any, Any]
    training_state: TrainingState
    parts: Sequence[StepPart]
    bad_steps: BadStepDetector
    graph: EagerPasses
    timer: StepTimer
    documents_room: GraphRoom
    tasks: Sequence[Task] = ()
    watchdog: Watchdog = field(default_factory=Watchdog)

    @property
    def transformer_config(self) -> TransformerConfig:
        """The configuration that megatron-core's layers and schedules share."""
        return get_model_config(self.training_state.chunks[0])

    @cached_property
    def forward_step(self) -> Callable[..., Any]:
        """megatron-core's callback that runs one microbatch."""
        context_size = self.config.parallel.context_parallel_size
        return build_forward_step(self.platform.device, context_size, self.documents_room)

    @property
    def seq_length(self) -> int:
        """Tokens in one sequence."""
        assert self.config.data.seq_length is not None
        return self.config.data.seq_length

    @property
    def length_multiple(self) -> int:
        """Sequences of other lengths must be a multiple of it, for GEMMs and for their split over ranks."""
        parallel = self.config.parallel
        if parallel.tp_comm_overlap:  # its buffers have the shape of a microbatch
            return self.seq_length
        multiple = derived.gemm_alignment(self.config.precision) if self.implementation.has_native_gemms else 1
        if parallel.sequence_parallel:
            multiple *= parallel.tensor_model_parallel_size
        if parallel.context_parallel_size > 1:
            multiple *= 2 * parallel.context_parallel_size
        return min(multiple, self.seq_length)

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one microbatch."""
        assert self.config.training.micro_batch_size is not None
        return self.config.training.micro_batch_size

    @cached_property
    def batch_schedule(self) -> BatchSchedule:
        """The global batch size of each step."""
        return iterations.batch_schedule(self.config, self.rank_position.world_size)

    @cached_property
    def warmup_steps(self) -> float:
        """Steps of the learning rate's warm-up, with a fraction if it ends within a batch."""
        return self.batch_schedule.steps_until(schedule_samples(self.config, self.rank_position.world_size).warmup)

    @property
    def global_batch_size(self) -> int:
        """Sequences in one step; under a batch schedule in a step of its last phase."""
        return self.batch_schedule.last_batch_size

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank in a step of `global_batch_size`."""
        return iterations.num_microbatches(self.config, self.rank_position.world_size, self.global_batch_size)

    def batch_size_at(self, consumed_samples: int) -> int:
        """Sequences in the step after so many samples."""
        return self.batch_schedule.batch_size_at(consumed_samples)

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Microbatches of this rank in the step after so many samples."""
        return iterations.num_microbatches(
            self.config, self.rank_position.world_size, self.batch_size_at(consumed_samples)
        )

    @property
    def eval_batch_size(self) -> int:
        """Sequences in one global batch of an evaluation."""
        return iterations.eval_batch_size(self.config, self.rank_position.world_size)

    def last_step(self, progress: Progress) -> int:
        """The last step of the run.

        With --train-samples the steps after `progress` are counted, since those before may have had other batch sizes.
        """
        training = self.config.training
        if training.train_iters is not None:
            return training.train_iters
        assert training.train_samples is not None
        return progress.step + self.batch_schedule.num_steps(training.train_samples, progress.consumed_samples)

    def end_sample(self, progress: Progress) -> int:
        """The consumed samples after the last step."""
        num_steps = max(0, self.last_step(progress) - progress.step)
        return self.batch_schedule.advance(num_steps, progress.consumed_samples)

    @cached_property
    def precision_phases(self) -> PrecisionPhases:
        """Changes the precision under `--fp8-schedule`."""
        return PrecisionPhases(self.config, self.transformer_config, self.training_state.chunks, self.implementation)

    def set_precision(self, step: int) -> None:
        """Compute in the precision of a step from now on. Steps count from 1; all ranks call it."""
        if self.precision_phases.enter(max(1, step)):
            self.graph.reset()  # it has the kernels of before

    def change_linears(self, linears: Sequence[HighPrecisionFallback]) -> None:
        """Compute linears in high precision, or with a scale per channel, from now on; all ranks call it."""
        if not linears:
            return
        fall_back(self.training_state.chunks, linears, self.implementation)
        for part in self.parts:
            part.linears_changed()
        self.graph.reset()  # it has the kernels of before

    @cached_property
    def sample_chain(self) -> Optional[SampleHashChain]:
        """The hash of the training samples, the same on all ranks; None without training data."""
        dataset, config = self.datasets[0], self.config
        if dataset is None:
            return None
        return SampleHashChain(dataset, self.seq_length, config.training.seed, config.data.packing)


def run_folder(config: RunConfig) -> Optional[Path]:
    """The folder of the run's records and checkpoints (`--save`), if it has one."""
    return Path(config.checkpoint.save) if config.checkpoint.save else None


def non_persistent_folder(config: RunConfig) -> Optional[Path]:
    """The folder of the run's non-persistent checkpoints; None if it writes none."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or checkpoint.non_persistent_save_interval is None:
        return None
    return Path(checkpoint.non_persistent_global_ckpt_dir or Path(checkpoint.save) / NON_PERSISTENT)


def checkpoint_folders(config: RunConfig) -> list[Path]:
    """The folders to which the run writes checkpoints: persistent, then non-persistent ones."""
    return [folder for folder in (run_folder(config), non_persistent_folder(config)) if folder is not None]
