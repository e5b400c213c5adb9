"""Where FP8 pays: each linear's GEMMs in BF16 against those in FP8 with all that quantizes for them, and the step.

The times are those of the plan (`compute`, `step_time`). A linear casts its input and its output's gradient once a
microbatch, each to both orientations, and its weight once a step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megafp8.config import derived, model_shapes
from megafp8.config.rules import recompute
from megafp8.config.settings import with_values
from megafp8.planning.compute import cast_s, product_s
from megafp8.planning.planned_run import PlannedRun, layer_products
from megafp8.planning.step_time import step_time

PAYS = 1.05
"""A step below this speed of BF16's is not worth its rounding."""
HIGH_PRECISION = {"precision.fp8_format": None, "precision.fp4_format": None, "precision.fp8_param_gather": False,
                  "precision.precision_map": (), "precision.fp8_schedule": None}  # fmt: skip


@dataclass(frozen=True)
class LinearGain:
    """One linear of a layer on one rank, a microbatch.

    Attributes:
        bf16_s: seconds of its three GEMMs in BF16.
        quantized_s: the same under the recipe.
        casts_s: of quantizing for them.
    """

    linear: model_shapes.GemmDimensions
    bf16_s: float
    quantized_s: float
    casts_s: float

    @property
    def speed(self) -> float:
        """To BF16."""
        return self.bf16_s / (self.quantized_s + self.casts_s)


def linear_gains(run: PlannedRun) -> list[LinearGain]:
    """The linears of a layer, in the order of the forward pass."""
    found = []
    for linear in model_shapes.gemm_dimensions(run.config):
        products = [product for product in layer_products(run) if product.linear == linear.name]
        of_wgrad = run.recipe if run.config.precision.fp8_wgrad else "bf16"
        quantized_s = sum(product_s(run, of_wgrad if p.gemm == "wgrad" else run.recipe, p) for p in products)
        bf16_s = sum(product_s(run, "bf16", product) for product in products)
        found.append(LinearGain(linear, bf16_s, quantized_s, linear_casts_s(run, run.recipe, linear)))
    return found


def linear_casts_s(run: PlannedRun, recipe: str, linear: model_shapes.GemmDimensions) -> float:
    """Seconds in which a linear quantizes its operands for a microbatch, its share of the weight included."""
    of_weight = 1 / derived.num_microbatches(run.config, run.world_size)
    activations = linear.rows * linear.in_features + gradient_rows(run, linear) * linear.out_features
    numbers = activations + of_weight * linear.in_features * linear.out_features
    return cast_s(run, recipe, numbers, 2 + of_weight)


def gradient_rows(run: PlannedRun, linear: model_shapes.GemmDimensions) -> int:
    """Rows of the output's gradient: a part of them behind linear_proj and linear_fc2, whose output is scattered."""
    return run.sharded_tokens if linear.rows == run.tokens else run.tokens


def in_high_precision(run: PlannedRun) -> PlannedRun:
    """The same run in BF16."""
    return dataclasses.replace(run, config=with_values(run.config, HIGH_PRECISION))


def fp8_warnings(run: PlannedRun) -> list[str]:
    """That a quantized step is hardly faster than one in BF16, or slower, and why; nothing where it pays."""
    quantized, plain = step_time(run), step_time(in_high_precision(run))
    speed = plain.seconds / quantized.seconds
    if speed >= PAYS:
        return []
    has_map = bool(run.config.precision.precision_map)
    asked = "the precision map" if has_map else derived.recipe_flag(run.config.precision)
    lines = [
        f"{asked} is not expected to pay on {run.gpu.name}: {speed:.2f} of BF16's "
        f"speed, {1e3 * quantized.seconds:.1f} ms a step against {1e3 * plain.seconds:.1f}"
    ]
    host_share = quantized.parts.get("host", 0.0) / quantized.seconds
    if host_share > 1 - 1 / PAYS:
        or_graph = "" if any(recompute.obstacles(run.config)) else ", or --cuda-graph-impl local"
        lines.append(
            f"kernels are so short that the GPU waits {host_share:.0%} of the step for the host, which starts more of "
            f"them in FP8: use a larger --micro-batch-size or --seq-length{or_graph}"
        )
    small = [gain for gain in linear_gains(run) if gain.speed < PAYS]
    if small and not has_map:  # gains are those of one recipe for all
        lines.append("too small for FP8, quantizing included: " + ", ".join(map(describe_gain, small)))
    return lines


def describe_gain(gain: LinearGain) -> str:
    """A linear in words."""
    linear = gain.linear
    return f"{linear.name} ({linear.in_features} to {linear.out_features} channels, {gain.speed:.2f} of BF16's speed)"
