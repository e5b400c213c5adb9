"""A GPU makes the bytes that a CPU makes, and the same products within the order of summation."""

import pytest
import torch

from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.linear import LinearPlan, emulated_linear
from megafp8.fp8.quantize import quantize
from megafp8.fp8.recipes import OperandRule, tensorwise, without_wgrad
from megafp8.fp8.rounding import cast, decode
from megafp8.fp8.scaling import ScaleRule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_bf16_value(fmt: Format) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    on_cpu, on_gpu = cast(every.clone(), fmt), cast(every.cuda(), fmt).cpu()
    assert torch.equal(on_cpu.view(torch.uint8), on_gpu.view(torch.uint8))
    values = decode(on_gpu.cuda(), fmt, torch.float32).cpu()
    torch.testing.assert_close(values, decode(on_cpu, fmt, torch.float32), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("scale_rule", [ScaleRule.FP32, ScaleRule.POWER_OF_TWO])
@pytest.mark.parametrize("spoil", [None, float("nan"), float("inf"), 1e30])
def test_tensorwise(fmt: Format, scale_rule: ScaleRule, spoil: float) -> None:
    x = torch.randn(257, 96)
    if spoil is not None:
        x[3, 5] = spoil
    rule = OperandRule(format=fmt, scale_rule=scale_rule)
    on_cpu, on_gpu = quantize(x, rule), quantize(x.cuda(), rule)
    assert torch.equal(on_cpu.codes.view(torch.uint8), on_gpu.codes.cpu().view(torch.uint8))
    assert torch.equal(on_cpu.dequant_scale, on_gpu.dequant_scale.cpu())


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2.0**-7), (torch.float32, 1e-5)])
@pytest.mark.parametrize("quantize_wgrad", [True, False])
@pytest.mark.parametrize("fuse_wgrad", [False, True])
def test_linear(dtype: torch.dtype, tolerance: float, quantize_wgrad: bool, fuse_wgrad: bool) -> None:
    recipe = tensorwise(forward=E4M3, backward=E5M2)
    plan = LinearPlan(recipe=recipe if quantize_wgrad else without_wgrad(recipe), fuse_wgrad=fuse_wgrad)
    tensors = [torch.randn(shape).to(dtype) for shape in ((8, 16, 64), (96, 64), (96,), (8, 16, 96))]
    results = []
    for device in ("cpu", "cuda"):
        x, w, b, dy = (tensor.to(device, copy=True) for tensor in tensors)
        x, w, b = (torch.nn.Parameter(tensor) for tensor in (x, w, b))
        w.main_grad, w.grad_added_to_main_grad = torch.zeros(96, 64, device=device), False
        y = emulated_linear(x, w, b, plan)
        y.backward(dy)
        results.append([y.detach(), x.grad, w.main_grad if fuse_wgrad else w.grad, b.grad])
    for on_cpu, on_gpu in zip(*results, strict=True):
        error = (on_gpu.cpu().float() - on_cpu.float()).norm() / on_cpu.float().norm()
        assert error <= tolerance
