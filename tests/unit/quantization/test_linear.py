"""The emulated linear compared with the same arithmetic in FP64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan, quantize_weight
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.quantize import dequantize
from megafp8.recipes import blockwise, mxfp8, nvfp4, tensorwise
from megafp8.recipes.base import Gemm, LinearRecipe, Operand, ScaleRule

RECIPES = {
    "tensorwise": tensorwise.build("hybrid"),
    "blockwise": blockwise.build("e4m3"),
    "blockwise hybrid, FP32 scales": blockwise.build("hybrid", fp8_block_scaling_fp32_scales=True),
    "mxfp8": mxfp8.build("e4m3"),
    "mxfp8 hybrid": mxfp8.build("hybrid"),
    "nvfp4": nvfp4.build("e2m1"),
    "nvfp4 four-over-six": nvfp4.build("e2m1", fp4_four_over_six=True),
    "nvfp4 to nearest": nvfp4.build("e2m1", fp4_hadamard=False, fp4_stochastic_rounding=False, fp4_2d_weights=False),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
PLAN = LinearPlan(recipe=RECIPES["tensorwise"])
FUSED = LinearPlan(recipe=PLAN.recipe, fuse_wgrad=True)
SCALE_BYTES = {ScaleRule.FP32: 4, ScaleRule.POWER_OF_TWO: 4, ScaleRule.E8M0: 1, ScaleRule.TWO_LEVEL: 1,
               ScaleRule.FOUR_OVER_SIX: 1}  # fmt: skip

# Sums of up to 160 FP32 products in another order, and one rounding to the result's type.
RELATIVE_ERROR = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TOKENS, INPUTS, OUTPUTS = 144, 160, 136  # more than a block of 128 each


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [4, 36, 160], w [136, 160], b [136], dy [4, 36, 136]; tokens and channels of very different size."""
    generator = torch.Generator().manual_seed(0)
    shapes = (4, TOKENS // 4, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,), (4, TOKENS // 4, OUTPUTS)
    x, w, b, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    for tensor in (x, dy):
        tensor.mul_(torch.logspace(-2, 1, tensor.shape[-1])).mul_(torch.logspace(-2, 0, TOKENS).view(4, -1, 1))
    x, w, b, dy = (tensor.to(dtype) for tensor in (x, w, b, dy))
    return x.requires_grad_(), torch.nn.Parameter(w), torch.nn.Parameter(b), dy


def plan_of(recipe: LinearRecipe, **options: bool) -> LinearPlan:
    """With restarted random numbers."""
    return LinearPlan(recipe=recipe, noise=RoundingNoise("test") if recipe.is_stochastic else None, **options)


def exact(tensor: Tensor, plan: LinearPlan, operand: Operand, gemm: Gemm) -> Tensor:
    """An operand as the GEMM uses it, as rows in FP64."""
    return dequantize(plan.quantize(tensor, operand, gemm)).double().flatten(end_dim=-2)


def assert_close(ours: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Within the rounding of the result and of the sums, whose size is that of the addends."""
    error = (ours.detach().double().view_as(expected) - expected).abs()
    rounding = RELATIVE_ERROR[ours.dtype] * expected.abs().clamp(min=torch.finfo(ours.dtype).tiny)
    assert (error <= rounding + 1e-6 * magnitude).all(), (error / (rounding + 1e-6 * magnitude)).max()


@each_recipe
@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize("has_bias", [False, True])
def test_three_gemms(recipe: LinearRecipe, dtype: torch.dtype, has_bias: bool) -> None:
    x, w, b, dy = tensors(dtype)
    y = emulated_linear(x, w, b if has_bias else None, plan_of(recipe))
    assert y.shape == dy.shape
    assert y.dtype == dtype
    y.backward(dy)

    plan = plan_of(recipe)
    qx, qw = exact(x, plan, Operand.INPUT, Gemm.FPROP), exact(w, plan, Operand.WEIGHT, Gemm.FPROP)
    bias = b.detach().double() if has_bias else torch.zeros(OUTPUTS, dtype=torch.float64)
    assert_close(y, qx @ qw.t() + bias, qx.abs() @ qw.abs().t() + bias.abs())
    qdy, qw = exact(dy, plan, Operand.GRAD_OUTPUT, Gemm.DGRAD), exact(w, plan, Operand.WEIGHT, Gemm.DGRAD)
    assert_close(x.grad, qdy @ qw, qdy.abs() @ qw.abs())
    qdy, qx = exact(dy, plan, Operand.GRAD_OUTPUT, Gemm.WGRAD), exact(x, plan, Operand.INPUT, Gemm.WGRAD)
    assert_close(w.grad, qdy.t() @ qx, qdy.abs().t() @ qx.abs())
    if has_bias:
        assert torch.equal(b.grad, dy.flatten(end_dim=-2).sum(dim=0)), "of the unquantized grad_output"


@each_recipe
def test_wgrad_in_high_precision(recipe: LinearRecipe) -> None:
    x, w, _, dy = tensors(torch.float32)
    emulated_linear(x, w, None, plan_of(recipe.without_wgrad())).backward(dy)
    rows, grad_rows = x.detach().flatten(end_dim=-2).double(), dy.flatten(end_dim=-2).double()
    assert_close(w.grad, grad_rows.t() @ rows, grad_rows.abs().t() @ rows.abs())
    plan = plan_of(recipe)
    qdy, qw = exact(dy, plan, Operand.GRAD_OUTPUT, Gemm.DGRAD), exact(w, plan, Operand.WEIGHT, Gemm.DGRAD)
    assert_close(x.grad, qdy @ qw, qdy.abs() @ qw.abs())


@each_recipe
def test_bf16_results_are_rounded_once(recipe: LinearRecipe) -> None:
    """A scale multiplied to a rounded product would change one in four results by one step."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    plan = plan_of(recipe)
    y = emulated_linear(x, w, None, plan)
    qx, qw = exact(x, plan, Operand.INPUT, Gemm.FPROP), exact(w, plan, Operand.WEIGHT, Gemm.FPROP)
    assert (y == (qx @ qw.t()).bfloat16()).float().mean() > 0.99


def stored_bytes(recipe: LinearRecipe) -> int:
    """Bytes that a linear keeps for its backward pass, without single numbers."""
    stored: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        stored.append(tensor)
        return tensor

    x, w, _, _ = tensors(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        emulated_linear(x, w, None, plan_of(recipe))
    return sum(tensor.nbytes for tensor in stored if tensor.ndim)


@each_recipe
def test_backward_keeps_codes_and_scales(recipe: LinearRecipe) -> None:
    expected = 0
    for (rows, columns), operand, gemm in (
        ((TOKENS, INPUTS), Operand.INPUT, Gemm.WGRAD), ((OUTPUTS, INPUTS), Operand.WEIGHT, Gemm.DGRAD),
    ):  # fmt: skip
        rule = recipe.rule(operand, gemm)
        expected += rows * columns // rule.format.codes_per_byte
        if rule.block is not None:
            num_blocks = math.ceil(rows / rule.block[0]) * math.ceil(columns / rule.block[1])
            expected += num_blocks * SCALE_BYTES[rule.scale_rule]
    assert stored_bytes(recipe) == expected
    with_input = stored_bytes(recipe.without_wgrad()) - stored_bytes(recipe)
    assert 0.9 * TOKENS * INPUTS < with_input < 1.6 * TOKENS * INPUTS, "BF16 instead of codes"


@each_recipe
def test_known_weight_codes_are_used(recipe: LinearRecipe) -> None:
    x, w, b, _ = tensors(torch.bfloat16)
    plan = plan_of(recipe)
    known, other = quantize_weight(w, plan), quantize_weight(w * 2, plan)
    assert torch.equal(emulated_linear(x, w, b, plan), emulated_linear(x, w, b, plan, known))
    assert torch.equal(emulated_linear(x, w, b, plan, other), emulated_linear(x, w * 2, b, plan))


@pytest.mark.parametrize(("name", "index"), [("input", 0), ("weight", 1), ("bias", 2)])
def test_tensors_of_different_dtypes_are_refused(name: str, index: int) -> None:
    operands = list(tensors(torch.bfloat16)[:3])
    operands[index] = operands[index].detach().float()
    with pytest.raises(TypeError, match=f"{name} (is )?torch.float32.*convert"):
        emulated_linear(*operands, PLAN)


def test_autocast_is_refused() -> None:
    """It would not affect these GEMMs, but with FP32 parameters the caller would expect it to."""
    x, w, b, _ = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="autocast is enabled for cpu"):
        emulated_linear(x, w, b, PLAN)
    with torch.autocast("cpu", enabled=False):
        assert emulated_linear(x, w, b, PLAN).dtype == torch.float32


def test_uses_under_one_rule_share_codes() -> None:
    _, w, _, _ = tensors(torch.bfloat16)
    weights = {name: quantize_weight(w, plan_of(recipe)) for name, recipe in RECIPES.items()}
    assert weights["tensorwise"].dgrad is weights["tensorwise"].fprop
    assert weights["blockwise"].dgrad is weights["blockwise"].fprop
    assert weights["nvfp4"].dgrad is weights["nvfp4"].fprop
    assert weights["mxfp8"].dgrad.rule != weights["mxfp8"].fprop.rule


def test_unneeded_gradients_are_not_computed() -> None:
    x, w, b, dy = tensors(torch.float32)
    w.requires_grad_(False)
    emulated_linear(x, w, b, PLAN).backward(dy)
    assert w.grad is None
    assert x.grad is not None
    x, w, b, dy = tensors(torch.float32)
    emulated_linear(x.detach(), w, b, PLAN).backward(dy)
    assert w.grad is not None


@each_recipe
@pytest.mark.parametrize("recompute", [lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=False)])
def test_recomputation_gives_the_same_bits(recompute: Callable, recipe: LinearRecipe) -> None:
    expected = tensors(torch.bfloat16)
    emulated_linear(*expected[:3], plan_of(recipe)).backward(expected[3])
    x, w, b, dy = tensors(torch.bfloat16)
    recompute(emulated_linear, x, w, b, plan_of(recipe)).backward(dy)
    for ours, theirs in zip((x, w, b), expected, strict=False):
        assert torch.equal(ours.grad, theirs.grad)


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize_wgrad", [True, False])
def test_weight_gradients_add_up_in_main_grad(dtype: torch.dtype, recipe: LinearRecipe, quantize_wgrad: bool) -> None:
    recipe = recipe if quantize_wgrad else recipe.without_wgrad()
    x, w, _, dy = tensors(dtype)
    emulated_linear(x, w, None, plan_of(recipe)).backward(dy)
    once, w.grad = w.grad, None

    w.main_grad = torch.ones(OUTPUTS, INPUTS)
    w.grad_added_to_main_grad = False
    for _ in range(2):
        emulated_linear(x, w, None, plan_of(recipe, fuse_wgrad=True)).backward(dy)
        assert w.grad is not None, "data parallelism counts on autograd delivering something"
        w.grad = None
    assert w.grad_added_to_main_grad
    bound = 2 * RELATIVE_ERROR[dtype] * once.float().abs() + 1e-5  # a separate gradient is rounded to BF16
    assert ((w.main_grad - (1 + 2 * once.float())).abs() <= bound).all()


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if not recipe.is_stochastic])
@pytest.mark.parametrize("quantize_wgrad", [True, False])
def test_microbatches_are_summed_in_fp32(name: str, quantize_wgrad: bool) -> None:
    """Compared with FP64 sums of the same codes. Gradients rounded to BF16 before the sum are off by 1e-3."""
    plan = plan_of(RECIPES[name] if quantize_wgrad else RECIPES[name].without_wgrad(), fuse_wgrad=True)
    x, w, _, dy = tensors(torch.bfloat16)
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(OUTPUTS, INPUTS), False
    expected = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
    for microbatch in range(8):
        grad_output = dy.roll(microbatch, dims=0) * (1 + microbatch % 5)
        emulated_linear(x, w, None, plan).backward(grad_output)
        a, b = grad_output.double().flatten(end_dim=-2), x.detach().double().flatten(end_dim=-2)
        if quantize_wgrad:
            a = exact(grad_output, plan, Operand.GRAD_OUTPUT, Gemm.WGRAD)
            b = exact(x, plan, Operand.INPUT, Gemm.WGRAD)
        expected += a.t() @ b
    assert (w.main_grad - expected).norm() / expected.norm() < 1e-6


