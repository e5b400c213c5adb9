"""Writing a checkpoint: whole and hashed, or not at all.

Leave to change what others see in a folder of checkpoints, which a save loses when it takes too long.
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
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megafp8.checkpoint import directory
from megafp8.checkpoint.manifest import FileEntry, Manifest, relative_files
from megafp8.checkpoint.metadata import check_readable
from megafp8.checkpoint.progress import Progress, Trainee
from megafp8.checkpoint.serialization import COMMON
from megafp8.checkpoint.state_dict import (
    content_metadata,
    layout,
    model_state,
    optimizer_state,
    put_rounded_masters,
    random_state,
)
from megafp8.checkpoint.writer import HashingWriter
from megafp8.config.schema import RunConfig
from megafp8.config.settings import to_json
from megafp8.data.sample_hash import SampleMark
from megafp8.device.collective_errors import call_on_all_ranks, on_rank_0, raise_peer_lost, reason
from megafp8.errors import CheckpointError, PeerLost
from megafp8.mcore.process_groups import gather_weights
from megafp8.resilience import fault_injection
from megafp8.utils.files import file_sha256, sync_file
from megafp8.utils.formatting import utc_now

BACKEND = CheckpointingConfig("torch_dist", 1)


@dataclass(frozen=True)
class ReusableSavePlan:
    """What of a checkpoint's writing is the same as long as its tensors are.

    Attributes:
        structure: names, shapes, types and places of everything that this rank writes.
        items: what this rank writes.
        metadata: of all ranks, on rank 0.
    """

    structure: list[Any]
    items: SavePlan
    metadata: Optional[Metadata]


@dataclass(frozen=True)
class Written:
    """What a rank has written: where in its files everything lies, and the files."""

    results: list[WriteResult]
    files: dict[str, FileEntry]


class WriteLease:
    """`with permit:` around each change. A thread cannot be ended from outside, so it asks before what it does."""

    def __init__(self) -> None:
        self._is_revoked = False
        self._change = threading.Lock()

    def __enter__(self) -> None:
        """
        Raises:
            CheckpointError: it is revoked.
        """
        self._change.acquire()
        if self._is_revoked:
            self._change.release()
            raise CheckpointError("the save was given up before")

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._change.release()

    def revoke(self) -> None:
        """No change begins any more; the one that is under way has ended when this returns, unless it hangs."""
        self._is_revoked = True
        if self._change.acquire(timeout=LEASE_TIMEOUT_S):
            self._change.release()


@dataclass(frozen=True)
class Save:
    """A save that all ranks have agreed on: what remains is each rank's own.

    Attributes:
        folder: of all checkpoints.
        keep: newest ones that stay in it; None: all.
        plan: can serve the next save.
        planner: knows where the data is.
        permit: to change what others see; revoked when the save is given up.
    """

    folder: Path
    keep: Optional[int]
    progress: Progress
    writer: HashingWriter
    plan: ReusableSavePlan
    planner: MCoreSavePlanner
    permit: WriteLease = field(default_factory=WriteLease)

    def write(self, data_of: Callable[[WriteItem], object]) -> Written:
        """Write this rank's files; in any thread.

        Args:
            data_of: the data of an item of the plan.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
        """
        results = self.writer.write(data_of, self.progress.step)
        fault_injection.point("save.shards_written", step=self.progress.step)
        return Written(results, self.writer.written)

    def finish(self, written: list[Written]) -> Path:
        """Rank 0's last part: metadata and other small files, the manifest, the name, and older checkpoints."""
        place = directory.unfinished_path(self.folder, self.progress.step)
        self.writer.finish(self.plan.metadata, [each.results for each in written])
        save_config(BACKEND, str(place))
        check_readable(place)
        files = {name: entry for each in written for name, entry in each.files.items()}
        files |= {name: sync_and_hash(place / name) for name in relative_files(place) if name not in files}
        manifest = Manifest(
            step=self.progress.step, consumed_samples=self.progress.consumed_samples, layout=layout(),
            saved_at=utc_now(), files=files,
        )  # fmt: skip
        path = directory.finish(self.folder, self.progress.step, manifest, self.permit)
        if self.keep is not None:
            directory.prune(self.folder, self.keep, never=self.progress.step, permit=self.permit)
        return path


def save_checkpoint(
    folder: Path,
    config: RunConfig,
    trainee: Trainee,
    progress: Progress,
    samples: Optional[SampleMark] = None,
    *,
    keep: Optional[int] = None,
) -> Path:
    """Write model, optimizer, schedule, random state, progress and configuration; all ranks call it.

    Args:
        samples: which samples the run has read, where that is known.
        keep: delete older checkpoints than so many of the newest; None keeps all.

    Returns:
        The finished checkpoint's folder, under its final name.

    Raises:
        CheckpointError: on all ranks: it could not be written. Checkpoints that were there are still there, and the
            trainee is as before.
    """
    with failure_explained(folder, progress.step):
        save = prepare_save(folder, config, trainee, progress, samples, keep=keep)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # other threads copy, and do not know this one's stream
        written = call_on_all_ranks(lambda: save.write(save.planner.resolve_data))
        return on_rank_0(lambda: save.finish(written))


