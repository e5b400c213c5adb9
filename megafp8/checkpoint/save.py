"""Synchronous checkpoint save, and the parts that asynchronous saves share.

A checkpoint is either complete, with hashes of all files, or absent. A save that times out loses its `WriteLease` and
with it the right to change the checkpoint folder.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megafp8.checkpoint import directory, gradient_residuals, local_scales, state_dict, weight_ema
from megafp8.checkpoint.directory import Retention
from megafp8.checkpoint.manifest import FileEntry, build_manifest, write_manifest
from megafp8.checkpoint.metadata import check_readable
from megafp8.checkpoint.progress import Progress, TrainingState
from megafp8.checkpoint.serialization import COMMON_FILE, check_shards
from megafp8.checkpoint.writer import HashingWriter
from megafp8.config.schema import ParallelConfig, RunConfig
from megafp8.config.settings import to_json
from megafp8.data.sample_hash import SampleHash
from megafp8.device.collective_errors import (
    call_on_all_ranks,
    call_on_rank_0,
    error_text,
    gather_on_rank_0,
    raise_peer_lost,
)
from megafp8.device.platform import local_rank, local_world_size
from megafp8.errors import CheckpointError, PeerLost
from megafp8.mcore.process_groups import gather_weights
from megafp8.resilience import fault_injection

BACKEND = CheckpointingConfig("torch_dist", 1)
# Time for a rename or a small write in progress to end. A hanging disk is not waited for.
LEASE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ReusableSavePlan:
    """The part of a save that stays the same while the tensors to write do.

    Attributes:
        structure: names, shapes, dtypes and offsets of everything that this rank writes.
        items: the items that this rank writes.
        metadata: of all ranks; on rank 0 only.
    """

    structure: list[Any]
    items: SavePlan
    metadata: Optional[Metadata]


@dataclass(frozen=True)
class WriteOutput:
    """Output of one rank's writer: locations of the items in its files, and the files."""

    results: list[WriteResult]
    files: dict[str, FileEntry]


class WriteLease:
    """Context manager around each visible change of the checkpoint folder; revocable from another thread.

    Python cannot stop a thread from outside, so the writing thread enters the lease before each change.
    """

    def __init__(self) -> None:
        self._is_revoked = False
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        """Begin a change.

        Raises:
            CheckpointError: the lease is revoked.
        """
        self._lock.acquire()
        if self._is_revoked:
            self._lock.release()
            raise CheckpointError("the save was cancelled")

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._lock.release()

    def revoke(self) -> None:
        """Prevent further changes. A change in progress has ended when this returns, unless the disk hangs."""
        # Before the lock is taken, so that the next writer that enters sees it.
        self._is_revoked = True
        if self._lock.acquire(timeout=LEASE_TIMEOUT_S):
            self._lock.release()


@dataclass(frozen=True)
class PreparedSave:
    """A save that all ranks have agreed on. What remains needs no collectives.

    Attributes:
        folder: of all checkpoints.
        keep: the checkpoints to keep; None keeps all.
        plan: reusable by the next save.
        planner: resolves an item to its data.
        is_divided: each machine has a folder of its own, with the files of its ranks. The checkpoint keeps its
            unfinished name there, since no folder has all of it.
        lease: for visible changes of the folder; revoked when the save is abandoned.
    """

    folder: Path
    keep: Optional[Retention]
    progress: Progress
    writer: HashingWriter
    plan: ReusableSavePlan
    planner: MCoreSavePlanner
    is_divided: bool = False
    lease: WriteLease = field(default_factory=WriteLease)

    def write(self, resolve_data: Callable[[WriteItem], object]) -> WriteOutput:
        """Write this rank's files. May run in any thread.

        Args:
            resolve_data: returns the data of an item of the plan.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
        """
        results = self.writer.write(resolve_data, self.progress.step)
        fault_injection.point("save.shards_written", step=self.progress.step)
        return WriteOutput(results, self.writer.written)

    def finish(self, written: list[WriteOutput]) -> Path:
        """On rank 0: write metadata and manifest, publish the checkpoint and prune older ones.

        Args:
            written: by all ranks.
        """
        unfinished = directory.unfinished_path(self.folder, self.progress.step)
        # The manifest comes after all that it lists, and the rename last: what a crash leaves before it is no
        # checkpoint.
        self.writer.finish(self.plan.metadata, [each.results for each in written])
        save_config(BACKEND, str(unfinished))
        check_readable(unfinished)
        files = {name: entry for each in written for name, entry in each.files.items()}
        step, consumed_samples = self.progress.step, self.progress.consumed_samples
        manifest = build_manifest(unfinished, step, consumed_samples, state_dict.parallel_layout(), files)
        if self.is_divided:
            with self.lease:
                write_manifest(unfinished, manifest)
            return unfinished
        path = directory.publish(self.folder, step, manifest, self.lease)
        if self.keep is not None:
            # After the new checkpoint is published: at no time is there none.
            directory.prune(self.folder, self.keep, protected_step=step, lease=self.lease)
        return path


