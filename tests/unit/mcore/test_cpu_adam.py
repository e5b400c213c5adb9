"""Adam on a CPU compared with torch's, and the properties that megatron-core's checkpoints need."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from megafp8.mcore.cpu_adam import Adam

# The rounding of one FP32 operation. The two implementations have different orders of operations.
ADAM_RELATIVE = 1e-7


def descend(build: Callable[[list[torch.Tensor]], torch.optim.Optimizer], num_steps: int = 12) -> list[torch.Tensor]:
    """Two parameters after some steps with a changing learning rate. The second one has no gradient at first."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(33, generator=generator).requires_grad_() for _ in range(2)]
    optimizer = build(parameters)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(33, generator=generator) * 10.0 ** (step % 3 - 3)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.5)])
def test_adam_is_adamw(weight_decay: float, betas: tuple[float, float]) -> None:
    ours = descend(lambda parameters: Adam(parameters, betas=betas, weight_decay=weight_decay))
    theirs = descend(lambda parameters: torch.optim.AdamW(parameters, betas=betas, weight_decay=weight_decay))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * ADAM_RELATIVE, atol=ADAM_RELATIVE)


def test_adam_with_decay_in_the_gradient() -> None:
    ours = descend(lambda parameters: Adam(parameters, weight_decay=0.1, adam_w_mode=False))
    theirs = descend(lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * ADAM_RELATIVE, atol=ADAM_RELATIVE)


def test_adam_without_bias_correction() -> None:
    """The first step is then lr (1 - beta1) g / (sqrt(1 - beta2) |g| + eps)."""
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = Adam([parameter], lr=1.0, betas=(0.9, 0.99), bias_correction=False)
    parameter.grad = torch.tensor([2.0])
    optimizer.step()
    assert parameter.item() == pytest.approx(-0.1 * 2 / (0.1 * 2 + 1e-8))


def test_adam_keeps_one_step_per_group_and_resumes_bitwise() -> None:
    def parameter_and_optimizer() -> tuple[torch.Tensor, torch.optim.Optimizer]:
        parameter = torch.linspace(-1, 1, 9).requires_grad_()
        return parameter, Adam([parameter], lr=1e-2, weight_decay=0.1)

    def step(parameter: torch.Tensor, optimizer: torch.optim.Optimizer, number: int) -> None:
        parameter.grad = torch.sin(parameter.detach() * number)
        optimizer.step()

    parameter, optimizer = parameter_and_optimizer()
    for number in range(1, 4):
        step(parameter, optimizer, number)
    assert optimizer.param_groups[0]["step"] == 3
    assert set(optimizer.state[parameter]) == {"exp_avg", "exp_avg_sq"}

    other, resumed = parameter_and_optimizer()
    other.data.copy_(parameter.data)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(parameter, optimizer, 4)
    step(other, resumed, 4)
    assert torch.equal(other, parameter)


def test_adam_leaves_parameters_without_gradient_alone() -> None:
    moved, still = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = Adam([moved, still], lr=0.1, weight_decay=0.5)
    moved.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(still, torch.ones(2)), "no decay either"
    assert not torch.equal(moved, torch.ones(2))
