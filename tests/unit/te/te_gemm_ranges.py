"""A program of `test_te_without_cuda.py`: GEMMs of Transformer Engine's linears open ranges of a profile.

Its kernels are torch operations here.
"""

from contextlib import contextmanager

import te_without_cuda  # noqa: F401  (first)
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpp_extensions import gemm as definitions
from transformer_engine.pytorch.module import grouped_linear, layernorm_linear, linear
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.ops.basic import basic_linear
from transformer_engine.pytorch.ops.basic import grouped_linear as grouped_operation

from megafp8.te.gemm_ranges import FUNCTIONS, gemm_ranges

opened = []


def general_gemm(first, second, layout="TN", out_dtype=None, **options):
    """y = x w^T is TN, dx = dy w is NN, dw = dy^T x is NT, with x or w as the first operand."""
    opened.append(layout)
    first, second = (first.t() if layout == "TN" else first), (second.t() if layout == "NT" else second)
    return (second @ first).to(out_dtype), None, None, None


@contextmanager
def new_range(name):
    opened.append(name)
    yield
    opened.append("end")


linear.general_gemm = general_gemm
TransformerEngineBaseModule.prepare_forward = lambda self, inputs, **options: inputs
USERS = [
    (module, name)
    for module in (linear, layernorm_linear, basic_linear, grouped_linear, grouped_operation)
    for name in FUNCTIONS
    if hasattr(module, name)
]
assert {name for _, name in USERS} == set(FUNCTIONS)
plain = [getattr(*each) for each in USERS]
defined = {name: getattr(definitions, name) for name in FUNCTIONS}

layer = te.Linear(8, 4, bias=False, device="cpu", params_dtype=torch.bfloat16)
layer.activation_dtype = torch.bfloat16
x = torch.randn(2, 8).bfloat16().requires_grad_()
with gemm_ranges(new_range):
    assert not any(getattr(*each) is before for each, before in zip(USERS, plain, strict=True))
    assert {name: getattr(definitions, name) for name in FUNCTIONS} == defined
    y = layer(x)
    y.sum().backward()
assert opened == ["fprop", "TN", "end", "dgrad", "NN", "end", "wgrad", "NT", "end"], opened
assert [getattr(*each) for each in USERS] == plain
assert torch.equal(y, x @ layer.weight.t()) and x.grad is not None and layer.weight.grad is not None
