"""The GEMMs of one transformer layer on one rank, and whether their dimensions suit the FP8 recipe.

A linear of `out_features` x `in_features` sees three GEMMs (fprop, dgrad, wgrad); between them every dimension is once
the one that lies contiguous in memory. cuBLAS reads FP8 operands in units of 16 bytes along it, MXFP8 has blocks of 32,
NVFP4 of 16, so all three of out, in and rows must be multiples (`derived.gemm_alignment`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megafp8.config import derived, precision_map
from megafp8.config.precision_map import LINEARS, OUTPUT_LAYER
from megafp8.config.schema import RunConfig
from megafp8.recipes import registry


@dataclass(frozen=True)
class GemmDimensions:
    """One linear as one rank computes it, for one microbatch."""

    name: str
    out_features: int
    in_features: int
    rows: int
    """Tokens in the quantized input: all that the rank holds before any gather."""


def rows_per_rank(config: RunConfig) -> int:
    """Tokens of one microbatch whose activations one rank quantizes.

    sequence / context ranks x micro batch; with sequence parallelism the tensor-parallel ranks share them too.
    """
    assert config.data.seq_length is not None and config.training.micro_batch_size is not None
    return config.data.seq_length * config.training.micro_batch_size // _sequence_shards(config)


def gemm_dimensions(config: RunConfig) -> list[GemmDimensions]:
    """The four linears of a transformer layer after tensor-parallel splitting, in the order of the forward pass.

    The output layer, which only a precision map quantizes, is not among them: its inputs and rows are those of
    linear_qkv, and the vocabulary is padded to what it needs.
    """
    model, ranks = config.model, config.parallel.tensor_model_parallel_size
    assert model.hidden_size is not None
    hidden, rows = model.hidden_size, rows_per_rank(config)
    query, kv = derived.query_projection_size(model), derived.kv_projection_size(model)
    ffn = derived.ffn_hidden_size(model)
    gathered = rows * ranks if config.parallel.sequence_parallel else rows
    return [
        GemmDimensions("linear_qkv", (query + 2 * kv) // ranks, hidden, rows),
        GemmDimensions("linear_proj", hidden, query // ranks, gathered),
        GemmDimensions("linear_fc1", (2 if model.swiglu else 1) * ffn // ranks, hidden, rows),
        GemmDimensions("linear_fc2", hidden, ffn // ranks, gathered),
    ]


def misfits(config: RunConfig) -> Iterator[str]:
    """A problem for each setting that gives a GEMM a dimension which the recipe cannot take, with the padded value.

    Expects a shape that is otherwise complete and divisible.
    """
    align, rule = _need(config, (*LINEARS, OUTPUT_LAYER))
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    assert model.hidden_size is not None and model.num_attention_heads is not None
    qkv, proj, _, fc2 = gemm_dimensions(config)
    if model.hidden_size % align:
        padded = _round_up(model.hidden_size, math.lcm(align, model.num_attention_heads))
        yield (
            f"hidden size {model.hidden_size} is a dimension of every linear: {rule}; "
            f"use --hidden-size {padded}"
        )
    align, rule = _need(config, LINEARS[:2])
    if qkv.out_features % align or proj.in_features % align:
        yield (
            f"linear_qkv gives {qkv.out_features} and linear_proj takes {proj.in_features} channels per rank "
            f"(heads of {derived.kv_channels(model)}, tensor-parallel size {tp}): {rule}; "
            f"use --kv-channels {_round_up(derived.kv_channels(model), align)}"
        )
    align, rule = _need(config, LINEARS[2:])
    if fc2.in_features % align:
        ffn = derived.ffn_hidden_size(model)
        yield (
            f"linear_fc2 takes {ffn} / {tp} = {fc2.in_features} channels per rank: {rule}; "
            f"use --ffn-hidden-size {_round_up(ffn, align * tp)}"
        )
    align, rule = _need(config, (*LINEARS, OUTPUT_LAYER))
    if qkv.rows % align:
        yield _rows_misfit(config, align, rule)


def _need(config: RunConfig, linears: tuple[str, ...]) -> tuple[int, str]:
    """What dimensions of these linears, in whichever layers, must be a multiple of; and who says so."""
    recipes = precision_map.recipes_of(config.model, config.precision, linears)
    if not recipes:
        return 1, ""
    strictest = max(recipes, key=lambda recipe: registry.get(recipe).gemm_alignment)
    align = registry.get(strictest).gemm_alignment
    return align, f"{precision_map.asked_by(config.precision, strictest)} needs multiples of {align}"


def _rows_misfit(config: RunConfig, align: int, rule: str) -> str:
    micro, seq = config.training.micro_batch_size, config.data.seq_length
    assert micro is not None and seq is not None
    shards = _sequence_shards(config)
    unit = align * shards
    padded_seq = _round_up(seq, unit // math.gcd(unit, micro))
    padded_micro = _round_up(micro, unit // math.gcd(unit, seq))
    return (
        f"a microbatch gives each rank {micro} x {seq} / {shards} = {rows_per_rank(config)} rows: {rule}; "
        f"use --seq-length {padded_seq} or --micro-batch-size {padded_micro}"
    )


def _sequence_shards(config: RunConfig) -> int:
    parallel = config.parallel
    shared = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return parallel.context_parallel_size * shared


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
