"""A program of `test_te_without_cuda.py`: Transformer Engine's fused MLP keeps the inputs of its norm and of SwiGLU as
FP8 codes, and nothing else. Kernels are torch operations here."""

from unittest import mock

import te_without_cuda  # noqa: F401  (first)
import torch
import transformer_engine_torch as tex
from megatron.core import parallel_state
from small_te_mlp import FFN, HIDDEN, small_mlp, use_torch_operations
from transformer_engine.pytorch.ops.basic import rmsnorm

from megafp8.models import saved_activations
from megafp8.quantization.saved_activations import pack, unpack
from megafp8.te import patches

patches.install()
parallel_state.set_tensor_model_parallel_world_size(1)
TOKENS = 16
use_torch_operations()


def gradients(parts, packed):
    """The output, and gradients of the input and all weights. `packed` gets the tensors that are packed."""
    mlp = small_mlp()
    if parts:
        saved_activations.pack_in_fused_mlp(mlp, "mlp", parts)
    hidden = torch.randn(TOKENS // 2, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def noted(tensor):
        packed.append(tensor.clone())
        return pack(tensor)

    with mock.patch.object(saved_activations, "pack", noted):
        output, _ = mlp(hidden * 1)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [hidden, *mlp.parameters()])]


def expected(parts, hidden_of, activated_of):
    """The gradients, where the inputs of norm and SwiGLU are decoded codes in the backward pass."""
    norm, swiglu_backward = rmsnorm.rmsnorm_bwd, tex.dswiglu
    try:
        rmsnorm.rmsnorm_bwd = lambda gradient, x, *others: norm(gradient, hidden_of(x), *others)
        tex.dswiglu = lambda dy, x, _: swiglu_backward(dy, activated_of(x), _)
        return gradients((), [])
    finally:
        rmsnorm.rmsnorm_bwd, tex.dswiglu = norm, swiglu_backward


def as_codes(tensor):
    return unpack(pack(tensor))


def same(tensor):
    return tensor


CASES = {("norm",): (as_codes, same), ("activation",): (same, as_codes), ("norm", "activation"): (as_codes, as_codes)}
plain = gradients((), [])
for parts, decoders in CASES.items():
    packed: list[torch.Tensor] = []
    found = gradients(parts, packed)
    assert [each.shape[-1] for each in packed] == [{"norm": HIDDEN, "activation": 2 * FFN}[part] for part in parts]
    assert all(each.numel() == TOKENS * each.shape[-1] for each in packed)
    assert torch.equal(found[0], plain[0])
    assert not torch.equal(found[1], plain[1])
    for one, other in zip(found, expected(parts, *decoders), strict=True):
        assert torch.equal(one, other)

# With the residual connection in the backward kernel of the norm: an error if not both are packed.
mlp = small_mlp(returns_input=True)
saved_activations.pack_in_fused_mlp(mlp, "mlp", ("norm", "activation"))
assert mlp(torch.ones(8, 2, HIDDEN).requires_grad_() * 1)[0][0].requires_grad

with torch.no_grad():
    mlp = small_mlp()
    saved_activations.pack_in_fused_mlp(mlp, "mlp", ("norm", "activation"))
    assert torch.equal(mlp(torch.ones(8, 2, HIDDEN))[0], small_mlp()(torch.ones(8, 2, HIDDEN))[0])
