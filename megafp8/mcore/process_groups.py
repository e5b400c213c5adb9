"""Process groups of a run, the rank's position in them, per-rank seeds, and data-parallel weight gathers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing
from megatron.core.utils import get_batch_on_this_cp_rank

from megafp8.config.mixture import expert_tensor_size, is_mixture
from megafp8.config.schema import ModelConfig, ParallelConfig
from megafp8.config.stages import virtual_pipeline_size
from megafp8.mcore.patches import is_installed
from megafp8.recipes.base import DelayedOptions


@dataclass(frozen=True)
class RankPosition:
    """Position of this rank on every parallel axis.

    Attributes:
        rank, world_size: of the global process group.
        data_rank, data_size: of the data-parallel group without context parallelism; its ranks have different samples.
        is_first_stage, is_last_stage: of the pipeline, regardless of virtual stages.
        needs_documents: attention stops at the borders of documents, which are in the batches.
    """

    rank: int
    world_size: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    data_size: int
    is_first_stage: bool
    is_last_stage: bool
    needs_documents: bool = False

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss is counted. Tensor-parallel ranks hold copies of it, so one of them counts."""
        return self.is_last_stage and self.tensor_rank == 0

    @property
    def needs_batches(self) -> bool:
        """Whether this rank reads batches. The first stage needs tokens, the last one labels, each one documents."""
        return self.is_first_stage or self.is_last_stage or self.needs_documents


def build_process_groups(model: ModelConfig, parallel: ParallelConfig, needs_documents: bool = False) -> RankPosition:
    """Create all process groups. torch.distributed must be initialized.

    Args:
        needs_documents: attention stops at the borders of documents.
    """
    has_experts = is_mixture(model)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size(model, parallel),
        pipeline_model_parallel_comm_backend=parallel.pipeline_model_parallel_comm_backend,
        context_parallel_size=parallel.context_parallel_size,
        # On a dense model these settings have no effect, and the ranks need not fit them.
        expert_model_parallel_size=parallel.expert_model_parallel_size if has_experts else 1,
        expert_tensor_parallel_size=expert_tensor_size(parallel) if has_experts else None,
        hierarchical_context_parallel_sizes=list(parallel.hierarchical_context_parallel_sizes) or None,
        order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        create_gloo_process_groups=True,
    )
    return RankPosition(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        is_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        needs_documents=needs_documents,
    )


def seed_rank(seed: int, captures_dropout: bool = False) -> None:
    """Seed the random states of dropout.

    Tensor-parallel ranks share a seed outside the tensor-parallel region. Pipeline stages and data- and
    context-parallel ranks have different seeds; in Megatron-LM data-parallel ranks share one. The CPU generator is
    seeded too: its state is saved in checkpoints, and would otherwise differ in every process.

    Args:
        captures_dropout: keep the states as generators, which a CUDA graph can advance. They draw the same numbers.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    rank_seed = seed + 100 * stage + 10_000 * replica
    torch.default_generator.manual_seed(rank_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        rank_seed, use_cudagraphable_rng=captures_dropout, force_reset_rng=True
    )


def split_over_context(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this context-parallel rank's part of a batch of (B, S) tensors: chunks r and 2n-1-r of 2n, for balance.

    Without a group megatron-core 0.19 splits the batch over all ranks.
    """
    options = {"is_hybrid_cp": False} if is_installed(">=0.19") else {}
    return get_batch_on_this_cp_rank(batch, cp_group=parallel_state.get_context_parallel_group(), **options)


def destroy_process_groups() -> None:
    """Destroy megatron-core's process groups and their communicators. The default group stays.

    megatron-core only drops its references, and NCCL communicators would keep their GPU memory.
    """
    for group in parallel_state._global_process_group_list or []:
        if group is not None:  # None is the default group
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def bucket_groups(chunk: Any) -> list[Any]:
    """The groups of gradient buckets of a chunk, those of experts that other ranks reduce last."""
    return [*chunk.bucket_groups, *expert_bucket_groups(chunk)]


def expert_bucket_groups(chunk: Any) -> list[Any]:
    """The groups of gradient buckets that are reduced over the expert data-parallel ranks."""
    return list(getattr(chunk, "expert_parallel_bucket_groups", ()))


def is_reduced_over_expert_ranks(parameter: Any) -> bool:
    """Whether a weight is held by other ranks than the data-parallel ones: that of an expert with expert ranks."""
    return not getattr(parameter, "allreduce", True)


def reset_param_gather(chunks: Iterable[Any]) -> None:
    """Make the next forward pass gather all weights, if gathers overlap with it.

    megatron-core sets a flag on the host when weights are gathered, and clears it when gradients are reduced. Replaying
    a CUDA graph does neither. A graph captured after a forced gather would contain no gathers, and an eager forward
    pass after a replay would find a stale flag.
    """
    for chunk in chunks:
        for group in bucket_groups(chunk):
            group.param_gather_dispatched = False


def gather_weights(chunks: Iterable[Any]) -> None:
    """All-gather the updated weights of the data-parallel ranks now. Collective.

    Transformer Engine keeps a transposed copy of each FP8 weight for dgrad. megatron-core 0.16 updates the copies after
    a gather, but not after a forced gather where gathers overlap with the forward pass. The next step would then
    compute dgrad with outdated weights. 0.19 updates them after every gather.
    """
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
        if is_installed("<0.19") and chunk.ddp_config.overlap_param_gather:
            fp8_weights = [weight for weight in chunk.parameters() if is_float8tensor(weight)]
            if fp8_weights:
                post_all_gather_processing(fp8_weights)


def amax_reduction_group(options: DelayedOptions) -> dist.ProcessGroup:
    """The ranks over which amaxes of delayed scaling are reduced."""
    return parallel_state.get_amax_reduction_group(
        with_context_parallel=True, tp_only_amax_red=not options.is_reduced_over_data
    )
