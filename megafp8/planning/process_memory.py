"""Device memory of a process besides what torch allocates."""

from __future__ import annotations

from megafp8.config import mixture, topology
from megafp8.config.schema import RunConfig

CONTEXT_BYTES = int(7.7 * 2**30)
"""CUDA context, loaded kernels and their stacks, workspaces. Measured on H100s with Transformer Engine 2.20.2 and torch
2.11: what a process of a dense model (7.70 GiB) and one of a mixture (7.78 GiB) had beside torch's reserved memory."""
FREE_MEMORY_FRACTION = 0.05
"""Device memory kept free for fragmentation."""
COMMUNICATOR_BYTES = 256 * 2**20
"""Buffers of one NCCL communicator: 32 channels x 2 directions x NCCL_BUFFSIZE, 4 MiB by NCCL's documentation."""


def non_torch_bytes(config: RunConfig, world_size: int) -> int:
    """Device memory of a process that torch does not allocate: CUDA context, workspaces and NCCL's buffers."""
    parallel = config.parallel
    groups: list[int] = [parallel.expert_model_parallel_size] if mixture.is_mixture(config.model) else []
    groups += (
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        topology.data_parallel_size(config, world_size, with_context_parallel=True), world_size,
    )  # fmt: skip
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * sum(size > 1 for size in groups)
