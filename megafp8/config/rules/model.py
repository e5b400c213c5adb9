"""Rules about the shape of the model and about parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config import derived, dimensions, topology
from megafp8.config.activations import is_gated
from megafp8.config.rules.base import (
    Rule,
    all_positive,
    flags_without_effect,
    has_shape,
    has_whole_replicas,
    no_effect_without,
)
from megafp8.config.schema import AUTO, RunConfig
from megafp8.recipes import registry
from megafp8.utils.integers import round_up


def shape_is_given(config: RunConfig, world_size: int) -> Iterator[str]:
    """The number of layers, hidden size and number of heads have no default."""
    model = config.model
    required = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
    }
    missing = [flag for flag, value in required.items() if value is None]
    if missing:
        yield f"{', '.join(missing)}: missing; give them, or choose a named shape with --model-preset"


def heads_divide_hidden_size(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without --kv-channels the width of a head is hidden size / heads."""
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_channels is not None or not all_positive(hidden, heads):
        return
    assert hidden is not None and heads is not None
    if hidden % heads:
        yield (
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: use --hidden-size "
            f"{round_up(hidden, heads)}, or set the channels per head with --kv-channels"
        )


def query_groups_divide_heads(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every key/value head serves equally many query heads."""
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if not model.group_query_attention:
        if groups != 1:
            yield no_effect_without(f"--num-query-groups {groups}", "--group-query-attention")
        return
    if all_positive(heads, groups) and heads is not None and heads % groups:
        divisor = math.gcd(heads, groups)
        yield (
            f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}: "
            f"use --num-query-groups {divisor}, or another divisor"
        )


def one_activation(config: RunConfig, world_size: int) -> Iterator[str]:
    """The MLP has one activation function, and settings of a gate have one."""
    model = config.model
    flags = {
        "--swiglu": model.swiglu,
        "--geglu": model.geglu,
        "--squared-relu": model.squared_relu,
        "--quick-geglu": model.quick_geglu,
        "--openai-gelu": model.openai_gelu,
    }
    given = [flag for flag, is_given in flags.items() if is_given]
    if len(given) > 1:
        yield f"{' and '.join(given)} are given together: keep one"
    of_gates = {
        f"--activation-func-clamp-value {model.activation_func_clamp_value}": (
            model.activation_func_clamp_value is not None
        ),
        f"--glu-linear-offset {model.glu_linear_offset:g}": model.glu_linear_offset != 0,
    }
    if not is_gated(model):
        yield from flags_without_effect(of_gates, "--swiglu or --quick-geglu")


def mlp_has_width(config: RunConfig, world_size: int) -> Iterator[str]:
    """The default width with SwiGLU is rounded down to a multiple of 64, which is 0 for very small models."""
    hidden = config.model.hidden_size
    if all_positive(hidden) and dimensions.ffn_hidden_size(config.model) == 0:
        yield f"--hidden-size {hidden} with --swiglu results in an MLP of hidden size 0: give --ffn-hidden-size"


def positions_reach_the_sequence(config: RunConfig, world_size: int) -> Iterator[str]:
    """Learned position embeddings have one row per position of the sequence."""
    model, seq = config.model, config.data.seq_length
    if model.position_embedding_type != "learned_absolute":
        return
    if model.max_position_embeddings is None:
        yield (
            "learned position embeddings need --max-position-embeddings (at least the sequence length); "
            "--position-embedding-type rope needs none"
        )
    elif seq is not None and model.max_position_embeddings < seq:
        yield (
            f"--max-position-embeddings {model.max_position_embeddings} is less than --seq-length {seq}: "
            f"use --max-position-embeddings {seq}, or a shorter sequence"
        )


def rotated_channels_are_pairs(config: RunConfig, world_size: int) -> Iterator[str]:
    """Rotary embeddings rotate pairs of channels."""
    model = config.model
    if model.position_embedding_type not in ("rope", "yarn") or not 0 < model.rotary_percent <= 1:
        return
    if model.multi_latent_attention:  # `rules.mla` has its own
        return
    if model.kv_channels is None and not all_positive(model.hidden_size, model.num_attention_heads):
        return
    channels = dimensions.kv_channels(model)
    rotated = int(channels * model.rotary_percent)
    if channels > 0 and (rotated < 2 or rotated % 2):
        yield (
            f"--rotary-percent {model.rotary_percent:g} of a head's {channels} channels is {rotated}, but rotary "
            "embedding needs an even number of at least 2: change --rotary-percent or --kv-channels"
        )


RULES: tuple[Rule, ...] = (
    shape_is_given,
    heads_divide_hidden_size,
    query_groups_divide_heads,
    one_activation,
    mlp_has_width,
    positions_reach_the_sequence,
    rotated_channels_are_pairs,
)


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
    for flag, size in parts.items():
        assert size is not None
        if size % tp:
            yield (
                f"{flag} {size} is not divisible by --tensor-model-parallel-size {tp} ({size} / {tp} = "
                f"{size / tp:.4g}): use {flag} {round_up(size, tp)}, or fewer tensor-parallel ranks"
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
    if groups % (tp * ranks):
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
    """Data- and context-parallel ranks exchange what --use-nccl-ub registers: buffers, which FSDP2 does not have."""
    parallel = config.parallel
    if parallel.use_nccl_ub and parallel.use_torch_fsdp2:
        yield (
            "--use-nccl-ub is not supported with --use-torch-fsdp2: it has no weight and gradient buffers; remove one "
            "of them"
        )
        return
    if not parallel.use_nccl_ub or not has_whole_replicas(config, world_size):
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
    if precision.precision_map:
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


PARALLEL_RULES: tuple[Rule, ...] = (
    world_size_divides,
    tensor_ranks_divide_the_model,
    padded_rows_are_divisible,
    sequence_divides,
    context_exchange_divides_heads,
    context_levels_multiply_to_the_group,
    parameter_gather_overlap_has_its_parts,
    registered_buffers_have_ranks,
    tensor_overlap_has_its_parts,
)
