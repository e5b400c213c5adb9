"""Casts and SwiGLU by our kernels, as Transformer Engine stores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from requirements import require_transformer_engine

require_transformer_engine()

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import Float8CurrentScaling

from megafp8.kernels import tensorwise
from megafp8.kernels.rope import split_and_rotate
from megafp8.te import quantizers as te_quantize
from megafp8.te.fused_mlp import QuantizingSwiGLU
from megafp8.te.patches import cast_by_kernels

pytestmark = pytest.mark.gpu
KINDS = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}
PARTS = {
    "delayed": ("_data", "_transpose", "_scale_inv"),
    "blockwise": ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"),
    "tensorwise": ("_data", "_transpose", "_scale_inv"),
}
EVERY_KIND = (
    pytest.mark.parametrize("is_power_of_two", [True, False]),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("columnwise", [True, False]),
    pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"]),
)


def every_kind(test: Callable[..., None]) -> Callable[..., None]:
    for mark in EVERY_KIND:
        test = mark(test)
    return test


def quantizer_of(recipe: str, kind: str, is_power_of_two: bool, columnwise: bool) -> te.Quantizer:
    if recipe == "blockwise":
        return te.Float8BlockQuantizer(
            KINDS[kind], rowwise=True, columnwise=columnwise, force_pow_2_scales=is_power_of_two, block_scaling_dim=1
        )
    return te.Float8CurrentScalingQuantizer(
        KINDS[kind], torch.device("cuda"), columnwise=columnwise, force_pow_2_scales=is_power_of_two
    )


def check(ours: Any, theirs: Any, recipe: str, share: float) -> None:
    """Compare all existing parts. At most this fraction of their bytes or scales may differ."""
    for name in PARTS[recipe]:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.shape == other.shape and one.dtype == other.dtype, name
            bits = torch.uint8 if one.dtype == torch.uint8 else torch.int32
            assert (one.view(bits) != other.view(bits)).float().mean().item() <= share, name


@every_kind
def test_casts_equal_transformer_engine(recipe: str, kind: str, is_power_of_two: bool, columnwise: bool) -> None:
    how = quantizer_of(recipe, kind, is_power_of_two, columnwise)
    inputs = torch.randn(2, 128, 384, device="cuda") * torch.logspace(-6, 5, 384, device="cuda")
    inputs[0, :, 128:256] = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = inputs.to(dtype)
        kernels = te_quantize.kernels_for(how, x.shape)
        check(te_quantize.cast(x, how, kernels), tex.quantize(x, how), recipe, 0)


@every_kind
def test_swiglu_differs_only_by_last_bits_of_the_exponential(
    recipe: str, kind: str, is_power_of_two: bool, columnwise: bool
) -> None:
    how, share = quantizer_of(recipe, kind, is_power_of_two, columnwise), 1e-3
    inputs = torch.randn(2, 128, 2 * 384, device="cuda").bfloat16()
    gradients = torch.randn(2, 128, 384, device="cuda").bfloat16()
    for ours, theirs in (
        (QuantizingSwiGLU()._tex_swiglu_forward(inputs, how), tex.swiglu(inputs, how)),
        (QuantizingSwiGLU()._tex_swiglu_backward(gradients, inputs, how), tex.dswiglu(gradients, inputs, how)),
    ):
        check(ours, theirs, recipe, share if recipe == "blockwise" else 0)


@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_delayed_casts_and_amax_equal_transformer_engine(kind: str, columnwise: bool) -> None:
    inputs = torch.randn(2, 128, 384, device="cuda") * torch.logspace(-6, 5, 384, device="cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        scale, *amaxes = torch.tensor([[16.0], [0.0], [0.0]], device="cuda")
        how, their_how = (te.Float8Quantizer(scale, amax, KINDS[kind], columnwise=columnwise) for amax in amaxes)
        x = inputs.to(dtype)
        kernels = te_quantize.kernels_for(how, x.shape)
        check(te_quantize.cast(x, how, kernels), tex.quantize(x, their_how), "delayed", 0)
        assert torch.equal(*amaxes)


@pytest.mark.parametrize("kind", KINDS)
def test_delayed_swiglu_differs_only_by_last_bits_of_the_exponential(kind: str) -> None:
    (scale, *amaxes), share = torch.tensor([[16.0], [0.0], [0.0]], device="cuda"), 1e-3
    how, their_how = (te.Float8Quantizer(scale, amax, KINDS[kind]) for amax in amaxes)
    inputs = torch.randn(2, 128, 2 * 384, device="cuda").bfloat16()
    gradients = torch.randn(2, 128, 384, device="cuda").bfloat16()
    for ours, theirs in (
        (QuantizingSwiGLU()._tex_swiglu_forward(inputs, how), tex.swiglu(inputs, their_how)),
        (QuantizingSwiGLU()._tex_swiglu_backward(gradients, inputs, how), tex.dswiglu(gradients, inputs, their_how)),
    ):
        theirs.update_usage(columnwise_usage=True)
        check(ours, theirs, "delayed", share)
        torch.testing.assert_close(*amaxes, rtol=1e-6, atol=0)


def test_layers_cast_with_the_chosen_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizers = {recipe: quantizer_of(recipe, "e4m3", True, True) for recipe in ("blockwise", "tensorwise")}
    quantizers["delayed"] = te.Float8Quantizer(*torch.tensor([[1.0], [0.0]], device="cuda"), KINDS["e4m3"])
    inputs = torch.randn(128, 256, device="cuda").bfloat16()
    calls, plain = [], te_quantize.cast
    monkeypatch.setattr(te_quantize, "cast", lambda *args: calls.append(args) or plain(*args))
    for recipes in (("tensorwise", "blockwise", "delayed"), ("blockwise",), (), ("delayed",), ()):
        cast_by_kernels(recipes)
        for recipe, how in quantizers.items():
            calls.clear()
            how(inputs)
            assert len(calls) == (recipe in recipes)


def test_a_recorded_amax_saves_a_pass_with_equal_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward pass of the preceding linear."""
    heads, groups, dim, sizes = 6, 3, 32, (64, 4)
    linear = te.LayerNormLinear(256, (heads + 2 * groups) * dim, bias=False, params_dtype=torch.bfloat16)
    inputs = torch.randn(*sizes, 256, device="cuda").bfloat16().requires_grad_()
    angles = torch.rand(sizes[0], 1, 1, dim, device="cuda")
    gradients = [torch.randn(*sizes, count, dim, device="cuda").bfloat16() for count in (heads, groups, groups)]
    passes, plain = [], tensorwise._amaxes
    monkeypatch.setattr(tensorwise, "_amaxes", lambda inputs: passes.append(inputs) or plain(inputs))
    found = []
    cast_by_kernels(("tensorwise",))
    for notes_amax in (False, True):
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            joined = linear(inputs)
        parts = split_and_rotate(joined, angles, heads, groups, records_amax=notes_amax)
        passes.clear()
        found.append(torch.autograd.grad(parts, (inputs, linear.weight), gradients))
        assert len(passes) == (not notes_amax)
    cast_by_kernels(())
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("are_used", [True, False])
def test_the_fused_mlp_passes_factors_to_its_backward_pass(are_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are not used, gradients are the same."""
    found, plain = [], tensorwise.annotation

    def noted(tensor: torch.Tensor, name: str) -> Optional[torch.Tensor]:
        found.append((name, plain(tensor, name)))
        return found[-1][1] if are_used else None

    first, last = (te.ops.Linear(*sizes, bias=False).bfloat16() for sizes in ((256, 512), (256, 128)))
    mlp = te.ops.Sequential(first, QuantizingSwiGLU(), last)
    inputs = torch.linspace(-2, 2, 64 * 4 * 256, device="cuda").reshape(64, 4, 256).bfloat16().requires_grad_()
    gradients = []
    for patch in (plain, noted):
        monkeypatch.setattr(tensorwise, "annotation", patch)
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            gradients += torch.autograd.grad(mlp(inputs).square().sum(), inputs)
    assert [value is not None for name, value in found if name == "factors"] == [True]
    assert torch.equal(*gradients)


def test_shapes_without_full_tiles_use_transformer_engine() -> None:
    blocks, whole = (quantizer_of(recipe, "e4m3", True, True) for recipe in ("blockwise", "tensorwise"))
    scaled = te.Float8Quantizer(*torch.tensor([[1.0], [0.0]], device="cuda"), KINDS["e4m3"])
    weights = te.Float8BlockQuantizer(KINDS["e4m3"], rowwise=True, columnwise=True, block_scaling_dim=2)
    for how in (blocks, whole, scaled):
        assert te_quantize.kernels_for(how, (128, 128)) is not None
        assert te_quantize.kernels_for(how, (128, 144)) is None and te_quantize.kernels_for(how, (16, 128)) is None
        result = QuantizingSwiGLU()._tex_swiglu_forward(torch.randn(128, 288, device="cuda").bfloat16(), how)
        assert result.shape == (128, 144)
    whole.with_amax_reduction = True
    for how in (None, weights, whole):
        assert te_quantize.kernels_for(how, (128, 128)) is None
