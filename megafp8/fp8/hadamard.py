"""The Hadamard transform of NVFP4's column operands.

Sixteen consecutive tokens of one channel are replaced by their products with an orthogonal 16 x 16 matrix, so that an
outlier among them is spread over all and the block's scale need not cover it. Both operands of wgrad are transformed
along the summed dimension, and the transform drops out of the product: (Q dy)^T (Q x) = dy^T x.

Transformer Engine's matrix: Sylvester's Hadamard matrix with the fixed signs below on its rows, times 1/4. Its
transform is a BF16 product with FP32 sums, the result rounded to BF16.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

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
