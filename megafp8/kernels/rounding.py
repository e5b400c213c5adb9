"""Casts and scales inside Triton kernels, bit for bit those of `quantization/rounding.py`, `nvfp4.py` and `scaling.py`.

A format is described by a `FormatSpec`: below its smallest normal number the values are evenly spaced, above it each
power of two has 2^mantissa_bits of them. At a magnitude where FP32's own spacing equals that of the format, an FP32
addition rounds to the format: with c = 1.5 x 2^23 steps, |v| + c is |v| rounded to nearest, ties to even, and the low
bits of the sum are the number of steps. This serves E4M3, E5M2 and E2M1, on any GPU and in Triton's interpreter,
without a conversion instruction (`round_to_value`, `round_to_code`).

The results equal torch's to the bit because divisions are `div_rn` (IEEE; `/` is an approximation), NaN is handled
explicitly, kernels are launched with `enable_fp_fusion=False`, and Triton does not flush subnormals to zero.

`cast_to_code` and `cast_to_words` are for kernels that write what Transformer Engine would: they use the GPU's own
conversion, four FP32 to four FP8 in one register. Triton's own cast converts pairs. Where such a pair is stored twice,
once through shared memory, ptxas before 13.0 stores the contents of another register (seen with 12.8 and 12.9;
triton-lang/triton 11111).
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megafp8.recipes.formats import E2M1, E4M3, E5M2, Format

FP32_MAX = tl.constexpr(3.4028234663852886e38)
FP32_EXPONENT = tl.constexpr(0x7F800000)
FP32_SIGN = tl.constexpr(-0x80000000)
INFINITY = tl.constexpr(float("inf"))
LARGEST_E8M0 = tl.constexpr(254)
SMALLEST_POWER = tl.constexpr(1 << 22)  # 2^-127 as FP32 bits, subnormal
TOP = tl.constexpr(E4M3.max * E2M1.max)  # two-level scaling maps the amax of the tensor to this
TOP_OF_FOUR_OR_SIX = tl.constexpr(256 * E2M1.max)  # four-over-six, to this


def nearest_fp32(number: float) -> float:
    """The FP32 number next to a number."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


PER_SIX, PER_FOUR = tl.constexpr(nearest_fp32(1 / E2M1.max)), tl.constexpr(1 / 4)


class FormatSpec(NamedTuple):
    """A number format as compile-time constants of a kernel.

    Attributes:
        max: largest finite magnitude, (1 + max_mantissa / 2^23) 2^max_exponent.
        mantissa_bits: stored mantissa bits.
        min_exponent: of the smallest normal number.
        code_bits: 8, or 4 with two codes in a byte.
        special: smallest code above the finite ones; 0x80 where every code is finite.
        nan: the code that NaN becomes.
    """

    max: float
    max_mantissa: int
    max_exponent: int
    mantissa_bits: int
    min_exponent: int
    code_bits: int
    special: int
    nan: int


def format_spec(fmt: Format) -> FormatSpec:
    """The specification of E4M3, E5M2 or E2M1. E2M1 has no NaN: its `nan` is the code of the largest value."""
    (max_bits,) = struct.unpack("i", struct.pack("f", fmt.max))
    return FormatSpec(
        max=fmt.max,
        max_mantissa=max_bits & 0x7FFFFF,
        max_exponent=(max_bits >> 23) - 127,
        mantissa_bits=fmt.mantissa_bits,
        min_exponent=1 - fmt.exponent_bias,
        code_bits=8 // fmt.codes_per_byte,
        special=0x80 if fmt.first_special_code is None else fmt.first_special_code,
        nan=0x7 if fmt.nan_code is None else fmt.nan_code,
    )


def code_dtype(spec: FormatSpec) -> torch.dtype:
    """The dtype of codes of E4M3 or E5M2."""
    return torch.float8_e5m2 if spec.mantissa_bits == E5M2.mantissa_bits else torch.float8_e4m3fn


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def flag_infinity(largest, flag):
    """Set a flag to 1 if one of some amaxes is infinite; a flag None is left out. Nothing but 1 is ever stored, so that
    programs need no order."""
    if flag is not None:
        tl.store(flag + tl.zeros_like(largest).to(tl.int32), 1, mask=largest == float("inf"))


@triton.jit
def without_nan(largest):
    """A maximum of magnitudes with NaN replaced by 0. `tl.max` ignores NaN, and is NaN only if all elements are."""
    return tl.where(largest == largest, largest, 0.0)


