"""Weighted mean of checkpoints of one model, of any layouts, as a checkpoint of the weights.

Training at a constant rate followed by a merge takes the place of a decay of the rate (WSM, arXiv 2507.17634).

| part | in the merged checkpoint |
|---|---|
| weights, and biases by which routers select experts | mean of FP32 main weights, or of weights without them; in FP32 |
| scales and amax histories of delayed scaling | those of the newest checkpoint |
| step, samples, skipped updates, settings | those of the newest checkpoint |
| optimizer state, schedule, random states | left out |

With `has_ema` the moving averages of the weights (`--ema-decay`) take the place of the main weights, and one checkpoint
is enough.

Everything else is refused by name. A sum in FP64 is rounded once, to FP32. Blocks of rows are read, summed and written
one after the other, so that memory holds no complete tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum, prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from megafp8 import __version__
from megafp8.checkpoint import gradient_residuals, local_scales, weight_ema
from megafp8.checkpoint.compatibility import model_differences
from megafp8.checkpoint.manifest import FileEntry, Manifest, check_complete, content_sha256, read_manifest, summarize
from megafp8.checkpoint.metadata import OPTIMIZER_PREFIX, is_extra_state, load_common_state
from megafp8.checkpoint.optimizer_exchange import COMPLETE, SHARDED
from megafp8.checkpoint.standalone import CheckpointTensors, save_files, write_item, write_items
from megafp8.config import settings
from megafp8.errors import CheckpointError

UNIFORM, LINEAR, SQUARE_ROOT, EMA = METHODS = ("uniform", "linear", "1-sqrt", "ema")
# Last parts of the names of weights without main weights, and of the bias of experts, which is updated without them.
EXPERT_BIAS = "expert_bias"
AVERAGED = ("weight", "bias", "layer_norm_weight", "layer_norm_bias", "gate_weight", "softmax_offset", EXPERT_BIAS)
RANDOM_STATE = "random_state"
# Plain values of the newest checkpoint that the merged one has, and those that belong to what is left out.
KEPT = (
    "step", "consumed_samples", "samples", "history", "grad_factor", "origin", "layout", "content_metadata",
    "extensions", local_scales.KEY,
)  # fmt: skip
LEFT_OUT = (
    "optimizer", "schedule", RANDOM_STATE, "num_threads", gradient_residuals.KEY, gradient_residuals.LAYOUT_KEY,
    weight_ema.KEY,
)  # fmt: skip
BLOCK_ELEMENTS = 1 << 23
"""Elements that are summed at once: 64 MiB in FP64, and about 2.5 times that with what is read and written."""


def coefficients(method: str, number: int, decay: float = 0.9) -> tuple[float, ...]:
    """Return the coefficients c_1, ..., c_n of n checkpoints, the oldest first. Their sum is 1, rounded in FP64.

    - uniform: 1 / n.
    - linear: i / (n (n + 1) / 2).
    - 1-sqrt: sqrt(i / n) - sqrt((i - 1) / n). What training added between checkpoints i and i + 1 counts with
      c_(i+1) + ... + c_n = 1 - sqrt(i / n): the factor of a rate that decays as 1 - sqrt over n equal intervals, which
      begin one interval before the first checkpoint. By the same rule, uniform stands for a linear decay.
    - ema: (1 - d) d^(n - i), divided by their sum.

    Args:
        decay: d of ema, between 0 and 1.
    """
    places = range(1, number + 1)
    if method == UNIFORM:
        raw = [1.0] * number
    elif method == LINEAR:
        raw = [float(place) for place in places]
    elif method == SQUARE_ROOT:
        raw = [sqrt(place / number) - sqrt((place - 1) / number) for place in places]
    else:
        raw = [decay ** (number - place) for place in places]
    return tuple(value / fsum(raw) for value in raw)


@dataclass(frozen=True)
class Source:
    """A checkpoint to merge.

    Attributes:
        common: its plain values.
        coefficient: its part in the mean.
        has_ema: its moving averages count, not its weights.
    """

    path: Path
    manifest: Manifest
    common: Mapping[str, Any]
    tensors: CheckpointTensors
    coefficient: float
    has_ema: bool = False

    def best_name(self, name: str) -> str:
        """Return the name of the FP32 main weight of a weight, or of its moving average; without one, the weight's."""
        names = (prefix + name for prefix in ((weight_ema.PREFIX,) if self.has_ema else (SHARDED, COMPLETE)))
        return next((each for each in names if each in self.tensors.locations), name)


