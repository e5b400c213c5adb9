"""Sigmoids inside kernels, from gates whose exponential is infinite to those where it is zero.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import interpreter
import torch
from interpreter import DEVICE

interpreter.skip_without_kernels()

import triton
import triton.language as tl

from megafp8.kernels.swiglu import exact_sigmoid, sigmoid

COUNT = 2**16


@triton.jit
def kernel(gates, fast, exact, plain, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    a = tl.load(gates + at)
    tl.store(fast + at, sigmoid(a))
    tl.store(exact + at, exact_sigmoid(a))
    tl.store(plain + at, 1.0 / (1.0 + tl.exp(-a)))


def test_sigmoids_with_and_without_guards_are_equal() -> None:
    """The fast one bitwise, also where results are subnormal; CUDA's own where they are normal."""
    gates = torch.linspace(-110, 110, COUNT, device=DEVICE)
    fast, exact, plain = torch.full((3, COUNT), torch.nan, device=DEVICE)
    kernel[(1,)](gates, fast, exact, plain, COUNT=COUNT, num_warps=8)
    assert torch.equal(fast, plain)
    assert (plain < 2**-126).any() and (plain == 1).any()
    torch.testing.assert_close(exact.double(), gates.double().sigmoid(), rtol=2**-21, atol=2**-126)
