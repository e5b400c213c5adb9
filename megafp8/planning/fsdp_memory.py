"""Memory of `--use-torch-fsdp2`: sharded weights and gradients, and what is complete for a time.

Embedding, output layer and final norm are complete during forward and backward. Of the layers two are complete, the one
that computes and the next one; all of them with `--torch-fsdp2-no-reshard-after-forward`. The gradients of a layer, and
of embedding and output layer, are complete until they are reduced: in the dtype of the weights, and in that of the
reduction. A rank that gathers codes has its rows in high precision too. Derived from the code of FSDP2, not measured.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megafp8.config import topology
from megafp8.config.schema import RunConfig

NUM_GATHERED_LAYERS = 2
ERROR_BYTES = 4  # of a parameter, in FP32
MESSAGE_BYTES = 6  # of a row's element, as codes and sums between replicas, for all layers at once
ROW_BYTES = 2  # of a parameter, in BF16 or FP16


def num_shards(config: RunConfig, world_size: int) -> int:
    """Ranks over which optimizer state is sharded, and with FSDP2 weights and gradients: those of a replica."""
    ranks = topology.data_parallel_size(config, world_size, with_context_parallel=True)
    return ranks // config.parallel.num_distributed_optimizer_instances if config.parallel.use_torch_fsdp2 else ranks


def shard(config: RunConfig, world_size: int, estimate: Any, layer_parameters: int) -> Any:
    """Return an estimate (`MemoryEstimate`) with weights and gradients sharded; unchanged without FSDP2.

    Args:
        estimate: with complete weights and gradients, and sharded optimizer state.
        layer_parameters: those of its parameters that are in the linears of layers.
    """
    parallel = config.parallel
    if not parallel.use_torch_fsdp2:
        return estimate
    assert config.model.num_layers is not None
    ranks = num_shards(config, world_size)
    layer = layer_parameters / config.model.num_layers / estimate.parameters
    others = 1 - layer_parameters / estimate.parameters
    gathered = min(1.0, others + NUM_GATHERED_LAYERS * layer) if parallel.torch_fsdp2_reshard_after_forward else 1.0
    # Errors of FP8 gradients are those of all codes that a rank sends: of all gradients within a replica, of its rows
    # between replicas.
    all_errors_bytes = ERROR_BYTES * estimate.parameters if config.precision.grad_reduce_fp8_error_feedback else 0
    errors_bytes = all_errors_bytes if config.precision.grad_reduce_fp8_intra_node == "fp8" else 0
    if parallel.num_distributed_optimizer_instances > 1:
        errors_bytes += -(-all_errors_bytes // ranks)
    gradients_bytes = estimate.gradients_bytes - all_errors_bytes
    sends_rows = parallel.num_distributed_optimizer_instances > 1 and config.precision.grad_reduce_in_fp8
    messages_bytes = -(-MESSAGE_BYTES * estimate.parameters // ranks) if sends_rows else 0
    complete_bytes = estimate.weights_bytes * gathered
    complete_bytes += (estimate.weights_bytes + gradients_bytes) * (others + layer)
    rows_bytes = ROW_BYTES * layer_parameters if config.precision.fp8_param_gather else 0
    return dataclasses.replace(
        estimate,
        weights_bytes=-(-(estimate.weights_bytes + rows_bytes) // ranks),
        gradients_bytes=-(-gradients_bytes // ranks) + errors_bytes + messages_bytes,
        buffers_bytes=estimate.buffers_bytes + int(complete_bytes),
    )
