"""Rules about parallelism: sizes that ranks divide, and what communication needs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config import derived, dimensions, precision_map, topology
from megafp8.config.rules.base import (
    all_positive,
    has_shape,
    has_whole_replicas,
    no_effect_without,
)
from megafp8.config.schema import AUTO, RunConfig
from megafp8.recipes import registry
from megafp8.utils.integers import fitting_size, round_up


def world_size_divides(config: RunConfig, world_size: int) -> Iterator[str]:
    """The world size is a multiple of tensor x pipeline x context, the ranks of one model replica."""
    parallel = config.parallel
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    if world_size < 1:
        yield f"world size {world_size} must be at least 1"
    elif all_positive(tp, pp, cp) and world_size % (tp * pp * cp):
        ranks = tp * pp * cp
        yield (
            f"world size {world_size} is not a multiple of tensor x pipeline x context parallel size = "
            f"{tp} x {pp} x {cp} = {ranks} ({world_size} / {ranks} = {world_size / ranks:.3g}): "
            f"start {round_up(world_size, ranks)} ranks, or change --tensor-model-parallel-size, "
            "--pipeline-model-parallel-size or --context-parallel-size"
        )


def tensor_ranks_divide_the_model(config: RunConfig, world_size: int) -> Iterator[str]:
    """Tensor-parallel ranks have equal numbers of heads, key/value heads and MLP channels."""
    if not has_shape(config) or config.parallel.tensor_model_parallel_size == 1:
        return
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    parts = {
        "--num-attention-heads": model.num_attention_heads,
        "--num-query-groups": dimensions.num_query_groups(model) if model.group_query_attention else tp,
        "--ffn-hidden-size": dimensions.ffn_hidden_size(model),
    }
    fitting = fitting_size(tp, *filter(None, parts.values()))
    for flag, size in parts.items():
        assert size is not None
        if size % tp:
            yield (
                f"{flag} {size} is not divisible by --tensor-model-parallel-size {tp} ({size} / {tp} = "
                f"{size / tp:.4g}): use --tensor-model-parallel-size {fitting}, or another model with {flag} "
                f"{round_up(size, tp)}"
            )


def padded_rows_are_divisible(config: RunConfig, world_size: int) -> Iterator[str]:
    """--padded-vocab-size has room for the vocabulary, and equal parts for the tensor-parallel ranks."""
    rows, tp = config.model.padded_vocab_size, config.parallel.tensor_model_parallel_size
    if not all_positive(rows, tp) or rows is None:
        return
    multiple = tp * derived.gemm_alignment(config.precision)
    if rows % multiple:
        yield (
            f"--padded-vocab-size {rows} is not a multiple of {multiple}, which --tensor-model-parallel-size {tp} and "
            f"the recipe's GEMMs need: use {round_up(rows, multiple)}"
        )
    num_ids = (config.model.vocab_size or 0) + (config.data.tokenizer_type == "NullTokenizer")
    if rows < num_ids:
        yield f"--padded-vocab-size {rows} is less than the {num_ids} ids of the vocabulary: use at least {num_ids}"


def sequence_divides(config: RunConfig, world_size: int) -> Iterator[str]:
    """The sequence divides into two slices per context-parallel rank, and one per sequence-parallel rank."""
    seq, parallel = config.data.seq_length, config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if not all_positive(seq, cp, tp) or seq is None:
        return
    if cp > 1 and seq % (2 * cp):
        yield (
            f"--seq-length {seq} is not a multiple of 2 x --context-parallel-size = 2 x {cp} = {2 * cp}: "
            f"use --seq-length {round_up(seq, 2 * cp)}"
        )
    elif parallel.sequence_parallel and (seq // cp) % tp:
        yield (
            f"--sequence-parallel: {seq} / {cp} = {seq // cp} tokens are not divisible by --tensor-model-parallel-size "
            f"{tp}: use --seq-length {round_up(seq, 2 * cp * tp if cp > 1 else tp)}"
        )


def context_exchange_divides_heads(config: RunConfig, world_size: int) -> Iterator[str]:
    """An all-to-all over context-parallel ranks distributes the heads of a rank over them."""
    parallel = config.parallel
    ranks, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if "a2a" not in parallel.cp_comm_type or not has_shape(config) or ranks == 1:
        return
    if parallel.cp_comm_type == "a2a+p2p":
        ranks = max((1, *parallel.hierarchical_context_parallel_sizes[:1]))
    groups = dimensions.num_query_groups(config.model)
    if not dimensions.divides_heads(config, ranks):
        yield (
            f"--cp-comm-type {parallel.cp_comm_type} distributes key-value heads over tensor x context ranks, but "
            f"{groups} heads are not divisible by {tp} x {ranks} = {tp * ranks}: use --cp-comm-type p2p, or change the "
            "parallel sizes"
        )


def context_levels_multiply_to_the_group(config: RunConfig, world_size: int) -> Iterator[str]:
    """--cp-comm-type a2a+p2p has two levels of groups; other types have none."""
    parallel, sizes = config.parallel, config.parallel.hierarchical_context_parallel_sizes
    cp, given = parallel.context_parallel_size, " ".join(map(str, sizes))
    if parallel.cp_comm_type != "a2a+p2p":
        if sizes:
            yield no_effect_without(f"--hierarchical-context-parallel-sizes {given}", "--cp-comm-type a2a+p2p")
    elif len(sizes) != 2 or not all_positive(*sizes) or math.prod(sizes) != cp:
        yield (
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes with two numbers, ranks of the "
            f"all-to-all and of the ring, whose product is --context-parallel-size {cp}, not {given or 'none'}: give "
            "them, or use --cp-comm-type p2p"
        )


def parameter_gather_overlap_has_its_parts(config: RunConfig, world_size: int) -> Iterator[str]:
    """--overlap-param-gather needs the distributed optimizer and the buckets of --overlap-grad-reduce."""
    parallel = config.parallel
    if not parallel.overlap_param_gather:
        return
    needed = {
        "--use-distributed-optimizer": parallel.use_distributed_optimizer,
        "--overlap-grad-reduce": parallel.overlap_grad_reduce,
    }
    missing = [flag for flag, given in needed.items() if given is False]
    if missing:
        yield f"--overlap-param-gather also needs {' and '.join(missing)}"


def registered_buffers_have_ranks(config: RunConfig, world_size: int) -> Iterator[str]:
    """Data- and context-parallel ranks exchange what --use-nccl-ub registers: buffers with complete gradients."""
    parallel = config.parallel
    if not parallel.use_nccl_ub or parallel.shards_weights or not has_whole_replicas(config, world_size):
        return
    if topology.data_parallel_size(config, world_size, with_context_parallel=True) == 1:
        yield (
            f"--use-nccl-ub with one data- x context-parallel rank of {world_size}: no other rank has the same weights "
            "and gradients; remove it, or use more ranks"
        )


def tensor_overlap_has_its_parts(config: RunConfig, world_size: int) -> Iterator[str]:
    """--tp-comm-overlap overlaps the collectives of sequence parallelism, and its user buffers have one shape."""
    parallel, precision = config.parallel, config.precision
    if not parallel.tp_comm_overlap:
        return
    if parallel.tensor_model_parallel_size == 1 or not parallel.sequence_parallel:
        yield "--tp-comm-overlap needs --tensor-model-parallel-size above 1 and --sequence-parallel"
    if precision.use_transformer_engine_op_fuser:
        yield (
            "--tp-comm-overlap with --use-transformer-engine-op-fuser: Transformer Engine's fused operations do not "
            "support the overlap; remove one"
        )
    if precision_map.with_all_phases(precision).precision_map:
        yield (
            "--tp-comm-overlap with a precision map: the user buffers support only one recipe; remove "
            "--tp-comm-overlap or the map"
        )
    if config.training.micro_batch_size == AUTO:
        yield (
            "--tp-comm-overlap with --micro-batch-size auto: the user buffers have a fixed size; give a number as "
            "--micro-batch-size"
        )
    recipe = derived.quantization_recipe(precision)
    if recipe is not None and not registry.get(recipe).supports_userbuffers:
        known = ", ".join(each.name for each in registry.recipes() if each.supports_userbuffers)
        yield (
            f"--tp-comm-overlap with {recipe}: Transformer Engine's user buffers support only {known}; remove "
            "--tp-comm-overlap"
        )
