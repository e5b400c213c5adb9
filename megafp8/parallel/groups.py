"""The process groups of a run, and this rank's place in them. The only caller of `initialize_model_parallel`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megafp8.config.derived import virtual_pipeline_size
from megafp8.config.schema import RunConfig


@dataclass(frozen=True)
class Place:
    """Where this rank stands.

    Attributes:
        rank, world_size: among all ranks.
        data_rank, data_size: among the ranks that see other samples (context-parallel ranks see the same samples).
        is_first_stage, is_last_stage: of the pipeline, whatever the virtual stage.
    """

    rank: int
    world_size: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int
    data_size: int
    is_first_stage: bool
    is_last_stage: bool

    @property
    def reports_loss(self) -> bool:
        """One rank of each (data, context) pair counts the loss: tensor-parallel ranks hold copies of it."""
        return self.is_last_stage and self.tensor_rank == 0

    @property
    def needs_batches(self) -> bool:
        """The first stage reads tokens, the last one labels."""
        return self.is_first_stage or self.is_last_stage


def build_groups(config: RunConfig) -> Place:
    """Make all process groups of the layout and seed the per-rank random states. Needs torch.distributed to run."""
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size(config),
        context_parallel_size=parallel.context_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        create_gloo_process_groups=True,
    )
    seed_rank(config.training.seed)
    return Place(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        is_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )


def seed_rank(seed: int) -> None:
    """Seed dropout: equal on tensor-parallel ranks outside their own region, different wherever activations differ.

    Megatron-LM gives all data-parallel ranks one stream, so that their samples share masks. The host's own generator is
    seeded too: what it starts from is else another number in every process, and goes into checkpoints.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    rank_seed = seed + 100 * stage + 10_000 * replica
    torch.default_generator.manual_seed(rank_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(rank_seed, force_reset_rng=True)


def leave_groups() -> None:
    """Destroy the groups of the layout and their communicators; torch.distributed goes on.

    megatron-core only forgets them, and NCCL's keep their memory on the GPU.
    """
    for group in parallel_state._global_process_group_list or []:
        if group is not None:  # stands for all ranks
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