def save_checkpoint(
    folder: Path,
    config: RunConfig,
    training_state: TrainingState,
    progress: Progress,
    samples: Optional[SampleHash] = None,
    *,
    keep: Optional[Retention] = None,
    is_divided: bool = False,
) -> Path:
    """Save model, optimizer, scheduler, RNG state, progress and configuration; all ranks call it.

    Args:
        samples: position in the sample order, if known.
        keep: the checkpoints to keep; None keeps all.
        is_divided: see `PreparedSave`.

    Returns:
        The folder of the published checkpoint, or of the unfinished one where it is divided.

    Raises:
        CheckpointError: on all ranks: the save failed. Earlier checkpoints and the training state are unchanged.
    """
    with save_errors(folder, progress.step, is_divided):
        prepared = prepare_save(folder, config, training_state, progress, samples, keep=keep, is_divided=is_divided)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # writer threads copy on other streams than this thread's
        written = gather_on_rank_0(lambda: prepared.write(prepared.planner.resolve_data))
        return call_on_rank_0(lambda: prepared.finish(written))


def prepare_save(
    folder: Path,
    config: RunConfig,
    training_state: TrainingState,
    progress: Progress,
    samples: Optional[SampleHash] = None,
    *,
    keep: Optional[Retention] = None,
    last: Optional[ReusableSavePlan] = None,
    is_written_later: bool = False,
    is_divided: bool = False,
) -> PreparedSave:
    """Do the part of a save that needs collectives; all ranks call it, inside `save_errors`.

    Args:
        last: plan of the previous save, reused if it fits on all ranks.
        is_written_later: clone what changes before the next optimizer update.
        is_divided: see `PreparedSave`.
    """
    fault_injection.point("save.begin")
    state = build_state_dict(config, training_state, progress, samples, is_written_later)
    fault_injection.point("save.state_gathered")
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    # Copies of other ranks are left out here, so that planning does not have to.
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    structure = [plan_signature(leaf) for leaves in flat.values() for leaf in leaves]
    # Collective. All ranks have to agree: a rank with another structure makes all of them plan again.
    by_rank = call_on_all_ranks(lambda: (num_bytes_to_write(sharded), last is not None and last.structure == structure))
    if not all(is_same for _, is_same in by_rank):
        last = None
        check_shards(sharded, common)
    unfinished = directory.unfinished_path(folder, progress.step)

    def make_folder() -> None:
        rank, size = dist.get_rank(), local_world_size() if is_divided else len(by_rank)
        if is_first_rank(is_divided):
            num_bytes = sum(num_bytes for num_bytes, _ in by_rank[rank : rank + size])
            directory.make_unfinished_folder(folder, progress.step, num_bytes)
        if rank == 0:
            torch.save(common, unfinished / COMMON_FILE)

    # No rank writes before the folder exists: this call returns on all ranks together.
    call_on_all_ranks(make_folder)
    writer = HashingWriter(unfinished)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    data = mcore_to_pyt_state_dict(flat, False)
    # Planning gathers the items of all ranks on rank 0; a reused plan needs no communication.
    if last is None:
        (_, metadata, _), items, *_ = save_state_dict_async_plan(data, writer, planner=planner)
        last = ReusableSavePlan(structure, items, metadata)
    else:
        planner.set_up_planner(data, is_coordinator=dist.get_rank() == 0)
        writer.prepare_write_data(last.items, planner)
    return PreparedSave(folder, keep, progress, writer, last, planner, is_divided)


