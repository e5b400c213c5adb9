"""A GPU produces the same bytes as a CPU, and the same products up to the summation order."""

import dataclasses

import pytest
import torch

from megafp8.quantization import scaled_gemm
from megafp8.quantization.delayed_scaling import AmaxExchange, DelayedScale, DelayedState
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.nvfp4 import RoundingNoise, hadamard_transform
from megafp8.quantization.quantize import dequantize, quantize, quantize_for
from megafp8.quantization.quantized_tensor import Use
from megafp8.quantization.rounding import cast, decode
from megafp8.recipes import blockwise, delayed, mxfp8, nvfp4, rowwise, tensorwise
from megafp8.recipes.base import LinearRecipe, OperandRule, ScaleRule
from megafp8.recipes.formats import E2M1, E4M3, E5M2, Format

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RULES = [
    OperandRule(format=fmt, block=block, scale_rule=scale_rule)
    for fmt in (E4M3, E5M2)
    for scale_rule, blocks in (
        (ScaleRule.FP32, (None, (1, 128), (128, 1), (128, 128))),
        (ScaleRule.POWER_OF_TWO, (None, (1, 128), (128, 1), (128, 128))),
        (ScaleRule.E8M0, ((1, 32), (32, 1))),
        (ScaleRule.E8M0_FLOOR, ((1, 32),)),
    )
    for block in blocks
]
RULES += [
    OperandRule(format=E2M1, block=block, scale_rule=scale_rule)
    for scale_rule in (ScaleRule.TWO_LEVEL, ScaleRule.FOUR_OVER_SIX)
    for block in ((1, 16), (16, 1), (16, 16))
]
RECIPES = {
    "tensorwise": tensorwise.build("hybrid"),
    "tensorwise, wgrad in high precision": tensorwise.build("hybrid").without_wgrad(),
    "delayed": delayed.build("hybrid"),
    "blockwise": blockwise.build("e4m3"),
    "blockwise, FP32 scales": blockwise.build("hybrid", fp8_block_scaling_fp32_scales=True),
    "mxfp8": mxfp8.build("e4m3"),
    "nvfp4": nvfp4.build("e2m1", fp4_stochastic_rounding=False),
}


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
def test_every_bf16_value(fmt: Format) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    on_cpu, on_gpu = cast(every.clone(), fmt), cast(every.cuda(), fmt).cpu()
    assert torch.equal(on_cpu.view(torch.uint8), on_gpu.view(torch.uint8))
    values = decode(on_gpu.cuda(), fmt, torch.float32).cpu()
    torch.testing.assert_close(values, decode(on_cpu, fmt, torch.float32), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("spoil", [None, float("nan"), float("inf"), 1e30])
def test_codes_and_scales(rule: OperandRule, dtype: torch.dtype, spoil: float) -> None:
    x = torch.randn(257, 96) * torch.logspace(-4, 3, 96)
    if spoil is not None:
        x[3, 5] = spoil
    x = x.to(dtype)
    on_cpu, on_gpu = quantize(x, rule), quantize(x.cuda(), rule)
    assert torch.equal(on_cpu.codes.view(torch.uint8), on_gpu.codes.cpu().view(torch.uint8))
    assert torch.equal(on_cpu.dequant_scale.float(), on_gpu.dequant_scale.cpu().float())
    theirs = dequantize(on_gpu).cpu()
    torch.testing.assert_close(dequantize(on_cpu), theirs, rtol=0, atol=0, equal_nan=True)


SATURATING_RULES = [
    OperandRule(format=E4M3, scale_rule=ScaleRule.DELAYED),
    OperandRule(format=E4M3, margin=-3),
    OperandRule(format=E4M3, block=(1, 32), scale_rule=ScaleRule.E8M0_FLOOR),
    OperandRule(format=E2M1, block=(1, 16), scale_rule=ScaleRule.FOUR_OVER_SIX),
    OperandRule(format=E2M1, block=(1, 16), scale_rule=ScaleRule.TWO_LEVEL),
]


@pytest.mark.parametrize("rule", SATURATING_RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_counts_of_saturated_values(rule: OperandRule, dtype: torch.dtype) -> None:
    """Not run for delayed scaling and nvfp4. EDEN is left out: its amaxes are of transformed values, whose sums have
    another order."""
    x = (1000 * torch.randn(64, 256) * torch.logspace(-7, 0, 64)[:, None]).to(dtype)
    found = []
    for device in ("cpu", "cuda"):
        count = torch.zeros(2, dtype=torch.int64, device=device)
        delayed_scale = DelayedScale(torch.ones((), device=device), torch.zeros((), device=device))
        quantize_for(x.to(device), [Use(rule)], delayed=delayed_scale, counts=[count])
        found.append(count.tolist())
    assert found[0] == found[1] and found[0][1] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hadamard_transform(dtype: torch.dtype) -> None:
    x = torch.randn(64, 96).to(dtype)
    torch.testing.assert_close(hadamard_transform(x.cuda()).cpu(), hadamard_transform(x), rtol=2.0**-8, atol=1e-6)


def test_stochastic_rounding_is_unbiased() -> None:
    rule = OperandRule(format=E2M1, block=(1, 16), scale_rule=ScaleRule.TWO_LEVEL, is_stochastic=True)
    x, noise = torch.randn(64, 64).cuda(), RoundingNoise("test")
    draws = [dequantize(quantize(x, rule, generator=noise.next_generator(x.device))) for _ in range(400)]
    assert not torch.equal(draws[0], draws[1])
    nearest = quantize(x, dataclasses.replace(rule, is_stochastic=False))
    fits = x.abs() <= 6 * nearest.tensor_scale * nearest.dequant_scale.float().repeat_interleave(16, dim=1)
    mean_error = (torch.stack(draws).mean(dim=0) - x)[fits].norm()
    assert mean_error < (dequantize(nearest) - x)[fits].norm() / 10


def plan_of(recipe: LinearRecipe, device: str, fuse_wgrad: bool) -> LinearPlan:
    if recipe.delayed is None:
        return LinearPlan(recipe=recipe, fuse_wgrad=fuse_wgrad)
    state, exchange = DelayedState(recipe).to(device), AmaxExchange()
    exchange.join(state, None)
    return LinearPlan(
        recipe=recipe, fuse_wgrad=fuse_wgrad, delayed=state.scales_for_forward()[0],
        after_backward=lambda: exchange.backward_ran(state),
    )  # fmt: skip


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2.0**-7), (torch.float32, 1e-5)])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("fuse_wgrad", [False, True])
def test_linear(dtype: torch.dtype, tolerance: float, recipe: LinearRecipe, fuse_wgrad: bool) -> None:
    if recipe.name == "nvfp4":  # the transform's last bit sometimes decides between two codes
        tolerance = 2.0**-5
    tensors = [torch.randn(shape).to(dtype) for shape in ((8, 16, 64), (96, 64), (96,), (8, 16, 96))]
    results = []
    for device in ("cpu", "cuda"):
        x, w, b, dy = (tensor.to(device, copy=True) for tensor in tensors)
        x, w, b = (torch.nn.Parameter(tensor) for tensor in (x, w, b))
        w.main_grad, w.grad_added_to_main_grad = torch.zeros(96, 64, device=device), False
        y = emulated_linear(x, w, b, plan_of(recipe, device, fuse_wgrad))
        y.backward(dy)
        results.append([y.detach(), x.grad, w.main_grad if fuse_wgrad else w.grad, b.grad])
    for on_cpu, on_gpu in zip(*results, strict=True):
        error = (on_gpu.cpu().float() - on_cpu.float()).norm() / on_cpu.float().norm()
        assert error <= tolerance


