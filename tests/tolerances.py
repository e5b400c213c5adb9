"""Every tolerance of the tests that compare trainings, with where it comes from. None is relaxed without a reason here.

The measure is the model's own sensitivity: move every weight by at most one unit in its last place (`small_run.nudge`)
and train again. Nothing that changes the order of sums can be expected to stay closer than that, and a test
(`parity/test_fp8_layouts.py`) holds the numbers below against it from both sides.
"""

# A loss between 4 and 8 is a multiple of 2^-21 = 4.8e-7. Summing its tokens in another order moves it by one or two of
# these; over 20 steps at these learning rates the weights' own differences stay below that. Eight nudged trainings of
# each style stayed within two units; this is four.
LAYOUT_LOSS = 2e-6

# Relative. Eight nudged trainings: 2e-7 for gpt2. For llama 2e-5, at single steps, from its normalized queries and keys
# (without --qk-layernorm it is as good as gpt2). These are the next round numbers above twice that.
LAYOUT_GRAD_NORM = {"llama": 5e-5, "gpt2": 1e-6}

# The same numbers, summed over other ranks. Each rank rounds its own sum to FP32 once per microbatch (ranks' sums are
# then added in FP64), which moves a loss between 4 and 8 by up to half a unit of 2^-21 on each side of the comparison,
# and the masked attention kernel of context-parallel ranks rounds in another order once more: two units.
SUMMED_ELSEWHERE = 2 * 2.0**-21

# Root mean square over six steps. A weight's last bit decides now and then to which of two FP8 codes, 6% to 12% apart,
# an activation is rounded; then scales and everything behind them move. Twelve nudged FP8 trainings of each style had
# up to 2.6e-4 (and 5.8e-4 at a single step), and splitting a sum over ranks is a nudge of that kind. Twice that; scales
# that do depend on the layout (--fp8-amax-reduction te, or another micro-batch) give 5.6e-4.
FP8_LAYOUT_LOSS = 5e-4

# --- One linear beside Transformer Engine's on Hopper ---
# Both multiply the same codes exactly; results differ by what sums drop, and by where that tips their rounding.

# Two BF16 results, each rounded once, in opposite directions at worst: 2 u |y| with u = 2^-8.
LINEAR_ROUNDING = 2 * 2.0**-8

# What sums drop, in units of S = sum |a| |b|. Hopper's FP8 units add 32 products to the sum so far in one step, and cut
# each of the addends 13 bits below the largest (arXiv:2412.19437, section 3.5.2). Say products are of size 1 and random
# sign. After t steps the sum is about sqrt(32 t), so a step drops about sqrt(32 / 3) 2^-13 sqrt(32 t) and n steps about
# 13 n 2^-13; S is 32 n. That is 2^-14 S, root mean square, however long the sum: "fast" accumulation. With the split
# accumulator, and always under blockwise, an FP32 register takes over every 128 products: only the parts' errors add
# up, as random numbers do, which halves them from 512 products on.
_FAST, _SPLIT = 2.0**-14, 2.0**-15
_PER_TENSOR = {"fprop": _FAST, "dgrad": _SPLIT, "wgrad": _SPLIT}  # what Transformer Engine's recipes choose
TENSOR_CORE_RMS = {
    "tensorwise": _PER_TENSOR, "delayed": _PER_TENSOR, "blockwise": dict.fromkeys(_PER_TENSOR, _SPLIT),
}  # fmt: skip
# The largest of some hundred thousand results: four times that.
TENSOR_CORE_PEAK = {
    recipe: {gemm: 4 * rms for gemm, rms in gemms.items()} for recipe, gemms in TENSOR_CORE_RMS.items()
}

# So few roundings to BF16 are tipped: 94% or more of the results were equal on an H200. A second rounding (a scale
# multiplied to a BF16 product) would leave 73%, which this must catch.
LINEAR_EQUAL_FRACTION = 0.90
