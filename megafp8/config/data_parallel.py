"""How data-parallel ranks share a model: in buffers of megatron-core's DDP, or sharded by torch's FSDP2.

`strategy_of` chooses by `--use-torch-fsdp2`. Whatever depends on it asks that object, and nothing else reads the flag.
`rules/data_parallel.py` has what FSDP2 excludes, and `megafp8/fsdp/` has what it does in a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Optional

from megafp8.config import topology
from megafp8.config.schema import ParallelConfig, RunConfig

SHARDING, SHARDING_FLAG = "FSDP2", "--use-torch-fsdp2"
"""What shards weights, as messages name it."""
OPTIMIZER_SHARDING_FLAGS = f"--use-distributed-optimizer or {SHARDING_FLAG}"

NUM_GATHERED_LAYERS = 2
ERROR_BYTES = 4  # of a parameter, in FP32
MESSAGE_BYTES = 6  # of a row's element, as codes and sums between replicas, for all layers at once
ROW_BYTES = 2  # of a parameter, in BF16 or FP16


class DataParallelStrategy:
    """megatron-core's DDP: a rank has all weights, and buffers with all gradients.

    Attributes:
        shards_weights: a rank has its rows of weights and gradients. Weights are gathered before they are used, and
            gradients reduced, in every microbatch. There are no buffers.
        shards_optimizer: a rank has a part of the optimizer state; None where that is not chosen yet.
        num_replicas: groups of ranks over which all of this is sharded.
        num_gathers: of each weight in a step, or in a microbatch if weights are sharded.
        reshards: gathered weights are freed after the forward pass.
    """

    shards_weights: ClassVar[bool] = False

    def __init__(self, parallel: ParallelConfig):
        self.shards_optimizer: Optional[bool] = parallel.use_distributed_optimizer
        self.num_replicas = 1
        self.num_gathers = 1 if self.shards_optimizer else 0
        self.reshards = False

    def num_shards(self, config: RunConfig, world_size: int) -> int:
        """Ranks over which state is sharded, if it is: those of a replica."""
        return topology.data_parallel_size(config, world_size, with_context_parallel=True) // self.num_replicas

    def memory(self, config: RunConfig, world_size: int, estimate: Any, layer_parameters: int) -> Any:
        """A `MemoryEstimate` with what is sharded.

        Args:
            estimate: with complete weights and gradients, and sharded optimizer state.
            layer_parameters: those of its parameters that are in the linears of layers.
        """
        return estimate

    def graph_limits(self) -> Iterator[tuple[str, str]]:
        """What keeps a step out of a CUDA graph: the flag, and why."""
        yield from ()

    def untested_graphs(self) -> Iterator[tuple[str, str]]:
        """Settings with which a CUDA graph has to be asked for: the flag, and why."""
        yield from ()


class Fsdp2(DataParallelStrategy):
    """torch's FSDP2: ranks, or those of each of several replicas (hybrid sharding), have rows of everything."""

    shards_weights = True

    def __init__(self, parallel: ParallelConfig):
        super().__init__(parallel)
        self.shards_optimizer = True
        self.num_replicas = parallel.num_distributed_optimizer_instances
        self.reshards = parallel.torch_fsdp2_reshard_after_forward
        self.num_gathers = 2 if self.reshards else 1

    def memory(self, config: RunConfig, world_size: int, estimate: Any, layer_parameters: int) -> Any:
        """Sharded weights and gradients, and what is complete for a time.

        Derived from the code of FSDP2, not measured.
        """
        assert config.model.num_layers is not None
        ranks, precision = self.num_shards(config, world_size), config.precision
        layer = layer_parameters / config.model.num_layers / estimate.parameters
        others = 1 - layer_parameters / estimate.parameters
        # Embedding, output layer and final norm are complete during forward and backward. Of the layers two are, the
        # one that computes and the next one; all of them without resharding.
        gathered = min(1.0, others + NUM_GATHERED_LAYERS * layer) if self.reshards else 1.0
        # Errors of FP8 gradients are those of all codes that a rank sends: of all gradients within a replica, of its
        # rows between replicas.
        all_errors_bytes = ERROR_BYTES * estimate.parameters if precision.grad_reduce_fp8_error_feedback else 0
        errors_bytes = all_errors_bytes if precision.grad_reduce_fp8_intra_node == "fp8" else 0
        if self.num_replicas > 1:
            errors_bytes += -(-all_errors_bytes // ranks)
        gradients_bytes = estimate.gradients_bytes - all_errors_bytes
        sends_rows = self.num_replicas > 1 and precision.grad_reduce_in_fp8
        messages_bytes = -(-MESSAGE_BYTES * estimate.parameters // ranks) if sends_rows else 0
        complete_bytes = estimate.weights_bytes * gathered
        # The gradients of a layer, and of embedding and output layer, are complete until they are reduced: in the dtype
        # of the weights, and in that of the reduction.
        complete_bytes += (estimate.weights_bytes + gradients_bytes) * (others + layer)
        # A rank that gathers codes has its rows in high precision too.
        rows_bytes = ROW_BYTES * layer_parameters if precision.fp8_param_gather else 0
        return dataclasses.replace(
            estimate,
            weights_bytes=-(-(estimate.weights_bytes + rows_bytes) // ranks),
            gradients_bytes=-(-gradients_bytes // ranks) + errors_bytes + messages_bytes,
            buffers_bytes=estimate.buffers_bytes + int(complete_bytes),
        )

    def graph_limits(self) -> Iterator[tuple[str, str]]:
        if not self.reshards:
            yield (
                "--torch-fsdp2-no-reshard-after-forward",
                "a validation leaves weights gathered, and a graph does not gather them again",
            )

    def untested_graphs(self) -> Iterator[tuple[str, str]]:
        yield (
            SHARDING_FLAG,
            "losses of its graph, which shortens steps only with --fp8-param-gather, have not been compared with those "
            "of launched kernels",
        )


def strategy_of(parallel: ParallelConfig) -> DataParallelStrategy:
    """How the data-parallel ranks of a run share its model."""
    return Fsdp2(parallel) if parallel.use_torch_fsdp2 else DataParallelStrategy(parallel)
