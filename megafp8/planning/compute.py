"""Compute model: seconds of one microbatch in one transformer layer on one GPU, by part.

    linears       per GEMM: launch + max(FLOPs / (peak x fraction x w / (w + 1/2)), bytes / memory bandwidth).
                  w: waves of 128 x 128 tiles over the SMs; on average half a wave is idle at the end
    attention     causal FLOPs / (peak x fraction x s / (s + s_half)), of which 2/7 forward (2 GEMMs of 7)
    memory-bound  bytes that norms, residual additions, activation and rotary embedding move / (bandwidth x fraction)
    casts         quantizing inputs (forward) and grad_outputs (backward) to codes and transposed codes: launch + bytes;
                  packing (forward) and unpacking (backward) saved activations

The fractions are measured: `Calibration` in `planned_run.py`. Bytes are counted as the kernels of megatron-core 0.16
with Transformer Engine 2.20 read and write them, including fusions. Dropout and biases are not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from typing import Optional

from megafp8.config import attention_layers, derived, dimensions, latent_attention, model_shapes
from megafp8.config.activations import is_gated
from megafp8.config.rules.precision import uses_op_fuser, uses_split_rope_kernel
from megafp8.config.saved_activations import ACTIVATION, NORM, PACKED_BYTES
from megafp8.planning.planned_run import PlannedRun, layer_gemms, layer_linears, output_layer_gemms
from megafp8.recipes import registry
from megafp8.resources.memory import has_fused_loss, logit_elements
from megafp8.resources.recipe_shares import BF16, output_layer_recipes

TILE = 128
BF16_BYTES = 2
ATTENTION_FORWARD_FRACTION = 2 / 7


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer in one direction. fprop, dgrad and wgrad are sums over the four linears."""

    fprop: float = 0.0
    dgrad: float = 0.0
    wgrad: float = 0.0
    attention: float = 0.0
    norms: float = 0.0
    additions: float = 0.0
    """Of residuals."""
    rotary: float = 0.0
    activation: float = 0.0
    permutation: float = 0.0
    """Of tokens, into the order of experts and back."""
    casts: float = 0.0

    @property
    def gemms(self) -> float:
        """All GEMMs of the linears, without attention."""
        return self.fprop + self.dgrad + self.wgrad

    @property
    def memory_bound(self) -> float:
        """Memory-bound operations other than casts."""
        return self.norms + self.additions + self.rotary + self.activation + self.permutation

    @property
    def total(self) -> float:
        """All parts."""
        return self.gemms + self.attention + self.memory_bound + self.casts

    def plus(self, other: LayerTime) -> LayerTime:
        """The sum of both, part by part."""
        return LayerTime(*(sum(each) for each in zip(astuple(self), astuple(other), strict=True)))


def gemm_s(run: PlannedRun, recipe: str, m: int, n: int, k: int) -> float:
    """Seconds of an (m, k) x (k, n) GEMM."""
    waves = (m / TILE) * (n / TILE) / run.gpu.num_sms
    flops_per_s = gemm_flops_per_s(run, recipe) * waves / (waves + 0.5)
    operand_bytes = bytes_per_element(recipe) * k * (m + n) + BF16_BYTES * m * n
    return run.calibration.gemm_start_s + max(2.0 * m * n * k / flops_per_s, run.memory_s(operand_bytes))


def layer_gemms_s(run: PlannedRun, recipe: str, kind: str, has_experts: bool = False) -> float:
    """Seconds of the GEMMs of one layer in `kind`: fprop, dgrad or wgrad, without those of routed experts."""
    return sum(gemm_s(run, recipe, *gemm.shape) for gemm in layer_gemms(run, has_experts) if gemm.kind == kind)


def grad_output_rows(run: PlannedRun, linear: model_shapes.GemmDimensions) -> int:
    """Rows of grad_output on a rank: a shard for linear_proj and linear_fc2, whose output is reduce-scattered."""
    is_shard = linear.rows == run.sizes.tokens or linear.name in latent_attention.DOWN_PROJECTIONS
    return run.sharded_tokens if is_shard else run.sizes.tokens


def gemm_flops_per_s(run: PlannedRun, recipe: str) -> float:
    """FLOP/s of a large GEMM under a recipe, or in BF16 (`bf16`)."""
    flops, calibration = run.gpu.peak.flops, run.calibration
    if recipe == BF16:
        return flops["bf16"] * calibration.bf16_gemm_fraction
    known = registry.get(recipe)
    if not known.multiplies_codes(run.gpu.compute_capability):
        return flops["bf16"] * calibration.bf16_gemm_fraction  # emulation multiplies dequantized operands
    if known.block_length is None:
        fraction = calibration.fp8_gemm_fraction
    elif run.gpu.compute_capability < known.slow_gemm_until:
        fraction = calibration.blockwise_gemm_fraction
    else:  # Blackwell multiplies blocks of every size on the tensor cores for MXFP8
        fraction = calibration.block_scaled_gemm_fraction
    return flops[known.family] * fraction


