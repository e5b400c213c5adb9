"""Parameters and activations of experts on one rank."""

from __future__ import annotations

from megafp8.config import derived, dimensions, mixture, model_shapes, multi_token, topology
from megafp8.config.run_sizes import RunSizes
from megafp8.config.schema import OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig

# ---- Device memory of a process besides what torch allocates --------------------------------------------------------

CONTEXT_BYTES = int(7.7 * 2**30)
"""CUDA context, loaded kernels and their stacks, workspaces. Measured on H100s with Transformer Engine 2.20.2 and torch
2.11: what a process of a dense model (7.70 GiB) and one of a mixture (7.78 GiB) had beside torch's reserved memory."""
FREE_MEMORY_FRACTION = 0.05
"""Device memory kept free for fragmentation."""
COMMUNICATOR_BYTES = 256 * 2**20
"""Buffers of one NCCL communicator: 32 channels x 2 directions x NCCL_BUFFSIZE, 4 MiB by NCCL's documentation."""


def non_torch_bytes(config: RunConfig, world_size: int) -> int:
    """Device memory of a process that torch does not allocate: CUDA context, workspaces, NCCL's buffers, and those of
    the dispatcher `peer`, of tokens and of sums for the tokens of all ranks."""
    parallel = config.parallel
    groups: list[int] = [parallel.expert_model_parallel_size] if mixture.is_mixture(config.model) else []
    groups += (
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        topology.data_parallel_size(config, world_size, with_context_parallel=True), world_size,
    )  # fmt: skip
    peers = 0
    if mixture.is_mixture(config.model) and mixture.token_dispatcher(config) == mixture.PEER:
        length, micro = config.data.seq_length or 0, config.training.micro_batch_size
        num_tokens = parallel.expert_model_parallel_size * length * (micro if isinstance(micro, int) else 1)
        peers = 2 * BYTES["bf16"] * num_tokens // parallel.context_parallel_size * (config.model.hidden_size or 0)
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * sum(size > 1 for size in groups) + peers


# ---- Bytes of optimizer state for each parameter of a shard, and of what an update has beside it for a time ---------
# The one-pass update (`optimizer.fused_adam`) needs nothing beside the state. Transformer Engine's Adam, for what the
# one-pass update does not have, turns FP8 and FP16 state into FP32 for all parameters at once
# (`FusedAdam.get_unscaled_state`). The memory of activations and logits is free by then.

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
UNEVEN_LOAD = 1.6
"""Rows of the busiest of two expert-parallel ranks over their mean, at least: what three mixtures reached on H200s in
the first steps of training, when routing is far from balanced."""
SCALED = ("fp16", "fp8")
"""Dtypes whose tensors have a scale."""


def state_bytes(optimizer: OptimizerConfig, precision: PrecisionConfig) -> tuple[int, int, int]:
    """Bytes for each parameter of master weights, of moments, and of FP32 copies of low-precision gradients."""
    params_dtype = derived.params_dtype(precision)
    if optimizer.use_precision_aware_optimizer:
        is_remainder = params_dtype == "bf16" and not precision.fp8_param_gather  # the 16 bits that BF16 weights lack
        master = BYTES["bf16" if is_remainder else optimizer.main_params_dtype]
        return master, BYTES[optimizer.exp_avg_dtype] + BYTES[optimizer.exp_avg_sq_dtype], 0
    master = 0 if params_dtype == "fp32" else BYTES["fp32"]
    moments = (2 if optimizer.optimizer == "adam" else 1) * BYTES["fp32"]
    return master, moments, 0 if derived.grad_dtype(precision) == "fp32" else BYTES["fp32"]


def update_bytes(sizes: RunSizes) -> int:
    """Bytes for each parameter of the FP32 copies that an update makes of its state."""
    optimizer = sizes.optimizer
    if not optimizer.use_precision_aware_optimizer or sizes.has_one_pass_update:
        return 0
    dtypes = (optimizer.main_params_dtype, optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    return BYTES["fp32"] * sum(dtype in SCALED for dtype in dtypes)


# ----------------------------------------------------------------------------------------------------------------------


def expert_layers_on_stage(sizes: RunSizes, stage: int) -> int:
    """Layers with experts on a pipeline stage, with those of multi-token prediction."""
    if not mixture.is_mixture(sizes.model):
        return 0
    has_experts = mixture.expert_layers(sizes.model)
    depths = sizes.depths_on(stage) if multi_token.has_experts(sizes.model) else 0
    return sum(has_experts[layer] for layer in sizes.layers[stage]) + depths


def expert_parameters_on_stage(sizes: RunSizes, stage: int) -> int:
    """Parameters of the routed experts on one rank of a stage."""
    if not mixture.is_mixture(sizes.model):
        return 0
    ranks = sizes.parallel.expert_model_parallel_size * mixture.expert_tensor_size(sizes.parallel)
    per_layer = model_shapes.count_parameters(sizes.model, 0).experts_per_layer
    return expert_layers_on_stage(sizes, stage) * per_layer // ranks


def keeps_experts_in_bf16(parallel: ParallelConfig) -> bool:
    """Whether the experts' weights stay in BF16 with `--fp8-param-gather`: where all of them run in one launch."""
    return parallel.moe_expert_kernels == "triton"


def mlp_channels(sizes: RunSizes) -> tuple[int, int]:
    """Elements in the MLP of a layer on one rank, mean over the layers, and permuted elements of experts' inputs.

    The load of the experts counts as balanced, but for the room that the dispatcher `peer` has. A rank with more tokens
    needs more.
    """
    model, tokens, tp = sizes.model, sizes.tokens, sizes.tensor
    dense = tokens * dimensions.ffn_hidden_size(model) // tp
    if not mixture.is_mixture(model):
        return dense, 0
    assert model.num_layers is not None
    fraction = mixture.num_expert_layers(model) / model.num_layers
    # A rank never needs room for more rows than all ranks have together.
    ranks = sizes.parallel.expert_model_parallel_size
    room = min(mixture.PEER_ROOM * UNEVEN_LOAD, ranks) if sizes.uses_peers else 1.0
    widths = room * model.moe_router_topk * mixture.moe_ffn_hidden_size(model)
    widths += model.moe_shared_expert_intermediate_size or 0
    elements = (1 - fraction) * dense + fraction * tokens * widths // tp
    return int(elements), int(fraction * room * model.moe_router_topk * sizes.residual_elements)
