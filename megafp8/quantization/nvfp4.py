"""NVFP4: the cast to packed E2M1 codes, the Hadamard transform, and random numbers for stochastic rounding.

E2M1 represents 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign, and code n is the n-th of these values. Its spacing is 0.5
below 2, then 1, then 2. The cast uses FP32 additions: at a magnitude where FP32's own spacing equals the step, adding
rounds to a multiple of the step. With c = 1.5 x 2^23 steps, v + c is v rounded to nearest, ties to even, and the low
bits of the sum are the number of steps. Nothing is rounded before that.

Stochastic rounding adds a random number of up to half a step before that rounding. The probability of rounding up is
v's position between its two neighbors, in units of 1/256: Blackwell's conversion also uses 8 random bits an element.

The Hadamard transform replaces 16 consecutive tokens of a channel by their product with an orthogonal 16 x 16 matrix Q,
which spreads an outlier over all of them, so that the block's scale need not cover it. Both operands of wgrad are
transformed along the summed dim, and the transform cancels: (Q dy)^T (Q x) = dy^T x. The matrix is Transformer
Engine's: Sylvester's Hadamard matrix with fixed signs on its rows, times 1/4. The product has FP32 sums and is rounded
to BF16.

The random numbers are reproducible. Each draw of a linear has its own generator, seeded with the linear's name (run,
layer, linear, rank) and its number of earlier draws, which checkpoints contain. So they depend neither on other layers
nor on dropout. Activation recomputation draws nothing, because only gradients are rounded stochastically.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

E2M1_MAX = 6.0
EXPONENT_FIELD = 0x7F800000
ONE = 0x3F800000  # the bits of 1.0
EXPONENT_UNIT = 1 << 23
HALF_UNIT_MANTISSA = 0x400000
# Added to the bits of 2^e it gives those of 1.5 x 2^(e + 22), where FP32's spacing is 2^(e - 1): E2M1's step at 2^e.
TO_COUNTER = 22 * EXPONENT_UNIT + HALF_UNIT_MANTISSA
NOISE_LEVELS = 256

HADAMARD_SIZE = 16
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


# --- E2M1 -------------------------------------------------------------------------------------------------------------


def cast(values: Tensor, out: Tensor, noise: Optional[Tensor] = None) -> Tensor:
    """Round FP32 values to packed E2M1 codes. `values` is overwritten.

    Args:
        values: FP32 [..., K], K even.
        out: uint8 [..., K / 2]: element 2i in the low half of byte i.
        noise: uint8 [..., K], random; None rounds to nearest.

    Numerics: saturates at 6; the sign of zero is kept; NaN becomes 6, as in Transformer Engine's conversion.
    """
    values.nan_to_num_(nan=E2M1_MAX)
    sign = values.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
    magnitude = values.abs_().clamp_(max=E2M1_MAX)
    power = magnitude.view(torch.int32).bitwise_and(EXPONENT_FIELD).clamp_(min=ONE)  # 2^e as bits, e = 0, 1 or 2
    if noise is not None:
        half_steps = noise.to(torch.float32).add_(0.5 - NOISE_LEVELS / 2).mul_(1 / (2 * NOISE_LEVELS))
        magnitude.add_(half_steps.mul_(power.view(torch.float32)))
    counter = power + TO_COUNTER
    steps = magnitude.add_(counter.view(torch.float32)).view(torch.int32).sub_(counter)
    # 2^e has the code 2 + 2e and is 2 of its steps above zero.
    codes = steps.add_(power.sub_(ONE).bitwise_right_shift_(22)).add_(sign)
    pairs = codes.to(torch.uint8).view(torch.int16)  # little-endian: the even element is the low byte
    return out.copy_(pairs.bitwise_right_shift(4).bitwise_or_(pairs).bitwise_and_(0xFF))


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., K / 2] to bytes [..., K], each with one code in its upper half and zeros below."""
    pairs = packed.to(torch.int16)
    even, odd = pairs.bitwise_and(0x0F).bitwise_left_shift_(4), pairs.bitwise_and_(0xF0).bitwise_left_shift_(8)
    return even.bitwise_or_(odd).view(torch.uint8)


