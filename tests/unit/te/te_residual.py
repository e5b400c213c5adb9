"""A program of `test_te_without_cuda.py`: around a fused MLP, the kernel of the norm's backward pass adds the
residual's gradient. Kernels are torch operations here."""

from contextlib import nullcontext
from types import SimpleNamespace

import te_without_cuda  # noqa: F401  (first)
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from small_te_mlp import HIDDEN, backward, normalize, small_mlp
from transformer_engine.pytorch import utils
from transformer_engine.pytorch.ops.basic import rmsnorm

from megafp8.te import fused_mlp, patches

patches.install()
parallel_state.set_tensor_model_parallel_world_size(1)
called: list[str] = []


def normalize_backward_add(gradient, x, add, _, weight, *others):
    called.append("norm and residual")
    dx, dw = backward(normalize, gradient, x, weight)
    return dx + add, dw


def normalize_backward(gradient, x, _, weight, *others):
    called.append("norm")
    return backward(normalize, gradient, x, weight)


def swiglu(x):
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def linear_forward(self, ctx, inputs, **quantizers):
    ctx.save_for_backward(inputs)
    return inputs @ self.weight.t()


def linear_backward(self, ctx, gradient):
    (inputs,) = ctx.saved_tensors
    return gradient @ self.weight, [gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)]


rmsnorm.rmsnorm_fwd = lambda x, weight, *others: (normalize(x, weight), None, torch.zeros(len(x)))
tex.rmsnorm_bwd_add, rmsnorm.rmsnorm_bwd = normalize_backward_add, normalize_backward
tex.swiglu, tex.dswiglu = lambda x, _: swiglu(x), lambda dy, x, _: backward(swiglu, dy, x)[0]
utils._empty_tensor = lambda: torch.empty(0)
te.ops.BasicLinear.op_forward, te.ops.BasicLinear.op_backward = linear_forward, linear_backward


def small_layer(kind: type) -> torch.nn.Module:
    """The part of a layer after the MLP."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(inference_fuse_tp_communication=False, bias_dropout_fusion=False)
    layer.recompute_pre_mlp_layernorm = layer.offload_mlp_norm = False
    layer.bias_dropout_add_exec_handler, layer.mlp_bda, layer.hidden_dropout = nullcontext, get_bias_dropout_add, 0.0
    return layer


def gradients(returns_input: bool) -> list[torch.Tensor]:
    """Of a layer's MLP and residual: of the input, and of all weights."""
    mlp = small_mlp(returns_input)
    layer = small_layer(fused_mlp.ResidualLayer if returns_input else fused_mlp.TransformerLayer)
    hidden = torch.randn(8, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    called.clear()
    inputs = hidden * 1  # a layer's input is another operation's result
    output = layer._forward_post_mlp(mlp(inputs), inputs)
    return list(torch.autograd.grad(output.square().sum(), [hidden, *mlp.parameters()]))


plain = gradients(False)
assert called == ["norm"]
fused = gradients(True)
assert called == ["norm and residual"]
assert len(plain) == len(fused) == 4
for one, other in zip(fused, plain, strict=True):
    torch.testing.assert_close(one, other)
assert plain[0].abs().max() > 1

with torch.no_grad():
    mlp, layer, hidden = small_mlp(True), small_layer(fused_mlp.ResidualLayer), torch.ones(8, 2, HIDDEN)
    output = layer._forward_post_mlp(mlp(hidden), hidden)
    assert torch.equal(output, small_layer(fused_mlp.TransformerLayer)._forward_post_mlp(
        small_mlp(False)(hidden), hidden
    ))  # fmt: skip
