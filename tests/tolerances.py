"""Every tolerance of the tests that compare trainings, with its derivation. None is relaxed without a reason here.

The measure is the model's own sensitivity: move every weight by at most one unit in its last place (`small_run.nudge`)
and train again. A change of the summation order cannot be expected to stay closer than that. A test
(`parity/test_fp8_layouts.py`) checks the numbers below against it from both sides."""

# A loss between 4 and 8 is a multiple of 2^-21 = 4.8e-7. Summing its tokens in another order moves it by one or two of
# these; over 20 steps at these learning rates the weights' own differences stay below that. Eight nudged trainings of
# each style stayed within two units; this is four.
LAYOUT_LOSS = 2e-6

# Relative. Eight nudged trainings: 2e-7 for gpt2. For llama 2e-5, at single steps, from its normalized queries and keys
# (without --qk-layernorm it equals gpt2's). These are the next round numbers above twice that.
LAYOUT_GRAD_NORM = {"llama": 5e-5, "gpt2": 1e-6}

# Mixtures whose capacity keeps the tokens with the highest scores, where a last bit may decide which is dropped. Four
# nudged trainings on one rank, over four steps: up to 2.1e-5, and 1.0e-4 of the norms; two ranks with the kernels of
# CPUs without AVX: 2.3e-4 of a norm. The bounds are about twice that.
# Tokens dropped by position give 1.6e-3, a capacity that counts the tokens of half a rank 3.6e-4.
CAPACITY_BY_SCORE_LOSS, CAPACITY_BY_SCORE_GRAD_NORM = 5e-5, 5e-4

# The same numbers, summed over other ranks. Each rank rounds its own sum to FP32 once per microbatch (ranks' sums are
# then added in FP64), which moves a loss between 4 and 8 by up to 0.5 units of 2^-21 on each side of the comparison.
# The masked attention kernel of context-parallel ranks rounds once more in another order: two units.
SUMMED_ELSEWHERE = 2 * 2.0**-21

# Root mean square over six steps, by recipe. A weight's last bit sometimes decides to which of two codes, 6% to 12%
# apart in FP8, an activation is rounded; then scales and everything behind them move. Twelve nudged tensorwise
# trainings of each style had up to 2.6e-4 (and 5.8e-4 at a single step), and splitting a sum over ranks is a nudge of
# that kind. Eight of the other recipes had up to 3.4e-4 (delayed), 3.4e-4 (blockwise), 2.5e-4 (mxfp8) and 8.7e-4
# (nvfp4, whose steps are four times as wide; its shards of a gradient are also rounded by other random numbers than the
# full gradient). The bound is twice that. Scales that depend on the layout give more: tensorwise 3e-4 to 6e-4, nvfp4
# 3e-3 (--fp8-amax-reduction te), tensorwise with another micro-batch 5.6e-4.
FP8_LAYOUT_LOSS = {"tensorwise": 5e-4, "delayed": 7e-4, "blockwise": 7e-4, "mxfp8": 5e-4, "nvfp4": 2e-3}

# The same for mixtures of experts, where a last bit may also decide to which expert a token goes. Four nudged trainings
# of each recipe had up to 2.8e-4 (tensorwise), 2.0e-4 (delayed), 5.3e-4 (blockwise), 2.3e-4 (mxfp8) and 3.4e-4 (nvfp4);
# the bound is about twice that. For nvfp4 it is twice the 1.2e-3 of tensor-parallel ranks, which round shards of a
# gradient by other random numbers.
MIXTURE_FP8_LAYOUT_LOSS = {"tensorwise": 6e-4, "delayed": 5e-4, "blockwise": 1.1e-3, "mxfp8": 5e-4, "nvfp4": 2.5e-3}

# Nats, over six steps whose gradients are reduced as FP8 codes. Measured, by layout and kind of scales: 7e-5 to 4.3e-4.
# The bound is about twice that.
FP8_GRADIENT_LOSS = 1e-3

# Nats, over six steps of a level of FP8-LM, to BF16, and over three steps to the same level under another layout.
# Measured: 1.1e-3 to 1.7e-3, and 2e-4 to 7e-4. The bound is twice the largest.
FP8_LM_LOSS = 3.5e-3
# Relative, of the norm of all gradients in the same steps. Measured with O1: 1.6e-3 to 2.6e-3.
FP8_LM_NORM = 1e-2

# Relative error of the gradients of two layers whose saved activations are codes: the largest one of an E4M3 code.
# Measured: 0.031 to 0.041, in weights of norms, which are the only ones to be multiplied with decoded codes at once.
SAVED_ACTIVATION_GRADIENT = 1 / 16

# Nats, over six steps with saved activations as codes: to those without, and to one rank's under another layout.
# Measured: 1e-4 to 4e-4, and 5e-4 to 7e-4. The bound is twice the largest.
SAVED_ACTIVATION_LOSS = 1.4e-3

# Where scales depend on the layout, two layouts are two quantizations of one training. Each differs from high precision
# by its own errors. The tolerance is a multiple of that distance, which is measured in the same test: two errors of the
# same size, in the worst case of opposite sign.
OTHER_SCALES = 2.0

# --- One linear compared with Transformer Engine's on Hopper ---
# Both multiply the same codes exactly. Results differ by the bits that sums drop, and by the roundings that this
# changes.

# Two BF16 results, each rounded once, in the worst case in opposite directions: 2 u |y| with u = 2^-8.
LINEAR_ROUNDING = 2 * 2.0**-8

# What sums drop, in units of S = sum |a| |b|, root mean square and maximum, by a model of Hopper's FP8 units
# (conformance/tensor_core.py; test_tensor_core.py checks these numbers against it): "fast" where the sum stays in the
# unit, "split" where FP32 takes over every 128 products. For sums of 256 and more: fast approaches 4.6e-5 as they get
# longer, split falls from 1.9e-5. An H200 had 4.63e-5 and 4.9e-6 for 4096 products, the model 4.57e-5 and 4.9e-6.
_FAST, _SPLIT = 5e-5, 2e-5
_PER_TENSOR = {"fprop": _FAST, "dgrad": _SPLIT, "wgrad": _SPLIT}  # the modes of Transformer Engine's recipes
TENSOR_CORE_RMS = {
    "tensorwise": _PER_TENSOR, "delayed": _PER_TENSOR, "blockwise": dict.fromkeys(_PER_TENSOR, _SPLIT),
}  # fmt: skip
# The largest results drop the most, since the cut depends on the sum so far. An H200: 6.1e-4 and 1.0e-4.
TENSOR_CORE_PEAK = {
    recipe: {gemm: 14 * rms for gemm, rms in gemms.items()} for recipe, gemms in TENSOR_CORE_RMS.items()
}

# Few roundings to BF16 change: of sums of 256 products 94% or more were equal on an H200, of 512 with fast accumulation
# 89%, as in the model. A second rounding (a scale multiplied to a BF16 product) would leave 73%, which this must
# detect. (The longer fast sums are, the fewer: 69% at 4096 in the model.)
LINEAR_EQUAL_FRACTION = 0.85

# --- Logits compared with transformers' ---
# FP32, largest difference over largest logit, for models of two and three layers as wide as 128. Both compute the same
# products in another summation order: 20 sums of up to 512 terms, each off by some units of 2^-24 of its terms, which
# norms propagate. Measured: 0 (equal to the bit) to 7e-7. A mistake in a name or a layout gives 0.1 and more.
TRANSFORMERS_LOGITS = 5e-6
