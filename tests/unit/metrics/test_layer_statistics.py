"""Statistics of layers: known values, and the direction in which faults move them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.config.flags import parse
from megafp8.config.rules import setting_problems
from megafp8.metrics.layer_statistics import (
    INPUT_STATISTICS,
    LIMITS,
    SETTLING_STEPS,
    attention_logit_bound,
    first_steps_not_stored,
    input_statistics,
    root_mean_square,
    suggestion_text,
    swiglu_alignment,
)

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 4 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 "
    "--bf16 --swiglu --disable-bias-linear --position-embedding-type rope"
)
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
SMOOTH = "--fp8-guard smooth-swiglu"
KEEP = "the layer in high precision with --precision"
MOVE = f"--fp8-guard bf16-layer; {KEEP}"
NORM, CAP = "--qk-layernorm in a new run", "--attention-logit-softcapping 50 in a new run"


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


@pytest.mark.parametrize("interval", [1, 10, 20, 50])
@pytest.mark.parametrize("warmup", [23, 200, 2000])
def test_runs_are_unwatched_for_20_steps_after_the_warmup(warmup: int, interval: int) -> None:
    """At every interval, unless the warm-up is short beside it: the learning rates of two more intervals then at most
    double their sum."""
    first, needed = first_steps_not_stored(warmup, interval), warmup / 2 + 2 * interval
    assert first == (warmup + 20 if needed <= warmup + 20 else needed)
    rates = [min(1.0, step / warmup) for step in range(1, 2101)]
    first_stored = int(first) + 1
    assert sum(rates[: first_stored + 2 * interval]) <= 2 * sum(rates[:first_stored])
    assert SETTLING_STEPS == 20


def test_a_warmup_of_a_benchmark_leaves_a_value_before_its_fault_at_the_default_interval() -> None:
    """23 steps, and a fault from step 70 on: those of step 60 are kept, which two intervals did not."""
    assert first_steps_not_stored(23, 10) == 43 and first_steps_not_stored(23, 20) < 60


def suggestions_of(statistic: str, name: str, words: str) -> str:
    config = parse(f"{RUN} {words}".split()).config
    assert setting_problems(config, 1) == []
    return suggestion_text(statistic, name, config.model, config.precision, config.training.fp8_guard)


@pytest.mark.parametrize(
    ("statistic", "flags", "expected"),
    [
        ("attention logits", FP8, f"{NORM}; {CAP}; a lower --lr"),
        ("attention logits", f"{FP8} --qk-layernorm", f"{CAP}; a lower --lr"),
        ("attention logits", f"{FP8} --qk-l2-norm", f"{CAP}; a lower --lr"),
        ("attention logits", f"{FP8} --attention-logit-softcapping 30", f"{NORM}; a lower --lr"),
        ("SwiGLU alignment", f"{FP8} --fp8-guard warn", f"{SMOOTH}; {MOVE}; a larger --weight-decay"),
        ("SwiGLU alignment", f"{FP8} {SMOOTH}", f"{MOVE}; a larger --weight-decay"),
        ("gradient SNR", FP8, f"a lower --lr; {KEEP}"),
        ("gradient SNR", "", "a lower --lr"),
        ("gradient SNR", f"{FP8} --precision layers.1.*=bf16", "a lower --lr"),
    ],
)
def test_what_a_run_does_is_no_suggestion(statistic: str, flags: str, expected: str) -> None:
    assert suggestions_of(statistic, "layers.1", flags) == expected


@pytest.mark.parametrize("statistic", INPUT_STATISTICS)
def test_scales_per_channel_are_advised_where_they_help(statistic: str) -> None:
    for name in ("layers.1.linear_fc2.input", "layers.1.shared_experts.linear_fc2.input"):
        assert suggestions_of(statistic, name, f"{FP8} --fp8-guard warn") == f"{SMOOTH}; {MOVE}"
    for name in ("layers.1.linear_fc1.input", "layers.1.linear_fc2.smoothed_input"):
        assert suggestions_of(statistic, name, f"{FP8} --fp8-guard warn") == MOVE


@pytest.mark.parametrize("statistic", ["kurtosis", "SwiGLU alignment"])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--fp8-format hybrid --fp8-recipe delayed", MOVE),
        (f"{FP8} --fp8-param-gather --use-distributed-optimizer", KEEP),
        (f"{FP8} --precision *.linear_fc2=bf16", MOVE),
    ],
)
def test_flags_that_the_run_refuses_are_no_suggestion(statistic: str, flags: str, expected: str) -> None:
    name = "layers.1.linear_fc2.input" if statistic == "kurtosis" else "layers.1"
    found = suggestions_of(statistic, name, f"{flags} --fp8-guard warn")
    assert found.removesuffix("; a larger --weight-decay") == expected
