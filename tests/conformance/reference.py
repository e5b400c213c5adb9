"""Low-precision quantization, as slow and simple as possible. Read it from top to bottom.

It shares nothing with the package. The formats come from the OCP 8-bit Floating Point Specification (OFP8) 1.0 and the
OCP Microscaling Formats (MX) Specification 1.0, the scale rules from Transformer Engine's kernels. It uses numpy only.
Every step is exact or one IEEE FP32 operation.
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
# E2M1 has no special codes at all: 6 = 1.5 x 2^2 is code 7, its sign is bit 3.
FORMATS = {
    "e4m3": {"mantissa_bits": 3, "bias": 7, "largest_code": 0x7E, "sign": 0x80},
    "e5m2": {"mantissa_bits": 2, "bias": 15, "largest_code": 0x7B, "sign": 0x80},
    "e2m1": {"mantissa_bits": 1, "bias": 1, "largest_code": 0x7, "sign": 0x8},
}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7}  # the code that hardware writes


def positive_value(code: int, fmt: str) -> float:
    """The value of a finite code without its sign."""
    mantissa_bits, bias = FORMATS[fmt]["mantissa_bits"], FORMATS[fmt]["bias"]
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    if exponent > 0:
        return (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)


def value(code: int, fmt: str) -> float:
    """The value of any code. A double holds every one exactly."""
    sign_bit = FORMATS[fmt]["sign"]
    sign, magnitude = (-1.0 if code & sign_bit else 1.0), code & (sign_bit - 1)
    if magnitude > FORMATS[fmt]["largest_code"]:
        return sign * math.inf if fmt == "e5m2" and magnitude == 0x7C else math.nan
    return sign * positive_value(magnitude, fmt)


# The finite magnitudes in rising order; code n stands for entry n.
MAGNITUDES = {fmt: [positive_value(c, fmt) for c in range(spec["largest_code"] + 1)] for fmt, spec in FORMATS.items()}


# --- 2. Rounding ---------------------------------------------------------------------------------------------------
def round_to_code(x: float, fmt: str) -> int:
    """The nearest code; of two equally near ones the even one; beyond the maximum, the maximum."""
    if math.isnan(x):
        return NAN_CODE[fmt]
    sign = FORMATS[fmt]["sign"] if math.copysign(1, x) < 0 else 0
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
    """The largest magnitude. NaN is ignored, infinity is not."""
    largest = 0.0
    for element in x.ravel():
        if not math.isnan(element):
            largest = max(largest, abs(float(element)))
    return np.float32(largest)


def quant_scale(
    largest: np.float32, fmt: str, power_of_two: bool, on_overflow: float = np.finfo(np.float32).max
) -> np.float32:
    """The factor that scales `largest` to the format's maximum."""
    if largest == 0 or np.isinf(largest):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(MAGNITUDES[fmt][-1]) / largest  # IEEE FP32 division
    if np.isinf(scale):
        scale = np.float32(on_overflow)
    if power_of_two:  # clear the mantissa: round down
        scale = np.float32(2.0 ** math.floor(math.log2(float(scale))))
    return scale


# --- 4. Per-tensor current scaling -----------------------------------------------------------------------------------
def codes_of(x: np.ndarray, scale: np.float32, fmt: str) -> np.ndarray:
    """Each element times the scale, one FP32 product, rounded to a code (uint8)."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.astype(np.float32) * scale
    codes = [round_to_code(float(element), fmt) for element in scaled.ravel()]
    return np.array(codes, dtype=np.uint8).reshape(x.shape)


def quantize_tensorwise(x: np.ndarray, fmt: str, power_of_two: bool) -> tuple[np.ndarray, np.float32]:
    """Codes (the shape of x) and dequant_scale of an FP32 array (BF16 input widened, which is exact)."""
    scale = quant_scale(amax(x), fmt, power_of_two)
    return codes_of(x, scale, fmt), np.float32(1) / scale


# --- 5. Delayed scaling ----------------------------------------------------------------------------------------------
def delayed_update(
    history: list[np.float32], scale: np.float32, largest: np.float32, fmt: str, take_max: bool, margin: int
) -> tuple[list[np.float32], np.float32]:
    """The history, and the scale for the next use of a tensor whose amax over all ranks was `largest`."""
    if largest == 0:
        return history, scale
    rolled = history[1:] + [largest]
    chosen = max(rolled) if take_max else largest
    if not np.isinf(chosen):
        with np.errstate(over="ignore"):
            scale = np.float32(MAGNITUDES[fmt][-1] / 2**margin) / chosen
        scale = min(scale, np.finfo(np.float32).max)
    return [np.float32(0)] + rolled[1:], scale


# --- 6. Blocks -------------------------------------------------------------------------------------------------------
# A block of r rows and c columns has its own scale. At a ragged edge a block is the part that exists.
#     blockwise   1 x 128 for what is summed along a row, 128 x 1 along a column, 128 x 128 for weights
#     mxfp8       1 x 32 and 32 x 1
#     nvfp4       1 x 16, 16 x 1, and 16 x 16 for weights
def blocks_of(x: np.ndarray, block: tuple[int, int]) -> list[tuple[int, int, tuple[slice, slice]]]:
    """(block row, block column, its place in x) for each block."""
    height, width = block
    return [
        (i, j, (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)))
        for i in range(-(-x.shape[0] // height))
        for j in range(-(-x.shape[1] // width))
    ]


def quantize_blockwise(
    x: np.ndarray, block: tuple[int, int], fmt: str, power_of_two: bool, largest_input: float
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and dequant_scale [block rows, block columns]. A scale that overflows becomes the input type's maximum."""
    codes, scales = np.zeros(x.shape, dtype=np.uint8), {}
    for i, j, index in blocks_of(x, block):
        scale = quant_scale(amax(x[index]), fmt, power_of_two, on_overflow=largest_input)
        codes[index], scales[i, j] = codes_of(x[index], scale, fmt), np.float32(1) / scale
    return codes, as_matrix(scales, np.float32)