@dataclass(frozen=True)
class MergePlan:
    """Checkpoints that fit together.

    Attributes:
        sources: ascending by step.
        method: as text: the method, and its decay.
        averaged: names of the tensors to average.
    """

    sources: tuple[Source, ...]
    method: str
    averaged: tuple[str, ...]

    @property
    def newest(self) -> Source:
        """The checkpoint of the last step."""
        return self.sources[-1]

    @property
    def num_bytes(self) -> int:
        """Size of the averaged tensors."""
        return sum(prod(self.newest.tensors.locations[name].shape) for name in self.averaged) * 4

    def provenance(self) -> dict[str, Any]:
        """Return what the manifest says about the merge. `sha256` is that of a source's manifest."""
        sources = [
            {
                "path": str(source.path.resolve()), "step": source.manifest.step,
                "sha256": content_sha256(source.manifest), "coefficient": source.coefficient,
                "averaged": self.averaged_form(source),
            }
            for source in self.sources
        ]  # fmt: skip
        return {"version": __version__, "weights": self.method, "sources": sources}

    def averaged_form(self, source: Source) -> str:
        """Return which of its tensors a source contributes, as text."""
        if source.has_ema:
            return f"moving average after {source.common[weight_ema.KEY][weight_ema.NUM_UPDATES]} updates"
        num_masters = sum(source.best_name(name) != name for name in self.averaged)
        if num_masters:  # tensors that no optimizer updates, such as biases of experts, have none
            return "FP32 main weights"
        dtypes = {source.tensors.locations[name].dtype for name in self.averaged}
        return "weights in " + " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))

    def write(self, folder: Path, on_bytes: Callable[[int], Any] = lambda num_bytes: None) -> Path:
        """Write the merged checkpoint into the folder of a run, and return its own folder.

        Args:
            on_bytes: called with the number of bytes of each block that was averaged.

        Raises:
            CheckpointError: a source cannot be read or has values that are not finite, or it cannot be written.
        """
        common = {name: self.newest.common[name] for name in KEPT if name in self.newest.common}
        config = settings.from_json(self.newest.common["config"])
        # So that a run that requests the optimizer state is told that there is none.
        config = settings.with_values(config, {"checkpoint.no_save_optim": True, "checkpoint.no_save_rng": True})
        common["config"] = settings.to_json(config)
        write = partial(self._write_files, common=common, on_bytes=on_bytes)
        return save_files(folder, common, self.num_bytes, write, self.provenance())

    def _write_files(
        self, folder: Path, common: Mapping[str, Any], on_bytes: Callable[[int], Any]
    ) -> dict[str, FileEntry]:
        tensors, averaged = self.newest.tensors, set(self.averaged)
        made: list[tuple[WriteItem, Callable[[], Tensor]]] = []
        for name, location in tensors.locations.items():
            if name in averaged:
                for rows in blocks_of_rows(location.shape):
                    item = write_item(
                        location.key, chunk_of(location.chunk, rows, location.layer), tensors.stored_shape(name),
                        torch.float32,
                    )  # fmt: skip
                    made.append((item, partial(mean, self.sources, name, rows)))
            elif is_extra_state(name):
                # A scale belongs to the history beside it and to activations of one step: a mean of either would be
                # that of no run. The mean of weights is within the range of theirs, and the next steps adapt both.
                item = write_item(location.key, location.chunk, tensors.stored_shape(name), location.dtype)
                made.append((item, partial(tensors.load, name)))
        make_by_index = {item.index: make for item, make in made}

        def make(item: WriteItem) -> Tensor:
            tensor = make_by_index[item.index]().view(item.tensor_data.chunk.sizes)
            on_bytes(tensor.nbytes)
            return tensor

        objects = {name: tensors.load_object(name) for name in tensors.objects if is_extra_state(name)}
        return write_items(folder, common, [item for item, _ in made], make, objects)


def plan_merge(
    paths: Sequence[Path],
    method: str = UNIFORM,
    decay: float = 0.9,
    has_ema: bool = False,
    on_verified: Callable[[int], Any] = lambda num_bytes: None,
) -> MergePlan:
    """Check everything before anything is written. Every byte of the checkpoints is read.

    Args:
        paths: of checkpoints, in any order; those of one step count as given, the last as the newest.
        method: one of `METHODS`.
        decay: as in `coefficients`.
        has_ema: average the moving averages of the weights.
        on_verified: called with the number of bytes of each verified checkpoint.

    Raises:
        CheckpointError: a checkpoint is damaged or has a part that is not known, or they are of different models.
    """
    manifests = {}
    for path in paths:
        check_complete(path)
        manifests[path] = read_manifest(path)
        on_verified(manifests[path].num_bytes)
    ordered = sorted(paths, key=lambda path: manifests[path].step)
    parts = coefficients(method, len(ordered), decay)
    sources = tuple(
        Source(path, manifests[path], load_common_state(path), CheckpointTensors(path), part, has_ema)
        for path, part in zip(ordered, parts, strict=True)
    )
    for source in sources:
        check_same_model(source, sources[-1])
        if has_ema and weight_ema.KEY not in source.common:
            raise CheckpointError(f"{source.path} has no moving average of the weights: its run needs --ema-decay")
        if has_ema and not source.common[weight_ema.KEY][weight_ema.NUM_UPDATES]:
            raise CheckpointError(
                f"the moving average in {source.path} has had no update by step {source.manifest.step}: take a later "
                "checkpoint, or give the run a shorter --ema-interval"
            )
    averaged = names_to_average(sources[-1])
    for source in sources:
        check_same_weights(source, sources[-1], averaged)
    return MergePlan(sources, f"{method} {decay:g}" if method == EMA else method, averaged)


