"""A device's casts, linears and their speed against the emulation and products of its codes."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Optional, Protocol, Union

import torch
from torch import Tensor

from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.quantize import dequantize
from megafp8.quantization.te_layout import COLUMN, ROW, StoredOperand, as_stored, find_differences
from megafp8.recipes import registry
from megafp8.recipes.base import OPERANDS_OF, Gemm, LinearRecipe, Operand, OperandRule

# Complete blocks of every recipe in both dimensions; some incomplete ones of 128.
CAST_SHAPES = ((128, 128), (256, 384), (64, 1024), (160, 544))
MANY_SIZES = "rows of many sizes"
LINEAR_SIZES = ((256, 512, 384), (1024, 4096, 512))  # tokens, inputs, outputs
# So large that the GPU, and not the start of its kernels from Python, takes the time.
SPEED_SIZES = ((16384, 8192, 8192), (8192, 4096, 14336))
SPEED_ROUNDS = 20
# Random numbers differ between libraries, so that gradients are rounded to nearest.
TO_NEAREST = {"fp4_stochastic_rounding": False}
# A result is rounded to BF16 once: half a unit in the last place, 2^-8 relative at most.
ROUNDING = 2.0**-8
# What a tensor core drops of a sum, in units of the sum of magnitudes, for one GEMM over all lengths. Hopper keeps 14
# bits of each product with fast accumulation; a model of it and an H200 gave 6.1e-4 at most. A device that keeps more
# drops less.
DROPPED = 7e-4
# Root mean square of the error of gradients that are rounded stochastically, relative to that of the gradients. Their
# values are random, so that they cannot be compared one by one; zero gradients have 1, and saturated ones more. The
# emulation has 0.17.
LARGEST_STOCHASTIC_ERROR = 0.5
STOCHASTIC = " with stochastic rounding"
# Of a gradient, in which the comparison must refuse a planted fault.
PLANTED_ROWS = 64


class NativeLayers(Protocol):
    """Casts and linears of a device. Gradients are rounded to nearest, but where `linear` is told not to.

    `te/native.py` has those of Transformer Engine.
    """

    def cast(self, recipe: str, number_format: str, operand: Operand, tensor: Tensor) -> dict[str, StoredOperand]:
        """Both sides ("row" and "col") of a BF16 tensor [M, K], quantized as an operand; delayed scales are 1."""

    def linear(
        self, recipe: Optional[str], number_format: str, x: Tensor, w: Tensor, dy: Tensor,
        rounds_to_nearest: bool = True,
    ) -> dict[Gemm, Tensor]:  # fmt: skip
        """Output, input gradient and weight gradient of a linear, in BF16 on the CPU; None is BF16.

        Args:
            rounds_to_nearest: False rounds as the recipe does.
        """

    def step_times(
        self, recipes: dict[Optional[str], str], sizes: tuple[int, int, int], rounds: int
    ) -> dict[Optional[str], list[float]]:
        """Milliseconds of forward and backward pass of a linear, casts included, by recipe, all interleaved.

        Args:
            recipes: number formats by recipe; None is BF16.
            sizes: tokens, inputs, outputs.
        """


# ---- casts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CastComparison:
    """Casts of one recipe in one format.

    Attributes:
        compared: number of casts: operands, sides and inputs.
        differing: a line for each cast that differs, with the position of its first difference, or that failed.
    """

    recipe: str
    format: str
    compared: int
    differing: tuple[str, ...]

    def problem(self, where: str = "") -> str:
        """A line on the casts that differ."""
        differ = f"{len(self.differing)} of {self.compared} casts differ{where}"
        return f"{self.recipe} {self.format}: {differ}; the first is {self.differing[0]}"


@contextmanager
def one_thread() -> Iterator[None]:
    """The comparisons are thousands of short operations. On a busy host, threads that end each of them together wait
    for the slowest, which took ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def cast_inputs(shape: tuple[int, int]) -> dict[str, Tensor]:
    """Distributions that break quantizers, by name; FP32 on the CPU."""
    generator = torch.Generator().manual_seed(shape[0] * 10_000 + shape[1])
    normal = torch.randn(shape, generator=generator)
    exponents = torch.randint(-12, 12, (shape[0], 1), generator=generator).float()

    def with_value(row: int, column: int, value: float) -> Tensor:
        return normal.clone().index_put_((torch.tensor(row), torch.tensor(column)), torch.tensor(value))

    return {
        "normal": normal,
        "tiny": normal * 1e-30,
        "huge": normal * 1e30,
        MANY_SIZES: normal * 10**exponents,
        "columns of many sizes": normal * torch.logspace(-6, 6, shape[1]),
        "one outlier": with_value(3, 5, 1e30),
        "blocks of zeros": normal * (torch.arange(shape[0]) // 32 % 2)[:, None],
        "all zero": torch.zeros(shape),
        "equal": torch.full(shape, 0.3),
        "subnormal": normal * 1e-40,
        "an infinity": with_value(0, 1, float("inf")),
        "a NaN": with_value(7, 2, float("nan")),
    }


def cast_cases() -> Iterator[tuple[str, Tensor]]:
    """Shape and name of each input, and the input in BF16."""
    for shape in CAST_SHAPES:
        for name, tensor in cast_inputs(shape).items():
            yield f"{shape[0]} x {shape[1]}, {name}", tensor.bfloat16()


def plan_of(recipe: LinearRecipe, device: str = "cpu") -> LinearPlan:
    """The plan of a linear's first step, where delayed scales are 1."""
    if recipe.delayed is None:
        return LinearPlan(recipe=recipe)
    return LinearPlan(recipe=recipe, delayed=DelayedState(recipe).to(device).scales_for_forward()[0])


@one_thread()
def compare_casts(native: NativeLayers, recipe: str, number_format: str) -> CastComparison:
    """Compare both sides of all operands of a recipe for all inputs: every code and every scale."""
    plan = plan_of(registry.get(recipe).rules(number_format, TO_NEAREST))
    uses = [(operand, gemm) for gemm, operands in OPERANDS_OF for operand in operands]
    compared, differing = 0, []
    for case, tensor in cast_cases():
        ours: dict[tuple[Optional[OperandRule], str], StoredOperand] = {}
        theirs = {operand: cast_or_failure(native, recipe, number_format, operand, tensor) for operand in Operand}
        for operand, gemm in uses:
            compared += 1
            sides = theirs[operand]
            if isinstance(sides, str):
                text = sides
            else:
                sums_over_rows = gemm is Gemm.WGRAD or (gemm is Gemm.DGRAD and operand is Operand.WEIGHT)
                side = COLUMN if sums_over_rows else ROW
                # The first step's delayed scales are equal, so that the rule is all that distinguishes operands.
                if (use := (plan.recipe.rule(operand, gemm), side)) not in ours:
                    ours[use] = as_stored(plan.quantize(tensor, operand, gemm), side)
                found = find_differences(ours[use], sides[side])
                text = ", ".join(f"{number} {what} ({first})" for what, (number, first) in found.items())
            if text:
                differing.append(f"{operand.value} for {gemm.value}, {case}: {text}")
    return CastComparison(recipe, number_format, compared, tuple(differing))


def cast_or_failure(
    native: NativeLayers, recipe: str, number_format: str, operand: Operand, tensor: Tensor
) -> Union[dict[str, StoredOperand], str]:
    """Both sides of the device's cast, or the message of what it raised: on a new device that is a result."""
    try:
        return native.cast(recipe, number_format, operand, tensor)
    except Exception as error:
        return f"failed: {failure_text(error)}"


def failure_text(error: Exception) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


@one_thread()
def compare_devices(recipe: str, number_format: str, device: str) -> CastComparison:
    """Compare the emulation on a device with the emulation on the CPU.

    Left out are operands that the recipe always rounds stochastically, because random numbers of two devices differ,
    and the Hadamard transform of rows of many sizes, whose sums depend on the order of additions.
    """
    rules = registry.get(recipe).rules(number_format, TO_NEAREST)
    plans = [(where, plan_of(rules, where)) for where in ("cpu", device)]
    uses = [(operand, gemm, rules.rule(operand, gemm)) for gemm, operands in OPERANDS_OF for operand in operands]
    compared, differing = 0, []
    for case, tensor in cast_cases():
        for operand, gemm, rule in uses:
            if rule is not None and (rule.is_stochastic or (rule.is_transformed and case.endswith(MANY_SIZES))):
                continue
            compared += 1
            ours, others = (
                [as_bytes(each) for each in plan.quantize(tensor.to(where), operand, gemm).tensors if each is not None]
                for where, plan in plans
            )
            if not all(map(torch.equal, ours, others)):
                differing.append(f"{operand.value} for {gemm.value}, {case}")
    return CastComparison(recipe, number_format, compared, tuple(differing))


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the CPU."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


# ---- linears ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearComparison:
    """One GEMM of a linear under one recipe.

    Attributes:
        sizes: tokens, inputs and outputs.
        bound_fraction: the largest difference as a fraction of its bound; above 1 the device is wrong, or its sums are
            coarser than Hopper's.
        rms_error: root mean square of the difference over the sum of magnitudes.
        failure: the message of a linear that failed, where nothing was compared.
    """

    recipe: str
    format: str
    gemm: str
    sizes: tuple[int, int, int]
    bound_fraction: float
    rms_error: float
    failure: Optional[str] = None

    def problem(self) -> str:
        """A line on a difference beyond the bound, or a failure."""
        what = f"failed: {self.failure}" if self.failure else f"differs by {self.bound_fraction:.2f} times its bound"
        return f"{self.recipe} {self.format}: {self.gemm} of {' x '.join(map(str, self.sizes))} {what}"


@functools.cache
def linear_inputs(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input [T, K], weight [N, K] and output gradient [T, N] in BF16. Columns of the input differ in size, as those of
    activations do."""
    generator = torch.Generator().manual_seed(tokens + inputs + outputs)
    x = torch.randn(tokens, inputs, generator=generator) * torch.exp2(4 * torch.rand(inputs, generator=generator))
    w = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    dy = torch.randn(tokens, outputs, generator=generator)
    return x.bfloat16(), w.bfloat16(), dy.bfloat16()


def gemm_operands(plan: LinearPlan, gemm: Gemm, tensors: dict[Operand, Tensor]) -> tuple[Tensor, Tensor]:
    """The values of both operands' codes, FP32, as matrices whose product is the GEMM's."""
    a, b = (dequantize(plan.quantize(tensors[operand], operand, gemm)) for operand in dict(OPERANDS_OF)[gemm])
    return (a.t() if gemm is Gemm.WGRAD else a), (b.t() if gemm is Gemm.FPROP else b)


def reference_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and that of the magnitudes, in the dtype of the operands. FP32 drops units of 2^-24 of a sum, which
    is nothing beside `DROPPED`, and takes a third of FP64's time."""
    return a @ b, a.abs() @ b.abs()


def bound_fraction(result: Tensor, product: Tensor, magnitude: Tensor) -> float:
    """The largest difference of a result from the reference's product, as a fraction of its bound."""
    return ((result - product).abs_() / (ROUNDING * product.abs()).add_(magnitude, alpha=DROPPED)).max().item()


def stochastic_fraction(result: Tensor, product: Tensor, _: Tensor) -> float:
    """The root mean square of a gradient's error, as a fraction of its bound."""
    return ((result - product).norm() / product.norm()).item() / LARGEST_STOCHASTIC_ERROR


def planted_gradients(plan: LinearPlan, gemm: Gemm, dy: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The first rows of wrong gradients that a device may return without an error: zeros, and those of a grad_output
    whose every code is the largest of its format.

    Args:
        b: the second operand.
    """
    saturated = dy.sign() * dy.abs().max()
    saturated = saturated[:, :PLANTED_ROWS] if gemm is Gemm.WGRAD else saturated[:PLANTED_ROWS]
    codes = dequantize(plan.quantize(saturated, Operand.GRAD_OUTPUT, gemm))
    product = (codes.t() if gemm is Gemm.WGRAD else codes) @ b
    yield "all-zero", torch.zeros_like(product)
    yield "saturated", product


@one_thread()
def compare_linears(native: NativeLayers, recipe: str, number_format: str) -> list[LinearComparison]:
    """Compare output and both gradients of linears of all sizes with products of the same codes in FP32.

    A recipe that rounds gradients stochastically is compared a second time with this rounding. Each comparison of a
    gradient must refuse what `planted_gradients` plants in its place; if it does not, it counts as failed.
    """
    found: list[LinearComparison] = []
    is_stochastic = registry.get(recipe).rules(number_format).is_stochastic
    plan = plan_of(registry.get(recipe).rules(number_format, TO_NEAREST))
    for sizes in LINEAR_SIZES:
        x, w, dy = linear_inputs(*sizes)
        tensors = {Operand.INPUT: x, Operand.WEIGHT: w, Operand.GRAD_OUTPUT: dy}
        operands = {gemm: gemm_operands(plan, gemm, tensors) for gemm in Gemm}
        products = {gemm: reference_product(*pair) for gemm, pair in operands.items()}
        for to_nearest in (True, False) if is_stochastic else (True,):
            suffix, fraction_of = ("", bound_fraction) if to_nearest else (STOCHASTIC, stochastic_fraction)
            try:
                results = native.linear(recipe, number_format, x, w, dy, rounds_to_nearest=to_nearest)
            except Exception as error:  # on a new device that is a result
                text = failure_text(error)
                found.append(LinearComparison(recipe, number_format, f"all{suffix}", sizes, math.inf, 0.0, text))
                continue
            for gemm, result in results.items():
                if gemm is Gemm.FPROP and not to_nearest:
                    continue
                product, magnitude = products[gemm]
                planted = planted_gradients(plan, gemm, dy, operands[gemm][1]) if gemm is not Gemm.FPROP else ()
                rows = product[:PLANTED_ROWS], magnitude[:PLANTED_ROWS]
                accepted = [name for name, tensor in planted if fraction_of(tensor, *rows) <= 1]
                failure = f"did not refuse a planted {' and a planted '.join(accepted)} gradient" if accepted else None
                fraction = math.inf if accepted else fraction_of(result, product, magnitude)
                rms = ((result - product) / magnitude).norm().item() / product.numel() ** 0.5
                name = gemm.value + suffix
                found.append(LinearComparison(recipe, number_format, name, sizes, fraction, rms, failure))
    return found


@dataclass(frozen=True)
class LinearSpeed:
    """Forward and backward pass of one linear, casts included.

    Attributes:
        recipe: None is BF16.
        sizes: tokens, inputs, outputs.
        ms: median.
        speedup: BF16's median over this one.
    """

    recipe: Optional[str]
    sizes: tuple[int, int, int]
    ms: float
    speedup: float


def measure_speed(
    native: NativeLayers, formats: dict[str, str], sizes: Sequence[tuple[int, int, int]] = SPEED_SIZES,
    rounds: int = SPEED_ROUNDS,
) -> list[LinearSpeed]:  # fmt: skip
    """Time all recipes and BF16, interleaved.

    Args:
        formats: number formats by recipe.
    """
    found = []
    for each in sizes:
        times = native.step_times(dict([(None, ""), *formats.items()]), each, rounds)
        medians = {name: statistics.median(values) for name, values in times.items()}
        found += [LinearSpeed(name, each, ms, medians[None] / ms) for name, ms in medians.items()]
    return found
