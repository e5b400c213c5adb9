"""Rules about the shape of the model and about parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.rules.base import (
    Rule,
    all_positive,
    flags_without_effect,
    has_shape,
    microbatches,
    no_effect_without,
)
from megafp8.config.schema import AUTO, ModelConfig, RunConfig
from megafp8.recipes import registry


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
            f"{derived.round_up(hidden, heads)}, or set the channels per head with --kv-channels"
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
    """The MLP has one activation function."""
    if config.model.swiglu and config.model.squared_relu:
        yield "--swiglu and --squared-relu are both given: keep one"


def mlp_has_width(config: RunConfig, world_size: int) -> Iterator[str]:
    """The default width with SwiGLU is rounded down to a multiple of 64, which is 0 for very small models."""
    hidden = config.model.hidden_size
    if all_positive(hidden) and derived.ffn_hidden_size(config.model) == 0:
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


def rotary_settings_need_rope(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of rotary embeddings have no effect without them."""
    model, default = config.model, ModelConfig()
    if model.position_embedding_type != "rope":
        is_given = {
            "--rotary-base": model.rotary_base != default.rotary_base,
            "--rotary-percent": model.rotary_percent != default.rotary_percent,
            "--rotary-interleaved": model.rotary_interleaved,
            "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
            "--use-rope-scaling": model.use_rope_scaling,
        }
        yield from flags_without_effect(is_given, "--position-embedding-type rope")
    if model.rope_scaling_factor != default.rope_scaling_factor and not model.use_rope_scaling:
        yield no_effect_without(f"--rope-scaling-factor {model.rope_scaling_factor:g}", "--use-rope-scaling")


def rotated_channels_are_pairs(config: RunConfig, world_size: int) -> Iterator[str]:
    """Rotary embeddings rotate pairs of channels."""
    model = config.model
    if model.position_embedding_type != "rope" or not all_positive(model.rotary_percent):
        return
    if model.kv_channels is None and not all_positive(model.hidden_size, model.num_attention_heads):
        return
    channels = derived.kv_channels(model)
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
    rotary_settings_need_rope,
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
            f"start {derived.round_up(world_size, ranks)} ranks, or change --tensor-model-parallel-size, "
            "--pipeline-model-parallel-size or --context-parallel-size"
        )


def tensor_ranks_divide_the_model(config: RunConfig, world_size: int) -> Iterator[str]:
    """Tensor-parallel ranks have equal numbers of heads, key/value heads and MLP channels."""
    if not has_shape(config) or config.parallel.tensor_model_parallel_size == 1:
        return
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    parts = {
        "--num-attention-heads": model.num_attention_heads,
        "--num-query-groups": derived.num_query_groups(model) if model.group_query_attention else tp,
        "--ffn-hidden-size": derived.ffn_hidden_size(model),
    }
    for flag, size in parts.items():
        assert size is not None
        if size % tp:
            yield (
                f"{flag} {size} is not divisible by --tensor-model-parallel-size {tp} ({size} / {tp} = "
                f"{size / tp:.4g}): use {flag} {derived.round_up(size, tp)}, or fewer tensor-parallel ranks"
            )


def stages_divide_the_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """Pipeline stages have equal numbers of layers."""
    layers, pp = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    if all_positive(layers, pp) and layers is not None and layers % pp:
        yield (
            f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {pp} ({layers} / {pp} = "
            f"{layers / pp:.4g}): use {derived.round_up(layers, pp)} layers, or another number of stages"
        )


def one_spelling_of_virtual_stages(config: RunConfig, world_size: int) -> Iterator[str]:
    """The interleaved schedule is given by layers per chunk or by chunks per rank."""
    parallel = config.parallel
    per_stage, chunks = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    if per_stage is not None and chunks is not None:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_stage} and --num-virtual-stages-per-pipeline-rank {chunks} "
            "are two ways to set the same value: keep one"
        )


