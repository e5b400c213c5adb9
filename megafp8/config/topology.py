"""Parallel layout: ranks, groups and layers of each axis, computed without torch and without process groups.

Rank order
----------
W ranks form a grid with four axes, W = tensor x context x data x pipeline. The tensor axis varies fastest and the
pipeline axis slowest, which is megatron-core's order `tp-cp-ep-dp-pp` with one expert-parallel rank:

    rank = t + tensor * (c + context * (d + data * p))

With --use-tp-pp-dp-mapping the data axis is the slowest one (`tp-cp-ep-pp-dp`), so that the stages of a pipeline are
close to each other:

    rank = t + tensor * (c + context * (p + pipeline * d))

The order follows the communication volume. Tensor-parallel ranks exchange activations several times per layer, so they
are neighbours and, since launchers number ranks by node, share a node's NVLink. Context-parallel ranks exchange keys
and values in every layer. Data-parallel ranks reduce gradients once per step. Pipeline ranks communicate least: one
activation per microbatch between neighbouring stages.

Example: 16 ranks, tensor 2, context 1, pipeline 2, hence data 4.

    stage 0:  [0 1] [2 3] [4 5] [6 7]          a bracket is one tensor-parallel group;
    stage 1:  [8 9] [10 11] [12 13] [14 15]    {0 2 4 6} is a data-parallel group, {0 8} a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megafp8.config.schema import RunConfig
from megafp8.config.stages import Stages, virtual_pipeline_size
from megafp8.errors import ConfigError

Groups = tuple[tuple[int, ...], ...]
"""A partition of all ranks into groups."""


@dataclass(frozen=True)
class RankCoordinates:
    """Position of a rank in the grid."""

    tensor: int
    context: int
    data: int
    pipeline: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.tensor, self.context, self.data, self.pipeline))


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the axes, and their order.

    Attributes:
        virtual: number of model chunks per pipeline rank; 1 without interleaving.
        data_is_last: whether the data axis varies slowest, and not the pipeline axis.
    """

    world_size: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: int = 1
    data_is_last: bool = False

    def __post_init__(self) -> None:
        ranks = self.tensor * self.context * self.pipeline
        if ranks < 1 or self.world_size < 1 or self.world_size % ranks:
            raise ValueError(
                f"world size {self.world_size} is not a multiple of tensor {self.tensor} x context {self.context} x "
                f"pipeline {self.pipeline} = {ranks}"
            )

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def sides(self) -> dict[str, int]:
        """Sizes of the axes, fastest first."""
        slow = ("pipeline", "data") if self.data_is_last else ("data", "pipeline")
        return {axis: getattr(self, axis) for axis in ("tensor", "context", *slow)}

    def stride(self, axis: str) -> int:
        """Difference of the ranks of neighbours on an axis."""
        stride = 1
        for name, side in self.sides.items():
            if name == axis:
                return stride
            stride *= side
        raise ValueError(f"no such axis: {axis}")

    def coordinates(self, rank: int) -> RankCoordinates:
        """Position of `rank`. Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        position = {}
        for axis, side in self.sides.items():
            rank, position[axis] = divmod(rank, side)
        return RankCoordinates(**position)

    # ---- groups ---------------------------------------------------------------------------------------------------

    def groups(self, *axes: str) -> Groups:
        """Groups of ranks that differ in the given axes only, each in ascending order.

        Args:
            axes: some of `tensor`, `context`, `data`, `pipeline`. Gradients are reduced over
                `groups("data", "context")`.
        """
        unknown = set(axes) - {"tensor", "context", "data", "pipeline"}
        if unknown:
            raise ValueError(f"no such axis: {', '.join(sorted(unknown))}")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            position = vars(self.coordinates(rank))
            key = tuple(here for axis, here in position.items() if axis not in axes)
            members.setdefault(key, []).append(rank)
        return tuple(map(tuple, members.values()))

    # ---- description ----------------------------------------------------------------------------------------------

    def describe_stages(self, stages: Stages) -> list[str]:
        """One line per pipeline stage."""
        length, stride = self.world_size // self.pipeline, self.stride("pipeline")
        lines = []
        for stage in range(self.pipeline):
            first, modules = stage * stride, self._modules_on(stage, stages)
            if self.data_is_last and self.data > 1:
                ranks = f"ranks {first}-{first + stride - 1} of every {stride * self.pipeline}"
            else:
                ranks = f"rank {first}" if length == 1 else f"ranks {first}-{first + length - 1}"
            lines.append(f"stage {stage}: {ranks}: {modules}")
        if length == 1:
            return lines
        neighbours = f"groups of {self.tensor} neighbouring ranks" if self.tensor > 1 else "single ranks"
        lines.append(f"within a stage: tensor-parallel {neighbours} x context {self.context} x data {self.data}")
        return lines

    def describe(self, stages: Stages) -> list[str]:
        """One line per tensor-parallel group, in the order of their ranks.

        Args:
            stages: the layers of each stage.
        """
        lines = []
        for ranks in self.groups("tensor"):
            here = self.coordinates(ranks[0])
            parts = [f"stage {here.pipeline}", f"data {here.data}"]
            if self.context > 1:
                parts.append(f"context {here.context}")
            lines.append(f"ranks {as_ranges(ranks)}: {', '.join(parts)}: {self._modules_on(here.pipeline, stages)}")
        return lines

    def _modules_on(self, stage: int, stages: Stages) -> str:
        layers = as_ranges([layer for chunk in stages[stage] for layer in chunk])
        modules = ["embedding"] * (stage == 0) + ([f"layers {layers}"] if layers else [])
        return " + ".join(modules + ["output"] * (stage == self.pipeline - 1)) or "no layers"


def model_parallel_size(config: RunConfig) -> int:
    """Ranks per model replica: tensor x pipeline x context."""
    sizes = config.parallel
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def data_parallel_size(config: RunConfig, world_size: int, *, with_context_parallel: bool = False) -> int:
    """Model replicas: world size / (tensor x pipeline x context).

    Args:
        with_context_parallel: count data- x context-parallel ranks instead, over which gradients are reduced. The
            functions of megatron-core's `parallel_state` have the same argument.

    Raises:
        ConfigError: the world size is not a multiple of the ranks per replica.
    """
    ranks = model_parallel_size(config)
    if world_size < 1 or ranks < 1 or world_size % ranks:
        raise ConfigError(
            f"world size {world_size} is not a multiple of tensor x pipeline x context parallel size "
            f"= {config.parallel.tensor_model_parallel_size} x {config.parallel.pipeline_model_parallel_size} x "
            f"{config.parallel.context_parallel_size} = {ranks}"
        )
    replicas = world_size // ranks
    return replicas * config.parallel.context_parallel_size if with_context_parallel else replicas


def layout_of(config: RunConfig, world_size: int) -> ParallelLayout:
    """The layout of a configuration. Raises ValueError if the world size does not divide."""
    parallel = config.parallel
    return ParallelLayout(
        world_size,
        tensor=parallel.tensor_model_parallel_size,
        context=parallel.context_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        virtual=virtual_pipeline_size(config.model, config.parallel) or 1,
        data_is_last=parallel.use_tp_pp_dp_mapping,
    )


def as_ranges(numbers: Sequence[int]) -> str:
    """(0, 1, 4, 5) -> "0-1, 4-5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
