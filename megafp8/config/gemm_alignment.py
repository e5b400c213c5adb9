"""Which dimensions of GEMMs a recipe cannot quantize, with the sizes to use instead."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config import dimensions, latent_attention, precision_map
from megafp8.config.model_shapes import GemmDimensions, gemm_dimensions, rows_per_rank, sequence_shards
from megafp8.config.precision_map import MLP_LINEARS, OUTPUT_LAYER
from megafp8.config.schema import RunConfig
from megafp8.recipes import registry
from megafp8.utils.integers import round_up


def gemm_alignment_problems(config: RunConfig) -> Iterator[str]:
    """Problems with GEMM dimensions that are no multiples of the recipe's alignment, with the padded value.

    The shape must be complete and divisible by the parallel sizes.
    """
    all_linears = (*precision_map.ATTENTION_LINEARS, *MLP_LINEARS, OUTPUT_LAYER)
    align, rule = _required_alignment(config, all_linears)
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    assert model.hidden_size is not None and model.num_attention_heads is not None
    *attention, _, fc2 = gemm_dimensions(config)
    if model.hidden_size % align:
        padded = round_up(model.hidden_size, math.lcm(align, model.num_attention_heads))
        yield f"hidden size {model.hidden_size} is a dimension of every linear: {rule}; use --hidden-size {padded}"
    align, rule = _required_alignment(config, precision_map.ATTENTION_LINEARS)
    if latent_attention.is_latent(model):
        yield from _latent_alignment_problems(attention, align, rule)
    elif (qkv := attention[0]).out_features % align or attention[-1].in_features % align:
        proj = attention[-1]
        yield (
            f"linear_qkv has {qkv.out_features} output and linear_proj {proj.in_features} input channels per rank "
            f"(heads of {dimensions.kv_channels(model)}, tensor-parallel size {tp}): {rule}; use --kv-channels "
            f"{round_up(dimensions.kv_channels(model), align)}"
        )
    align, rule = _required_alignment(config, MLP_LINEARS)
    if fc2.in_features % align:
        ffn = dimensions.ffn_hidden_size(model)
        yield (
            f"linear_fc2 has {ffn} / {tp} = {fc2.in_features} input channels per rank: {rule}; use --ffn-hidden-size "
            f"{round_up(ffn, align * tp)}"
        )
    align, rule = _required_alignment(config, all_linears)
    if rows_per_rank(config) % align:
        yield _rows_problem(config, align, rule)


def _latent_alignment_problems(linears: list[GemmDimensions], align: int, rule: str) -> Iterator[str]:
    for linear in linears:
        if linear.out_features % align or linear.in_features % align:
            yield (
                f"{linear.name} has {linear.out_features} output and {linear.in_features} input channels per rank: "
                f"{rule}; change the sizes of --multi-latent-attention, or the tensor-parallel size"
            )


def _required_alignment(config: RunConfig, linears: tuple[str, ...]) -> tuple[int, str]:
    """The alignment of these linears in all layers, and a text that names the recipe that needs it."""
    recipes = precision_map.recipes_of(config.model, config.precision, linears)
    if not recipes:
        return 1, ""
    strictest = max(recipes, key=lambda recipe: registry.get(recipe).gemm_alignment)
    align = registry.get(strictest).gemm_alignment
    return align, f"{precision_map.recipe_source(config.precision, strictest)} needs multiples of {align}"


def _rows_problem(config: RunConfig, align: int, rule: str) -> str:
    micro, seq = config.training.micro_batch_size, config.data.seq_length
    assert micro is not None and seq is not None
    shards = sequence_shards(config)
    unit = align * shards
    padded_seq = round_up(seq, unit // math.gcd(unit, micro))
    padded_micro = round_up(micro, unit // math.gcd(unit, seq))
    return (
        f"a microbatch has {micro} x {seq} / {shards} = {rows_per_rank(config)} rows per rank: {rule}; use "
        f"--seq-length {padded_seq} or --micro-batch-size {padded_micro}"
    )
