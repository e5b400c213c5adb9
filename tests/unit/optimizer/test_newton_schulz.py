"""Newton-Schulz against singular values in FP64: what each set of coefficients does to them."""

from __future__ import annotations

import pytest
import torch

from megafp8.config.optimizers import COEFFICIENTS, polynomials, steps_problem
from megafp8.config.schema import OptimizerConfig
from megafp8.optimizer.muon import EPSILON, newton_schulz

# Set -> steps, and the range of the singular values afterwards that were at least 0.02 of the norm.
SETS = {"simple": (5, 0.68, 1.21), "quintic": (5, 0.68, 1.15), "polar_express": (8, 0.99, 1.01), "aol": (4, 0.68, 1.1)}
QUINTIC = polynomials(OptimizerConfig())
# FP32 rounds a direction of a small singular value to within 2^-24 of the norm in each of three products of a step, and
# the five steps multiply it by up to 4.08 * 3.95 * 3.74 * 2.88 * 2.84 = 493: 15 * 493 * 2^-24 = 4.4e-4 in the worst
# case, if all errors point in one direction. Measured: 1.3e-6.
FP32_ERROR = 1e-5


def plain(matrix: torch.Tensor, steps: tuple[tuple[float, float, float], ...]) -> torch.Tensor:
    """The definition, in FP64."""
    x = matrix.double() / matrix.double().norm()
    for a, b, c in steps:
        square = x @ x.T
        x = a * x + b * square @ x + c * square @ square @ x
    return x


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SETS)
def test_singular_values_approach_one(name: str) -> None:
    num_steps, least, most = SETS[name]
    optimizer = OptimizerConfig(muon_coefficient_type=name, muon_num_ns_steps=num_steps)
    assert steps_problem(optimizer) is None and len(polynomials(optimizer)) == num_steps
    result = newton_schulz(random_matrix(24, 48), polynomials(optimizer), "highest")
    values = torch.linalg.svdvals(result)
    assert least < values.min() and values.max() < most


def test_small_singular_values_are_raised() -> None:
    """The claim of the documentation: from 0.002 of the norm on, the result is between 0.68 and 1.15."""
    directions, _ = torch.linalg.qr(random_matrix(6, 6).double())
    values = torch.tensor([1.0, 0.5, 0.1, 0.02, 0.005, 0.00205], dtype=torch.float64)
    matrix = (directions * values / values.norm()) @ directions.T
    raised = torch.linalg.svdvals(plain(matrix, QUINTIC))
    assert raised.min() > 0.68 and raised.max() < 1.15


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (8, 40), (40, 8), (1, 5)])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_fp32_is_the_definition(rows: int, columns: int, name: str) -> None:
    steps = polynomials(OptimizerConfig(muon_coefficient_type=name, muon_num_ns_steps=SETS[name][0]))
    matrix = random_matrix(rows, columns)
    for precision in ("highest", "high"):  # the same on a CPU
        error = newton_schulz(matrix, steps, precision) - plain(matrix, steps)
        assert error.norm() / min(rows, columns) ** 0.5 < FP32_ERROR


def test_bf16_is_near() -> None:
    """Each step rounds its result once to BF16: a relative error of 2^-9, which later steps do not amplify."""
    matrix = random_matrix(32, 64)
    error = newton_schulz(matrix, QUINTIC, "medium") - plain(matrix, QUINTIC)
    relative = error.norm() / 32**0.5
    assert FP32_ERROR < relative < 3 * 5 * 2.0**-9


def test_a_stack_is_its_matrices() -> None:
    stack = torch.stack([random_matrix(8, 12, seed) for seed in range(3)])
    together = newton_schulz(stack, QUINTIC, "highest")
    for matrix, result in zip(stack, together, strict=True):
        assert (newton_schulz(matrix, QUINTIC, "highest") - result).norm() < FP32_ERROR


def test_the_size_does_not_matter_but_zero_stays() -> None:
    matrix = random_matrix(8, 8)
    assert (newton_schulz(matrix * 1e6, QUINTIC, "highest") - newton_schulz(matrix, QUINTIC, "highest")).norm() < 1e-3
    assert torch.equal(newton_schulz(torch.zeros(8, 4), QUINTIC, "medium"), torch.zeros(8, 4))
    tiny = matrix / matrix.norm() * EPSILON * 1e-3  # divided by epsilon, and not by its norm
    assert newton_schulz(tiny, QUINTIC, "highest").norm() < 1


@pytest.mark.parametrize(
    ("name", "num_steps", "text"),
    [
        ("quintic", 7, "needs a multiple of 5 steps"),
        ("aol", 6, "needs a multiple of 4 steps"),
        ("polar_express", 7, "needs at least 8 steps"),
        ("simple", 0, "must be at least 1"),
    ],
)
def test_steps_without_coefficients_are_a_problem(name: str, num_steps: int, text: str) -> None:
    problem = steps_problem(OptimizerConfig(muon_coefficient_type=name, muon_num_ns_steps=num_steps))
    assert problem is not None and text in problem


def test_more_steps_repeat_the_set_or_its_end() -> None:
    more = polynomials(OptimizerConfig(muon_coefficient_type="quintic", muon_num_ns_steps=10))
    assert more == COEFFICIENTS["quintic"] * 2
    longer = polynomials(OptimizerConfig(muon_coefficient_type="polar_express", muon_num_ns_steps=10))
    assert longer[8:] == COEFFICIENTS["polar_express"][-1:] * 2
