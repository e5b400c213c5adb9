"""Optimizer state in the buckets of Megatron-LM's distributed optimizer (`dp_reshardable`, its default).

For each pipeline and tensor rank the checkpoint has flat tensors: the buckets of the gradient buffer, which hold the
rank's parts of its weights in reverse order of the module's parameters. Each part begins at a multiple of
`PARAMETER_ALIGNMENT` elements. Names and places of the parts are not stored. They follow from the model and the layout,
and the master weights confirm them: rounded to the weights' dtype, they must be the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint.convert.model_tensors import FINAL_NORM, POSITIONS, Weight
from megafp8.checkpoint.optimizer_state import NAMES
from megafp8.checkpoint.standalone import LAYER_PATTERN, CheckpointTensors, LazyTensor
from megafp8.checkpoint.state_dict import EMBEDDING, OUTPUT_LAYER
from megafp8.errors import CheckpointError
from megafp8.utils.integers import round_up

PARAMETER_ALIGNMENT = 64
MASTER = NAMES[0]
BUCKET_NAME = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\." + MASTER
)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes of the run that saved the checkpoint.

    Attributes:
        num_chunks: model chunks on each pipeline rank.
    """

    num_stages: int
    num_chunks: int
    num_tensor_ranks: int


@dataclass(frozen=True)
class BucketOffset:
    """Where a tensor rank's part of a weight is.

    Attributes:
        bucket: name of the bucket without the kind of state.
        first: index of the first element.
    """

    bucket: str
    first: int


def stage_weights(weights: Iterable[Weight], layout: Layout, num_layers: int, stage: int, chunk: int) -> list[Weight]:
    """Return the weights of one chunk of one pipeline rank, in the order of its parameters."""
    per_chunk = num_layers // (layout.num_stages * layout.num_chunks)
    first_layer = (chunk * layout.num_stages + stage) * per_chunk
    is_first = (stage, chunk) == (0, 0)
    is_last = (stage, chunk) == (layout.num_stages - 1, layout.num_chunks - 1)
    found = []
    for weight in weights:
        layer = LAYER_PATTERN.search(weight.name)
        if layer is not None:
            is_here = first_layer <= int(layer[2]) < first_layer + per_chunk
        elif weight.name in (EMBEDDING, POSITIONS):
            is_here = is_first
        else:
            is_here = is_last
        found += [weight] if is_here else []
    return found


def with_shared_output(weights: list[Weight], all_weights: list[Weight], is_first: bool) -> list[Weight]:
    """Append the last stage's copy of a shared embedding."""
    is_last = any(weight.name.startswith(FINAL_NORM) for weight in weights)
    if not is_last or is_first or any(weight.name == OUTPUT_LAYER for weight in all_weights):
        return weights
    return [*weights, Weight(OUTPUT_LAYER, all_weights[0].shape, 0)]


def offsets_in_buckets(
    weights: list[Weight], num_ranks: int, buckets: list[tuple[str, int]]
) -> dict[str, BucketOffset]:
    """Return where each weight is.

    Args:
        weights: of a chunk, in the order of the parameters.
        buckets: names and numbers of elements, in order.

    Raises:
        CheckpointError: the weights do not fill the buckets.
    """
    offsets, number, position = {}, 0, 0
    for weight in reversed(weights):
        position = round_up(position, PARAMETER_ALIGNMENT)
        if number < len(buckets) and position == buckets[number][1]:
            number, position = number + 1, 0
        end = position + prod(weight.local_shape(num_ranks))
        if number == len(buckets) or end > buckets[number][1]:
            raise CheckpointError(f"{weight.name} is not where the model's parameters place it in the buckets")
        offsets[weight.name] = BucketOffset(buckets[number][0], position)
        position = end
        if position == buckets[number][1]:
            number, position = number + 1, 0
    if number < len(buckets):
        raise CheckpointError(f"the model's parameters do not fill {buckets[number][0]}")
    return offsets


