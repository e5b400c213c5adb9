"""Parallel layout: ranks, groups and layers of each axis, computed without torch and without process groups.

Rank order
----------
W ranks form a grid with four axes, W = tensor x context x data x pipeline. The tensor axis varies fastest and the
pipeline axis slowest, which is megatron-core's order `tp-cp-ep-dp-pp` with one expert-parallel rank:

    rank = t + tensor * (c + context * (d + data * p))

The order follows the communication volume. Tensor-parallel ranks exchange activations several times per layer, so they
are neighbours and, since launchers number ranks by node, share a node's NVLink. Context-parallel ranks exchange keys
and values in every layer. Data-parallel ranks reduce gradients once per step. Pipeline ranks communicate least: one
activation per microbatch between neighbouring stages.

Example: 16 ranks, tensor 2, context 1, pipeline 2, hence data 4.

    stage 0:  [0 1] [2 3] [4 5] [6 7]          a bracket is one tensor-parallel group;
    stage 1:  [8 9] [10 11] [12 13] [14 15]    {0 2 4 6} is a data-parallel group, {0 8} a pipeline.

Layers
------
Without virtual stages, stage p has the p-th block of L/pipeline consecutive layers. In the interleaved schedule each
rank has `virtual` shorter chunks: chunk v of stage p starts at layer v*(L/virtual) + p*(L/(virtual*pipeline)). A
microbatch then passes every stage `virtual` times, once per chunk, and the pipeline bubble shrinks by that factor
(Narayanan et al. 2021, section 2.2). With 8 layers, 2 stages and 2 chunks:

    stage 0:  layers 0 1 and 4 5        stage 1:  layers 2 3 and 6 7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.config import derived
from megafp8.config.schema import RunConfig

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
    """Sizes of the axes. `virtual` is the number of chunks per pipeline rank; None without interleaving."""

    world_size: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: Optional[int] = None

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
    def sides(self) -> tuple[int, int, int, int]:
        """(tensor, context, data, pipeline), fastest first."""
        return (self.tensor, self.context, self.data, self.pipeline)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Position of `rank`. Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        position = []
        for side in self.sides:
            rank, here = divmod(rank, side)
            position.append(here)
        return RankCoordinates(*position)

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

    # ---- layers ---------------------------------------------------------------------------------------------------

    @property
    def chunks_per_rank(self) -> int:
        """Model chunks on each pipeline rank; 1 without interleaving."""
        return self.virtual or 1

    def layers_of(self, pipeline_rank: int, virtual_rank: int, num_layers: int) -> range:
        """Global indices, from 0, of the layers in one chunk.

        Args:
            pipeline_rank: stage, from 0.
            virtual_rank: chunk of that stage, from 0; 0 without interleaving.
            num_layers: layers of the model; a multiple of pipeline x chunks.
        """
        chunks = self.chunks_per_rank
        if not (0 <= pipeline_rank < self.pipeline and 0 <= virtual_rank < chunks):
            raise ValueError(f"no chunk {virtual_rank} of stage {pipeline_rank} in {self}")
        if num_layers % (self.pipeline * chunks):
            raise ValueError(f"{num_layers} layers do not divide over {self.pipeline} stages x {chunks} chunks")
        length = num_layers // (self.pipeline * chunks)
        start = virtual_rank * (num_layers // chunks) + pipeline_rank * length
        return range(start, start + length)

    def layers_on(self, pipeline_rank: int, num_layers: int) -> tuple[int, ...]:
        """Global indices of all layers of one stage, over its chunks."""
        chunks = (self.layers_of(pipeline_rank, chunk, num_layers) for chunk in range(self.chunks_per_rank))
        return tuple(layer for chunk in chunks for layer in chunk)

    def describe_stages(self, num_layers: int) -> list[str]:
        """One line per pipeline stage, for world sizes too large to list."""
        ranks_per_stage, lines = self.world_size // self.pipeline, []
        for stage in range(self.pipeline):
            first = stage * ranks_per_stage
            modules = self._modules_on(stage, num_layers)
            lines.append(f"stage {stage}: ranks {first}-{first + ranks_per_stage - 1}: {modules}")
        neighbours = f"groups of {self.tensor} neighbouring ranks" if self.tensor > 1 else "single ranks"
        lines.append(f"within a stage: tensor-parallel {neighbours} x context {self.context} x data {self.data}")
        return lines

    def describe(self, num_layers: int) -> list[str]:
        """One line per tensor-parallel group, in the order of stages."""
        lines = []
        for ranks in self.groups("tensor"):
            here = self.coordinates(ranks[0])
            parts = [f"stage {here.pipeline}", f"data {here.data}"]
            if self.context > 1:
                parts.append(f"context {here.context}")
            lines.append(f"ranks {as_ranges(ranks)}: {', '.join(parts)}: {self._modules_on(here.pipeline, num_layers)}")
        return lines

    def _modules_on(self, stage: int, num_layers: int) -> str:
        modules = ["embedding"] * (stage == 0) + [f"layers {as_ranges(self.layers_on(stage, num_layers))}"]
        return " + ".join(modules + ["output"] * (stage == self.pipeline - 1))


def layout_of(config: RunConfig, world_size: int) -> ParallelLayout:
    """The layout of a configuration. Raises ValueError if the world size does not divide."""
    parallel = config.parallel
    return ParallelLayout(
        world_size,
        tensor=parallel.tensor_model_parallel_size,
        context=parallel.context_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        virtual=derived.virtual_pipeline_size(config),
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
