"""Time of one microbatch in one transformer layer on one GPU, part by part, from the sizes of what it computes.

    linears    each GEMM: its start, and FLOPs / (peak x fraction x w / (w + 1/2)), or its bytes at the memory's speed
               if that takes longer. w: waves of 128 x 128 tiles over the multiprocessors; half of one idles at the end
               on average
    attention  causal FLOPs / (peak x fraction x s / (s + s_half)), a part 2/7 of it forward (2 GEMMs of 7)
    passes     bytes that norms, residual additions, activation, rotary embedding move / (memory bandwidth x fraction)
    casts      of inputs (forward) and output gradients (backward), each to codes and transposed codes: their start, and
               their bytes

The fractions are measured (`calibration.py`). Bytes are counted as the kernels of megatron-core 0.16 with Transformer
Engine 2.20 read and write them, fusions included; dropout and biases are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import derived, model_shapes
from megafp8.config.rules.precision import fuses_operations, rotates_in_one_kernel
from megafp8.planning.planned_run import HIGH, PlannedRun, Product, layer_products, output_products, output_recipes
from megafp8.recipes import registry

TILE = 128
BF16_BYTES = 2
ATTENTION_FORWARD_SHARE = 2 / 7


@dataclass(frozen=True)
class Pass:
    """Seconds of one direction of one layer."""

    fprop: float = 0.0
    """The four linears' GEMMs of the forward pass."""
    dgrad: float = 0.0
    wgrad: float = 0.0
    attention: float = 0.0
    norms: float = 0.0
    """Norms and residual additions."""
    rotary: float = 0.0
    activation: float = 0.0
    casts: float = 0.0

    @property
    def gemms(self) -> float:
        """All GEMMs of the linears."""
        return self.fprop + self.dgrad + self.wgrad

    @property
    def passes(self) -> float:
        """All that is bound by memory, but for casts."""
        return self.norms + self.rotary + self.activation

    @property
    def total(self) -> float:
        """Seconds of the GPU."""
        return self.gemms + self.attention + self.passes + self.casts


def gemm_s(run: PlannedRun, recipe: str, rows: int, columns: int, summed: int) -> float:
    """Seconds of a product of rows x summed and summed x columns numbers."""
    waves = (rows / TILE) * (columns / TILE) / run.gpu.num_sms
    rate = gemm_flops(run, recipe) * waves / (waves + 0.5)
    operand_bytes = code_bytes(recipe) * summed * (rows + columns) + BF16_BYTES * rows * columns
    return run.calibration.gemm_start_s + max(2.0 * rows * columns * summed / rate, run.memory_s(operand_bytes))


def product_s(run: PlannedRun, recipe: str, product: Product) -> float:
    """Seconds of one of a model's products."""
    return gemm_s(run, recipe, product.rows, product.columns, product.summed)


def products_s(run: PlannedRun, recipe: str, gemm: str) -> float:
    """Seconds of one layer's fprop, dgrad or wgrad."""
    return sum(product_s(run, recipe, product) for product in layer_products(run) if product.gemm == gemm)


def gemm_flops(run: PlannedRun, recipe: str) -> float:
    """FLOP/s of a large GEMM."""
    flops, calibration = run.gpu.peak.flops, run.calibration
    if recipe == HIGH:
        return flops["bf16"] * calibration.bf16_gemm_fraction
    known = registry.get(recipe)
    if not known.multiplies_codes(run.gpu.compute_capability):
        return flops["bf16"] * calibration.bf16_gemm_fraction  # emulated: decoded operands
    if known.block_length is None:
        fraction = calibration.fp8_gemm_fraction
    elif run.gpu.compute_capability < known.slow_gemm_until:
        fraction = calibration.blockwise_gemm_fraction
    else:  # from Blackwell on, blocks of every size are multiplied by the units for MXFP8
        fraction = calibration.block_scaled_gemm_fraction
    return flops[known.family] * fraction


def code_bytes(recipe: str) -> float:
    """Bytes of a number that a GEMM multiplies, `bf16` being high precision."""
    return BF16_BYTES if recipe == HIGH else registry.get(recipe).code_bytes


def forward_pass(run: PlannedRun, recipe: str) -> Pass:
    """One layer forward, with linears under `recipe` (`bf16` for a layer kept in high precision)."""
    linears = model_shapes.gemm_dimensions(run.config)
    stream, heads, ffn = _channels(run)
    is_fused = _fuses_activation(run, recipe)
    gate_and_up = 2 if run.config.model.swiglu else 1
    return Pass(
        fprop=products_s(run, recipe, "fprop"),
        attention=attention_s(run) * ATTENTION_FORWARD_SHARE,
        # Two norms (read, write) and two additions (read, read, write).
        norms=run.memory_s(BF16_BYTES * stream * (2 * 2 + 2 * 3)),
        rotary=run.memory_s(BF16_BYTES * 2 * heads),
        # In one kernel with the cast behind it, its result is neither written nor read.
        activation=run.memory_s(BF16_BYTES * ffn * (gate_and_up + 1 - 2 * is_fused)),
        casts=cast_s(run, recipe, sum(linear.rows * linear.in_features for linear in linears), len(linears)),
    )