def test_dummy_gradient_is_zero_where_it_is_added() -> None:
    x, w, _, dy = tensors(torch.float32)
    w.main_grad, w.grad_added_to_main_grad, w.zero_out_wgrad = torch.zeros(OUTPUTS, INPUTS), False, True
    emulated_linear(x, w, None, FUSED).backward(dy)
    assert not w.grad.any()
    assert w.main_grad.any()


def test_without_main_grad_the_gradient_is_returned() -> None:
    x, w, _, dy = tensors(torch.float32)
    emulated_linear(x, w, None, FUSED).backward(dy)
    assert w.grad.any()


@each_recipe
def test_no_tokens(recipe: LinearRecipe) -> None:
    """An expert may get none."""
    x, w, b, _ = tensors(torch.float32)
    empty = x.detach()[:, :0].requires_grad_()
    emulated_linear(empty, w, b, plan_of(recipe)).sum().backward()
    assert not w.grad.any()
    assert empty.grad.shape == (4, 0, INPUTS)


@each_recipe
def test_any_number_of_tokens_goes_forward(recipe: LinearRecipe) -> None:
    """A prompt may have any length."""
    x, w, b, _ = tensors(torch.bfloat16)
    with torch.no_grad():
        y = emulated_linear(x[0, :7], w, b, plan_of(recipe))
    assert y.shape == (7, OUTPUTS)


@each_recipe
def test_nan_stays_visible(recipe: LinearRecipe) -> None:
    """Except in FP4, which has no NaN: it becomes the largest number, as on a GPU."""
    x, w, b, dy = tensors(torch.bfloat16)
    with torch.no_grad():
        x[1, 2, 3] = float("nan")
    y = emulated_linear(x, w, b, plan_of(recipe))
    assert y[1, 2].isnan().all() == (recipe.name != "nvfp4")
    assert not y[0].isnan().any()


def test_stochastic_rounding_draws_new_numbers_each_time() -> None:
    plan = plan_of(RECIPES["nvfp4"])
    gradients = []
    for _ in range(2):
        x, w, _, dy = tensors(torch.bfloat16)
        emulated_linear(x, w, None, plan).backward(dy)
        gradients.append(x.grad)
    assert not torch.equal(*gradients)
    assert plan.noise.num_draws == 4, "for dgrad and wgrad each"


def test_tokens_not_divisible_by_16_are_refused_in_training() -> None:
    x, w, _, _ = tensors(torch.bfloat16)
    with pytest.raises(ValueError, match="groups of 16"):
        emulated_linear(x[:1, :7], w, None, plan_of(RECIPES["nvfp4"]))
