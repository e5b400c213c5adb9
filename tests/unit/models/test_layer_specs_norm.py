"""LayerNorm and RMSNorm compared with their formulas, and the mark that sequence parallelism needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.models.layer_specs import Norm

SIZE = 24
# A few FP32 roundings compared with FP64.
RELATIVE = 2e-6


def config(normalization: str, **others: Any) -> Any:
    fields = {
        "normalization": normalization,
        "layernorm_zero_centered_gamma": False,
        "sequence_parallel": False,
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
    }
    return SimpleNamespace(**(fields | others))


def filled(norm: Norm) -> Norm:
    """With weights and biases that differ from one another."""
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.linspace(0.5, 1.5, SIZE) + number)
    return norm


def expected(norm: Norm, x: Tensor, zero_centered: bool = False) -> Tensor:
    """By the definition, in FP64."""
    x, weight = x.double(), norm.weight.detach().double() + zero_centered
    if norm.bias is None:
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight + norm.bias.double()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_formula(normalization: str, zero_centered: bool) -> None:
    norm = filled(Norm(config(normalization, layernorm_zero_centered_gamma=zero_centered), SIZE, eps=1e-3))
    x = torch.randn(3, 5, SIZE, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.5
    y = norm(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y.detach().double(), expected(norm, x, zero_centered), rtol=RELATIVE, atol=RELATIVE)


def test_only_layernorm_has_a_bias() -> None:
    assert Norm(config("LayerNorm"), SIZE).bias is not None
    assert Norm(config("RMSNorm"), SIZE).bias is None
    assert [name for name, _ in Norm(config("RMSNorm"), SIZE).named_parameters()] == ["weight"]


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_parameters_are_marked_for_sequence_parallelism(normalization: str, is_marked: bool) -> None:
    norm = Norm(config(normalization, sequence_parallel=is_marked), SIZE)
    assert {parameter.sequence_parallel for parameter in norm.parameters()} == {is_marked}


def test_statistics_are_fp32_under_bf16() -> None:
    """A BF16 sum of squares of 300 would stop growing. The result is rounded once, at the end."""
    norm = Norm(config("RMSNorm", params_dtype=torch.bfloat16), 4096)
    torch.nn.init.ones_(norm.weight)
    x = torch.full((2, 4096), 300.0, dtype=torch.bfloat16)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.detach().float(), torch.ones(2, 4096), rtol=2.0**-8, atol=0)


def test_unknown_keywords_of_megatron_core_are_taken() -> None:
    assert Norm(config("RMSNorm"), hidden_size=SIZE, eps=1e-5, persist_layer_norm=True).eps == 1e-5
