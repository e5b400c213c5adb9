"""A program of `test_te_without_cuda.py`: which tensors our kernels quantize, and which Transformer Engine's."""

from types import SimpleNamespace

import te_without_cuda  # noqa: F401  (first)
import torch
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

from megafp8.kernels import blockwise, delayed, tensorwise
from megafp8.kernels.rope import split_and_rotate
from megafp8.te import fused_mlp, patches, quantizers

E4M3 = DType.kFloat8E4M3
blocks, weights = (
    Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=number) for number in (1, 2)
)
whole, reduced = (Float8CurrentScalingQuantizer(E4M3, torch.device("cpu")) for _ in range(2))
reduced.with_amax_reduction = True
scaled = Float8Quantizer(*torch.tensor([[2.0], [0.0]]), E4M3)

KERNELS = [(blocks, blockwise), (whole, tensorwise), (scaled, delayed)]
for quantizer, kernels in KERNELS:
    assert quantizers.kernels_for(quantizer, (2, 64, 256)) is kernels
    assert quantizers.kernels_for(quantizer, (128, 144)) is quantizers.kernels_for(quantizer, (16, 128)) is None
for quantizer in (weights, reduced, None):
    assert quantizers.kernels_for(quantizer, (128, 128)) is None

# Casts: recipe by recipe, and again when they change.
found: list[object] = []
for quantizer in (*quantizers.CHECKED, Float8Quantizer):
    quantizer.quantize_impl = lambda self, tensor: None  # in place of Transformer Engine's kernels
plain_cast = quantizers.cast
quantizers.cast = lambda tensor, quantizer, kernels: found.append(kernels)
for recipes in (("blockwise", "tensorwise", "delayed"), ("blockwise",), (), ("tensorwise",), ("delayed",), ()):
    patches.cast_by_kernels(recipes)
    found.clear()
    for quantizer in (blocks, whole, scaled, weights):
        quantizer.quantize_impl(torch.zeros(128, 128))
    by_recipe = {"blockwise": blockwise, "tensorwise": tensorwise, "delayed": delayed}
    assert found == [by_recipe[recipe] for recipe in by_recipe if recipe in recipes], recipes

# After Transformer Engine's own casts the scales or amaxes of the result tell of an infinite one.
SCALES = torch.full((128, 8), 0x7F, dtype=torch.uint8)
INFINITE = SCALES.clone()
INFINITE[5, 3] = 0xFE
values = torch.zeros(128, 256)
spoiled = values.clone()
spoiled[0, 0] = torch.inf
by_scale: list[tuple[object, ...]] = []
quantizers.flag_where_scale_is_one = lambda *given: by_scale.append(given)


def is_flagged(quantizer: object, tensor: torch.Tensor, **parts: object) -> bool:
    """After a cast whose result has some parts."""
    flag = torch.zeros(1, dtype=torch.int32)
    setattr(quantizer, quantizers.INFINITY, flag)
    type(quantizer).quantize_impl = lambda self, tensor: SimpleNamespace(**parts)
    patches.cast_by_kernels(())
    quantizer.quantize_impl(tensor)
    delattr(quantizer, quantizers.INFINITY)
    quantizer.quantize_impl(tensor)
    return bool(flag.item())


mx, nv = quantizers.MXFP8Quantizer(E4M3), quantizers.NVFP4Quantizer.__new__(quantizers.NVFP4Quantizer)
for rows, columns in ((INFINITE, None), (None, INFINITE)):
    assert is_flagged(mx, values, _rowwise_scale_inv=rows, _columnwise_scale_inv=columns)
assert not is_flagged(mx, values, _rowwise_scale_inv=SCALES, _columnwise_scale_inv=None)
for tensor, is_infinite in ((values[:64], False), (spoiled[:64], True)):  # scales with padding, which may be anything
    assert is_flagged(mx, tensor, _rowwise_scale_inv=INFINITE, _columnwise_scale_inv=None) is is_infinite
for amax in (2.0, torch.inf):
    assert is_flagged(nv, values, _amax_rowwise=torch.tensor([amax]), _amax_columnwise=None) is (amax == torch.inf)
    assert is_flagged(nv, values, _amax_rowwise=None, _amax_columnwise=torch.tensor([amax])) is (amax == torch.inf)
assert is_flagged(blocks, spoiled, _rowwise_scale_inv=None) and not is_flagged(blocks, values, _rowwise_scale_inv=None)
assert not by_scale
for quantizer, part, rows_per_scale in ((whole, "_scale_inv", 1), (blocks, "_rowwise_scale_inv", 1),
                                        (weights, "_rowwise_scale_inv", 128)):  # fmt: skip
    by_scale.clear()
    is_flagged(quantizer, values.view(2, 64, 256), **{part: SCALES})
    ((read, scales, _, number),) = by_scale  # without a flag nothing is read
    assert read.shape == (128, 256) and scales is SCALES and number == rows_per_scale

# SwiGLU gets both factors, and tensor parts whose transpose counts. Other sizes use Transformer Engine.
launched: list[object] = []
delayed.swiglu = lambda *given: launched.append(given)
delayed.swiglu_backward = lambda *given: launched.append(given)
Float8Quantizer.make_empty = lambda self, shape, dtype: SimpleNamespace(
    _data=torch.zeros(shape), _transpose=torch.zeros(shape[-1], *shape[:-1]), _scale_inv=None, _transpose_invalid=True
)
swiglu, x, dy = fused_mlp.QuantizingSwiGLU(), torch.zeros(2, 64, 512), torch.zeros(2, 64, 256)
y, dx = swiglu._tex_swiglu_forward(x, scaled), swiglu._tex_swiglu_backward(dy, x, scaled)
assert [tuple(tensor.shape for tensor in given[:-1]) for given in launched] == [
    ((128, 512),), ((128, 256), (128, 512)),
]  # fmt: skip
for result, width, (*_, parts) in ((y, 256, launched[0]), (dx, 512, launched[1])):
    assert result._data.shape == (2, 64, width) and not result._transpose_invalid
    assert parts.rows is result._data and parts.columns is result._transpose and parts.scale_inv is result._scale_inv
    assert parts.scale is scaled.scale and parts.amax is scaled.amax and parts.spec.mantissa_bits == 3
swiglu._tex_swiglu_forward(torch.zeros(2, 64, 288), scaled)
assert len(launched) == 2

# The amax that the rotation records for the joined gradient reaches the cast that Transformer Engine requests.
quantizers.cast = plain_cast
patches.cast_by_kernels(["tensorwise"])
Float8CurrentScalingQuantizer.make_empty = Float8Quantizer.make_empty
tensorwise._amaxes = lambda inputs: "a pass"
tensorwise._quantize = lambda inputs, amaxes, to: found.append(amaxes)


class Linear(torch.autograd.Function):
    """The start of a linear's backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.fp8, ctx.backward_override, ctx.debug, ctx.use_bias, ctx.sequence_parallel = True, None, False, False, True
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        TransformerEngineBaseModule.grad_output_preprocess(ctx, gradient, False, whole)
        return gradient


inputs, angles = torch.zeros(64, 2, 384, requires_grad=True), torch.zeros(64, 1, 1, 128)
for notes_amax in (True, False):
    found.clear()
    torch.cat(split_and_rotate(Linear.apply(inputs), angles, 1, 1, records_amax=notes_amax)).sum().backward()
    (amaxes,) = found
    assert amaxes.dtype == torch.float32 and amaxes.shape == (1,) if notes_amax else amaxes == "a pass"
