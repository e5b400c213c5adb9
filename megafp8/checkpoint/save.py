"""Writing a checkpoint: whole and hashed, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException

from megafp8 import faults
from megafp8.checkpoint import folder as folders
from megafp8.checkpoint.hashing_writer import HashingWriter
from megafp8.checkpoint.manifest import FileEntry, Manifest, relative_files
from megafp8.checkpoint.safe_load import COMMON
from megafp8.checkpoint.state import (
    Progress,
    Trainee,
    content_metadata,
    layout,
    model_state,
    optimizer_state,
    random_state,
)
from megafp8.checkpoint.together import on_rank_0, reason, together
from megafp8.checkpoint.weights import put_rounded_masters
from megafp8.config.schema import RunConfig
from megafp8.config.serialize import to_json
from megafp8.data.atomic import file_sha256
from megafp8.data.sample_chain import SampleMark
from megafp8.errors import CheckpointError
from megafp8.telemetry.records import utc_now

BACKEND = CheckpointingConfig("torch_dist", 1)


def save_checkpoint(
    folder: Path, config: RunConfig, trainee: Trainee, progress: Progress, samples: Optional[SampleMark] = None
) -> Path:
    """Write model, optimizer, schedule, random state, progress and configuration; all ranks call it.

    Args:
        samples: which samples the run has read, where that is known.

    Returns:
        The finished checkpoint's folder, under its final name.

    Raises:
        CheckpointError: on all ranks: it could not be written. Checkpoints that were there are still there, and the
            trainee is as before.
    """
    faults.point("save.begin")
    state = whole_state(config, trainee, progress, samples)
    faults.point("save.state_gathered")
    with failure_explained(folder, progress.step):
        sharded, common = save_preprocess(state)
        num_bytes = sum(together(lambda: bytes_to_write(sharded)))
        on_rank_0(lambda: folders.make_unfinished(folder, progress.step, num_bytes))
        place = folders.unfinished_path(folder, progress.step)
        on_rank_0(lambda: torch.save(common, place / COMMON))
        written = together(lambda files=write_shards(sharded, place): files)  # type: ignore[misc]
        return on_rank_0(lambda: finish(folder, config, progress, written))


def whole_state(
    config: RunConfig, trainee: Trainee, progress: Progress, samples: Optional[SampleMark]
) -> dict[str, Any]:
    """Everything that a checkpoint holds, as megatron-core's sharded state; all ranks call it."""
    sync_parameters(config, trainee)
    state = model_state(trainee.chunks)
    model = dict(state)
    if not config.checkpoint.no_save_optim:
        state["optimizer"] = optimizer_state(trainee, model, is_loading=False)
        state["schedule"] = trainee.schedule.state_dict()
    if not config.checkpoint.no_save_rng:
        state["random_state"] = random_state()
    put_rounded_masters(model, trainee.optimizer)
    return state | {
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
        "samples": None if samples is None else samples.plain(),
        "config": to_json(config),
        "layout": list(layout()),
        "content_metadata": content_metadata(),
    }


def write_shards(sharded: dict[str, Any], place: Path) -> dict[str, FileEntry]:
    """Write this rank's part of the tensors and objects; all ranks call it. The files that this rank wrote."""
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    writer = HashingWriter(place)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    checkpoint.save(mcore_to_pyt_state_dict(flat, False), storage_writer=writer, planner=planner)
    faults.point("save.shards_written")
    return writer.written


def finish(folder: Path, config: RunConfig, progress: Progress, written: list[dict[str, FileEntry]]) -> Path:
    """Rank 0's last part: its own small files, the manifest, the name, and older checkpoints."""
    place = folders.unfinished_path(folder, progress.step)
    save_config(BACKEND, str(place))
    files = {name: entry for of_rank in written for name, entry in of_rank.items()}
    files |= {name: sync_and_hash(place / name) for name in relative_files(place) if name not in files}
    manifest = Manifest(
        step=progress.step, consumed_samples=progress.consumed_samples, layout=layout(), saved_at=utc_now(), files=files
    )
    path = folders.finish(folder, progress.step, manifest)
    if config.checkpoint.ckpt_keep is not None:
        folders.prune(folder, config.checkpoint.ckpt_keep, never=progress.step)
    return path


def sync_and_hash(path: Path) -> FileEntry:
    """Wait until a small file is on the disk, and describe it."""
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())
    return FileEntry(path.stat().st_size, file_sha256(path))


def bytes_to_write(sharded: dict[str, Any]) -> int:
    """Bytes of the tensors that this rank writes."""
    leaves = (leaf for leaf in nested_values(sharded) if isinstance(leaf, ShardedTensor))
    return sum(leaf.data.numel() * leaf.data.element_size() for leaf in leaves if is_main_replica(leaf.replica_id))


@contextmanager
def failure_explained(folder: Path, step: int) -> Iterator[None]:
    """Within, what goes wrong becomes a CheckpointError, and what was written so far makes room again."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        if dist.get_rank() == 0:
            shutil.rmtree(folders.unfinished_path(folder, step), ignore_errors=True)
        raise CheckpointError(f"step {step} cannot be saved to {folder}: {reason(error)}") from error


def sync_parameters(config: RunConfig, trainee: Trainee) -> None:
    """With overlapped gathers, weights right after an update are still on their way: wait for them."""
    if config.parallel.overlap_param_gather:
        for chunk in trainee.chunks:
            chunk.start_param_sync(force_sync=True)
