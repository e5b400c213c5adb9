"""Sharded weights (FSDP2): how messages name them, and the memory that they take.

`rules/sharding.py` has what they exclude, and `megafp8/fsdp/` what they do in a run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megafp8.config.run_sizes import RunSizes

NAME, FLAG = "FSDP2", "--use-torch-fsdp2"
"""What shards weights, as messages name it."""
NO_BUFFER = f"{NAME} has no buffer with complete gradients"
OPTIMIZER_FLAGS = f"--use-distributed-optimizer or {FLAG}"
UNTESTED_GRAPH = (
    "losses of its graph, which shortens steps only with --fp8-param-gather, have not been compared with those of "
    "launched kernels"
)
NO_GRAPH = (
    "--torch-fsdp2-no-reshard-after-forward",
    "a validation leaves weights gathered, and a graph does not gather them again",
)

NUM_GATHERED_LAYERS = 2
ERROR_BYTES = 4  # of a parameter, in FP32
MESSAGE_BYTES = 6  # of a row's element, as codes and sums between replicas, for all layers at once
ROW_BYTES = 2  # of a parameter, in BF16 or FP16


def num_shards(sizes: RunSizes) -> int:
    """Ranks over which state is sharded, if it is: those of a replica."""
    return sizes.replicas // sizes.parallel.num_replicas


def shard(sizes: RunSizes, estimate: Any, layer_parameters: int) -> Any:
    """Return an estimate (`MemoryEstimate`) with weights and gradients sharded; unchanged if they are not.

    Derived from the code of FSDP2, not measured.

    Args:
        estimate: with complete weights and gradients, and sharded optimizer state.
        layer_parameters: those of its parameters that are in the linears of layers.
    """
    parallel, precision = sizes.parallel, sizes.precision
    if not parallel.shards_weights:
        return estimate
    assert sizes.model.num_layers is not None
    ranks = num_shards(sizes)
    layer = layer_parameters / sizes.model.num_layers / estimate.parameters
    others = 1 - layer_parameters / estimate.parameters
    # Embedding, output layer and final norm are complete during forward and backward. Of the layers two are, the one
    # that computes and the next one, unless all are kept.
    gathered = 1.0 if parallel.keeps_gathered else min(1.0, others + NUM_GATHERED_LAYERS * layer)
    # Errors of FP8 gradients are those of all codes that a rank sends: of all gradients within a replica, of its rows
    # between replicas.
    all_errors_bytes = ERROR_BYTES * estimate.parameters if precision.grad_reduce_fp8_error_feedback else 0
    errors_bytes = all_errors_bytes if precision.grad_reduce_fp8_intra_node == "fp8" else 0
    if parallel.num_replicas > 1:
        errors_bytes += -(-all_errors_bytes // ranks)
    gradients_bytes = estimate.gradients_bytes - all_errors_bytes
    sends_rows = parallel.num_replicas > 1 and precision.grad_reduce_in_fp8
    messages_bytes = -(-MESSAGE_BYTES * estimate.parameters // ranks) if sends_rows else 0
    complete_bytes = estimate.weights_bytes * gathered
    # The gradients of a layer, and of embedding and output layer, are complete until they are reduced: in the dtype of
    # the weights, and in that of the reduction.
    complete_bytes += (estimate.weights_bytes + gradients_bytes) * (others + layer)
    # A rank that gathers codes has its rows in high precision too.
    rows_bytes = ROW_BYTES * layer_parameters if precision.fp8_param_gather else 0
    return dataclasses.replace(
        estimate,
        weights_bytes=-(-(estimate.weights_bytes + rows_bytes) // ranks),
        gradients_bytes=-(-gradients_bytes // ranks) + errors_bytes + messages_bytes,
        buffers_bytes=estimate.buffers_bytes + int(complete_bytes),
    )
