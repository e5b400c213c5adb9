"""Casts between FP32 values and low-precision codes: E4M3, E5M2 and packed E2M1.

The cast to FP8 is Transformer Engine's: round to nearest, ties to even; overflow and infinity saturate to the largest
finite value; NaN of either sign becomes the code 0x7F. torch's own cast differs in three cases, and is never used
alone: `float8_e5m2` turns overflow into infinity, `float8_e4m3fn` turned it into NaN before torch 2.12, and NaN keeps
its sign. The cast to E2M1, which torch does not have, is in `nvfp4.py`.

On a CPU, torch converts FP8 to BF16 one element at a time. `decode` moves the bits instead, about 13 times faster. FP8
and BF16 both consist of sign, exponent and mantissa: a code shifted into BF16's fields is its value times a power of
two, which accounts for the two exponent biases. Subnormal codes become BF16 subnormals, for which the same product is
exact, so that one multiplication serves all finite codes. E2M1 is decoded the same way.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from megafp8.quantization import nvfp4
from megafp8.recipes.formats import Format

CODE_DTYPES = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8, "e8m0": torch.float8_e8m0fnu,
}  # fmt: skip
"""torch's dtype of codes, by the name of their format."""
BF16_EXPONENT_BIAS = 127
CANONICAL_NAN = 0x7F
NEGATIVE_NAN = 0xFF


def cast(values: Tensor, fmt: Format, out: Optional[Tensor] = None, noise: Optional[Tensor] = None) -> Tensor:
    """Round FP32 values to codes. `values` is overwritten.

    Args:
        values: FP32, any shape; E2M1 packs pairs along the last dim, which then is even.
        fmt: E4M3, E5M2 or E2M1.
        out: the codes; default a new tensor.
        noise: E2M1 only: random bytes, one a value, for stochastic rounding; None rounds to nearest.

    Returns:
        codes in `CODE_DTYPES`: the shape of `values`, with E2M1 half as long in the last dim.

    Numerics: nearest, ties to even, subnormals too; overflow and infinity saturate; NaN becomes 0x7F, and in E2M1,
    which has none, the largest value.
    """
    assert values.dtype == torch.float32, f"cast() rounds FP32 once; got {values.dtype}"
    if out is None:
        out = torch.empty(codes_shape(values.shape, fmt), dtype=CODE_DTYPES[fmt.name], device=values.device)
    if fmt.codes_per_byte == 2:
        return nvfp4.cast(values, out, noise)
    assert noise is None, f"{fmt.name} is rounded to nearest"
    out.copy_(values.clamp_(-fmt.max, fmt.max))  # clamp keeps NaN
    # torch's negative NaN is 0xFF in both formats.
    raw = out.view(torch.uint8)
    if raw.is_cuda:  # unconditionally: reading the data would synchronize with the device
        raw.masked_fill_(raw == NEGATIVE_NAN, CANONICAL_NAN)
    elif raw.numel() and raw.amax().item() == NEGATIVE_NAN:
        raw[raw == NEGATIVE_NAN] = CANONICAL_NAN
    return out


def codes_shape(shape: torch.Size, fmt: Format) -> tuple[int, ...]:
    """Shape of the codes of a tensor."""
    if fmt.codes_per_byte == 1:
        return tuple(shape)
    if shape[-1] % fmt.codes_per_byte:
        raise ValueError(f"{fmt.name} has {fmt.codes_per_byte} codes in a byte, rows of {shape[-1]} are odd: pad them")
    return (*shape[:-1], shape[-1] // fmt.codes_per_byte)


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """The values of codes, exactly, before any dequantization scale.

    Args:
        codes: of `CODE_DTYPES`, any shape.
        dtype: torch.bfloat16 or torch.float32; both hold every E4M3, E5M2 and E2M1 value.

    Returns:
        contiguous tensor of `dtype`, one value a code.
    """
    is_packed = fmt.codes_per_byte == 2
    if not is_packed and (codes.is_cuda or _has_special(codes, fmt)):
        return codes.to(dtype)
    raw = nvfp4.unpack(codes) if is_packed else codes.contiguous()  # bytes: sign, exponent, mantissa from the top
    shift = fmt.exponent_bits  # a byte has 7 - exponent_bits mantissa bits, BF16 has 7
    sign_and_magnitude = (0x7F << shift) - (1 << 15)  # bit 15 and seven magnitude bits, as a negative int16
    bits = raw.view(torch.int8).to(torch.int16)  # sign extension puts the sign into bit 15
    bits.bitwise_left_shift_(shift).bitwise_and_(sign_and_magnitude)
    values = bits.view(torch.bfloat16).mul_(2.0 ** (BF16_EXPONENT_BIAS - fmt.exponent_bias))
    return values if dtype == torch.bfloat16 else values.to(dtype)


def _has_special(codes: Tensor, fmt: Format) -> bool:
    """Whether any FP8 code is infinity or NaN: one signed and one unsigned maximum over the bytes."""
    special = fmt.first_special_code
    if special is None or not codes.numel():
        return False
    largest, largest_unsigned = codes.view(torch.int8).amax().item(), codes.view(torch.uint8).amax().item()
    return largest >= special or largest_unsigned >= special | 0x80