def bytes_per_element(recipe: str) -> float:
    """Bytes per element of a GEMM operand under a recipe; 2 for `bf16`."""
    return BF16_BYTES if recipe == BF16 else registry.get(recipe).code_bytes


def forward_time(run: PlannedRun, recipe: str, has_experts: bool = False) -> LayerTime:
    """The forward pass of one layer whose linears have `recipe`; `bf16` for a layer in high precision.

    Args:
        has_experts: of a layer with experts, without the routed ones.
    """
    linears = layer_linears(run.config, has_experts)
    residual, qkv, ffn = _num_activations(run, has_experts)
    is_fused = _fuses_activation(run, recipe)
    num_fc1_outputs = 2 if is_gated(run.config.model) else 1
    return LayerTime(
        fprop=layer_gemms_s(run, recipe, "fprop", has_experts),
        attention=attention_s(run) * ATTENTION_FORWARD_FRACTION,
        # Two norms (read, write) and two residual additions (read, read, write).
        norms=run.memory_s(BF16_BYTES * residual * 2 * 2),
        additions=run.memory_s(BF16_BYTES * residual * 2 * 3),
        rotary=run.memory_s(BF16_BYTES * 2 * qkv),
        # When the activation is fused with the cast that follows, its result is neither written nor read.
        activation=run.memory_s(BF16_BYTES * ffn * (num_fc1_outputs + 1 - 2 * is_fused)),
        casts=cast_s(run, recipe, sum(linear.rows * linear.in_features for linear in linears), len(linears))
        + packing_s(run, has_experts),
    )


def backward_time(run: PlannedRun, recipe: str, has_experts: bool = False) -> LayerTime:
    """The backward pass of one layer, without recomputation."""
    linears = layer_linears(run.config, has_experts)
    residual, qkv, ffn = _num_activations(run, has_experts)
    is_fused = _fuses_activation(run, recipe)
    num_fc1_outputs = 2 if is_gated(run.config.model) else 1
    wgrad_recipe = recipe if run.config.precision.fp8_wgrad else BF16
    # With sequence parallelism a rank quantizes its shard of proj's and fc2's grad_output, before the gather.
    num_grads = sum(grad_output_rows(run, linear) * linear.out_features for linear in linears)
    # Without the split-and-rotate kernel, the gradients of queries, keys and values are concatenated separately.
    rotary_passes = 2 if uses_split_rope_kernel(run.config) else 4
    return LayerTime(
        dgrad=layer_gemms_s(run, recipe, "dgrad", has_experts),
        wgrad=layer_gemms_s(run, wgrad_recipe, "wgrad", has_experts),
        attention=attention_s(run) * (1 - ATTENTION_FORWARD_FRACTION),
        # Two norms (read input and gradient, write) and two gradient additions. Fused with the MLP's norm, one addition
        # saves a write and a read.
        norms=run.memory_s(BF16_BYTES * residual * 2 * 3),
        additions=run.memory_s(BF16_BYTES * residual * (2 * 3 - 2 * run.config.precision.residual_norm_fusion)),
        rotary=run.memory_s(BF16_BYTES * rotary_passes * qkv),
        activation=run.memory_s(BF16_BYTES * ffn * (1 + 2 * num_fc1_outputs - 2 * num_fc1_outputs * is_fused)),
        casts=cast_s(run, recipe, num_grads, len(linears)) + packing_s(run, has_experts),
    )


def cast_s(run: PlannedRun, recipe: str, num_elements: float, num_tensors: float) -> float:
    """Seconds of quantizing tensors to codes and transposed codes.

    Args:
        num_elements: of all tensors together.
    """
    if recipe == BF16:
        return 0.0
    calibration, known = run.calibration, registry.get(recipe)
    fraction = calibration.blockwise_cast_fraction if known.slow_cast else calibration.cast_fraction
    bytes_per_s = run.gpu.hbm_bytes_per_s * fraction
    return num_tensors * calibration.cast_start_s + known.cast_bytes * num_elements / bytes_per_s


def packing_s(run: PlannedRun, has_experts: bool) -> float:
    """Seconds of packing the saved activations of a layer, or of unpacking them: one launch for each tensor."""
    parts = run.config.precision.fp8_saved_activations
    residual, _, ffn = _num_activations(run, has_experts)
    seconds, bytes_moved = 0.0, BF16_BYTES + PACKED_BYTES
    if NORM in parts:
        seconds += 2 * run.calibration.cast_start_s + run.memory_s(bytes_moved * 2 * residual)
    if ACTIVATION in parts:
        num_fc1_outputs = 2 if is_gated(run.config.model) else 1
        seconds += run.calibration.cast_start_s + run.memory_s(bytes_moved * num_fc1_outputs * ffn)
    return seconds


