"""E2M1, the 4-bit format: rounding by FP32 additions, and two codes to a byte.

E2M1 holds 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign; code n is the n-th of them. Between powers of two the values are
half a power of two apart (0.5 below 2, then 1, then 2). FP32 numbers that large that their own spacing is a given step
round to multiples of the step by themselves, so v + c with c = 1.5 x 2^23 steps is v rounded to nearest, ties to even,
and the low bits of the sum are the number of steps. No rounding comes before that one.

Stochastic rounding moves v by up to half a step, at random, before it is rounded: up with a probability that is v's
place between its two neighbours, in units of 1/256. Blackwell's conversion has 8 random bits an element too.

The Hadamard transform of NVFP4's column operands.

Sixteen consecutive tokens of one channel are replaced by their products with an orthogonal 16 x 16 matrix, so that an
outlier among them is spread over all and the block's scale need not cover it. Both operands of wgrad are transformed
along the summed dimension, and the transform drops out of the product: (Q dy)^T (Q x) = dy^T x.

Transformer Engine's matrix: Sylvester's Hadamard matrix with the fixed signs below on its rows, times 1/4. Its
transform is a BF16 product with FP32 sums, the result rounded to BF16.

Random numbers for stochastic rounding that a run can repeat.

Each draw of a linear has a generator of its own, seeded with who draws (run, layer, linear, rank) and how often it has
drawn before. So the numbers depend neither on other layers, nor on dropout, nor on whether activations are recomputed,
which draws nothing: only gradients are rounded stochastically. The count is in the checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

MAX = 6.0
EXPONENT_FIELD = 0x7F800000
ONE = 0x3F800000  # the bits of 1.0
EXPONENT_UNIT = 1 << 23
HALF_UNIT_MANTISSA = 0x400000
# From 2^e as bits to those of 1.5 x 2^(e + 22), whose neighbours in FP32 are 2^(e - 1) apart: E2M1's step at 2^e.
TO_COUNTER = 22 * EXPONENT_UNIT + HALF_UNIT_MANTISSA
NOISE_LEVELS = 256


def cast(values: Tensor, out: Tensor, noise: Optional[Tensor] = None) -> Tensor:
    """Round FP32 to packed E2M1 codes. `values` is overwritten.

    Args:
        values: FP32 [..., K], K even.
        out: uint8 [..., K / 2]: element 2i in the low half of byte i.
        noise: uint8 [..., K], random; None rounds to nearest, ties to even.

    Numerics: saturates at 6; the sign of zero is kept; NaN becomes 6 (Transformer Engine's conversion).
    """
    values.nan_to_num_(nan=MAX)
    sign = values.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
    magnitude = values.abs_().clamp_(max=MAX)
    power = magnitude.view(torch.int32).bitwise_and(EXPONENT_FIELD).clamp_(min=ONE)  # 2^e as bits, e = 0, 1 or 2
    if noise is not None:
        half_steps = noise.to(torch.float32).add_(0.5 - NOISE_LEVELS / 2).mul_(1 / (2 * NOISE_LEVELS))
        magnitude.add_(half_steps.mul_(power.view(torch.float32)))
    counter = power + TO_COUNTER
    steps = magnitude.add_(counter.view(torch.float32)).view(torch.int32).sub_(counter)
    # A power of two is at code 2 + 2e and 2 steps of its own above zero.
    codes = steps.add_(power.sub_(ONE).bitwise_right_shift_(22)).add_(sign)
    return _pack(codes.to(torch.uint8), out)


def _pack(codes: Tensor, out: Tensor) -> Tensor:
    """Codes [..., K], one a byte, to bytes [..., K / 2]."""
    pairs = codes.view(torch.int16)  # little-endian: the even element is the low byte
    return out.copy_(pairs.bitwise_right_shift(4).bitwise_or_(pairs).bitwise_and_(0xFF))


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., K / 2] to bytes [..., K], each with one code in its upper half and zeros below."""
    pairs = packed.to(torch.int16)
    even, odd = pairs.bitwise_and(0x0F).bitwise_left_shift_(4), pairs.bitwise_and_(0xF0).bitwise_left_shift_(8)
    return even.bitwise_or_(odd).view(torch.uint8)


SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@functools.lru_cache(maxsize=8)
def transform_matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Q [16, 16], orthogonal; 16 values of a channel become Q times them."""
    matrix = torch.ones(1, 1)
    while len(matrix) < SIZE:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    signed = torch.tensor(SIGNS, dtype=torch.float32)[:, None] * matrix
    return (signed.t() / 4).contiguous().to(device=device, dtype=dtype)


def transform_columns(rows: Tensor) -> Tensor:
    """Transform each channel of [T, K] in groups of 16 rows.

    Numerics: FP32 sums, rounded to the dtype of `rows`.

    Raises:
        ValueError: T is no multiple of 16.
    """
    num_rows, channels = rows.shape
    check_groups(num_rows)
    groups = rows.reshape(num_rows // SIZE, SIZE, channels)
    return torch.matmul(transform_matrix(rows.dtype, rows.device), groups).view(num_rows, channels)


def check_groups(num_rows: int) -> None:
    """Refuse rows that are no whole groups.

    Raises:
        ValueError: they are no multiple of 16.
    """
    if num_rows % SIZE:
        raise ValueError(
            f"the Hadamard transform takes rows in groups of {SIZE}, here are {num_rows}: choose --seq-length and "
            "--micro-batch-size so that each rank has a multiple, or give --no-fp4-hadamard"
        )


class RoundingNoise(nn.Module):
    """A stream of generators.

    Args:
        name: of the stream; equal names give equal numbers, device by device.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.register_buffer("num_draws", torch.zeros(1, dtype=torch.int64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoundingNoise:
        """Stay on the CPU: reading a count must not stop a device."""
        return self

    def next_generator(self, device: torch.device) -> torch.Generator:
        """A generator for one tensor."""
        digest = hashlib.sha256(f"{self.name}|{self.num_draws.item()}".encode()).digest()
        self.num_draws += 1
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def random_bytes(count: int, generator: torch.Generator) -> Tensor:
    """uint8 [count], all values alike. Eight of them are one draw of 64 bits."""
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device)
    return words.random_(-(1 << 63), None, generator=generator).view(torch.uint8)[:count]
