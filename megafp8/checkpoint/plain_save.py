"""A checkpoint of weights alone, written without the model that they are of, in one process without groups.

Each tensor is made when its turn comes, so that no more than those being written are in memory. Names are those of
`plain_tensors`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import save_config
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megafp8.checkpoint import folder as folders
from megafp8.checkpoint.hashing_writer import HashingWriter
from megafp8.checkpoint.manifest import FileEntry, Manifest, relative_files
from megafp8.checkpoint.plain_tensors import Place
from megafp8.checkpoint.reading import check_readable
from megafp8.checkpoint.safe_load import COMMON
from megafp8.checkpoint.save import BACKEND, sync_and_hash
from megafp8.checkpoint.state import content_metadata
from megafp8.config.schema import RunConfig
from megafp8.config.serialize import to_json
from megafp8.errors import CheckpointError
from megafp8.telemetry.records import utc_now

LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
STEP = 0
ONE_RANK = (1, 1, 1)


@dataclass(frozen=True)
class Source:
    """A tensor that is made when it is written, by a thread of the writer.

    Attributes:
        make: gives it, of this shape and type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


def save_weights(folder: Path, config: RunConfig, sources: Mapping[str, Source]) -> Path:
    """Write a checkpoint of step 0 that holds weights alone: what `--no-save-optim --no-save-rng` would leave.

    Args:
        sources: every weight of the model, by name.

    Returns:
        The finished checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written or read back, or a tensor is not what its source says.
    """
    place = folders.unfinished_path(folder, STEP)
    common = {
        "step": STEP, "consumed_samples": 0, "samples": None, "config": to_json(config), "layout": list(ONE_RANK),
        "content_metadata": content_metadata(),
    }  # fmt: skip
    try:
        folders.make_unfinished(folder, STEP, sum(source.num_bytes for source in sources.values()))
        torch.save(common, place / COMMON)
        save_config(BACKEND, str(place))
        files = write_shards(place, sources)
        check_readable(place)
        files |= {name: sync_and_hash(place / name) for name in relative_files(place) if name not in files}
        manifest = Manifest(step=STEP, consumed_samples=0, layout=ONE_RANK, saved_at=utc_now(), files=files)
        return folders.finish(folder, STEP, manifest)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def write_shards(place: Path, sources: Mapping[str, Source]) -> dict[str, FileEntry]:
    """Write the tensors and the metadata that tells where they are; the tensors' files."""
    items = write_items(sources)
    of_index = {item.index: source for item, source in zip(items, sources.values(), strict=True)}
    writer = HashingWriter(place)
    plans, metadata = create_default_global_save_plan([SavePlan(items)])
    (plan,) = writer.prepare_global_plan(plans)
    writer.prepare_write_data(plan, planner=None)
    results = writer.write(lambda item: made(of_index[item.index], item), STEP)
    writer.finish(metadata, [results])
    return writer.written


def write_items(sources: Mapping[str, Source]) -> list[WriteItem]:
    """What torch has to know of each tensor, in their order."""
    places = [place_of(name, source) for name, source in sources.items()]
    lengths = Counter(place.key for place in places)
    items = []
    for place in places:
        whole = place.shape if place.layer is None else (lengths[place.key], *place.shape)
        data = TensorWriteData(place.chunk, TensorProperties(dtype=place.dtype), torch.Size(whole))
        items.append(WriteItem(MetadataIndex(place.key, place.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def place_of(name: str, source: Source) -> Place:
    """Where a tensor of this name lies: that of a layer in the stack of all layers."""
    match = LAYER.search(name)
    key = LAYER.sub(r"\g<1>layers.", name, count=1)
    return Place(key, None if match is None else int(match[2]), source.shape, source.dtype)


def made(source: Source, item: WriteItem) -> Tensor:
    """A tensor as it lies in the checkpoint.

    Raises:
        CheckpointError: it is not what its source says.
    """
    tensor = source.make()
    if (tuple(tensor.shape), tensor.dtype) != (source.shape, source.dtype):
        raise CheckpointError(
            f"{item.index.fqn} was made as {tuple(tensor.shape)} {tensor.dtype}, not as {source.shape} {source.dtype}"
        )
    return tensor.view(item.tensor_data.chunk.sizes)
