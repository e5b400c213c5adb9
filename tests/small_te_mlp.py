"""Transformer Engine's fused MLP without a model around it, for programs that import `te_without_cuda` first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te

from megafp8.te.fused_mlp import FusedMLP, SwiGLUFusedMLP

HIDDEN, FFN, EPS = 32, 48, 1e-5


def small_mlp(returns_input: bool = False) -> SwiGLUFusedMLP:
    """Two linears, HIDDEN to twice FFN to HIDDEN, with the same weights each time."""
    torch.manual_seed(0)
    mlp = SwiGLUFusedMLP.__new__(SwiGLUFusedMLP)
    torch.nn.Module.__init__(mlp)
    mlp.linear_fc1 = te.LayerNormLinear(HIDDEN, 2 * FFN, bias=False, normalization="RMSNorm", eps=EPS, device="cpu")
    mlp.linear_fc2 = te.Linear(FFN, HIDDEN, bias=False, device="cpu")
    mlp.config = mlp.linear_fc1.config = mlp.linear_fc2.config = SimpleNamespace(
        tp_comm_overlap=False, gated_linear_unit=True, activation_func_fp8_input_store=False, fp8="hybrid"
    )
    mlp.activation_func, mlp._fused_impl, mlp.linear_fc2.te_return_bias = F.silu, None, False
    mlp.returns_input = returns_input
    return mlp


def normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm by torch."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def backward(function: Callable, gradient: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of a function's result with respect to its inputs."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*leaves), leaves, gradient)


def operations_of(mlp: FusedMLP, recipe: object) -> list[te.ops.BasicLinear]:
    """The operations in place of its linears, as the first forward pass makes them."""
    mlp._fused_impl = (mlp._make_fused_impl(),)
    operations = [operation for operation in mlp._fused_impl[0] if isinstance(operation, te.ops.BasicLinear)]
    for operation in operations:
        operation.reset_recipe_state(recipe=recipe)
    return operations
