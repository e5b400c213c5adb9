"""QuantizedLinear and quantize_model on a GPU: the CPU's results, state, checkpoints, autocast and compilation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megafp8.quantization.modules import QuantizedLinear, quantize_model
from megafp8.recipes import registry

INPUTS, OUTPUTS, TOKENS = 256, 384, 128
NEAREST = {"nvfp4": {"fp4_stochastic_rounding": False}}
# Of conformance/test_cuda.py: the order of sums, and in BF16 one rounding of the result. The Hadamard transform's last
# bit sometimes decides between two FP4 codes, and Hopper's FP8 GEMMs of rowwise scales keep 14 bits of a sum.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
OTHER_TOLERANCES = {"nvfp4": 2.0**-5, "quartet2": 2.0**-5, "rowwise": 2e-2}
# Relative error of a gradient of normally distributed numbers under random rounding. On a CPU it is 0.18.
RANDOM_GRADIENT_ERROR = 0.3

every_recipe = pytest.mark.parametrize("recipe", registry.names())


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.cpu().double() - theirs.cpu().double()).norm() / theirs.cpu().double().norm()).item()


def results(layer: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Output, gradient of the input and of the weight, after a step that gives delayed scaling its scales."""
    generator, found = torch.Generator().manual_seed(0), []
    x, dy = (torch.randn(TOKENS, size, generator=generator).to(dtype) for size in (INPUTS, OUTPUTS))
    for _ in range(2):
        layer.weight.grad = None
        mine = x.to(layer.weight.device, copy=True).requires_grad_()
        output = layer(mine)
        output.backward(dy.to(layer.weight.device))
        found = [output.detach(), mine.grad, layer.weight.grad]
    return found


@every_recipe
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gpu_computes_what_a_cpu_computes(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    on_cpu = QuantizedLinear(INPUTS, OUTPUTS, dtype=dtype, recipe=recipe, **NEAREST.get(recipe, {}))
    on_gpu = copy.deepcopy(on_cpu).cuda()
    pairs = zip(results(on_gpu, dtype), results(on_cpu, dtype), strict=True)
    errors = [relative_error(ours, theirs) for ours, theirs in pairs]
    bound = max(TOLERANCE[dtype], OTHER_TOLERANCES.get(recipe, 0))
    if on_cpu.rules.is_stochastic:  # a GPU's random numbers are others
        assert errors[0] <= bound
    else:
        assert max(errors) <= bound, errors


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2"])
def test_random_gradients_are_near_those_of_nn_linear(recipe: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS, device="cuda")
    layer = QuantizedLinear(INPUTS, OUTPUTS, device="cuda", recipe=recipe)
    layer.load_state_dict(plain.state_dict())
    for ours, theirs in zip(results(layer, torch.float32), results(plain, torch.float32), strict=True):
        assert relative_error(ours, theirs) < RANDOM_GRADIENT_ERROR


def model_of(recipe: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.GELU(), nn.Linear(OUTPUTS, INPUTS)).cuda()
    quantize_model(model, recipe, seed=seed)
    return model


def train(model: nn.Module, steps: Sequence[int], run: nn.Module | None = None) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for step in steps:
        x = torch.randn(37, INPUTS, generator=torch.Generator().manual_seed(step)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = ((run or model)(x) - x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@every_recipe
def test_training_goes_on_from_a_checkpoint(recipe: str, tmp_path: Path) -> None:
    """Bitwise, under autocast, with 37 rows."""
    model = model_of(recipe)
    train(model, range(3))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    expected = train(model, range(3, 6))
    other = model_of(recipe, seed=5)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, map_location="cpu"))
    assert train(other, range(3, 6)) == expected


def test_state_moves_with_the_model() -> None:
    model = model_of("delayed")
    assert all(buffer.is_cuda and buffer.dtype == torch.float32 for buffer in model.bfloat16().buffers())
    assert not any(buffer.is_cuda for buffer in model.cpu().buffers())


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_compiled_models_train(recipe: str) -> None:
    model = model_of(recipe)
    compiled, eager = train(model, range(3), torch.compile(model)), train(model_of(recipe), range(3))
    assert compiled == pytest.approx(eager, rel=2.0**-7)  # a compiled GELU rounds at other points


def test_layers_made_on_a_gpu_have_seeds_of_their_own() -> None:
    torch.manual_seed(0)
    layers = [QuantizedLinear(32, 32, device="cuda", recipe="nvfp4") for _ in range(2)]
    assert layers[0]._seed != layers[1]._seed
