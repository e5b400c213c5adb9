"""Statistics of layers: known values, and the direction in which faults move them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.config.flags import parse
from megafp8.metrics.layer_statistics import (
    LIMITS,
    advice,
    attention_logit_bound,
    input_statistics,
    root_mean_square,
    swiglu_alignment,
)

SMOOTH = "--fp8-guard smooth-swiglu"
MOVE = "--fp8-guard bf16-layer; the layer in high precision with --precision"


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def test_normal_numbers() -> None:
    kurtosis, outlier, subnormal = input_statistics(normal(512, 64).bfloat16()).tolist()
    assert kurtosis == pytest.approx(3.0, abs=0.1)
    assert outlier == pytest.approx(1 / 64, rel=0.2)
    assert subnormal < 1e-3


def test_values_of_any_magnitude_do_not_overflow() -> None:
    values = normal(64, 64)
    expected = input_statistics(values)
    for factor in (1e30, 1e-30):
        torch.testing.assert_close(input_statistics(values * factor), expected, rtol=1e-4, atol=1e-4)
    assert input_statistics(torch.zeros(4, 4)).tolist() == [0.0, 0.0, 0.0]


def test_outliers_exceed_the_limits() -> None:
    values = normal(512, 64)
    values[:, 5] *= 1e3
    assert input_statistics(values)[1] > LIMITS["outlier share"].value
    values = normal(512, 64)
    values[0, 0] = 1e5
    kurtosis, _, subnormal = input_statistics(values).tolist()
    assert kurtosis > LIMITS["kurtosis"].value and subnormal > LIMITS["subnormal share"].value


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_values_exceed_every_limit(bad: float) -> None:
    values = normal(8, 8)
    values[0, 0] = bad
    assert float(input_statistics(values)[0]) == float(root_mean_square(values)) == torch.inf


def test_aligned_weights() -> None:
    weight = normal(64, 256)
    assert swiglu_alignment(weight) < 0.5
    weight[3] = -2.0 * weight[32 + 3]
    assert swiglu_alignment(weight) == pytest.approx(1.0)


@pytest.mark.parametrize("softmax_scale", [8**-0.5, 1.0])
def test_bound_of_attention_logits(softmax_scale: float) -> None:
    query, key = normal(16, 2, 4, 8), normal(16, 2, 2, 8)  # two heads share a key
    logits = torch.einsum("sbhd,tbhd->bhst", query, key.repeat_interleave(2, dim=2)) * softmax_scale
    bound = attention_logit_bound(query, key, softmax_scale)
    assert logits.abs().amax() <= bound <= 4 * logits.abs().amax()
    torch.testing.assert_close(attention_logit_bound(3 * query, key, softmax_scale), 3 * bound)


def test_bound_of_capped_attention_logits() -> None:
    query, key, cap = normal(16, 2, 4, 8), normal(16, 2, 4, 8), 5.0
    logits = cap * torch.tanh(torch.einsum("sbhd,tbhd->bhst", query, key) / cap)
    bound = attention_logit_bound(query, key, 1.0, cap)
    assert logits.abs().amax() <= bound <= cap < attention_logit_bound(query, key, 1.0)
    assert attention_logit_bound(1e3 * query, key, 1.0, cap) == cap
    query[0, 0, 0, 0] = torch.inf
    assert attention_logit_bound(query, key, 1.0, cap) == torch.inf, "such logits are not finite"


@pytest.mark.parametrize(
    ("statistic", "flags", "expected"),
    [
        (
            "attention logits",
            "",
            "--qk-layernorm in a new run; --attention-logit-softcapping in a new run; a lower --lr",
        ),
        ("attention logits", "--qk-layernorm", "--attention-logit-softcapping in a new run; a lower --lr"),
        ("attention logits", "--qk-l2-norm", "--attention-logit-softcapping in a new run; a lower --lr"),
        ("attention logits", "--attention-logit-softcapping 50", "--qk-layernorm in a new run; a lower --lr"),
        (
            "SwiGLU alignment",
            "--fp8-guard warn",
            f"{SMOOTH}; {MOVE}; a larger --weight-decay",
        ),
        ("SwiGLU alignment", SMOOTH, f"{MOVE}; a larger --weight-decay"),
        ("gradient SNR", "", "a lower --lr; the layer in high precision with --precision"),
        ("gradient SNR", "--bf16", "a lower --lr"),
    ],
)
def test_what_a_run_does_is_no_advice(statistic: str, flags: str, expected: str) -> None:
    recipe = "" if flags == "--bf16" else "--fp8-format hybrid"
    assert advice(statistic, parse(f"{recipe} {flags}".split()).config) == expected
