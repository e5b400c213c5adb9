"""Muon for the matrices of the layers and AdamW for all other weights, in one torch optimizer.

For a matrix W with gradient G, learning rate l, momentum beta and weight decay w, all in FP32:

    W <- W - l w W
    M <- beta M + (1 - beta) G
    D  = beta M + (1 - beta) G with --muon-nesterov, else M
    W <- W - l * scale * extra * orthogonal(D)

`orthogonal` is `newton_schulz`. The scale follows from the shape of the matrix (--muon-scale-mode). This is the
arithmetic of Megatron-LM's Muon. A fused `linear_fc1` of a gated MLP is one matrix, as there. The query, key and value
rows of `linear_qkv` are three matrices, each with the rows of all query groups, unless --muon-no-split-qkv. An expert's
linears are matrices of their own, also where experts are stacked in one tensor.

Unlike Megatron-LM, which excludes only the word embeddings, position embeddings are AdamW's, too: they are a table.

torch.optim.Muon is not used: it has no tensor parallelism, no split of fused weights, one set of coefficients, and one
parameter group of matrices only.

Tensor parallelism (--muon-tp-mode). `duplicated`: the ranks gather the direction and orthogonalize the complete matrix,
which is that of one rank up to the order of rows of a gated `linear_fc1`. `distributed`: the products are summed over
the ranks. `blockwise`: each shard is a matrix, with the scale of its own shape; results depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.config.optimizers import IS_MATRIX, Polynomial, polynomials
from megafp8.config.schema import OptimizerConfig
from megafp8.kernels.cpu_matmul import multiplied
from megafp8.mcore.cpu_adam import Adam
from megafp8.quantization.quantize import has_kernels

# ---- Newton-Schulz iteration: the orthogonal factor of a matrix, from matrix products alone -------------------------
# Muon replaces the momentum G = U S V^T of a weight by an approximation of U V^T. A step maps every singular value s of
# X, which starts as G / ||G||, to the polynomial a s + b s^3 + c s^5, which moves all of (0, 1] near 1:
#
#     A = X X^T        X <- a X + (b A + c A^2) X
#
# The smaller dimension of X comes first, so that A is small. Steps on an (m, n) matrix with m <= n take
# 4 m^2 n + 2 m^3 FLOPs each. The result is not exactly orthogonal: the five steps of `quintic` move singular values
# above 0.002 ||G|| to between 0.68 and 1.15.
#
# Source: Jordan 2024, "Muon: An optimizer for hidden layers in neural networks".

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
    with product_precision(precision):
        for a, b, c in steps:
            gram = symmetric_product(x, x.mT)
            if group is not None:
                dist.all_reduce(gram, group=group)
            coefficients = symmetric_product(gram, gram, gram, alpha=c, beta=b)
            x = add_product(x, coefficients, x, beta=a)
    x = x.float()
    return x.mT if is_turned else x


def symmetric_product(
    x: Tensor, transposed: Tensor, added: Optional[Tensor] = None, *, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """beta * added + alpha * x x^T, in the dtype of `x`; on a GPU from one triangle where that saves time.

    Args:
        x: [..., m, n].
        transposed: x^T, or `x` itself if it is symmetric.
        added: [..., m, m], symmetric.
    """
    if x.dtype == torch.bfloat16 and has_kernels(x):
        from megafp8.kernels import symmetric  # needs Triton

        if symmetric.pays(x):
            return symmetric.multiply_by_transpose(x, added, alpha=alpha, beta=beta)
    if added is None:
        return multiplied(torch.matmul, x, transposed)
    return add_product(added, x, transposed, alpha=alpha, beta=beta)


def add_product(added: Tensor, left: Tensor, right: Tensor, *, alpha: float = 1.0, beta: float) -> Tensor:
    """beta * added + alpha * left right, of matrices or of stacks of them."""
    function = torch.addmm if added.ndim == 2 else torch.baddbmm
    return multiplied(function, added, left, right, alpha=alpha, beta=beta)


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


# ----------------------------------------------------------------------------------------------------------------------

MOMENTUM = "momentum_buffer"
SHARED_MODES = ("duplicated", "distributed")
"""Values of --muon-tp-mode with which shards are orthogonalized as one matrix."""


@dataclass(frozen=True)
class MuonSettings:
    """Settings of the update; names and meaning are those of the flags."""

    momentum: float
    has_nesterov: bool
    splits_qkv: bool
    scale_mode: str
    extra_scale_factor: float
    steps: tuple[Polynomial, ...]
    precision: str
    tp_mode: str

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig) -> MuonSettings:
        """The settings of a run."""
        return cls(
            momentum=optimizer.muon_momentum,
            has_nesterov=optimizer.muon_nesterov,
            splits_qkv=optimizer.muon_split_qkv,
            scale_mode=optimizer.muon_scale_mode,
            extra_scale_factor=optimizer.muon_extra_scale_factor,
            steps=polynomials(optimizer),
            precision=optimizer.muon_fp32_matmul_prec,
            tp_mode=optimizer.muon_tp_mode,
        )


@dataclass(frozen=True)
class Matrix:
    """How a weight is one or more matrices.

    Attributes:
        group: tensor-parallel ranks that hold shards of it.
        sharded_dim: the dimension of [rows, columns] that they share; None if every rank holds all of it.
        qkv_rows: query, key and value rows of one query group; None for other weights than `linear_qkv`.
    """

    group: Optional[dist.ProcessGroup] = None
    sharded_dim: Optional[int] = None
    qkv_rows: Optional[tuple[int, int, int]] = None


class Muon(Adam):
    """Muon for the parameter groups with `is_muon`, AdamW for the others.

    The state of a matrix is `momentum_buffer`; that of other weights is Adam's. All of it is FP32.

    Args:
        groups: parameter groups; their tensors are FP32.
        matrices: how each tensor of the groups with `is_muon` is a matrix.
    """

    def __init__(self, groups: list[dict[str, Any]], matrices: Mapping[Tensor, Matrix], settings: MuonSettings):
        super().__init__(groups)
        self.matrices, self.settings = matrices, settings

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient. Ranks that share matrices must all call it."""
        for group in self.param_groups:
            # Also without parameters: a rank that saves the group's settings may have none of them.
            group["step"] = group.get("step", 0) + 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group.get(IS_MATRIX):
                self.step_group(group, parameters)
                continue
            for parameter in parameters:
                self.update_matrix(parameter, group["lr"], group["weight_decay"])

    def update_matrix(self, parameter: Tensor, learning_rate: float, weight_decay: float) -> None:
        """Update one weight."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        if weight_decay:
            parameter.add_(parameter, alpha=-learning_rate * weight_decay)
        state[MOMENTUM].lerp_(gradient, 1 - self.settings.momentum)
        direction = state[MOMENTUM]
        if self.settings.has_nesterov:
            direction = gradient.lerp(direction, self.settings.momentum)
        parameter.add_(orthogonalize(direction, self.matrices[parameter], self.settings), alpha=-learning_rate)

    def initialize(self) -> None:
        """Give parameters that were not updated yet their initial state, which is zero."""
        for group in self.param_groups:
            names = (MOMENTUM,) if group.get(IS_MATRIX) else ("exp_avg", "exp_avg_sq")
            for parameter in group["params"]:
                for name in names:
                    self.state[parameter].setdefault(name, torch.zeros_like(parameter))


def orthogonalize(direction: Tensor, matrix: Matrix, settings: MuonSettings) -> Tensor:
    """Orthogonalize and scale the direction of a weight, or each matrix of which it consists.

    Args:
        direction: FP32 [rows, columns], or [experts, rows, columns]; of a sharded weight this rank's part.

    Returns:
        FP32, of the same shape.
    """
    if matrix.qkv_rows is None or not settings.splits_qkv:
        return orthogonalize_one(direction, matrix, settings)
    columns = direction.shape[-1]
    groups = direction.view(-1, sum(matrix.qkv_rows), columns).split(matrix.qkv_rows, dim=1)
    parts = [
        orthogonalize_one(part.reshape(-1, columns), matrix, settings).view(-1, rows, columns)
        for part, rows in zip(groups, matrix.qkv_rows, strict=True)
    ]
    return torch.cat(parts, dim=1).view_as(direction)


def orthogonalize_one(direction: Tensor, matrix: Matrix, settings: MuonSettings) -> Tensor:
    """Orthogonalize and scale one matrix, or each of a stack, over the ranks that share it."""
    rows, columns = direction.shape[-2:]
    group, sharded_dim = matrix.group, matrix.sharded_dim
    if group is None or sharded_dim is None or group.size() == 1 or settings.tp_mode not in SHARED_MODES:
        update = newton_schulz(direction, settings.steps, settings.precision)
    elif settings.tp_mode == "distributed":
        update = newton_schulz(direction, settings.steps, settings.precision, sharded_dim=sharded_dim, group=group)
        rows, columns = (rows * group.size(), columns) if sharded_dim == 0 else (rows, columns * group.size())
    else:
        parts = [torch.empty_like(direction) for _ in range(group.size())]
        dist.all_gather(parts, direction.contiguous(), group=group)
        dim = direction.ndim - 2 + sharded_dim
        complete = newton_schulz(torch.cat(parts, dim=dim), settings.steps, settings.precision)
        update = complete.chunk(group.size(), dim=dim)[group.rank()]
        rows, columns = complete.shape[-2:]
    return update * (shape_scale(rows, columns, settings.scale_mode) * settings.extra_scale_factor)


def shape_scale(rows: int, columns: int, mode: str) -> float:
    """The factor of an update of a [rows, columns] = [out, in] matrix (--muon-scale-mode).

    `spectral`: Liu et al. 2025, "Muon is scalable for LLM training"; the update then has an RMS of about 1.
    `shape_scaling`: Jordan 2024. `unit_rms_norm`: Pethick et al. 2025, "Training deep learning models with
    norm-constrained LMOs".
    """
    if mode == "spectral":
        return float(max(rows, columns) ** 0.5)
    if mode == "shape_scaling":
        return float(max(1.0, rows / columns) ** 0.5)
    assert mode == "unit_rms_norm"
    return float((rows / columns) ** 0.5)
