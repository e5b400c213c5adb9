"""A program that `test_te_without_cuda.py` runs: which tensors our kernels quantize, and which Transformer Engine's."""

from types import SimpleNamespace

import te_without_cuda  # noqa: F401  (first)
import torch
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

from megafp8.model import block_kernels, delayed_kernels, te_operations, te_patches, te_quantize, tensor_kernels

E4M3 = DType.kFloat8E4M3
blocks, weights = (
    Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=number) for number in (1, 2)
)
whole, reduced = (Float8CurrentScalingQuantizer(E4M3, torch.device("cpu")) for _ in range(2))
reduced.with_amax_reduction = True
scaled = Float8Quantizer(*torch.tensor([[2.0], [0.0]]), E4M3)

KERNELS = [(blocks, block_kernels), (whole, tensor_kernels), (scaled, delayed_kernels)]
for quantizer, kernels in KERNELS:
    assert te_quantize.kernels_for(quantizer, (2, 64, 256)) is kernels
    assert te_quantize.kernels_for(quantizer, (128, 144)) is te_quantize.kernels_for(quantizer, (16, 128)) is None
for quantizer in (weights, reduced, None):
    assert te_quantize.kernels_for(quantizer, (128, 128)) is None

# Casts: recipe by recipe, and again when they change.
found: list[object] = []
te_quantize.cast = lambda tensor, quantizer, kernels: found.append(kernels)
for recipes in (("blockwise", "tensorwise"), ("blockwise",), (), ("tensorwise",), ()):
    te_patches.cast_by_kernels(recipes)
    found.clear()
    for quantizer in (blocks, whole, scaled, weights):
        quantizer.quantize_impl(torch.zeros(128, 128))
    by_recipe = {"blockwise": block_kernels, "tensorwise": tensor_kernels}
    assert found == [by_recipe[recipe] for recipe in by_recipe if recipe in recipes], recipes

# SwiGLU hands them its halves, and the parts of a tensor whose transpose counts; other sizes go the usual way.
launched: list[object] = []
delayed_kernels.swiglu = lambda *given: launched.append(given)
delayed_kernels.swiglu_backward = lambda *given: launched.append(given)
Float8Quantizer.make_empty = lambda self, shape, dtype: SimpleNamespace(
    _data=torch.zeros(shape), _transpose=torch.zeros(shape[-1], *shape[:-1]), _scale_inv=None, _transpose_invalid=True
)
swiglu, x, dy = te_operations.QuantizingSwiGLU(), torch.zeros(2, 64, 512), torch.zeros(2, 64, 256)
y, dx = swiglu._tex_swiglu_forward(x, scaled), swiglu._tex_swiglu_backward(dy, x, scaled)
assert [tuple(tensor.shape for tensor in given[:-1]) for given in launched] == [
    ((128, 512),), ((128, 256), (128, 512)),
]  # fmt: skip
for result, width, (*_, parts) in ((y, 256, launched[0]), (dx, 512, launched[1])):
    assert result._data.shape == (2, 64, width) and not result._transpose_invalid
    assert parts.rows is result._data and parts.columns is result._transpose and parts.scale_inv is result._scale_inv
    assert parts.scale is scaled.scale and parts.amax is scaled.amax and parts.grid.mantissa_bits == 3
swiglu._tex_swiglu_forward(torch.zeros(2, 64, 288), scaled)
assert len(launched) == 2
