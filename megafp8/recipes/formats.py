"""Low-precision number formats: E4M3, E5M2, E2M1 and E8M0.

Sources: E4M3 and E5M2 from "OCP 8-bit Floating Point Specification (OFP8)" 1.0, table 1; E2M1 and E8M0 from "OCP
Microscaling Formats (MX) Specification" 1.0, sections 5.3.3 and 5.4.1.

Every E4M3, E5M2 and E2M1 value is exactly representable in BF16, so BF16 tensor cores multiply them without rounding.
The torch dtype of the codes of each format is in `quantization/rounding.py`; this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Optional


@dataclass(frozen=True, kw_only=True)
class Format:
    """One number format.

    Attributes:
        name: short name, for example "e4m3".
        codes_per_byte: 2 if two codes share a byte, with the even element in the low half.
        exponent_bits, mantissa_bits: stored bits, without the sign.
        max: largest finite magnitude; larger values saturate to it.
        min_normal: smallest positive normal value.
        min_subnormal: smallest positive value.
        first_special_code: smallest positive code that is infinity or NaN; None if every code is finite.
        nan_code: code that NaN is converted to; None if the format has no NaN.
    """

    name: str
    codes_per_byte: int = 1
    exponent_bits: int
    mantissa_bits: int
    max: float
    min_normal: float
    min_subnormal: float
    first_special_code: Optional[int]
    nan_code: Optional[int]

    @property
    def exponent_bias(self) -> int:
        """A code with exponent field e > 0 and mantissa field m is (1 + m / 2^mantissa_bits) 2^(e - bias).

        With e = 0 it is (m / 2^mantissa_bits) 2^(1 - bias).
        """
        return (1 << (self.exponent_bits - 1)) - 1


E4M3 = Format(
    name="e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    max=448.0,
    min_normal=2.0**-6,
    min_subnormal=2.0**-9,
    first_special_code=0x7F,
    nan_code=0x7F,
)
E5M2 = Format(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    max=57344.0,
    min_normal=2.0**-14,
    min_subnormal=2.0**-16,
    first_special_code=0x7C,
    nan_code=0x7F,
)
E2M1 = Format(
    name="e2m1",
    codes_per_byte=2,
    exponent_bits=2,
    mantissa_bits=1,
    max=6.0,
    min_normal=1.0,
    min_subnormal=0.5,
    first_special_code=None,
    nan_code=None,
)
E8M0 = Format(  # unsigned powers of two, used for scales only
    name="e8m0",
    exponent_bits=8,
    mantissa_bits=0,
    max=2.0**127,
    min_normal=2.0**-127,
    min_subnormal=2.0**-127,
    first_special_code=0xFF,
    nan_code=0xFF,
)

FORMATS: Mapping[str, Format] = MappingProxyType({each.name: each for each in (E4M3, E5M2, E2M1, E8M0)})