def backward_pass(run: PlannedRun, recipe: str) -> Pass:
    """One layer backward, without what is computed again."""
    linears = model_shapes.gemm_dimensions(run.config)
    stream, heads, ffn = _channels(run)
    is_fused = _fuses_activation(run, recipe)
    gate_and_up = 2 if run.config.model.swiglu else 1
    of_wgrad = recipe if run.config.precision.fp8_wgrad else "bf16"
    # Without the kernel that splits and rotates, the gradients of queries, keys and values are concatenated after it.
    rotary_passes = 2 if rotates_in_one_kernel(run.config) else 4
    return Pass(
        dgrad=products_s(run, recipe, "dgrad"),
        wgrad=products_s(run, of_wgrad, "wgrad"),
        attention=attention_s(run) * (1 - ATTENTION_FORWARD_SHARE),
        # Two norms (read input and gradient, write) and two sums of gradients, of which the MLP's norm can save one's
        # writing and reading.
        norms=run.memory_s(BF16_BYTES * stream * (2 * 3 + 2 * 3 - 2 * run.config.precision.residual_norm_fusion)),
        rotary=run.memory_s(BF16_BYTES * rotary_passes * heads),
        activation=run.memory_s(BF16_BYTES * ffn * (1 + 2 * gate_and_up - 2 * gate_and_up * is_fused)),
        casts=cast_s(run, recipe, _gradient_numbers(run, linears), len(linears)),
    )


def cast_s(run: PlannedRun, recipe: str, numbers: float, tensors: float) -> float:
    """Seconds of quantizing so many numbers in so many tensors, to codes and transposed codes."""
    if recipe == "bf16":
        return 0.0
    calibration, known = run.calibration, registry.get(recipe)
    fraction = calibration.blockwise_cast_fraction if known.slow_cast else calibration.cast_fraction
    return tensors * calibration.cast_start_s + known.cast_bytes * numbers / (run.gpu.hbm_bytes_per_s * fraction)


def recomputed(run: PlannedRun, forward: Pass) -> float:
    """Seconds of the forward pass that run again in the backward pass."""
    training = run.config.training
    if derived.recompute_granularity(training) == "full":
        assert training.recompute_num_layers is not None
        layers = derived.layers_per_pipeline_rank(run.config)
        share = 1.0 if training.recompute_method == "uniform" else training.recompute_num_layers / layers
        return share * forward.total
    modules = derived.recompute_modules(training)
    again = forward.attention if "core_attn" in modules else 0.0
    again += forward.norms / 2 if "layernorm" in modules else 0.0
    if "mlp" in modules:
        weights = [linear.out_features * linear.in_features for linear in model_shapes.gemm_dimensions(run.config)]
        share = sum(weights[2:]) / sum(weights)
        again += share * (forward.fprop + forward.casts) + forward.activation
    return again


def attention_s(run: PlannedRun) -> float:
    """Seconds of attention, forward and backward, with the causal half (or the window) counted only."""
    model, calibration, seq = run.config.model, run.calibration, run.config.data.seq_length
    assert seq is not None
    window = min(model.window_size or seq, seq)
    mean_keys = window - window * window / (2 * seq)
    channels = derived.query_projection_size(model) // run.tensor
    flops = 3 * 2 * 2 * channels * mean_keys * run.tokens
    fraction = calibration.attention_fraction * window / (window + calibration.attention_half_tokens)
    return flops / (run.gpu.peak.flops["bf16"] * fraction)


def logits_s(run: PlannedRun) -> tuple[float, float, float]:
    """Seconds of (output layer forward, backward, loss) for one microbatch on the last stage."""
    recipes = output_recipes(run.config)
    forward, dgrad, wgrad = (product_s(run, recipes[product.gemm], product) for product in output_products(run))
    precision = run.config.precision
    # Transformer Engine's loss reads and writes logits once each way; the others keep an FP32 softmax as well.
    in_place = precision.cross_entropy_loss_fusion and precision.cross_entropy_fusion_impl == "te"
    return forward, dgrad + wgrad, run.memory_s((8 if in_place else 26) * run.tokens * run.padded_vocab // run.tensor)


def output_casts_s(run: PlannedRun) -> tuple[float, float]:
    """Seconds of quantizing the output layer's (input, logits' gradient) for one microbatch."""
    recipes = output_recipes(run.config)
    gradients = run.tokens * run.padded_vocab // run.tensor
    # Each of the two GEMMs that read the gradient has its own orientation of it, counted as half a cast to both.
    backward_s = sum(cast_s(run, recipes[gemm], gradients / 2, 1 / 2) for gemm in ("dgrad", "wgrad"))
    return cast_s(run, recipes["fprop"], run.sharded_tokens * run.hidden_size, 1), backward_s


def _channels(run: PlannedRun) -> tuple[int, int, int]:
    """Numbers of one microbatch on one rank: in the residual stream, in queries, keys and values, in the MLP."""
    model = run.config.model
    heads = derived.query_projection_size(model) + 2 * derived.kv_projection_size(model)
    tokens, tp = run.tokens, run.tensor
    is_rotary = model.position_embedding_type == "rope"
    return (
        run.sharded_tokens * run.hidden_size,
        tokens * heads // tp if is_rotary else 0,
        tokens * derived.ffn_hidden_size(model) // tp,
    )


def _gradient_numbers(run: PlannedRun, linears: list[model_shapes.GemmDimensions]) -> int:
    """Numbers in the gradients of the linears' outputs as a rank quantizes them: before any gather."""
    qkv, proj, fc1, fc2 = linears
    return run.tokens * (qkv.out_features + fc1.out_features) + run.sharded_tokens * (
        proj.out_features + fc2.out_features
    )


def _fuses_activation(run: PlannedRun, recipe: str) -> bool:
    """Whether activation and cast are one kernel."""
    return recipe != "bf16" and fuses_operations(run.config)
