"""The constants of the time model that were measured. `python benchmarks/planner_accuracy.py --fit` finds them again.

Each is fitted on the kernels that it describes, fractions on large ones and seconds on small ones: profiles of
megatron-core 0.16.1 with Transformer Engine 2.20 on one H200, one step on four, the small model whose step waits for
the host, and the GEMMs and casts of a model of 1024 channels. The rows are in `benchmarks/planner_measurements.py`,
with those that were held out. On other GPUs the same fractions and seconds are assumed, but for one: block-scaled GEMMs
need Blackwell, where nothing was measured here. Their fraction comes from published speeds of whole runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How near to their peaks things come."""

    bf16_gemm_fraction: float = 0.744
    """Of the BF16 peak, for a large GEMM inside a step (the GPU at its power limit)."""
    fp8_gemm_fraction: float = 0.701
    """Of the FP8 peak, with one scale for a tensor."""
    block_scaled_gemm_fraction: float = 0.615
    """Of the FP8 or FP4 peak, with a scale for each block, on Blackwell (MXFP8, blockwise, NVFP4). Fitted to Megatron-
    Bridge's speeds of MXFP8 to tensorwise in one layout, release 25.11: Llama 3 8B on B200, GB200, GB300, 405B on B200
    (rows `fit` of `benchmarks/planner_published.py`). NVFP4's rows were held out."""
    blockwise_gemm_fraction: float = 0.566
    """Of the FP8 peak, with a scale for each block, on Hopper."""
    gemm_start_s: float = 3.7e-6
    """Seconds of a GEMM beside its FLOPs, however small it is."""
    attention_fraction: float = 0.402
    """Of the BF16 peak, for long sequences; causal FLOPs of the model, forward and backward."""
    attention_half_tokens: float = 518.0
    """Sequence length at which attention comes to half of that."""
    memory_fraction: float = 0.538
    """Of the HBM bandwidth, for norms, activations, rotary embeddings and loss."""
    cast_fraction: float = 0.87
    """Of the HBM bandwidth, for casts with a scale for a tensor. Assumed for MXFP8 and NVFP4."""
    optimizer_fraction: float = 0.771
    """Of the HBM bandwidth, for the optimizer's passes."""
    blockwise_cast_fraction: float = 0.53
    """Of the HBM bandwidth, for casts to blocks of 128."""
    cast_start_s: float = 8.26e-6
    """Seconds of quantizing a tensor beside its bytes, however small it is."""
    busy_fraction: float = 0.958
    """Of a step on one GPU, the part in which a kernel runs."""
    nvlink_fraction: float = 0.413
    """Of the NVLink bandwidth, for collectives within a node."""
    bf16_host_layer_s: float = 0.00426
    """Seconds the host takes to start the kernels of one layer, forward and backward."""
    fp8_host_layer_s: float = 0.0055
    """The same with an FP8 recipe."""


CALIBRATION = Calibration()
