"""Rules about `--use-torch-fsdp2`: what it excludes, and sizes that its ranks can divide."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from megafp8.config import dimensions, sharding, topology
from megafp8.config.activations import is_gated
from megafp8.config.features import given_flags
from megafp8.config.rules.base import excluded, has_shape, has_whole_replicas, not_supported
from megafp8.config.schema import RunConfig

EXCLUDED = MappingProxyType(
    {
        # megatron-core asserts that its precision-aware optimizer is distributed.
        "--use-precision-aware-optimizer": (
            "megatron-core has optimizer state in FP8 and FP16 only in its distributed optimizer, and the optimizer of "
            "FSDP2 keeps FP32 master weights and moments of its rows"
        ),
        "--use-distributed-optimizer": "it shards the optimizer state itself",
        "--overlap-grad-reduce": "its reductions always overlap",
        "--overlap-param-gather": "its gathers always overlap",
        "--use-nccl-ub": "it has no weight and gradient buffers",
        "--pipeline-model-parallel-size VALUE": (
            "weights would be gathered for every microbatch of every stage; use tensor parallelism"
        ),
        "--num-experts VALUE": "experts have data-parallel groups of their own",
        "--use-transformer-engine-op-fuser with --fp8-param-gather": "fused operations quantize weights themselves",
        "--fp8-log-interval VALUE": "quantization statistics read complete weights and gradients",
        "--check-weight-hash-across-dp-replicas-interval": "there are no replicas to compare",
    }
)
# Features that do not support FSDP2, and those for which it is to be replaced.
EXCLUDED_BY = MappingProxyType(
    {
        "--qk-clip": "ranks have rows of a weight, and which rows is not tracked",
    }
)
REPLACED_FOR = MappingProxyType(
    {
        "--multi-latent-attention": "not tested; use --use-distributed-optimizer",
        "--mtp-num-layers VALUE": "use --use-distributed-optimizer",
    }
)


def fsdp_excludes_other_settings(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of other gradient and parameter buffers, and of what reads complete weights or gradients."""
    if not config.parallel.shards_weights:
        return
    yield from not_supported(config, sharding.FLAG, EXCLUDED)
    for feature, flag in given_flags(config, EXCLUDED_BY).items():
        yield from not_supported(config, flag, {sharding.FLAG: EXCLUDED_BY[feature]})
    for feature, flag in given_flags(config, REPLACED_FOR).items():
        yield from excluded(config, flag, {sharding.FLAG: REPLACED_FOR[feature]})


def fsdp_replicas_have_ranks(config: RunConfig, world_size: int) -> Iterator[str]:
    """Hybrid sharding: the data-parallel ranks are divided into replicas of several ranks."""
    replicas = config.parallel.num_replicas
    flag = f"--num-distributed-optimizer-instances {replicas}"
    if replicas > 1 and has_whole_replicas(config, world_size):
        ranks = topology.data_parallel_size(config, world_size, with_context_parallel=True)
        if ranks % replicas or ranks == replicas:
            yield (
                f"{flag}: {ranks} data- x context-parallel ranks are not {replicas} replicas of the same number of "
                "ranks, two or more: use another number of replicas"
            )


def fsdp_ranks_divide_the_rows(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every rank keeps the same number of rows of every parameter, which gives them a place in checkpoints."""
    model, parallel = config.model, config.parallel
    if not parallel.shards_weights or not has_shape(config) or not has_whole_replicas(config, world_size):
        return
    tensor = parallel.tensor_model_parallel_size
    ranks = topology.data_parallel_size(config, world_size, with_context_parallel=True)
    ranks //= max(1, parallel.num_replicas)
    if ranks <= 1:
        if parallel.num_replicas == 1:
            yield f"{sharding.FLAG} with one data-parallel rank has nothing to shard: remove it, or use more ranks"
        return
    assert model.hidden_size is not None
    queries, keys = dimensions.query_projection_size(model), dimensions.kv_projection_size(model)
    ffn = dimensions.ffn_hidden_size(model) * (2 if is_gated(model) else 1)
    rows = {
        "hidden size": model.hidden_size,
        "query, key and value rows per tensor-parallel rank": (queries + 2 * keys) // tensor,
        "MLP rows per tensor-parallel rank": ffn // tensor,
    }
    if model.padded_vocab_size:
        rows["--padded-vocab-size per tensor-parallel rank"] = model.padded_vocab_size // tensor
    else:
        rows["vocabulary multiple (--make-vocab-size-divisible-by)"] = dimensions.vocab_multiple(config) // tensor
    if model.position_embedding_type == "learned_absolute":
        rows["positions"] = model.max_position_embeddings or config.data.seq_length or ranks
    if model.qk_layernorm:
        widths = (
            (queries // tensor, keys // tensor) if model.qk_layernorm_across_heads else (dimensions.kv_channels(model),)
        )
        rows |= {f"weights of a query or key norm ({width})": width for width in widths}
    if model.softmax_type == "learnable" and model.num_attention_heads:
        rows["attention heads per tensor-parallel rank"] = model.num_attention_heads // tensor
    uneven = [f"{name} {size}" for name, size in rows.items() if size % ranks]
    if uneven:
        yield (
            f"{sharding.FLAG}: {ranks} data- x context-parallel ranks do not divide {', '.join(uneven)}: use fewer of "
            "these ranks, or other sizes"
        )
    if is_gated(model) and ranks % 2:
        yield (
            f"{sharding.FLAG}: with a gated MLP the number of data- x context-parallel ranks must be even, not "
            f"{ranks}, so that a rank has gate rows or up rows"
        )