def recompute_s(run: PlannedRun, forward: LayerTime, num_layers: int, experts_s: Optional[float] = None) -> float:
    """Seconds of activation recomputation in the backward pass, given the layer's forward pass.

    Args:
        num_layers: layers of the stage, some of which block recomputation recomputes.
        experts_s: the part of the forward pass of routed experts; None in a dense layer.
    """
    training = run.config.training
    if derived.recompute_granularity(training) == "full":
        assert training.recompute_num_layers is not None
        is_block = training.recompute_method == "block"
        fraction = min(1.0, training.recompute_num_layers / max(1, num_layers)) if is_block else 1.0
        return fraction * forward.total
    modules = derived.recompute_modules(training)
    seconds = forward.attention if "core_attn" in modules else 0.0
    seconds += (forward.norms + forward.additions) / 2 if "layernorm" in modules else 0.0
    if experts_s is not None:
        return seconds + (experts_s if "moe" in modules else 0.0)
    if "mlp" in modules:
        weights = [linear.out_features * linear.in_features for linear in run.sizes.linears]
        fraction = sum(weights[-2:]) / sum(weights)
        seconds += fraction * (forward.fprop + forward.casts) + forward.activation
    return seconds


def attention_s(run: PlannedRun) -> float:
    """Mean seconds of a layer's attention, forward and backward; of the causal half, or the sliding window."""
    model, calibration, seq = run.config.model, run.calibration, run.attended_tokens
    is_latent = latent_attention.is_latent(model)
    num_channels = latent_attention.mean_channels(model) if is_latent else dimensions.query_projection_size(model)
    channels = num_channels / run.sizes.tensor

    def seconds(window: float) -> float:
        mean_keys = window - window * window / (2 * seq)
        flops = 3 * 2 * 2 * channels * mean_keys * run.sizes.tokens
        fraction = calibration.attention_fraction * window / (window + calibration.attention_half_tokens)
        return flops / (run.gpu.peak.flops["bf16"] * fraction)

    windows = Counter(attention_layers.windows_in_tokens(model, seq))
    return sum(count * seconds(window) for window, count in windows.items()) / windows.total()


def output_layer_s(run: PlannedRun) -> tuple[float, float, float]:
    """Seconds of the output layer's forward GEMM, its backward GEMMs, and the loss, for one microbatch."""
    recipes = output_layer_recipes(run.config.model, run.config.precision)
    forward, dgrad, wgrad = (gemm_s(run, recipes[gemm.kind], *gemm.shape) for gemm in output_layer_gemms(run))
    # Transformer Engine's loss reads and writes the logits once each way. The others also keep an FP32 softmax.
    bytes_per_logit = 8 if has_fused_loss(run.config.precision) else 26
    return forward, dgrad + wgrad, run.memory_s(bytes_per_logit * logit_elements(run.sizes))


def output_layer_casts_s(run: PlannedRun) -> tuple[float, float]:
    """Seconds of quantizing the output layer's input (forward) and grad_output (backward) for one microbatch."""
    recipes = output_layer_recipes(run.config.model, run.config.precision)
    num_grads = logit_elements(run.sizes)
    # dgrad and wgrad read grad_output in different orientations. Each counts as half of a cast to both.
    backward_s = sum(cast_s(run, recipes[kind], num_grads / 2, 1 / 2) for kind in ("dgrad", "wgrad"))
    return cast_s(run, recipes["fprop"], run.sharded_tokens * run.sizes.hidden_size, 1), backward_s


def _num_activations(run: PlannedRun, has_experts: bool) -> tuple[int, int, int]:
    """Elements of one microbatch on one rank: residual stream, rotated queries, keys and values, and MLP.

    Args:
        has_experts: of a layer with experts, whose MLP are the shared ones.
    """
    model = run.config.model
    has_rope = model.position_embedding_type in ("rope", "yarn")
    qkv_size = dimensions.query_projection_size(model) + 2 * dimensions.kv_projection_size(model) if has_rope else 0
    if latent_attention.is_latent(model):  # rotated channels are concatenated with the others
        qkv_size = int(3 * latent_attention.mean_channels(model))
    width = (model.moe_shared_expert_intermediate_size or 0) if has_experts else dimensions.ffn_hidden_size(model)
    return (
        run.sharded_tokens * run.sizes.hidden_size,
        run.sizes.tokens * qkv_size // run.sizes.tensor,
        run.sizes.tokens * width // run.sizes.tensor,
    )


def _fuses_activation(run: PlannedRun, recipe: str) -> bool:
    """Whether the activation and the cast of its result are one kernel."""
    return recipe != BF16 and uses_op_fuser(run.config)
