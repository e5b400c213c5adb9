"""Transformer Engine's fused MLP without a model around it, for programs that import `te_without_cuda` first."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te

from megafp8.te.fused_mlp import SwiGLUFusedMLP

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
