"""`--fp8-saved-activations`: the bytes that autograd keeps, the gradients, and what is left as it is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small_run import FP8, PLAIN, build_run, small_config
from tolerances import SAVED_ACTIVATION_GRADIENT
from torch import Tensor

from megafp8.config.layer_backends import EMULATED
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.models import saved_activations
from megafp8.models.layer_specs import InputSavingRMSNorm
from megafp8.models.saved_activations import InputSaving, Packing
from megafp8.quantization.saved_activations import can_pack, pack, unpack
from megafp8.resources.memory import layer_activations

BOTH = "--fp8-saved-activations norm activation"
SIZES = "--bf16 --ffn-hidden-size 192 --num-layers 2"


def decoder_of(config: RunConfig) -> tuple[torch.nn.Module, dict]:
    chunk = build_run(config).training_state.chunks[0].module.module
    rotary = chunk.rotary_pos_emb(32) if hasattr(chunk, "rotary_pos_emb") else None
    return chunk.decoder, {"attention_mask": None, "rotary_pos_emb": rotary}


def held_bytes(decoder: torch.nn.Module, options: dict) -> int:
    """Bytes that a forward pass of the layers leaves allocated."""
    x = torch.randn(32, 4, 64).bfloat16().requires_grad_()
    with torch.profiler.profile(profile_memory=True) as profile:
        output = decoder(x * 1, **options)  # as in a model, the input is not a leaf
    assert output.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def saved_bytes(config: RunConfig) -> int:
    """Bytes less with the codes than with the tensors that they stand for."""
    decoder, options = decoder_of(config)
    packed = held_bytes(decoder, options)
    with mock.patch.object(saved_activations, "pack", lambda tensor: tensor):
        return held_bytes(decoder, options) - packed


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("parts", ["norm", "activation", "norm activation"])
def test_bytes_are_those_of_the_planner(style: str, parts: str) -> None:
    plain = small_config(style, f"{SIZES} {FP8}")
    config = small_config(style, f"{SIZES} {FP8} --fp8-saved-activations {parts}")
    (saved,) = run_ranks(1, saved_bytes, config)
    planned = [layer_activations(run_sizes(each, 1, 1024), implementation=EMULATED).total for each in (plain, config)]
    assert saved == 2 * (planned[0] - planned[1]) > 0


def gradients_of(config: RunConfig) -> list[Tensor]:
    """The output, the gradient of the input, and those of all weights."""
    decoder, options = decoder_of(config)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, 64, generator=generator).bfloat16().requires_grad_()
    output = decoder(x * 1, **options)
    output.backward(torch.randn(output.shape, generator=generator).bfloat16())
    grads = [each.main_grad if each.grad is None else each.grad for each in decoder.parameters()]
    return [output.detach(), x.grad, *grads]


@pytest.mark.parametrize(("style", "more"), [("llama", ""), ("gpt2", ""), ("gpt2", "--squared-relu")])
def test_the_forward_pass_is_exact_and_gradients_are_close(style: str, more: str) -> None:
    plain, packed = (
        run_ranks(1, gradients_of, small_config(style, f"{SIZES} {PLAIN} {more} {flags}"))[0] for flags in ("", BOTH)
    )
    assert torch.equal(plain[0], packed[0])
    errors = [
        float((a.float() - b.float()).norm() / a.float().norm())
        for a, b in zip(plain[1:], packed[1:], strict=True)
        if a.float().norm() > 0
    ]
    assert 0 < max(errors) < SAVED_ACTIVATION_GRADIENT


def test_values_survive_as_their_codes() -> None:
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0, 0], x[1, 1, 17], x[2, 2] = torch.inf, torch.nan, 0
    packed = pack(x)
    assert packed.codes.shape == x.shape and packed.scales.shape == (15, 2)
    back = unpack(packed)
    assert back.dtype == x.dtype and back.isinf()[0, 0, 0] and back.isnan()[1, 1, 17] and not back[2, 2].any()
    finite = x[1:].isfinite()
    amax = x[1:].float().nan_to_num().view(-1, 16).abs().amax(1, keepdim=True).expand(-1, 16).reshape(x[1:].shape)
    # Half a step of three mantissa bits, and of the subnormal numbers 2^-9 for scales up to amax / 224.
    bound = x[1:].float().abs() / 16 + amax / 224 * 2**-10
    assert ((back[1:].float() - x[1:].float()).abs()[finite] <= bound[finite]).all()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(64, dtype=torch.bfloat16),
        torch.zeros(4, 24, dtype=torch.bfloat16),
        torch.zeros(0, 16, dtype=torch.bfloat16),
        torch.zeros(4, 16, dtype=torch.float8_e4m3fn),
        torch.nn.Parameter(torch.zeros(4, 16)),
    ],
)
def test_other_tensors_are_not_packed(tensor: Tensor) -> None:
    assert not can_pack(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_that_saves_its_input(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(4, 3, 64, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(64, generator=generator).to(dtype)
    ours, torchs = ((x.clone().requires_grad_(), weight.clone().requires_grad_()) for _ in range(2))
    outputs = InputSavingRMSNorm.apply(*ours, 1e-5), F.rms_norm(torchs[0], (64,), torchs[1], 1e-5)
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward(grad)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_function_that_is_computed_again() -> None:
    x, bias = torch.randn(4, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    InputSaving.apply(lambda a, b: F.silu(a + b) ** 2, x, bias).sum().backward()
    found, x.grad, bias.grad = (x.grad, bias.grad), None, None
    (F.silu(x + bias) ** 2).sum().backward()
    assert torch.equal(found[0], x.grad) and torch.equal(found[1], bias.grad)
    InputSaving.apply(lambda a, b: F.silu(a), x, None).sum().backward()


def test_a_module_that_saves_another_tensor_is_an_error() -> None:
    packing, x = Packing(), torch.randn(4, 16, requires_grad=True)
    with (
        pytest.raises(RuntimeError, match="0 instead of 1 saved tensors of layers.0.mlp"),
        packing.hooks("layers.0.mlp"),
    ):
        packing.mark(x)
        (x * 2).square()
    with packing.hooks("layers.0.mlp"):
        packing.mark(x)
        x.square()


def no_grad_output(config: RunConfig) -> tuple[Tensor, Tensor]:
    decoder, options = decoder_of(config)
    x = torch.randn(32, 4, 64).bfloat16()
    with mock.patch.object(saved_activations, "pack", side_effect=AssertionError), torch.no_grad():
        without = decoder(x, **options)
    return without, decoder(x, **options).detach()


def test_nothing_is_packed_without_gradients() -> None:
    assert torch.equal(*run_ranks(1, no_grad_output, small_config("llama", f"{SIZES} {FP8} {BOTH}"))[0])