def as_matrix(entries: dict[tuple[int, int], object], dtype: type) -> np.ndarray:
    """Entries at (row, column) as a matrix."""
    matrix = np.zeros([1 + max(index[axis] for index in entries) for axis in (0, 1)], dtype=dtype)
    for index, entry in entries.items():
        matrix[index] = entry
    return matrix


# --- 7. MXFP8 --------------------------------------------------------------------------------------------------------
# A scale is a power of two, stored as the byte of its exponent: byte e is 2^(e - 127), 255 is NaN (E8M0).
POWERS_OF_TWO = [2.0 ** (exponent - 127) for exponent in range(255)]


def e8m0_round_up(x: np.float32) -> int:
    """The smallest E8M0 number that is not below x >= 0. Zero gives the smallest of all, infinity the largest."""
    if np.isnan(x):
        return 255
    return bisect.bisect_left(POWERS_OF_TWO[:254], float(x))


def quantize_mxfp8(x: np.ndarray, block: tuple[int, int], fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and E8M0 bytes [block rows, block columns]."""
    codes, scales = np.zeros(x.shape, dtype=np.uint8), {}
    for i, j, index in blocks_of(x, block):
        one_over_max = np.float32(1 / MAGNITUDES[fmt][-1])
        exponent = e8m0_round_up(amax(x[index]) * one_over_max)  # an FP32 product, not a quotient
        codes[index] = codes_of(x[index], np.float32(2.0 ** (127 - exponent)), fmt)
        scales[i, j] = exponent
    return codes, as_matrix(scales, np.uint8)


# --- 8. NVFP4 --------------------------------------------------------------------------------------------------------
# Two levels of scales: one FP32 number for the tensor, so that the largest block's scale is E4M3's maximum, and one
# E4M3 number a block. Every step is one FP32 operation, in this order.
def quantize_nvfp4(x: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Codes (one per byte), E4M3 bytes [block rows, block columns], and the tensor's amax."""
    largest_fp32, one = np.finfo(np.float32).max, np.float32(1)
    tensor_amax = amax(x)
    codes, scales = np.zeros(x.shape, dtype=np.uint8), {}
    with np.errstate(divide="ignore", over="ignore"):
        tensor_encode = min(np.float32(448 * 6) / tensor_amax, largest_fp32)
        if tensor_amax == 0 or tensor_encode == 0:
            tensor_encode = one
        for i, j, index in blocks_of(x, block):
            wanted = min(amax(x[index]) * (tensor_encode * np.float32(1 / 6)), largest_fp32)
            scales[i, j] = round_to_code(float(wanted), "e4m3")
            block_scale = np.float32(value(scales[i, j], "e4m3"))
            encode = min(one / (block_scale * (one / tensor_encode)), largest_fp32)
            codes[index] = codes_of(x[index], encode, "e2m1")
    return codes, as_matrix(scales, np.uint8), tensor_amax


def value_nvfp4(code: int, block_scale: int, tensor_amax: np.float32) -> float:
    """The value of a code."""
    return value(code, "e2m1") * value(block_scale, "e4m3") * float(tensor_amax) / (448 * 6)


# The Hadamard transform: entry (i, j) of Sylvester's matrix is -1 where i and j have an odd number of bits in common.
HADAMARD_SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def hadamard_entry(i: int, j: int) -> float:
    """The contribution of the i-th of 16 values to the j-th transformed one."""
    return HADAMARD_SIGNS[i] * (-1) ** bin(i & j).count("1") / 4


def hadamard_columns(x: np.ndarray) -> np.ndarray:
    """Each column in groups of 16 rows, in exact arithmetic."""
    transformed = np.zeros(x.shape)
    for start in range(0, len(x), 16):
        for j in range(16):
            for i in range(16):
                transformed[start + j] += hadamard_entry(i, j) * x[start + i].astype(np.float64)
    return transformed


def stochastic_neighbours(x: float, fmt: str) -> tuple[float, float, float]:
    """The two neighbours of x, and the probability of the upper one that makes the mean x."""
    magnitudes = MAGNITUDES[fmt]
    grid = sorted({-magnitude for magnitude in magnitudes} | set(magnitudes))
    x = min(max(x, grid[0]), grid[-1])
    below = max(entry for entry in grid if entry <= x)
    above = min(entry for entry in grid if entry >= x)
    return below, above, 0.0 if above == below else (x - below) / (above - below)
