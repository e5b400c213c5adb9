"""The ways to split the layers of a model over pipeline stages that the layout search tries.

Stages have as many layers where these divide. Otherwise the first and the last stage have fewer, which also balances
the embedding and the output layer: with --account-for-embedding-in-pipeline-split and
--account-for-loss-in-pipeline-split where one layer less on each is enough, else with
--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from megafp8.config.schema import RunConfig
from megafp8.config.settings import value_of

CHUNKS = "parallel.num_virtual_stages_per_pipeline_rank"
LAYERS_PER_CHUNK = "parallel.num_layers_per_virtual_pipeline_stage"
LAYOUT = "parallel.pipeline_model_parallel_layout"
FIRST, LAST = "parallel.decoder_first_pipeline_num_layers", "parallel.decoder_last_pipeline_num_layers"
EMBEDDING = "parallel.account_for_embedding_in_pipeline_split"
LOSS = "parallel.account_for_loss_in_pipeline_split"
UNEVEN = (LAYOUT, FIRST, LAST, EMBEDDING, LOSS)

Split = dict[str, Any]
"""Values of settings by name."""


def pipeline_sizes(num_layers: int) -> list[int]:
    """Pipeline-parallel sizes to try: divisors of the number of layers, and powers of two, which divide nodes."""
    powers = [2**exponent for exponent in range(1, num_layers.bit_length()) if 2 * 2**exponent <= num_layers]
    return sorted({*divisors(num_layers), *powers})


def stage_splits(config: RunConfig, pipeline: int, given: Collection[str]) -> list[Split]:
    """Settings of the stages and their model chunks for a pipeline-parallel size; most are not checked by the rules.

    Args:
        given: settings that are fixed to their value in `config`.
    """
    assert config.model.num_layers is not None
    is_given = any(name in given for name in UNEVEN)
    split = {} if is_given else uneven_ends(config.model.num_layers, pipeline)
    if CHUNKS in given or LAYERS_PER_CHUNK in given or LAYOUT in given or pipeline == 1:
        return [split]
    values = {name: value_of(config, name) for name in UNEVEN} | split
    sizes = divided_sizes(config.model.num_layers, pipeline, values)
    chunks = divisors(math.gcd(*sizes)) if min(sizes) > 0 else [1]
    return [split | {CHUNKS: None if number == 1 else number} for number in chunks]


def uneven_ends(num_layers: int, pipeline: int) -> Split:
    """Settings that make the first and the last stage shorter where the layers do not divide; empty where they do.

    They are also empty where the ends would have no layers, which the rules then report as layers that do not divide.
    """
    size = -(-num_layers // pipeline)
    missing = size * pipeline - num_layers
    if not missing or pipeline == 1:
        return {}
    if missing <= 2:
        return {LOSS: True} if missing == 1 else {EMBEDDING: True, LOSS: True}
    first, last = size - missing // 2, size - (missing - missing // 2)
    return {FIRST: first, LAST: last} if last >= 1 else {}


def divided_sizes(num_layers: int, pipeline: int, values: Split) -> list[int]:
    """Numbers of layers that model chunks must divide: those of the different stages."""
    ends = [values[name] for name in (FIRST, LAST) if values[name] is not None]
    if not ends:
        return [(num_layers + values[EMBEDDING] + values[LOSS]) // pipeline]
    num_others = pipeline - len(ends)
    return [*ends, *([(num_layers - sum(ends)) // num_others] if num_others else [])]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
