"""A program of `test_te_without_cuda.py`: the operands of Transformer Engine's fused MLP are observed, which changes
nothing. Kernels are torch operations here."""

import te_without_cuda  # noqa: F401  (first)
import torch
from megatron.core import parallel_state
from small_te_mlp import HIDDEN, normalize, small_mlp, swiglu, use_torch_operations

from megafp8.recipes.base import Operand
from megafp8.te import patches
from megafp8.training.extensions import statistics_hooks
from megafp8.training.extensions.statistics_hooks import FusedLinear, find_linears

patches.install()
parallel_state.set_tensor_model_parallel_world_size(1)
use_torch_operations()
NAMES = ("linear_fc1", "linear_fc2")
statistics_hooks.named_linears = lambda mlp: [(name, getattr(mlp, name)) for name in NAMES]


def microbatch(mlp, seed):
    """Output and gradients of one microbatch, the gradient of the output first."""
    hidden = torch.randn(8, 2, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    output, _ = mlp(hidden * 1)
    gradients = torch.autograd.grad(output.square().sum(), [output, hidden, *mlp.parameters()])
    return [hidden.detach(), output.detach(), *gradients]


def observe(linears):
    """Attach to the linears; what their observers will see."""
    seen = {linear.name: {} for linear in linears}
    for linear in linears:
        of_linear = seen[linear.name]
        linear.attach(lambda operand, tensor, codes, all=of_linear: all.setdefault(operand, []).append(tensor.detach()))
    return seen


def expected(mlp, hidden, output_gradient):
    """The operands by linear, with plain torch operations."""
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    normed = normalize(hidden, fc1.layer_norm_weight.detach())
    between = (normed @ fc1.weight.detach().t()).requires_grad_()
    activated = swiglu(between)
    (gradient,) = torch.autograd.grad(activated, between, output_gradient @ fc2.weight.detach())
    return {
        "linear_fc1": {Operand.INPUT: normed, Operand.WEIGHT: fc1.weight, Operand.GRAD_OUTPUT: gradient},
        "linear_fc2": {Operand.INPUT: activated, Operand.WEIGHT: fc2.weight, Operand.GRAD_OUTPUT: output_gradient},
    }


mlp = small_mlp()
plain = [microbatch(mlp, seed) for seed in (1, 2)]
linears = find_linears([mlp], dict.fromkeys(NAMES))
assert [type(linear) for linear in linears] == [FusedLinear, FusedLinear]
seen = observe(linears)
observed = [microbatch(mlp, seed) for seed in (1, 2)]
for linear in linears:
    linear.detach()
later = [microbatch(mlp, seed) for seed in (1, 2)]
for results in (observed, later):
    for ours, others in zip(plain, results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, others, strict=True))
for name, operands in expected(mlp, plain[0][0], plain[0][2]).items():
    assert set(seen[name]) == set(operands)
    for operand, tensor in operands.items():
        first = seen[name][operand][0]
        torch.testing.assert_close(first, tensor.reshape(first.shape))
        # Input and weight once, gradients of all microbatches, and none after the end.
        assert len(seen[name][operand]) == (2 if operand is Operand.GRAD_OUTPUT else 1), (name, operand)

mlp = small_mlp(returns_input=True)  # whose operations are made while there are hooks
seen = observe(find_linears([mlp], dict.fromkeys(NAMES)))
mlp(torch.ones(8, 2, HIDDEN).requires_grad_() * 1)
assert set(seen["linear_fc2"]) == {Operand.INPUT, Operand.WEIGHT}

mlp = small_mlp()
linears = find_linears([mlp], dict.fromkeys(NAMES))
mlp.is_split = True  # a linear was moved to BF16 since
for name in NAMES:
    linear = getattr(mlp, name)
    linear.forward = lambda hidden, linear=linear: (hidden @ linear.weight.t(), None)
mlp.forward = lambda hidden: (mlp.linear_fc2(swiglu(mlp.linear_fc1(hidden)[0]))[0], None)
seen = observe(linears)
mlp(torch.ones(8, 2, HIDDEN))[0].sum().backward()
assert all(set(operands) == set(Operand) for operands in seen.values())
