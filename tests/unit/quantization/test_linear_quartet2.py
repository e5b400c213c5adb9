"""The emulated linear under Quartet II: what it saves, what it multiplies, and gradients without bias."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafp8.config.precision_map import GemmChoice, LinearChoice, build_linear_recipe
from megafp8.config.schema import PrecisionConfig
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan, quantize_weight
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.quantize import dequantize
from megafp8.recipes import nvfp4, quartet2
from megafp8.recipes.base import Gemm, LinearRecipe, Operand

RECIPE = quartet2.build("e2m1")
TOKENS, INPUTS, OUTPUTS = 256, 96, 128  # the backward pass sums over tokens and outputs


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 128, 96], w [128, 96], dy [2, 128, 128]; channels of different size."""
    source = torch.Generator().manual_seed(0)
    shapes = (2, 128, INPUTS), (OUTPUTS, INPUTS), (2, 128, OUTPUTS)
    x, w, dy = (torch.randn(shape, generator=source) for shape in shapes)
    x.mul_(torch.logspace(-1, 1, INPUTS))
    return x.to(dtype).requires_grad_(), torch.nn.Parameter(w.to(dtype)), dy.to(dtype)


def plan_of(recipe: LinearRecipe = RECIPE, name: str = "test", **options: bool) -> LinearPlan:
    return LinearPlan(recipe=recipe, noise=RoundingNoise(name), **options)


def forward_values(tensor: Tensor, operand: Operand) -> Tensor:
    """What fprop reads, as rows."""
    return dequantize(plan_of().quantize(tensor, operand, Gemm.FPROP)).flatten(end_dim=-2)


def square(values: Tensor) -> float:
    return values.double().square().sum().item()


def test_fprop_is_that_of_four_over_six() -> None:
    x, w, _ = tensors()
    plain = nvfp4.build("e2m1", fp4_four_over_six=True, fp4_2d_weights=False)
    assert RECIPE.rule(Operand.WEIGHT, Gemm.FPROP) == plain.rule(Operand.WEIGHT, Gemm.FPROP)
    assert RECIPE.rule(Operand.INPUT, Gemm.FPROP) == plain.rule(Operand.INPUT, Gemm.FPROP)
    assert torch.equal(emulated_linear(x, w, None, plan_of()), emulated_linear(x, w, None, plan_of(plain)))