@triton.jit
def count_steps(v, noise, FORMAT: tl.constexpr):
    """Round |v| by an FP32 addition.

    Returns `magnitude + counter`, whose low bits count the steps, `counter`, and the power of two below |v|, all FP32.
    `noise` is a random byte for each value, which moves |v| by up to half a step; None rounds to nearest.
    """
    # Saturation comes first, so that rounding cannot overflow. NaN must survive: its code is set at the end.
    magnitude = tl.minimum(tl.abs(v), FORMAT.max, propagate_nan=tl.PropagateNan.ALL)
    power = float_of(tl.maximum(bits_of(magnitude) & FP32_EXPONENT, (127 + FORMAT.min_exponent) << 23))
    # Below the smallest normal number the step is that of the smallest normal number: subnormals need no case.
    if noise is not None:  # exact, but for the sum
        half_step: tl.constexpr = 0.5 ** (FORMAT.mantissa_bits + 8)
        magnitude = tl.fma(tl.fma(noise.to(tl.float32), half_step, -127.5 * half_step), power, magnitude)
    counter = power * (1.5 * 2.0 ** (23 - FORMAT.mantissa_bits))
    return magnitude + counter, counter, power


@triton.jit
def round_to_value(v, noise, FORMAT: tl.constexpr):
    """v rounded to the format, FP32. NaN stays NaN where the format has one."""
    if FORMAT.code_bits == 4:
        v = tl.where(v == v, v, FORMAT.max)
    counted, counter, _ = count_steps(v, noise, FORMAT)
    return float_of(bits_of(counted - counter) | (bits_of(v) & FP32_SIGN))


@triton.jit
def round_to_code(v, noise, FORMAT: tl.constexpr):
    """The code of v rounded to the format, in the low bits of an int32."""
    counted, counter, power = count_steps(v, noise, FORMAT)
    steps = bits_of(counted) - bits_of(counter)
    # Adjacent powers of two are 2^mantissa_bits codes apart, and each is 2^mantissa_bits of its own steps above zero.
    power_codes = (bits_of(power) - ((127 + FORMAT.min_exponent) << 23)) >> (23 - FORMAT.mantissa_bits)
    sign = (bits_of(v) >> (32 - FORMAT.code_bits)) & (1 << (FORMAT.code_bits - 1))
    return tl.where(v == v, (steps + power_codes) | sign, FORMAT.nan)


@triton.jit
def value_of_code(code, FORMAT: tl.constexpr):
    """The value of a code in the low bits of an int32; FP32, exact.

    Sign, exponent and mantissa are shifted into FP32's fields; a power of two accounts for the different bias. The
    product is exact for subnormal codes, too.
    """
    sign = code >> (FORMAT.code_bits - 1)
    magnitude = code & ((1 << (FORMAT.code_bits - 1)) - 1)
    value = float_of((sign << 31) | (magnitude << (23 - FORMAT.mantissa_bits))) * 2.0 ** (126 + FORMAT.min_exponent)
    if FORMAT.code_bits == 8:
        value = tl.where(magnitude >= FORMAT.special, float("nan"), value)
        if FORMAT.special < FORMAT.nan:  # E5M2 has infinities, though no cast here produces them
            value = tl.where(magnitude == FORMAT.special, float_of((sign << 31) | FP32_EXPONENT), value)
    return value


@triton.jit
def power_of_two_exponent(largest, FORMAT: tl.constexpr):
    """Biased exponent of the smallest power of two >= `largest` / format max."""
    # The addition carries into the exponent exactly if the mantissa of `largest` exceeds that of the format's max.
    return ((bits_of(largest) + (0x7FFFFF - FORMAT.max_mantissa)) >> 23) - FORMAT.max_exponent


@triton.jit
def quant_scale_of(largest, on_overflow, POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr):
    """`scaling.quant_scale_of`."""
    if POWER_OF_TWO:
        scale = float_of(tl.minimum(254 - power_of_two_exponent(largest, FORMAT), LARGEST_E8M0) << 23)
    else:
        scale = tl.div_rn(FORMAT.max, largest)
        scale = tl.where(scale == INFINITY, on_overflow, scale)
    return tl.where((largest > 0) & (largest < INFINITY), scale, 1.0)


@triton.jit
def e8m0_value(byte):
    """The power of two of an E8M0 byte."""
    return float_of(tl.where(byte == 0, SMALLEST_POWER, byte << 23))


@triton.jit
def power_of_two_scales(largest, FORMAT: tl.constexpr):
    """`quant_scale_of` with powers of two, and its reciprocal, in integer arithmetic on the exponent fields."""
    bits = largest.to(tl.uint32, bitcast=True)
    power = (bits + (0x7FFFFF - FORMAT.max_mantissa)) & 0xFF800000
    scale = tl.minimum(((254 + FORMAT.max_exponent) << 23) - power, 254 << 23)
    scale = tl.where(bits - 1 < 0x7F7FFFFF, scale, 127 << 23).to(tl.int32)  # unsigned: 0, infinity and NaN give 1
    return float_of(scale), float_of(tl.maximum((254 << 23) - scale, SMALLEST_POWER))