def find_offsets(
    tensors: CheckpointTensors, weights: list[Weight], layout: Layout, num_layers: int
) -> dict[str, list[BucketOffset]]:
    """Return where each weight's optimizer state is, by tensor rank.

    Raises:
        CheckpointError: the weights do not fill the buckets.
    """
    by_buffer: dict[tuple[int, int], dict[int, tuple[str, int]]] = {}
    for name, location in tensors.locations.items():
        if match := BUCKET_NAME.fullmatch(name):
            group, buffer, bucket = (int(text) for text in match.groups())
            by_buffer.setdefault((group, buffer), {})[bucket] = name.removesuffix(f".{MASTER}"), location.shape[0]
    num_buffers = layout.num_stages * layout.num_chunks * layout.num_tensor_ranks
    if len(by_buffer) != num_buffers:
        raise CheckpointError(f"the optimizer's buckets are of {len(by_buffer):,} model chunks, not {num_buffers:,}")
    found: dict[str, list[BucketOffset]] = {}
    for stage in range(layout.num_stages):
        for chunk in range(layout.num_chunks):
            here = stage_weights(weights, layout, num_layers, stage, chunk)
            here = with_shared_output(here, weights, is_first=(stage, chunk) == (0, 0) and layout.num_stages == 1)
            for rank in range(layout.num_tensor_ranks):
                buckets = by_buffer.get((stage * layout.num_tensor_ranks + rank, chunk), {})
                offsets = offsets_in_buckets(here, layout.num_tensor_ranks, [buckets[n] for n in sorted(buckets)])
                for name, offset in offsets.items():
                    found.setdefault(name, []).append(offset)
    return found


def bucket_sources(
    path: Path, tensors: CheckpointTensors, weights: list[Weight], layout: Layout, num_layers: int
) -> dict[str, LazyTensor]:
    """Return the optimizer state of all weights as complete tensors, by megafp8's names.

    Raises:
        CheckpointError: the buckets are not those of the model in this layout.
    """
    if num_layers % (layout.num_stages * layout.num_chunks):
        raise CheckpointError(f"{num_layers} layers are not the same number on every pipeline stage")
    offsets = find_offsets(tensors, weights, layout, num_layers)

    def source(weight: Weight, kind: str) -> LazyTensor:
        def make() -> Tensor:
            state = assemble(tensors, weight, kind, offsets[weight.name])
            if kind == MASTER:
                check_master_weight(path, weight, state, tensors.load(weight.name))
            return state

        return LazyTensor(weight.shape, torch.float32, make)

    return {f"optimizer.state.{kind}.{weight.name}": source(weight, kind) for weight in weights for kind in NAMES}


def assemble(tensors: CheckpointTensors, weight: Weight, kind: str, offsets: list[BucketOffset]) -> Tensor:
    """Read one kind of state of a weight from all tensor ranks' buckets. Shape: the weight's."""
    complete, num_ranks = torch.empty(weight.shape), len(offsets)
    shape = weight.local_shape(num_ranks)
    for rank, offset in enumerate(offsets):
        part = tensors.load_range(f"{offset.bucket}.{kind}", offset.first, offset.first + prod(shape)).view(shape)
        views = weight.local_part(complete, rank, num_ranks)
        for view, values in zip(views, part.chunk(len(views)), strict=True):
            view.copy_(values)
    return complete


def check_master_weight(path: Path, weight: Weight, master: Tensor, rounded: Tensor) -> None:
    """Raise if a master weight is not the one of a weight, so that nothing is read from a wrong place.

    Raises:
        CheckpointError: it is another one.
    """
    if not torch.equal(master.to(rounded.dtype), rounded):
        raise CheckpointError(
            f"{path}: the master weights in the optimizer's buckets differ from {weight.name}: the optimizer state "
            "cannot be assigned to weights. --no-load-optim imports the weights only"
        )


def common_optimizer_state(tensors: CheckpointTensors) -> Mapping[str, object]:
    """Return parameter groups and loss scale, of the first rank."""
    prefix = "optimizer.distributed.dp_group_idx_0."
    names = {"optimizer": f"{prefix}optimizer/shard_0_1", "grad_scaler": f"{prefix}grad_scaler/shard_0_1"}
    return dict(load_present(tensors, names)) | {"param_state_sharding_type": "fully_reshardable"}


def load_present(tensors: CheckpointTensors, names: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield those of several objects that the checkpoint has."""
    for name, key in names.items():
        if key in tensors.objects:
            yield name, tensors.load_object(key)
