"""Newton-Schulz iteration: the orthogonal factor of a matrix, from matrix products alone.

Muon replaces the momentum G = U S V^T of a weight by an approximation of U V^T. A step maps every singular value s of
X, which starts as G / ||G||, to the polynomial a s + b s^3 + c s^5, which moves all of (0, 1] near 1:

    A = X X^T        X <- a X + (b A + c A^2) X

The smaller dimension of X comes first, so that A is small. Steps on an (m, n) matrix with m <= n take
4 m^2 n + 2 m^3 FLOPs each. The result is not exactly orthogonal: the five steps of `quintic` move singular values above
0.002 ||G|| to between 0.68 and 1.15.

Source: Jordan 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.config.muon import Polynomial
from megafp8.kernels.cpu_matmul import multiplied

EPSILON = 1e-7
"""A matrix with a smaller norm is divided by this instead; Megatron-LM's value."""


def newton_schulz(
    matrix: Tensor,
    steps: Sequence[Polynomial],
    precision: str,
    *,
    sharded_dim: Optional[int] = None,
    group: Optional[dist.ProcessGroup] = None,
) -> Tensor:
    """Approximate the orthogonal factor of a matrix, or of each matrix of a stack.

    Args:
        matrix: FP32, [rows, columns] or [matrices, rows, columns].
        steps: coefficients of each step.
        precision: of the products; `medium`: operands and results in BF16, with FP32 sums; `high`: TF32 on a GPU, FP32
            on a CPU; `highest`: FP32.
        sharded_dim: dimension of [rows, columns] of which each rank of `group` has a part. The products then sum over
            it, also where it is the smaller one.
        group: the ranks that hold the parts; all of them must call.

    Returns:
        FP32, of the shape of `matrix`: of a sharded matrix this rank's part. Zero stays zero.
    """
    assert matrix.dtype == torch.float32
    is_turned = matrix.shape[-2] > matrix.shape[-1] if sharded_dim is None else sharded_dim == 0
    x = matrix.mT if is_turned else matrix
    squares = x.square().sum(dim=(-2, -1), keepdim=True)
    if group is not None:
        dist.all_reduce(squares, group=group)
    x = x / squares.sqrt().clamp_min(EPSILON)
    if precision == "medium":
        x = x.to(torch.bfloat16)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    with product_precision(precision):
        for a, b, c in steps:
            gram = multiplied(torch.matmul, x, x.mT)
            if group is not None:
                dist.all_reduce(gram, group=group)
            coefficients = multiplied(multiply_add, gram, gram, gram, beta=b, alpha=c)
            x = multiplied(multiply_add, x, coefficients, x, beta=a)
    x = x.float()
    return x.mT if is_turned else x


@contextmanager
def product_precision(precision: str) -> Iterator[None]:
    """Context in which FP32 products of a GPU are in TF32 for `high`, and in FP32 otherwise."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "high" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