# --- Hadamard transform -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def hadamard_matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Q [16, 16], orthogonal."""
    signed = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32)[:, None] * sylvester_matrix(HADAMARD_SIZE)
    return (signed.t() / 4).contiguous().to(device=device, dtype=dtype)


def sylvester_matrix(size: int) -> Tensor:
    """Sylvester's Hadamard matrix, FP32 [size, size] of 1 and -1; the size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def hadamard_transform(rows: Tensor) -> Tensor:
    """Transform each channel of [T, K] in groups of 16 rows.

    Numerics: FP32 sums, rounded to the dtype of `rows`. Where the 16 values differ by more than FP32's 24 bits, the
    last bit of a sum depends on the order of additions, which is the device's.

    Raises:
        ValueError: T is not a multiple of 16.
    """
    num_rows, channels = rows.shape
    check_hadamard_rows(num_rows)
    groups = rows.reshape(num_rows // HADAMARD_SIZE, HADAMARD_SIZE, channels)
    if rows.device.type == "cpu" and rows.dtype == torch.bfloat16:
        groups = groups.float()  # a CPU's products in BF16 lose subnormal numbers
    transformed = torch.matmul(hadamard_matrix(groups.dtype, rows.device), groups)
    return transformed.to(rows.dtype).view(num_rows, channels)


def check_hadamard_rows(num_rows: int) -> None:
    """Check that rows can be transformed in groups.

    Raises:
        ValueError: their number is not a multiple of 16.
    """
    if num_rows % HADAMARD_SIZE:
        raise ValueError(
            f"the Hadamard transform takes rows in groups of {HADAMARD_SIZE}, here are {num_rows}: choose "
            "--seq-length and --micro-batch-size so that each rank has a multiple, or give --no-fp4-hadamard"
        )


# --- random numbers ---------------------------------------------------------------------------------------------------


class RoundingNoise(nn.Module):
    """A reproducible stream of random generators for stochastic rounding.

    A CUDA graph draws from the generators that it was captured with. Each step (`start_step`) therefore takes the
    generators of the last one, in their order. A launched draw seeds its generator. A captured one does not: all of
    them are seeded before a replay (`seed_draws`).

    Args:
        name: of the stream; equal names give equal numbers on equal devices.

    Attributes:
        generators: of the draws of a step, in their order.
        draw_index: of the next draw among them; None before the first step, when every draw has a new generator.
    """

    num_draws: Tensor

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.register_buffer("num_draws", torch.zeros(1, dtype=torch.int64))
        self.generators: list[torch.Generator] = []
        self.draw_index: Optional[int] = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoundingNoise:
        """Stay on the CPU: reading the count must not synchronize with a device."""
        return self

    def start_step(self) -> None:
        """Take the generators of the last step again."""
        self.draw_index = 0

    def next_generator(self, device: torch.device) -> torch.Generator:
        """A generator for one tensor."""
        if self.draw_index is None:
            return self._seed(torch.Generator(device))
        if self.draw_index == len(self.generators):
            self.generators.append(torch.Generator(device))
        self.draw_index += 1
        generator = self.generators[self.draw_index - 1]
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return generator if is_captured else self._seed(generator)

    def seed_draws(self, number: int) -> None:
        """Seed the generators of the first draws of a step, before a replay that draws from them."""
        for generator in self.generators[:number]:
            self._seed(generator)

    def _seed(self, generator: torch.Generator) -> torch.Generator:
        """Seed a generator for the next draw of the stream."""
        digest = hashlib.sha256(f"{self.name}|{self.num_draws.item()}".encode()).digest()
        self.num_draws += 1
        return generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def random_bytes(count: int, generator: torch.Generator) -> Tensor:
    """uint8 [count], uniformly distributed. Eight of them are one draw of 64 bits."""
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device)
    return words.random_(-(1 << 63), None, generator=generator).view(torch.uint8)[:count]