def is_first_rank(is_divided: bool) -> bool:
    """Whether this rank makes and removes the folder that is written to: rank 0, or the first one of each machine."""
    return dist.get_rank() == 0 or (is_divided and local_rank() == 0)


def plan_signature(leaf: Any) -> Any:
    """Return everything about a sharded tensor or object that the save plan depends on."""
    if isinstance(leaf, ShardedTensor):
        return leaf.key, leaf.dtype, leaf.local_shape, leaf.global_shape, leaf.global_offset, leaf.data.requires_grad
    return leaf.unique_key


def build_state_dict(
    config: RunConfig,
    training_state: TrainingState,
    progress: Progress,
    samples: Optional[SampleHash],
    is_written_later: bool = False,
) -> dict[str, Any]:
    """Build the complete sharded state dictionary of a checkpoint; all ranks call it.

    Args:
        is_written_later: clone what the next forward-backward changes, so that only weights and moments alias the
            run's.
    """
    # First: an overlapped gather may still be writing the weights.
    finish_param_gather(config.parallel, training_state)
    state = state_dict.model_state(training_state.chunks)
    model = dict(state)
    if (scale_groups := local_scales.group_sizes(config.precision)) is not None:
        local_scales.name_by_rank(model)
    if not config.checkpoint.no_save_optim:
        state["optimizer"] = state_dict.optimizer_state(training_state, model, is_loading=False)
        state["schedule"] = training_state.schedule.state_dict()
        residuals = training_state.gradient_residuals
        state |= gradient_residuals.state_to_save(config.precision, residuals, is_written_later)
    state |= weight_ema.sharded_means(training_state, model)
    if not config.checkpoint.no_save_rng:
        state["random_state"] = state_dict.sharded_rng_state()
    # Weights and moments change in the next update, before which the run waits for the copy. Buffers change in the next
    # forward pass.
    if is_written_later:
        clone_buffers(model)
    # Last, because the other parts find weights by the parameter, which this replaces by a tensor.
    state_dict.use_rounded_master_weights(model, training_state.optimizer)
    if progress.extensions:
        state["extensions"] = progress.extensions
    return state | {
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
        "history": progress.history.plain(),
        "grad_factor": progress.grad_factor,
        "origin": progress.origin,
        "samples": None if samples is None else samples.plain(),
        "config": to_json(config),
        "layout": list(state_dict.parallel_layout()),
        local_scales.KEY: scale_groups,
        "num_threads": torch.get_num_threads(),
        "content_metadata": state_dict.content_metadata(),
    }


def clone_buffers(model: dict[str, Any]) -> None:
    """Clone what is not a parameter, such as scales and amax histories: a forward pass changes it."""
    for leaf in nested_values(model):
        if isinstance(leaf, ShardedTensor) and not isinstance(leaf.data, torch.nn.Parameter):
            leaf.data = leaf.data.clone()


def num_bytes_to_write(sharded: dict[str, Any]) -> int:
    """Return the size of the tensors that this rank writes."""
    leaves = (leaf for leaf in nested_values(sharded) if isinstance(leaf, ShardedTensor))
    return sum(leaf.data.numel() * leaf.data.element_size() for leaf in leaves if is_main_replica(leaf.replica_id))


@contextmanager
def save_errors(folder: Path, step: int, is_divided: bool = False) -> Iterator[None]:
    """Convert errors of a save to CheckpointError and remove the unfinished folder.

    Raises:
        PeerLost: another rank has ended.
    """
    try:
        yield
    except PeerLost:
        raise
    except (Exception, CheckpointException) as error:  # CheckpointException derives from BaseException
        raise_peer_lost(error)
        if is_first_rank(is_divided):
            shutil.rmtree(directory.unfinished_path(folder, step), ignore_errors=True)
        raise CheckpointError(f"step {step} cannot be saved to {folder}: {error_text(error)}") from error


def finish_param_gather(parallel: ParallelConfig, training_state: TrainingState) -> None:
    """Complete overlapped parameter all-gathers after the last update."""
    if parallel.overlap_param_gather:
        gather_weights(training_state.chunks)