@triton.jit
def e8m0_scales(largest, IS_FLOOR: tl.constexpr, FORMAT: tl.constexpr):
    """`scaling.e8m0_scales`: quantization scale, dequantization scale, and the E8M0 byte of the latter."""
    if IS_FLOOR:
        byte = tl.maximum((bits_of(largest) >> 23) - FORMAT.max_exponent, 0)
        byte = tl.where(largest == INFINITY, LARGEST_E8M0, byte)
    else:
        byte = tl.maximum(power_of_two_exponent(largest, FORMAT), 0)
        byte = tl.where(largest == INFINITY, LARGEST_E8M0, byte)
        rounds_down = bits_of(largest) == (FORMAT.max_exponent << 23) + FORMAT.max_mantissa + 1
        byte = tl.where(rounds_down, byte - 1, byte)
    return e8m0_value(LARGEST_E8M0 - byte), e8m0_value(byte), byte.to(tl.uint8)


@triton.jit
def two_level_scales(
    largest, tensor_largest, TENSOR_TOP: tl.constexpr, PER_BLOCK_TOP: tl.constexpr, SCALE_FORMAT: tl.constexpr
):
    """`scaling.two_level_scales`: quantization scale, and the block's dequantization scale as a value and as a code.

    PER_BLOCK_TOP is the reciprocal of what the amax of a block becomes.
    """
    encode = tl.minimum(tl.div_rn(TENSOR_TOP, tensor_largest), FP32_MAX)
    encode = tl.where((encode == 0) | (tensor_largest == 0), 1.0, encode)
    scaled = tl.minimum(largest * (encode * PER_BLOCK_TOP), FP32_MAX)
    dequant = round_to_value(scaled, None, SCALE_FORMAT)
    quant = tl.minimum(tl.div_rn(1.0, dequant * tl.div_rn(1.0, encode)), FP32_MAX)
    return quant, dequant, round_to_code(scaled, None, SCALE_FORMAT).to(tl.uint8)


# PTX. `cvt` puts its first source into the upper half: operands are passed in reverse order.
FOUR_CASTS = (
    "{{ .reg .b16 low, high; cvt.rn.satfinite.{0}.f32 low, $2, $1; cvt.rn.satfinite.{0}.f32 high, $4, $3;"
    " mov.b32 $0, {{low, high}}; }}"
)
TO_E4M3 = tl.constexpr(FOUR_CASTS.format("e4m3x2"))
TO_E5M2 = tl.constexpr(FOUR_CASTS.format("e5m2x2"))
FROM_BF16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
TO_BF16 = tl.constexpr(
    "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"
)
# Triton's interpreter has no inline assembly: each function below has a path without it.
IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def cast_to_code(y, FORMAT: tl.constexpr):
    """FP32 to codes of E4M3 or E5M2, uint8: rounded to nearest, ties to even, saturating."""
    if IS_INTERPRETED:
        codes = round_to_code(y, None, FORMAT).to(tl.uint8)
    elif FORMAT.mantissa_bits == 3:
        codes = tl.inline_asm_elementwise(TO_E4M3, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        codes = tl.inline_asm_elementwise(TO_E5M2, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    return codes


@triton.jit
def cast_to_words(a, b, c, d, FORMAT: tl.constexpr):
    """As `cast_to_code`, for four numbers: their codes in one int32, that of `a` in the lowest byte."""
    if IS_INTERPRETED:
        low = round_to_code(a, None, FORMAT) | (round_to_code(b, None, FORMAT) << 8)
        words = low | (round_to_code(c, None, FORMAT) << 16) | (round_to_code(d, None, FORMAT) << 24)
    elif FORMAT.mantissa_bits == 3:
        words = tl.inline_asm_elementwise(TO_E4M3, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        words = tl.inline_asm_elementwise(TO_E5M2, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    return words


@triton.jit
def widen(x):
    """BF16, FP16 or FP32 as FP32; BF16 two at a time."""
    if x.dtype.is_bf16() and not IS_INTERPRETED:
        x = tl.inline_asm_elementwise(FROM_BF16, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def round_to_type(y, TYPE: tl.constexpr):
    """FP32 rounded to BF16, FP16 or FP32, as FP32; BF16 two at a time."""
    if TYPE.is_bf16() and not IS_INTERPRETED:
        y = tl.inline_asm_elementwise(TO_BF16, "=r,=r,r,r", [y], dtype=tl.float32, is_pure=True, pack=2)
    else:
        y = y.to(TYPE).to(tl.float32)
    return y