def prepare_save(
    folder: Path,
    config: RunConfig,
    trainee: Trainee,
    progress: Progress,
    samples: Optional[SampleMark] = None,
    *,
    keep: Optional[int] = None,
    last: Optional[ReusableSavePlan] = None,
    is_written_later: bool = False,
) -> Save:
    """Everything about a save that ranks have to agree on; all ranks call it, inside `failure_explained`.

    Args:
        last: of the save before. It is taken again if it fits on all ranks.
        is_written_later: what changes before the next update of the weights is copied; else nothing is.
    """
    fault_injection.point("save.begin")
    state = complete_state(config, trainee, progress, samples, is_written_later)
    fault_injection.point("save.state_gathered")
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    structure = [description(leaf) for leaves in flat.values() for leaf in leaves]
    told = call_on_all_ranks(lambda: (bytes_to_write(sharded), last is not None and last.structure == structure))
    if not all(is_same for _, is_same in told):
        last = None
        validate_sharding_integrity(determine_global_metadata(sharded)[1], common)
    place = directory.unfinished_path(folder, progress.step)

    def make_place() -> None:
        directory.make_unfinished(folder, progress.step, sum(num_bytes for num_bytes, _ in told))
        torch.save(common, place / COMMON)

    on_rank_0(make_place)
    writer = HashingWriter(place)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    data = mcore_to_pyt_state_dict(flat, False)
    if last is None:
        (_, metadata, _), items, *_ = save_state_dict_async_plan(data, writer, planner=planner)
        last = ReusableSavePlan(structure, items, metadata)
    else:
        planner.set_up_planner(data, is_coordinator=dist.get_rank() == 0)
        writer.prepare_write_data(last.items, planner)
    return Save(folder, keep, progress, writer, last, planner)


def description(leaf: Any) -> Any:
    """All of a sharded tensor or object that a plan depends on."""
    if isinstance(leaf, ShardedTensor):
        return leaf.key, leaf.dtype, leaf.local_shape, leaf.global_shape, leaf.global_offset, leaf.data.requires_grad
    return leaf.unique_key


def complete_state(
    config: RunConfig,
    trainee: Trainee,
    progress: Progress,
    samples: Optional[SampleMark],
    is_written_later: bool = False,
) -> dict[str, Any]:
    """Everything that a checkpoint holds, as megatron-core's sharded state; all ranks call it.

    Args:
        is_written_later: only weights and moments are still those of the run, which the next update changes.
    """
    sync_parameters(config, trainee)
    state = model_state(trainee.chunks)
    model = dict(state)
    if not config.checkpoint.no_save_optim:
        state["optimizer"] = optimizer_state(trainee, model, is_loading=False)
        state["schedule"] = trainee.schedule.state_dict()
    if not config.checkpoint.no_save_rng:
        state["random_state"] = random_state()
    if is_written_later:
        copy_buffers(model)
    put_rounded_masters(model, trainee.optimizer)
    return state | {
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
        "history": progress.history.plain(),
        "samples": None if samples is None else samples.plain(),
        "config": to_json(config),
        "layout": list(layout()),
        "num_threads": torch.get_num_threads(),
        "content_metadata": content_metadata(),
    }


def copy_buffers(model: dict[str, Any]) -> None:
    """Take what is no parameter (a recipe's scales and histories) out of the run's reach: a forward pass changes it."""
    for leaf in nested_values(model):
        if isinstance(leaf, ShardedTensor) and not isinstance(leaf.data, torch.nn.Parameter):
            leaf.data = leaf.data.clone()


def bytes_to_write(sharded: dict[str, Any]) -> int:
    """Bytes of the tensors that this rank writes."""
    leaves = (leaf for leaf in nested_values(sharded) if isinstance(leaf, ShardedTensor))
    return sum(leaf.data.numel() * leaf.data.element_size() for leaf in leaves if is_main_replica(leaf.replica_id))


@contextmanager
def failure_explained(folder: Path, step: int) -> Iterator[None]:
    """Within, what goes wrong becomes a CheckpointError, and what was written so far makes room again.

    Raises:
        PeerLost: a rank is gone, and the run with it.
    """
    try:
        yield
    except PeerLost:
        raise
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise_peer_lost(error)
        if dist.get_rank() == 0:
            shutil.rmtree(directory.unfinished_path(folder, step), ignore_errors=True)
        raise CheckpointError(f"step {step} cannot be saved to {folder}: {reason(error)}") from error


def sync_parameters(config: RunConfig, trainee: Trainee) -> None:
    """With overlapped gathers, weights right after an update are still on their way: wait for them."""
    if config.parallel.overlap_param_gather:
        gather_weights(trainee.chunks)


def sync_and_hash(path: Path) -> FileEntry:
    """Wait until a small file is on the disk, and describe it."""
    sync_file(path)
    return FileEntry(path.stat().st_size, file_sha256(path))


# For a rename or a small file that is under way; a disk that hangs in one is not waited for.
LEASE_TIMEOUT_S = 5.0
