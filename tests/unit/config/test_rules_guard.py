"""`--fp8-guard`: what would have no effect is refused, and what is not watched is named at the start."""

import pytest

from megafp8.config import flags, rules
from megafp8.config.layer_backends import EMULATED
from megafp8.config.schema import RunConfig

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 4 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 "
    "--bf16 --swiglu --disable-bias-linear --position-embedding-type rope"
)
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
MIXTURE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48"
SHARED = "--moe-shared-expert-intermediate-size 64"
ATTENTION_IN_BF16 = "--precision *.linear_qkv=bf16 --precision *.linear_proj=bf16"


def config_of(words: str) -> RunConfig:
    return flags.parse(f"{RUN} {words}".split()).config


def problems(words: str) -> list[str]:
    return rules.setting_problems(config_of(words), 1)


def warnings(words: str) -> list[str]:
    config = config_of(words)
    assert rules.setting_problems(config, 1) == []
    return [warning for warning in rules.warnings(config, EMULATED, 1) if "--fp8-guard" in warning]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"smooth-swiglu {FP8} --precision *.linear_fc2=bf16", "in all layers are in high precision"),
        (f"smooth-swiglu {FP8} --precision *.linear_fc2:fprop,wgrad=bf16", "in all layers are in high precision"),
        (
            f"smooth-swiglu {FP8} {MIXTURE} {SHARED} --precision *.shared_experts.*=bf16",
            "shared experts are in high precision",
        ),
        (f"bf16-layer {FP8} --precision *.linear_*=bf16", "it watches no linear whose input is quantized"),
        ("bf16-layer --precision output_layer=tensorwise", "it watches no linear whose input is quantized"),
        (f"bf16-layer {FP8} {MIXTURE} {ATTENTION_IN_BF16}", "it watches no linear whose input is quantized"),
    ],
)
def test_what_would_change_no_layer_is_refused(words: str, reason: str) -> None:
    (problem,) = problems(f"--fp8-guard {words}")
    assert problem.startswith(f"--fp8-guard {words.split()[0]}: ") and reason in problem
    assert "use --fp8-guard warn" in problem and "--precision" in problem
    assert problems(f"--fp8-guard warn {words.partition(' ')[2]}") == []


@pytest.mark.parametrize(
    ("words", "fixes"),
    [
        (MIXTURE, ("warn", "bf16-layer")),
        (f"{MIXTURE} --precision layers.*.experts.*=bf16", ("warn", "bf16-layer")),
        (f"{MIXTURE} {ATTENTION_IN_BF16}", ("warn",)),
    ],
)
def test_policies_that_work_with_routed_experts_are_named(words: str, fixes: tuple[str, ...]) -> None:
    (problem,) = problems(f"--fp8-guard smooth-swiglu {FP8} {words}")
    reason, _, fix = problem.partition("; ")
    assert "the MLPs of all layers are routed experts" in reason
    assert fix == f"use --fp8-guard {' or '.join(fixes)}"
    assert [guard for guard in ("warn", "bf16-layer") if not problems(f"--fp8-guard {guard} {FP8} {words}")] == [*fixes]


@pytest.mark.parametrize("words", ["", "--fp8-param-gather --use-distributed-optimizer"])
def test_policies_that_work_with_delayed_scaling_are_named(words: str) -> None:
    delayed = f"--fp8-format hybrid --fp8-recipe delayed {words}"
    (problem,) = [text for text in problems(f"--fp8-guard smooth-swiglu {delayed}") if "with delayed scaling" in text]
    for guard in ("warn", "bf16-layer"):
        assert (guard in problem.partition("; ")[2]) is (problems(f"--fp8-guard {guard} {delayed}") == [])


@pytest.mark.parametrize(
    "words",
    [
        f"smooth-swiglu {FP8}",
        f"smooth-swiglu {FP8} --precision layers.0.linear_fc2=bf16",
        f"smooth-swiglu {FP8} {MIXTURE} {SHARED}",
        f"smooth-swiglu {FP8} {MIXTURE} --moe-layer-freq [0,1]",
        "smooth-swiglu --precision layers.1.linear_fc2=tensorwise",
        f"bf16-layer {FP8} {MIXTURE}",
        "bf16-layer --precision layers.0.linear_qkv:wgrad=tensorwise",
    ],
)
def test_what_may_change_a_layer_is_allowed(words: str) -> None:
    assert problems(f"--fp8-guard {words}") == []


def test_runs_in_high_precision_have_warnings_only() -> None:
    (warning,) = warnings("--fp8-guard warn")
    assert warning.startswith("--fp8-guard warn watches no linear")
    for guard in ("bf16-layer", "smooth-swiglu"):
        (problem,) = problems(f"--fp8-guard {guard}")
        assert problem.startswith(f"--fp8-guard {guard} has no effect without --fp8-format")


def test_routed_experts_are_named_as_not_watched() -> None:
    (warning,) = warnings(f"--fp8-guard bf16-layer {FP8} {MIXTURE}")
    assert warning.startswith("--fp8-guard bf16-layer does not watch the routed experts of 2 layers")
    assert warning.endswith("it watches the linears of attention")
    (warning,) = warnings(f"--fp8-guard warn {FP8} {MIXTURE} {SHARED} --moe-layer-freq [0,1]")
    assert warning.startswith("--fp8-guard warn does not watch the routed experts of 1 layer")
    assert warning.endswith("it watches the linears of attention, dense MLPs and shared experts")


def test_nothing_to_watch_gives_a_warning() -> None:
    (warning,) = warnings(f"--fp8-guard warn {FP8} --precision *.linear_*=bf16")
    assert "attention logits, the residual and the signal-to-noise ratio of gradients only" in warning


@pytest.mark.parametrize("words", ["", FP8, f"{FP8} {MIXTURE}", f"{FP8} --fp8-guard warn"])
def test_what_is_watched_completely_gives_no_warning(words: str) -> None:
    assert warnings(words) == []
