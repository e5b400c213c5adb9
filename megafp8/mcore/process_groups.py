"""The process groups of a run, and this rank's place in them. The only caller of `initialize_model_parallel`.

Gathering updated weights at once, where their gathers otherwise overlap with the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing

from megafp8.config.derived import virtual_pipeline_size
from megafp8.config.schema import RunConfig


@dataclass(frozen=True)
class RankPosition:
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


def build_groups(config: RunConfig) -> RankPosition:
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
    return RankPosition(
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


def gather_in_next_pass(chunks: Iterable[Any]) -> None:
    """Let the next forward pass gather all weights, where that overlaps, whoever has gathered them before.

    megatron-core notes on the host that weights are gathered, and takes it back when gradients are reduced. A replayed
    graph does neither: captured after a forced gather it would have none, and a pass after it would find an old note.
    """
    for chunk in chunks:
        for group in chunk.bucket_groups:
            group.param_gather_dispatched = False


def gather_weights(chunks: Iterable[Any]) -> None:
    """Bring the parts of all weights together that the data-parallel ranks have updated; all ranks call it.

    A weight that Transformer Engine keeps in FP8 has a second copy for the backward pass, transposed. megatron-core
    0.16 makes it anew after a gather, but not after one that is forced where gathers are overlapped: the next step
    would take gradients by the weights of an earlier one.
    """
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
        in_fp8 = [weight for weight in chunk.parameters() if is_float8tensor(weight)]
        if in_fp8 and chunk.ddp_config.overlap_param_gather:
            post_all_gather_processing(in_fp8)
