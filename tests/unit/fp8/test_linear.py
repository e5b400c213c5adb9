"""The emulated linear against the same arithmetic written out in FP64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafp8.fp8.formats import E4M3, E5M2
from megafp8.fp8.linear import LinearPlan, emulated_linear, quantize_weight
from megafp8.fp8.quantize import quantize
from megafp8.fp8.recipes import OperandRule, tensorwise

PLAN = LinearPlan(recipe=tensorwise(forward=E4M3, backward=E5M2))
HIGH_PRECISION_WGRAD = LinearPlan(recipe=tensorwise(forward=E4M3, backward=E5M2, quantize_wgrad=False))
FUSED = LinearPlan(recipe=PLAN.recipe, fuse_wgrad=True)

# Sums of 32 to 48 FP32 products in another order, and one rounding to the result's type.
RELATIVE_ERROR = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [4, 6, 32], w [48, 32], b [48], dy [4, 6, 48]."""
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 6, 32), (48, 32), (48,), (4, 6, 48)
    x, w, b, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x.requires_grad_(), torch.nn.Parameter(w), torch.nn.Parameter(b), dy


def exact(tensor: Tensor, fmt: object) -> Tensor:
    """Quantized and dequantized in FP64, as rows."""
    quantized = quantize(tensor, OperandRule(format=fmt))
    return (quantized.codes.double() * quantized.dequant_scale.double()).flatten(end_dim=-2)


def assert_close(ours: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Within the rounding of the result, and of the sums, whose size is that of the addends."""
    error = (ours.detach().double().view_as(expected) - expected).abs()
    assert (error <= RELATIVE_ERROR[ours.dtype] * expected.abs() + 1e-6 * magnitude).all(), error.max()


@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize("has_bias", [False, True])
def test_three_gemms(dtype: torch.dtype, has_bias: bool) -> None:
    x, w, b, dy = tensors(dtype)
    y = emulated_linear(x, w, b if has_bias else None, PLAN)
    assert y.shape == dy.shape
    assert y.dtype == dtype
    y.backward(dy)

    qx, qw, qdy = exact(x, E4M3), exact(w, E4M3), exact(dy, E5M2)
    bias = b.detach().double() if has_bias else torch.zeros(48, dtype=torch.float64)
    assert_close(y, (qx @ qw.t() + bias).view(4, 6, 48), (qx.abs() @ qw.abs().t() + bias.abs()).view(4, 6, 48))
    assert_close(x.grad, (qdy @ qw).view(4, 6, 32), (qdy.abs() @ qw.abs()).view(4, 6, 32))
    assert_close(w.grad, qdy.t() @ qx, qdy.abs().t() @ qx.abs())
    if has_bias:
        assert torch.equal(b.grad, dy.flatten(end_dim=-2).sum(dim=0)), "of the unquantized grad_output"


def test_wgrad_in_high_precision() -> None:
    x, w, _, dy = tensors(torch.float32)
    emulated_linear(x, w, None, HIGH_PRECISION_WGRAD).backward(dy)
    rows = x.detach().flatten(end_dim=-2)
    torch.testing.assert_close(w.grad, dy.flatten(end_dim=-2).t() @ rows, rtol=1e-6, atol=1e-5)
    qw, qdy = exact(w, E4M3), exact(dy, E5M2)
    assert_close(x.grad, (qdy @ qw).view(4, 6, 32), (qdy.abs() @ qw.abs()).view(4, 6, 32))


def test_bf16_results_are_rounded_once() -> None:
    """A scale multiplied to a rounded product would leave a quarter of the results one step off."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    y = emulated_linear(x, w, None, PLAN)
    assert (y == (exact(x, E4M3) @ exact(w, E4M3).t()).bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("plan, kept_bytes", [(PLAN, 24 * 32 + 48 * 32), (HIGH_PRECISION_WGRAD, 2 * 24 * 32 + 48 * 32)])
def test_backward_keeps_codes(plan: LinearPlan, kept_bytes: int) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x, w, _, _ = tensors(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        emulated_linear(x, w, None, plan)
    assert sum(tensor.nbytes for tensor in kept if tensor.ndim) == kept_bytes


def test_known_weight_codes_change_nothing() -> None:
    x, w, b, _ = tensors(torch.bfloat16)
    assert torch.equal(emulated_linear(x, w, b, PLAN), emulated_linear(x, w, b, PLAN, quantize_weight(w, PLAN)))


def test_known_weight_codes_are_used() -> None:
    x, w, b, _ = tensors(torch.bfloat16)
    other = quantize_weight(w * 2, PLAN)
    assert torch.equal(emulated_linear(x, w, b, PLAN, other), emulated_linear(x, w * 2, b, PLAN))


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    x, w, b, dy = tensors(torch.float32)
    w.requires_grad_(False)
    emulated_linear(x, w, b, PLAN).backward(dy)
    assert w.grad is None
    assert x.grad is not None
    x, w, b, dy = tensors(torch.float32)
    emulated_linear(x.detach(), w, b, PLAN).backward(dy)
    assert w.grad is not None


@pytest.mark.parametrize("recompute", [lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=False)])
def test_recomputation_gives_the_same_bits(recompute: Callable) -> None:
    expected = tensors(torch.bfloat16)
    emulated_linear(*expected[:3], PLAN).backward(expected[3])
    x, w, b, dy = tensors(torch.bfloat16)
    recompute(emulated_linear, x, w, b, PLAN).backward(dy)
    for ours, theirs in zip((x, w, b), expected, strict=False):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", [FUSED, LinearPlan(recipe=HIGH_PRECISION_WGRAD.recipe, fuse_wgrad=True)])
def test_weight_gradients_add_up_in_main_grad(dtype: torch.dtype, plan: LinearPlan) -> None:
    x, w, _, dy = tensors(dtype)
    emulated_linear(x, w, None, LinearPlan(recipe=plan.recipe)).backward(dy)
    once, w.grad = w.grad, None

    w.main_grad = torch.ones(48, 32)
    w.grad_added_to_main_grad = False
    for _ in range(2):
        emulated_linear(x, w, None, plan).backward(dy)
        assert w.grad is not None, "data parallelism counts on autograd delivering something"
        w.grad = None
    assert w.grad_added_to_main_grad
    torch.testing.assert_close(w.main_grad, 1 + 2 * once.float(), rtol=1e-6, atol=1e-5)


def test_stand_in_is_zero_where_it_will_be_added() -> None:
    x, w, _, dy = tensors(torch.float32)
    w.main_grad, w.grad_added_to_main_grad, w.zero_out_wgrad = torch.zeros(48, 32), False, True
    emulated_linear(x, w, None, FUSED).backward(dy)
    assert not w.grad.any()
    assert w.main_grad.any()


def test_without_main_grad_the_gradient_is_returned() -> None:
    x, w, _, dy = tensors(torch.float32)
    emulated_linear(x, w, None, FUSED).backward(dy)
    assert w.grad.any()


def test_no_tokens() -> None:
    """An expert may get none."""
    x, w, b, _ = tensors(torch.float32)
    empty = x.detach()[:, :0].requires_grad_()
    emulated_linear(empty, w, b, PLAN).sum().backward()
    assert not w.grad.any()
    assert empty.grad.shape == (4, 0, 32)


def test_nan_stays_visible() -> None:
    x, w, b, dy = tensors(torch.bfloat16)
    with torch.no_grad():
        x[1, 2, 3] = float("nan")
    y = emulated_linear(x, w, b, PLAN)
    assert y[1, 2].isnan().all()
    assert not y[0].isnan().any()
