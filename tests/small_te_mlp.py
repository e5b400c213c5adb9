"""Transformer Engine's fused MLP without a model around it, for programs that import `te_without_cuda` first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.pytorch import utils
from transformer_engine.pytorch.ops.basic import rmsnorm

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
    mlp.returns_input, mlp._result_hooks, mlp._gradient_hooks = returns_input, OrderedDict(), OrderedDict()
    return mlp


def normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm by torch."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def backward(function: Callable, gradient: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of a function's result with respect to its inputs."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*leaves), leaves, gradient)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU by torch."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def use_torch_operations() -> None:
    """Replace the kernels of the fused MLP by torch operations in high precision, in this process."""
    rmsnorm.rmsnorm_fwd = lambda x, weight, *others: (normalize(x, weight), None, torch.zeros(len(x)))
    rmsnorm.rmsnorm_bwd = lambda gradient, x, _, weight, *others: backward(normalize, gradient, x, weight)
    tex.swiglu, tex.dswiglu = lambda x, _: swiglu(x), lambda dy, x, _: backward(swiglu, dy, x)[0]
    utils._empty_tensor = lambda: torch.empty(0)
    te.ops.BasicLinear.op_forward, te.ops.BasicLinear.op_backward = _linear_forward, _linear_backward


def _linear_forward(self: te.ops.BasicLinear, ctx: Any, inputs: torch.Tensor, **quantizers: Any) -> torch.Tensor:
    ctx.save_for_backward(inputs, self.weight)
    return inputs @ self.weight.t()


def _linear_backward(
    self: te.ops.BasicLinear, ctx: Any, gradient: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    inputs, weight = ctx.saved_tensors
    return gradient @ weight, [gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)]


def operations_of(mlp: FusedMLP, recipe: object) -> list[te.ops.BasicLinear]:
    """The operations in place of its linears, as the first forward pass makes them."""
    mlp._fused_impl = (mlp._make_fused_impl(),)
    operations = [operation for operation in mlp._fused_impl[0] if isinstance(operation, te.ops.BasicLinear)]
    for operation in operations:
        operation.reset_recipe_state(recipe=recipe)
    return operations
