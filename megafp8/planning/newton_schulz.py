"""What --optimizer muon costs: FLOPs and seconds of Newton-Schulz.

A Newton-Schulz step on an (m, n) matrix with m <= n takes 4 m^2 n + 2 m^3 FLOPs, once an optimizer step and not once a
token. Five of them on an (m, m) matrix take as many as the forward and backward passes of 5 m tokens through it. The
router of a mixture is not counted. `resources/memory.py` has the bytes of Muon's state.
"""

from __future__ import annotations

from megafp8.config import dimensions, mixture, model_shapes
from megafp8.config.activations import is_gated
from megafp8.config.optimizers import is_layer_wise, updates_matrices
from megafp8.config.run_sizes import RunSizes
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.planning.planned_run import PlannedRun
from megafp8.resources.mixture_memory import expert_layers_on_stage

PRODUCTS_PER_STEP = 3
PEAKS = {"medium": "bf16", "high": "tf32", "highest": "fp32"}
"""--muon-fp32-matmul-prec -> dtype whose peak limits the products."""
FRACTION_OF_BF16 = {"medium": 1.0, "high": 0.5, "highest": 1 / 16}
"""Speed relative to BF16 where the table of GPUs has no peak of that dtype."""
Shape = tuple[int, int]


def split_matrices(config: RunConfig) -> tuple[list[Shape], list[Shape]]:
    """Complete matrices of a dense layer as (sharded, unsharded) sizes: of the attention, and of the MLP.

    The sharded size is the one that tensor parallelism divides.
    """
    model = config.model
    whole = with_values(
        config, {"parallel.tensor_model_parallel_size": 1, "training.micro_batch_size": 1, "data.seq_length": 1}
    )
    attention, mlp = [], []
    for linear in model_shapes.gemm_dimensions(whole):
        outputs, inputs = linear.out_features, linear.in_features
        if linear.name == "linear_qkv" and config.optimizer.muon_split_qkv:
            kv = dimensions.kv_projection_size(model)
            attention += [(dimensions.query_projection_size(model), inputs), (kv, inputs), (kv, inputs)]
        elif linear.name == "linear_fc1":
            mlp.append((outputs, inputs))
        elif linear.name == "linear_fc2":
            mlp.append((inputs, outputs))
        else:
            attention.append((inputs, outputs) if linear.name == "linear_proj" else (outputs, inputs))
    return attention, mlp


def mlp_matrices(config: RunConfig, width: int) -> list[Shape]:
    """The matrices of an MLP or an expert of some hidden size, as (sharded, unsharded) sizes."""
    hidden = config.model.hidden_size
    assert hidden is not None
    return [((2 if is_gated(config.model) else 1) * width, hidden), (width, hidden)]


def matrices_on_rank(config: RunConfig, sizes: RunSizes, stage: int) -> list[tuple[Shape, int, int]]:
    """(shape, how many, tensor-parallel size) of the matrices on one rank of a stage; shapes are complete."""
    model, parallel = config.model, config.parallel
    attention, mlp = split_matrices(config)
    num_layers, with_experts = sizes.num_layers_on(stage), expert_layers_on_stage(sizes, stage)
    tensor = parallel.tensor_model_parallel_size
    found = [(shape, num_layers, tensor) for shape in attention]
    found += [(shape, max(0, num_layers - with_experts), tensor) for shape in mlp]
    if with_experts:
        assert model.num_experts is not None
        count = with_experts * model.num_experts // parallel.expert_model_parallel_size
        expert_tensor = mixture.expert_tensor_size(parallel)
        found += [(shape, count, expert_tensor) for shape in mlp_matrices(config, mixture.moe_ffn_hidden_size(model))]
        if shared := model.moe_shared_expert_intermediate_size:
            found += [(shape, with_experts, tensor) for shape in mlp_matrices(config, shared)]
    return [(shape, count, ranks) for shape, count, ranks in found if count]


def matrix_flops(config: RunConfig, shape: Shape, ranks: int) -> float:
    """FLOPs of Newton-Schulz on one rank for a matrix that tensor-parallel ranks share."""
    sharded, unsharded = shape
    steps, mode = config.optimizer.muon_num_ns_steps, config.optimizer.muon_tp_mode
    if ranks > 1 and mode == "distributed":
        return steps * (4.0 * unsharded**2 * sharded / ranks + 2.0 * unsharded**3)
    rows = sharded if mode == "duplicated" else sharded // ranks
    small, large = sorted((rows, unsharded))
    return steps * (4.0 * small**2 * large + 2.0 * small**3)


def newton_schulz_flops(config: RunConfig, sizes: RunSizes, stage: int) -> float:
    """FLOPs of Newton-Schulz for all matrices on a rank of a stage, whichever data-parallel rank computes them."""
    matrices = matrices_on_rank(config, sizes, stage)
    return sum(count * matrix_flops(config, shape, ranks) for shape, count, ranks in matrices)


def newton_schulz_s(run: PlannedRun, stage: int, num_shards: int) -> float:
    """Seconds of Newton-Schulz on one rank of a stage. Not measured: FLOPs at the speed of large GEMMs.

    All FLOPs count, also those that the symmetric products of large matrices leave out, whose time is not measured.

    Args:
        num_shards: data-parallel ranks that divide the matrices.
    """
    config, calibration = run.config, run.calibration
    precision = config.optimizer.muon_fp32_matmul_prec
    bf16 = run.gpu.peak.flops["bf16"]
    peak = run.gpu.peak.flops.get(PEAKS[precision], bf16 * FRACTION_OF_BF16[precision])
    num_matrices = sum(count for _, count, _ in matrices_on_rank(config, run.sizes, stage))
    launches = num_matrices * config.optimizer.muon_num_ns_steps * PRODUCTS_PER_STEP
    compute_s = newton_schulz_flops(config, run.sizes, stage) / (peak * calibration.bf16_gemm_fraction)
    return (compute_s + launches * calibration.gemm_start_s) / num_shards


def newton_schulz_lines(config: RunConfig, sizes: RunSizes) -> list[str]:
    """What Muon computes on a rank of the first stage, for a dry run; none without Muon."""
    if not updates_matrices(config.optimizer):
        return []
    num_matrices = sum(count for _, count, _ in matrices_on_rank(config, sizes, 0))
    each = f"divided by {sizes.replicas} ranks" if is_layer_wise(config.optimizer, config.parallel) else "on each rank"
    tflop = newton_schulz_flops(config, sizes, 0) / 1e12
    return [f"muon: {num_matrices:,} matrices on the first stage, {tflop:,.3f} TFLOP of Newton-Schulz a step, {each}"]
