"""Time of the optimizer in a step: the bytes that its kernels move."""

from __future__ import annotations

from megafp8.config.fused_adam import fused_adam_obstacle
from megafp8.config.muon import is_muon
from megafp8.planning import communication
from megafp8.planning.memory import parameters_on_stage
from megafp8.planning.mixture_memory import expert_parameters_on_stage
from megafp8.planning.muon_cost import newton_schulz_s
from megafp8.planning.optimizer_memory import BYTES, SCALED
from megafp8.planning.planned_run import PlannedRun


def optimizer_s(run: PlannedRun, stage: int) -> float:
    """Seconds of the optimizer's kernels on gradients, master weights and moments, and of Newton-Schulz in Muon."""
    parameters = sum(parameters_on_stage(run.config, run.padded_vocab, stage))
    parallel = run.config.parallel
    is_sharded = parallel.use_distributed_optimizer or parallel.use_torch_fsdp2
    experts = expert_parameters_on_stage(run.config, stage)
    num_shards = communication.data_group(run).size if is_sharded else 1
    on_shard = (parameters - experts) / num_shards
    if experts:
        on_shard += experts / (communication.expert_data_group(run).size if is_sharded else 1)
    full_bytes, shard_bytes = optimizer_bytes_per_parameter(run)
    has_all_gradients = not parallel.use_torch_fsdp2
    moved_bytes = full_bytes * parameters / (1 if has_all_gradients else num_shards) + shard_bytes * on_shard
    orthogonalization_s = newton_schulz_s(run, stage, num_shards) if is_muon(run.config) else 0.0
    return moved_bytes / (run.gpu.hbm_bytes_per_s * run.calibration.optimizer_fraction) + orthogonalization_s


def optimizer_bytes_per_parameter(run: PlannedRun) -> tuple[int, int]:
    """Bytes that the optimizer moves per parameter of the rank, and per parameter of its shard.

    The fused kernel moves 34 bytes: grad norm 4, reading gradient, master weight and moments 16, writing them 12, BF16
    weight 2. megatron-core's optimizer moves 46: grad norm 4, clipping 8, Adam 28, copy to BF16 6; with per-token loss,
    dividing the complete gradient buffer by the number of tokens adds 8. Zeroing the gradient buffer adds 4 where
    gradients are accumulated into it. For FP16 and FP8 moments the kernel reads moments and gradient (4) once more to
    find their scales.
    """
    optimizer, training, precision = run.config.optimizer, run.config.training, run.config.precision
    state = {"fp32": 8, "fp16": 4, "bf16": 4, "fp8": 2}
    moments = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    scaled = [BYTES[dtype] for dtype in moments if dtype in SCALED]
    scale_bytes = 4 + sum(scaled) if scaled else 0
    saved_bytes = 0
    if optimizer.use_precision_aware_optimizer:
        # Smaller moments are read and written. TE keeps only the 16 bits of a master weight that BF16 lacks.
        saved_bytes = 8 - state[optimizer.exp_avg_dtype] + 8 - state[optimizer.exp_avg_sq_dtype] + 4
    zero_bytes = 0 if precision.gradient_overwrite and run.pipeline == 1 else 4
    if fused_adam_obstacle(run.config) is None:
        return zero_bytes, 34 - saved_bytes + scale_bytes
    return zero_bytes + (8 if training.calculate_per_token_loss else 0), 46 - saved_bytes
