"""Writing a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

from megafp8.checkpoint import folder as folders
from megafp8.checkpoint.state import (
    Progress,
    Trainee,
    content_metadata,
    layout,
    model_state,
    optimizer_state,
    random_state,
)
from megafp8.checkpoint.weights import put_rounded_masters
from megafp8.config.schema import RunConfig
from megafp8.config.serialize import to_json
from megafp8.data.sample_chain import SampleMark


def save_checkpoint(
    folder: Path, config: RunConfig, trainee: Trainee, progress: Progress, samples: Optional[SampleMark] = None
) -> Path:
    """Write model, optimizer, schedule, random state, progress and configuration; all ranks call it.

    Args:
        samples: which samples the run has read, where that is known.

    Returns:
        The finished checkpoint's folder, under its final name.
    """
    sync_parameters(config, trainee)
    if dist.get_rank() == 0:
        folders.make_unfinished(folder, progress.step)
    dist.barrier()
    state = model_state(trainee.chunks)
    model = dict(state)
    if not config.checkpoint.no_save_optim:
        state["optimizer"] = optimizer_state(trainee, model, is_loading=False)
        state["schedule"] = trainee.schedule.state_dict()
    if not config.checkpoint.no_save_rng:
        state["random_state"] = random_state()
    put_rounded_masters(model, trainee.optimizer)
    state |= {
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
        "samples": None if samples is None else samples.plain(),
        "config": to_json(config),
        "layout": list(layout()),
    }
    force_all_tensors_to_non_fp8(state)
    dist_checkpointing.save(
        state,
        str(folders.unfinished_path(folder, progress.step)),
        TorchDistSaveShardedStrategy("torch_dist", 1),
        content_metadata=content_metadata(),
    )
    dist.barrier()
    if dist.get_rank() == 0:
        folders.finish(folder, progress.step)
    dist.barrier()
    return folders.checkpoint_path(folder, progress.step)


def sync_parameters(config: RunConfig, trainee: Trainee) -> None:
    """With overlapped gathers, weights right after an update are still on their way: wait for them."""
    if config.parallel.overlap_param_gather:
        for chunk in trainee.chunks:
            chunk.start_param_sync(force_sync=True)
