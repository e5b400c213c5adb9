"""Rules about `--grad-reduce-in-fp8`: what it needs, and what it excludes."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived, sharding, topology
from megafp8.config.rules.base import has_whole_replicas
from megafp8.config.schema import RunConfig

FLAG = "--grad-reduce-in-fp8"
EXCLUDED_OVERRIDES = ("ddp.reduce_scatter_with_fp32_accumulation", "ddp.num_distributed_optimizer_instances")


def fp8_gradients_have_ranks(config: RunConfig, world_size: int) -> Iterator[str]:
    """Gradients are sent between data- and context-parallel ranks. A level leaves the reduction out without them."""
    if has_unused_reduction(config, world_size) and config.precision.fp8_lm_level is None:
        yield f"{FLAG} with one data-parallel rank has nothing to send: remove it, or use more ranks"


def has_unused_reduction(config: RunConfig, world_size: int) -> bool:
    """Whether gradients would be reduced in FP8, but only one rank has them."""
    if not config.precision.grad_reduce_in_fp8 or not has_whole_replicas(config, world_size):
        return False
    return topology.data_parallel_size(config, world_size, with_context_parallel=True) == 1


def fp8_gradients_exclude_other_reductions(config: RunConfig, world_size: int) -> Iterator[str]:
    """Reductions that do not go through the buckets of megatron-core's DDP, or that its fields replace."""
    if not config.precision.grad_reduce_in_fp8:
        return
    for entry in config.overrides:
        if entry.partition("=")[0] in EXCLUDED_OVERRIDES:
            yield f"{FLAG} with --override {entry}: both replace the reduction of gradients; remove one of them"


def fp8_gradients_within_nodes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Sums within a node in another dtype than FP8. That several nodes have ranks is checked when the run starts."""
    precision = config.precision
    intra_node = precision.grad_reduce_fp8_intra_node
    if not precision.grad_reduce_in_fp8 or intra_node == "fp8":
        return
    flag = f"--grad-reduce-fp8-intra-node {intra_node}"
    if config.parallel.shards_weights and config.parallel.num_replicas == 1:
        yield (
            f"{flag} with {sharding.FLAG} and one replica: all its ranks exchange codes; use "
            "--num-distributed-optimizer-instances N with a replica on each of N nodes, or remove one of the flags"
        )
    if intra_node == "fp32" and derived.grad_dtype(precision) == "bf16":
        yield f"{flag} with BF16 gradients (--grad-reduce-in-bf16): use --grad-reduce-fp8-intra-node bf16"


def fp8_gradient_errors_have_one_loss_scale(config: RunConfig, world_size: int) -> Iterator[str]:
    """The errors that are fed back are those of gradients at the loss scale of the last step."""
    if config.precision.grad_reduce_fp8_error_feedback and config.precision.fp16:
        yield (
            "--grad-reduce-fp8-error-feedback with --fp16: the loss scale changes, and the errors are those of the old "
            "one; remove one of them, or use --bf16"
        )
