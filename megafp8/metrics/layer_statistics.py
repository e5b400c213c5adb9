"""Statistics of layers that grow before a run in FP8 diverges, their limits, and what helps.

    kurtosis          of a linear's input: mean of x^4 over the squared mean of x^2; 3 for normal numbers
    outlier share     of a linear's input: the part of the sum of x^2 that lies in the largest channel
    subnormal share   of a linear's input: nonzero values that one scale for the tensor puts below E4M3's normal numbers
    SwiGLU alignment  of a layer: the largest |cosine| of the two weights of one channel (arXiv:2409.12517)
    attention logits  of a layer: the largest |q| |k| of one head times the scale of its softmax, a bound of its logits
    residual          of a layer: root mean square of its output
    gradient SNR      of a layer: signal-to-noise ratio of its gradients (`optimizer/gradient_snr.py`)

Attention logits, the residual and the SNR are also compared with their own past (`GROWTH`), since a factor of a few in
a hundred steps is early, and a fixed limit that is above the values of every healthy model is late. Healthy models
grow, too: weights of queries and keys with the sum of the learning rates so far, and logits with its square. So values
are compared with earlier ones only if these were taken after the steps of `first_steps_not_stored`: more than
`SETTLING_STEPS` after the warm-up, and where the sum at most doubles in two intervals, so that its square grows by at
most 4. In five it may grow by 12, so that logits above 100 so early may be a warning in a healthy model, too.

In a model of 8 layers and width 512 with a warm-up of 23 steps (two seeds, 60 and 104 steps of 2,048 tokens, emulated
tensorwise scaling in FP32, peak learning rate 1.2e-3), logits grew by factors of up to 5 in 20 steps from step 24 on,
and of up to 2.8 from step 44 on; a planted fault makes it 7 to 10. The residual grew by up to 6.4 in 50 steps from step
24 on, and by up to 2.1 from step 44 on. With 10 steps after the warm-up instead of 20 there was a false alarm.

The mean over the layers varies far less than the logits of one, and less between CPUs, whose vector units give a run
another course: in 65 clean runs of 2 layers it grew by at most 1.9 in 20 steps, with planted faults by 3.2 or more in
the first statistics, 10 steps after they began (`benchmarks/results/planted_faults.md`).

The SNR of a healthy model falls to that of noise. It rises again when the loss grows, which is no early warning: in
runs with planted faults it is noticed between 9 steps before and 6 steps after a loss that is 5% worse.

The limits lie between the largest values of clean runs and the smallest of runs with planted faults, which
`benchmarks/guard_calibration.py` measures on a small model. They are not calibrated on large models.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from megafp8.config.guarded_linears import SWIGLU_OUTPUT
from megafp8.config.precision_map import LinearChoice, is_quantized, resolve
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.recipes.formats import E4M3

ALIGNMENT = "SwiGLU alignment"
SMALLEST_NORMAL = E4M3.min_normal / E4M3.max  # of a tensor whose amax is 1


class Limit(NamedTuple):
    """The limit of a statistic.

    Attributes:
        value: larger ones are warnings.
        moves_layer: whether the layer in high precision helps. If not, the cause is not the quantization.
        suggestions: what to try, where it is of use (`suggestion_text`).
    """

    value: float
    moves_layer: bool
    suggestions: tuple[str, ...]


class Growth(NamedTuple):
    """A limit of the growth of a statistic.

    Attributes:
        factor: larger ones, over the smallest of the last observations, are warnings.
        floor: of the values; smaller ones may grow.
        num_intervals: number of those observations.
    """

    factor: float
    floor: float
    num_intervals: int


SMOOTH, MOVE = "--fp8-guard smooth-swiglu", "--fp8-guard bf16-layer"
KEEP = "the layer in high precision with --precision"
NORM = "--qk-layernorm in a new run"
CAP = "--attention-logit-softcapping 50 in a new run"  # of Gemma 2
LOWER_LR, MORE_DECAY = "a lower --lr", "a larger --weight-decay"
QUANTIZATION_SUGGESTIONS = (SMOOTH, MOVE, KEEP)
LIMITS = {
    "kurtosis": Limit(1000.0, True, QUANTIZATION_SUGGESTIONS),
    "outlier share": Limit(0.8, True, QUANTIZATION_SUGGESTIONS),
    "subnormal share": Limit(0.5, True, QUANTIZATION_SUGGESTIONS),
    ALIGNMENT: Limit(0.98, True, (*QUANTIZATION_SUGGESTIONS, MORE_DECAY)),
    "attention logits": Limit(500.0, False, (NORM, CAP, LOWER_LR)),
    "residual": Limit(1000.0, False, (LOWER_LR,)),
    "gradient SNR": Limit(math.inf, False, (LOWER_LR, KEEP)),
}
NUM_REMEMBERED = 5
"""Observations that are kept: with the default interval those of 100 steps."""
SETTLING_STEPS = 20
"""Steps after the learning rate's warm-up whose values are not kept for a comparison; steps, since the limits of growth
were calibrated at one interval, and at a longer one as many intervals would leave a run unwatched for longer."""
GROWTH = {
    "attention logits": (Growth(4.0, 100.0, NUM_REMEMBERED), Growth(4.5, 15.0, 2)),
    "residual": (Growth(4.0, 10.0, NUM_REMEMBERED),),
    "gradient SNR": (Growth(3.0, 0.2, NUM_REMEMBERED),),
}
MEAN_STEPS = 20
"""Steps over which the growth of a mean over the layers is limited; one interval if that is longer."""
MEAN_GROWTH = {"attention logits": (2.5, 10.0)}
"""Factor and floor, as in `Growth`, of the geometric mean over the layers."""
INPUT_STATISTICS = ("kurtosis", "outlier share", "subnormal share")
LAYER_STATISTICS = (ALIGNMENT, "attention logits", "residual")
GRADIENT_SNR = "gradient SNR"


def first_steps_not_stored(warmup_steps: float, interval: int) -> float:
    """Steps at the start of a run whose values are not kept for a comparison.

    They depend on the interval only if it is long beside the warm-up. A linear warm-up counts as half of its steps at
    the full learning rate; once the sum of the learning rates is that of two intervals, two more at most double it.
    """
    return max(warmup_steps + SETTLING_STEPS, warmup_steps / 2 + 2 * interval)


def smoothing_helps(statistic: str, name: str) -> bool:
    """Whether scales per channel of SwiGLU's output help against a warning of a layer, or of a linear's input."""
    return statistic == ALIGNMENT or name.endswith(f".{SWIGLU_OUTPUT}.input")


def suggestion_text(statistic: str, name: str, model: ModelConfig, precision: PrecisionConfig, guard: str) -> str:
    """What helps against a warning, and the run does not have yet.

    Args:
        name: of a layer, or of a linear's input: `layers.3.linear_fc2.input`.
        guard: `--fp8-guard`.
    """
    layer = ".".join(name.split(".")[:2])
    choices, has_fp8_weights = resolve(model, precision), precision.fp8_param_gather
    output = choices.get(f"{layer}.{SWIGLU_OUTPUT}", LinearChoice())
    can_smooth = model.swiglu and output.is_quantized and not output.is_stateful
    is_useful = {
        SMOOTH: smoothing_helps(statistic, name) and can_smooth and guard != "smooth-swiglu" and not has_fp8_weights,
        MOVE: guard != "bf16-layer" and not has_fp8_weights and is_quantized(precision),
        KEEP: any(choice.is_quantized and linear.startswith(f"{layer}.") for linear, choice in choices.items()),
        NORM: not (model.qk_layernorm or model.qk_l2_norm),
        CAP: model.attention_logit_softcapping is None,
    }
    return "; ".join(text for text in LIMITS[statistic].suggestions if is_useful.get(text, True))


def input_statistics(values: Tensor) -> Tensor:
    """`INPUT_STATISTICS` of a linear's input [..., channels], FP32 [3]; infinity where it is not finite."""
    rows = values.detach().reshape(-1, values.shape[-1]).float()
    magnitudes = rows.abs()
    amax = magnitudes.amax()
    squares = (rows / amax.clamp(min=torch.finfo(torch.float32).tiny)).square()  # no overflow
    energy = squares.sum(dim=0)
    total = energy.sum().clamp(min=1.0)  # the largest square is 1, unless all are zero
    kurtosis = squares.square().sum() * rows.numel() / total.square()
    num_nonzero = torch.count_nonzero(rows).clamp(min=1)
    num_subnormal = num_nonzero - torch.count_nonzero(magnitudes >= amax * SMALLEST_NORMAL)
    return finite_or_infinity(torch.stack([kurtosis, energy.amax() / total, num_subnormal.clamp(min=0) / num_nonzero]))


