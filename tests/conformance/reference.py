"""FP8 quantization as slowly and plainly as it can be written. Read it from top to bottom.

Nothing here is shared with the package: the formats come from the OCP 8-bit Floating Point Specification (OFP8) 1.0,
the scale rules from Transformer Engine's kernels. numpy only; every step is exact or one IEEE FP32 operation.
"""

import bisect
import math

import numpy as np

# --- 1. The formats ------------------------------------------------------------------------------------------------
# A code is sign, exponent field e, mantissa field m. With M mantissa bits and a bias B it stands for
#     (1 + m / 2^M) 2^(e - B)    where e > 0   (normal)
#     (m / 2^M) 2^(1 - B)        where e = 0   (subnormal, and zero)
# E4M3 gives up infinity: only mantissa 7 with exponent 15 is special (NaN), so that 448 = 1.75 x 2^8 is its maximum.
# E5M2 is IEEE-like: exponent 31 is infinity (m = 0) or NaN, so that 57344 = 1.75 x 2^15 is its maximum.
FORMATS = {
    "e4m3": {"mantissa_bits": 3, "bias": 7, "largest_code": 0x7E},
    "e5m2": {"mantissa_bits": 2, "bias": 15, "largest_code": 0x7B},
}
NAN_CODE = 0x7F  # the one that hardware writes, in both formats


def positive_value(code: int, fmt: str) -> float:
    """The value of a finite code without its sign."""
    mantissa_bits, bias = FORMATS[fmt]["mantissa_bits"], FORMATS[fmt]["bias"]
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    if exponent > 0:
        return (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)


def value(code: int, fmt: str) -> float:
    """The value of any code. A double holds every one exactly."""
    sign, magnitude = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if magnitude > FORMATS[fmt]["largest_code"]:
        return sign * math.inf if fmt == "e5m2" and magnitude == 0x7C else math.nan
    return sign * positive_value(magnitude, fmt)


# The finite magnitudes in rising order; code n stands for entry n.
MAGNITUDES = {fmt: [positive_value(c, fmt) for c in range(spec["largest_code"] + 1)] for fmt, spec in FORMATS.items()}


# --- 2. Rounding ---------------------------------------------------------------------------------------------------
def round_to_code(x: float, fmt: str) -> int:
    """The nearest code; of two equally near ones the even one; beyond the maximum, the maximum; NaN is NaN_CODE."""
    if math.isnan(x):
        return NAN_CODE
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    magnitudes, magnitude = MAGNITUDES[fmt], abs(x)
    if magnitude >= magnitudes[-1]:
        return sign | FORMATS[fmt]["largest_code"]
    above = bisect.bisect_right(magnitudes, magnitude)  # the first code that is larger
    below = above - 1
    to_below, to_above = magnitude - magnitudes[below], magnitudes[above] - magnitude
    if to_below == to_above:
        return sign | (below if below % 2 == 0 else above)
    return sign | (below if to_below < to_above else above)


# --- 3. Scales -----------------------------------------------------------------------------------------------------
def amax(x: np.ndarray) -> np.float32:
    """The largest magnitude. NaN is passed over; infinity is not."""
    largest = 0.0
    for element in x.ravel():
        if not math.isnan(element):
            largest = max(largest, abs(float(element)))
    return np.float32(largest)


def quant_scale(largest: np.float32, fmt: str, power_of_two: bool) -> np.float32:
    """What to multiply by so that `largest` lands on the format's maximum."""
    if largest == 0 or np.isinf(largest):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(MAGNITUDES[fmt][-1]) / largest  # IEEE FP32 division
    if np.isinf(scale):
        scale = np.finfo(np.float32).max
    if power_of_two:  # clear the mantissa: round down
        scale = np.float32(2.0 ** math.floor(math.log2(float(scale))))
    return scale


# --- 4. Per-tensor current scaling -----------------------------------------------------------------------------------
def quantize_tensorwise(x: np.ndarray, fmt: str, power_of_two: bool) -> tuple[np.ndarray, np.float32]:
    """Codes (uint8, the shape of x) and dequant_scale of an FP32 array (BF16 input widened, which is exact)."""
    scale = quant_scale(amax(x), fmt, power_of_two)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.astype(np.float32) * scale  # one FP32 product
    codes = [round_to_code(float(element), fmt) for element in scaled.ravel()]
    return np.array(codes, dtype=np.uint8).reshape(x.shape), np.float32(1) / scale