def check_same_model(source: Source, newest: Source) -> None:
    """Raise if a checkpoint is of another model than the newest."""
    configs = [settings.from_json(each.common["config"]) for each in (source, newest)]
    if lines := model_differences(*configs):
        raise CheckpointError(
            f"{source.path} is a checkpoint of a different model than {newest.path} (the first -> the second):\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nfix: give checkpoints of one model"
        )


def names_to_average(source: Source) -> tuple[str, ...]:
    """Return the names of weights and of biases of experts.

    Raises:
        CheckpointError: the checkpoint has a tensor or value of which it is not known how to merge it.
    """
    names, unknown = list[str](), [name for name in source.common if name not in (*KEPT, *LEFT_OUT, "config")]
    for name, location in source.tensors.locations.items():
        if name.startswith(OPTIMIZER_PREFIX) or is_extra_state(name):
            continue
        is_known = name.rpartition(".")[2] in AVERAGED or source.best_name(name) != name
        (names if is_known and location.dtype.is_floating_point else unknown).append(name)
    known_objects = (RANDOM_STATE, OPTIMIZER_PREFIX)
    unknown += [name for name in source.tensors.objects if not (is_extra_state(name) or name.startswith(known_objects))]
    if unknown:
        raise CheckpointError(f"{source.path} has parts that this version cannot merge: {summarize(sorted(unknown))}")
    return tuple(names)


def check_same_weights(source: Source, newest: Source, averaged: Sequence[str]) -> None:
    """Raise if the tensors to average differ from the newest checkpoint's in names or shapes."""
    own, theirs = source.tensors.locations, newest.tensors.locations
    problems = [f"{name} is missing" for name in averaged if name not in own]
    problems += [f"{name} is not in the other" for name in names_to_average(source) if name not in set(averaged)]
    for name in (name for name in averaged if name in own):
        if source.has_ema and source.best_name(name) == name and name.rpartition(".")[2] != EXPERT_BIAS:
            problems.append(f"{weight_ema.PREFIX}{name} is missing")
        best = own[source.best_name(name)]
        if best.shape != theirs[name].shape:
            problems.append(f"{source.best_name(name)} is {list(best.shape)} instead of {list(theirs[name].shape)}")
    if problems:
        raise CheckpointError(f"{source.path} does not have the weights of {newest.path}: {summarize(problems)}")


def blocks_of_rows(shape: tuple[int, ...]) -> Iterator[range]:
    """Yield ranges of dim 0 with at most `BLOCK_ELEMENTS` elements, or one row. A scalar has one row."""
    num_rows = shape[0] if shape else 1
    step = max(1, BLOCK_ELEMENTS // max(1, prod(shape[1:])))
    for first in range(0, num_rows, step):
        yield range(first, min(first + step, num_rows))


def chunk_of(chunk: ChunkStorageMetadata, rows: range, layer: int | None) -> ChunkStorageMetadata:
    """Return the rows of a tensor as a part of the stored tensor.

    Args:
        chunk: the complete tensor there.
        layer: index in dim 0 of a stack of all layers; None if it is not stacked.
    """
    if not chunk.sizes:
        return chunk
    axis = 0 if layer is None else 1
    offsets, sizes = list(chunk.offsets), list(chunk.sizes)
    offsets[axis], sizes[axis] = rows.start, len(rows)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def mean(sources: Sequence[Source], name: str, rows: range) -> Tensor:
    """Return the mean of some rows of a tensor, summed in FP64 and rounded once. FP32, shape (rows, *shape[1:]).

    Raises:
        CheckpointError: a checkpoint cannot be read, or has values that are not finite.
    """
    shape = sources[0].tensors.locations[name].shape
    total = torch.zeros((len(rows), *shape[1:]), dtype=torch.float64)
    for source in sources:
        best = source.best_name(name)
        for place, values in source.tensors.read_rows(best, rows.start, rows.stop):
            if not values.isfinite().all():
                raise CheckpointError(f"{source.path}: {best} has values that are NaN or infinite: leave it out")
            total[place] += values.double().mul_(source.coefficient)
    return total.float()