@pytest.mark.parametrize("leading", [(256,), (2, 128)], ids=["rows", "sequence and batch"])
def test_native_rowwise_gemms_follow_the_decoded_ones(
    leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same codes; sums of the tensor core keep fewer bits, in fprop 14 of them."""
    if not scaled_gemm.supports_scaled_mm(torch.device("cuda")):
        pytest.skip("for Hopper")
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(*leading, 512, generator=generator).bfloat16().cuda().requires_grad_()
    w = torch.randn(384, 512, generator=generator).bfloat16().cuda().requires_grad_()
    bias = torch.randn(384, generator=generator).bfloat16().cuda().requires_grad_()
    dy = torch.randn(*leading, 384, generator=generator).bfloat16().cuda()
    plan = LinearPlan(recipe=rowwise.build("hybrid"), fuse_wgrad=True)
    w.main_grad = torch.zeros(384, 512, device="cuda")

    def results() -> list[torch.Tensor]:
        w.main_grad.zero_()
        y = emulated_linear(x, w, bias, plan)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        y.backward(dy)
        return [y.detach(), dx, w.main_grad.clone()]

    native = results()
    monkeypatch.setattr(scaled_gemm, "multiplies_codes", lambda *_: False)
    decoded = results()
    for name, ours, theirs, bound in zip(("y", "dx", "dw"), native, decoded, (2e-2, 1e-2, 2e-3), strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < bound, name
    assert not torch.equal(native[2], decoded[2]), "the GEMMs were the decoded ones"