def virtual_stages_divide_the_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """The chunks of the interleaved schedule have equal numbers of layers."""
    layers, parallel = config.model.num_layers, config.parallel
    pp = parallel.pipeline_model_parallel_size
    if not all_positive(layers, pp) or layers is None or layers % pp:
        return
    for flag, divisor in (
        ("--num-layers-per-virtual-pipeline-stage", parallel.num_layers_per_virtual_pipeline_stage),
        ("--num-virtual-stages-per-pipeline-rank", parallel.num_virtual_stages_per_pipeline_rank),
    ):
        if divisor is not None and divisor > 0 and (layers // pp) % divisor:
            yield (
                f"{flag} {divisor} does not divide the {layers} / {pp} = {layers // pp} layers of a pipeline rank: use "
                f"a divisor of {layers // pp}"
            )


def interleaving_needs_a_pipeline(config: RunConfig, world_size: int) -> Iterator[str]:
    """The interleaved schedule needs at least two stages, and a number of microbatches that they divide."""
    parallel = config.parallel
    requested = (parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank)
    if not any(all_positive(value) for value in requested):
        return
    pp = parallel.pipeline_model_parallel_size
    if pp < 2:
        yield (
            f"virtual pipeline stages need --pipeline-model-parallel-size of at least 2, not {pp}: remove "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank, or add stages"
        )
        return
    count = microbatches(config, world_size)
    if count is not None and count % pp:
        micro, dp = config.training.micro_batch_size, derived.data_parallel_size(config, world_size)
        assert micro is not None
        yield (
            "the interleaved schedule needs a number of microbatches per step that is a multiple of "
            f"--pipeline-model-parallel-size {pp}, not {derived.global_batch_size(config, world_size)} / ({micro} x "
            f"{dp}) = {count}: use --global-batch-size {derived.round_up(count, pp) * micro * dp}"
        )


def sequence_divides(config: RunConfig, world_size: int) -> Iterator[str]:
    """The sequence divides into two slices per context-parallel rank, and one per sequence-parallel rank."""
    seq, parallel = config.data.seq_length, config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if not all_positive(seq, cp, tp) or seq is None:
        return
    if cp > 1 and seq % (2 * cp):
        yield (
            f"--seq-length {seq} is not a multiple of 2 x --context-parallel-size = 2 x {cp} = {2 * cp}: "
            f"use --seq-length {derived.round_up(seq, 2 * cp)}"
        )
    elif parallel.sequence_parallel and (seq // cp) % tp:
        yield (
            f"--sequence-parallel: {seq} / {cp} = {seq // cp} tokens are not divisible by --tensor-model-parallel-size "
            f"{tp}: use --seq-length {derived.round_up(seq, 2 * cp * tp if cp > 1 else tp)}"
        )


def context_exchange_divides_heads(config: RunConfig, world_size: int) -> Iterator[str]:
    """--cp-comm-type a2a distributes the heads of a rank over the context-parallel ranks."""
    parallel = config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if parallel.cp_comm_type != "a2a" or not has_shape(config) or cp == 1:
        return
    groups = derived.num_query_groups(config.model)
    if groups % (tp * cp):
        yield (
            f"--cp-comm-type a2a distributes key-value heads over tensor x context ranks, but {groups} heads are not "
            f"divisible by {tp} x {cp} = {tp * cp}: use --cp-comm-type p2p, or change the parallel sizes"
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


def tensor_overlap_has_its_parts(config: RunConfig, world_size: int) -> Iterator[str]:
    """--tp-comm-overlap overlaps the collectives of sequence parallelism, and its user buffers have one shape."""
    parallel, precision = config.parallel, config.precision
    if not parallel.tp_comm_overlap:
        backend = parallel.tp_comm_bootstrap_backend
        is_given = {
            "--tp-comm-overlap-cfg": parallel.tp_comm_overlap_cfg is not None,
            "--disable-tp-comm-overlap-ag": not parallel.tp_comm_overlap_ag,
            "--disable-tp-comm-overlap-rs": not parallel.tp_comm_overlap_rs,
            "--tp-comm-overlap-rs-dgrad": parallel.tp_comm_overlap_rs_dgrad,
            "--disable-tp-comm-bulk-dgrad": not parallel.tp_comm_bulk_dgrad,
            "--disable-tp-comm-bulk-wgrad": not parallel.tp_comm_bulk_wgrad,
            f"--tp-comm-bootstrap-backend {backend}": backend != "nccl",
        }
        yield from flags_without_effect(is_given, "--tp-comm-overlap")
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
    stages_divide_the_layers,
    one_spelling_of_virtual_stages,
    virtual_stages_divide_the_layers,
    interleaving_needs_a_pipeline,
    sequence_divides,
    context_exchange_divides_heads,
    parameter_gather_overlap_has_its_parts,
    tensor_overlap_has_its_parts,
)