def test_backward_multiplies_requantized_codes() -> None:
    """The same random numbers in the same order: signs, grad_output for both GEMMs, weight, input."""
    x, w, dy = tensors()
    emulated_linear(x, w, None, plan_of()).backward(dy)
    plan = plan_of().for_backward(x.device)
    rows = dy.flatten(end_dim=-2)
    grads = plan.quantize_to_codes(rows, Operand.GRAD_OUTPUT, (Gemm.DGRAD, Gemm.WGRAD))
    weight = plan.quantize(forward_values(w, Operand.WEIGHT), Operand.WEIGHT, Gemm.DGRAD)
    inputs = plan.quantize(forward_values(x, Operand.INPUT), Operand.INPUT, Gemm.WGRAD)
    assert torch.equal(weight.signs, grads[Gemm.DGRAD].signs), "shared, so that the transforms cancel"
    assert torch.equal(inputs.signs, grads[Gemm.WGRAD].signs)
    dgrad = dequantize(grads[Gemm.DGRAD]) @ dequantize(weight)
    wgrad = dequantize(grads[Gemm.WGRAD]).t() @ dequantize(inputs)
    torch.testing.assert_close(x.grad.flatten(end_dim=-2), dgrad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(w.grad, wgrad, rtol=1e-4, atol=1e-3)


def mean_gradients(draws: int) -> tuple[tuple[Tensor, Tensor], tuple[float, float]]:
    """The mean of dx and dw over draws, and the mean squared distance of a draw from the exact gradients."""
    x, w, dy = tensors()
    rows = dy.flatten(end_dim=-2)
    exact = rows @ forward_values(w, Operand.WEIGHT), rows.t() @ forward_values(x, Operand.INPUT)
    sums, errors, plan = [torch.zeros_like(each) for each in exact], [0.0, 0.0], plan_of()
    for _ in range(draws):
        x.grad = w.grad = None
        emulated_linear(x, w, None, plan).backward(dy)
        for index, grad in enumerate((x.grad.flatten(end_dim=-2), w.grad)):
            sums[index] += grad - exact[index]
            errors[index] += square(grad - exact[index]) / draws
    return (sums[0] / draws, sums[1] / draws), (errors[0], errors[1])


def test_gradients_are_those_of_the_forward_pass_in_the_mean() -> None:
    """The mean of n draws has 1/n of a draw's squared error, up to 5 standard deviations of a sum of 12288 squares.

    The errors of one GEMM's operands share their signs: 20% for sums that are therefore correlated.
    """
    draws = 64
    means, errors = mean_gradients(draws)
    for mean, error in zip(means, errors, strict=True):
        assert 0.8 * error / draws < square(mean) < 1.25 * error / draws


def stored_bytes(recipe: LinearRecipe) -> int:
    """Bytes of tensors that a linear keeps for its backward pass."""
    stored: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        stored.append(tensor)
        return tensor

    x, w, _ = tensors(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        emulated_linear(x, w, None, plan_of(recipe))
    return sum(tensor.nbytes for tensor in stored if tensor.ndim)


def test_backward_keeps_the_codes_of_fprop() -> None:
    assert stored_bytes(RECIPE) == (TOKENS + OUTPUTS) * (INPUTS // 2 + INPUTS // 16)


@pytest.mark.parametrize(
    "recompute", [lambda f, *a: f(*a), partial(checkpoint, use_reentrant=False)], ids=["kept", "recomputed"]
)
def test_recomputation_gives_the_same_bits(recompute: Callable) -> None:
    expected = tensors(torch.bfloat16)
    emulated_linear(*expected[:2], None, plan_of()).backward(expected[2])
    x, w, dy = tensors(torch.bfloat16)
    recompute(emulated_linear, x, w, None, plan_of()).backward(dy)
    assert torch.equal(x.grad, expected[0].grad)
    assert torch.equal(w.grad, expected[1].grad)


def test_known_weight_codes_are_used_and_drawn_for_each_microbatch() -> None:
    x, w, dy = tensors()
    plan = plan_of()
    known = quantize_weight(w, plan)
    assert known.dgrad is known.fprop
    assert plan.noise is not None and plan.noise.num_draws.item() == 0, "nothing is drawn before the backward pass"
    grads = []
    for _ in range(2):
        x.grad = None
        emulated_linear(x, w, None, plan, known).backward(dy)
        grads.append(x.grad)
    assert not torch.equal(*grads), "other signs"
    assert plan.noise.num_draws.item() == 2 * 5


def test_weight_gradients_add_up_in_main_grad() -> None:
    x, w, dy = tensors(torch.bfloat16)
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(OUTPUTS, INPUTS), False
    emulated_linear(x, w, None, plan_of(fuse_wgrad=True)).backward(dy)
    x, separate, dy = tensors(torch.bfloat16)
    emulated_linear(x, separate, None, plan_of()).backward(dy)
    torch.testing.assert_close(w.main_grad, separate.grad.float(), rtol=2.0**-8, atol=1e-4)


def mixed(**gemms: GemmChoice) -> LinearRecipe:
    recipe = build_linear_recipe(PrecisionConfig(bf16=True), LinearChoice(**gemms))
    assert recipe is not None
    return recipe


OURS = GemmChoice("quartet2", "e2m1")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(mixed(dgrad=OURS, wgrad=OURS), id="fprop-in-high-precision"),
        pytest.param(mixed(fprop=OURS, wgrad=OURS), id="dgrad-in-high-precision"),
        pytest.param(mixed(fprop=OURS, dgrad=OURS), id="wgrad-in-high-precision"),
        pytest.param(mixed(fprop=GemmChoice("mxfp8", "e4m3"), dgrad=OURS, wgrad=OURS), id="fprop-in-mxfp8"),
    ],
)
def test_gemms_may_have_other_recipes(recipe: LinearRecipe) -> None:
    """Each gradient is within the error of quantization of the exact one, wherever its operands come from."""
    x, w, dy = tensors()
    emulated_linear(x, w, None, plan_of(recipe)).backward(dy)
    rows = dy.flatten(end_dim=-2)
    for grad, exact in ((x.grad.flatten(end_dim=-2), rows @ w), (w.grad, rows.t() @ x.flatten(end_dim=-2))):
        assert square(grad - exact) < 0.05 * square(exact)