def swiglu_alignment(weight: Tensor) -> Tensor:
    """The largest |cosine| between the gate's weight of a channel and the other one, FP32 scalar.

    Args:
        weight: of linear_fc1 [2 F, H], the rows of the gate first.
    """
    gate, linear = weight.detach().float().chunk(2)
    return finite_or_infinity(torch.nn.functional.cosine_similarity(gate, linear, dim=1).abs().amax())


def attention_logit_bound(query: Tensor, key: Tensor, softmax_scale: float, cap: Optional[float] = None) -> Tensor:
    """The largest |q| |k| times the scale of the softmax, of any head, FP32 scalar.

    Args:
        query: [s, b, heads, d].
        key: [s, b, groups, d]; every group serves as many heads.
        softmax_scale: of the products, 1 / sqrt(d) by default in attention.
        cap: C, if logits are C tanh(x / C). Where x is not finite, nor is the bound.
    """
    longest_query, longest_key = (
        torch.linalg.vector_norm(tensor.detach().float(), dim=-1).flatten(0, 1).amax(dim=0) for tensor in (query, key)
    )
    heads_per_group = len(longest_query) // len(longest_key)
    products = longest_query * longest_key.repeat_interleave(heads_per_group)
    bound = finite_or_infinity(products.amax() * softmax_scale)
    return bound if cap is None else torch.where(bound.isfinite(), cap * torch.tanh(bound / cap), bound)


def root_mean_square(values: Tensor) -> Tensor:
    """Root mean square, FP32 scalar."""
    return finite_or_infinity(values.detach().float().square().mean().sqrt())


def finite_or_infinity(values: Tensor) -> Tensor:
    """NaN becomes infinity, which every limit notices."""
    return values.nan_to_num(nan=torch.inf, posinf=torch.inf)
