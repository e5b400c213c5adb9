"""The layers of each pipeline stage, from the settings alone.

Without other settings every stage has as many layers. In the interleaved schedule each stage has several model chunks,
and a microbatch passes all stages once per chunk, which makes the pipeline bubble shorter (Narayanan et al. 2021,
section 2.2). Layers are numbered in the order in which a microbatch passes them: those of the first chunks of all
stages, then those of the second ones. With 8 layers, 2 stages and 2 chunks:

    stage 0:  layers 0 1 and 4 5        stage 1:  layers 2 3 and 6 7

The flags for stages of different sizes are Megatron-LM's:

    --decoder-first-pipeline-num-layers, --decoder-last-...     the other stages share the remaining layers
    --account-for-embedding-in-pipeline-split, --account-for-loss-...   one layer less on the first or the last chunk
    --pipeline-model-parallel-layout                            the contents of every chunk

A run takes its layers from megatron-core, and `models.layer_specs` checks that they are those of this module. Rules and
planner need them without torch.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Optional

from megafp8.config.schema import ModelConfig, ParallelConfig, RunConfig
from megafp8.errors import ConfigError

Stages = tuple[tuple[range, ...], ...]
"""Global indices of layers, from 0, by stage and chunk."""
EMBEDDING, LAYER, MULTI_TOKEN, OUTPUT = "E", "t", "m", "L"
MAX_REPEATS = 4096
"""Limit on a number in a layout string, because the string is expanded."""


# ---- number of model chunks ---------------------------------------------------------------------------------------


def virtual_pipeline_size(model: ModelConfig, parallel: ParallelConfig) -> Optional[int]:
    """Model chunks per pipeline rank of the interleaved schedule; None without it and for one chunk."""
    chunks = _num_chunks(model.num_layers or 0, parallel)
    return chunks if chunks > 1 else None


def microbatch_group_size(parallel: ParallelConfig) -> int:
    """Consecutive microbatches of a model chunk in the interleaved schedule."""
    return parallel.microbatch_group_size_per_virtual_pipeline_stage or parallel.pipeline_model_parallel_size


def split_layers(num_layers: int, parallel: ParallelConfig) -> int:
    """Layers to split over the stages, including the embedding and the output layer where they count as layers."""
    return num_layers + parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split


def _num_chunks(num_layers: int, parallel: ParallelConfig) -> int:
    if parallel.pipeline_model_parallel_layout is not None:
        return len(expand_layout(parallel.pipeline_model_parallel_layout)) // parallel.pipeline_model_parallel_size
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        per_stage = split_layers(num_layers, parallel) // parallel.pipeline_model_parallel_size
        return per_stage // parallel.num_layers_per_virtual_pipeline_stage
    return parallel.num_virtual_stages_per_pipeline_rank or 1


# ---- layout strings -----------------------------------------------------------------------------------------------


def expand_layout(text: str) -> list[str]:
    """The contents of each stage of a layout string: "Et*2|(t|)*2L" -> ["Ett", "t", "t", "L"].

    As in megatron-core, commas have no meaning, groups are expanded before single letters, and groups do not nest.

    Raises:
        ConfigError: a number in it is above `MAX_REPEATS`.
    """
    text = text.replace(",", "")
    if any(int(number) > MAX_REPEATS for number in re.findall(r"\*([0-9]{1,18})", text)):
        raise ConfigError(f"--pipeline-model-parallel-layout {text}: numbers may be at most {MAX_REPEATS}")
    for repeated in (r"\(([^)]+)\)\*([0-9]+)", r"(.)\*([0-9]+)"):
        text = re.sub(repeated, lambda match: match.group(1) * int(match.group(2)), text)
    return text.split("|")


# ---- layers -------------------------------------------------------------------------------------------------------


def stage_layers(config: RunConfig) -> Stages:
    """The layers of each stage, by model chunk. The settings violate no rule of `config.rules.pipeline`."""
    assert config.model.num_layers is not None
    return _stage_layers(config.model.num_layers, config.parallel)


def kinds_of_stages(config: RunConfig) -> dict[int, int]:
    """One stage of each kind, and the number of stages of its kind, in the order of the stages.

    The first and the last stage are kinds of their own. Inner stages with as many layers are one kind, which the
    first of them stands for: it has the most microbatches in flight.
    """
    last = config.parallel.pipeline_model_parallel_size - 1
    first_of_size: dict[int, int] = {}
    counts = {0: 1}
    for stage, chunks in enumerate(stage_layers(config)[1:last], 1):
        kind = first_of_size.setdefault(sum(map(len, chunks)), stage)
        counts[kind] = counts.get(kind, 0) + 1
    return counts | {last: 1}


@functools.lru_cache(maxsize=1024)
def _stage_layers(num_layers: int, parallel: ParallelConfig) -> Stages:
    stages, chunks = parallel.pipeline_model_parallel_size, _num_chunks(num_layers, parallel)
    chunks = max(1, chunks)
    sizes = _chunk_sizes(num_layers, parallel, chunks)
    ends = list(itertools.accumulate(sizes, initial=0))
    return tuple(
        tuple(range(*ends[chunk * stages + stage :][:2]) for chunk in range(chunks)) for stage in range(stages)
    )


def _chunk_sizes(num_layers: int, parallel: ParallelConfig, chunks: int) -> Sequence[int]:
    """Number of layers of every chunk, in the order in which a microbatch passes them."""
    stages = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if parallel.pipeline_model_parallel_layout is not None:
        return [contents.count(LAYER) for contents in expand_layout(parallel.pipeline_model_parallel_layout)]
    if first is not None or last is not None:
        num_others = stages - (first is not None) - (last is not None)
        middle = (num_layers - (first or 0) - (last or 0)) // max(1, num_others)
        per_stage = [middle] * stages
        per_stage[0] = middle if first is None else first
        per_stage[-1] = middle if last is None else last
        return [size // chunks for size in per_stage] * chunks
    sizes = [split_layers(num_layers, parallel) // stages // chunks] * (stages * chunks)
    sizes[0] -= parallel.account_for_embedding_in_pipeline_split
    sizes[-1] -= parallel.account_for_loss_in_pipeline_split
    return sizes
