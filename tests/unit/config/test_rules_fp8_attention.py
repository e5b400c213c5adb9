"""FP8 attention is refused where Transformer Engine does not support it, or would compute something else."""

import pytest

from megafp8.checkpoint.compatibility import number_formats
from megafp8.config import flags
from megafp8.config.rules import precision, precision_map
from megafp8.config.rules.base import rules_of
from megafp8.device.capability import TARGETS, capability_problems

REQUESTED = "--bf16 --attention-dropout 0 --fp8-format hybrid --fp8-dot-product-attention"
MODEL = "--transformer-impl transformer_engine --hidden-size 1024 --num-attention-heads 8"


def found(text: str) -> list[str]:
    config = flags.parse(text.split()).config
    rules = (precision_map.fp8_attention_is_supported, *rules_of(precision))
    return [problem for rule in rules for problem in rule(config, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--attention-backend fused",
        "--fp8-param-gather --use-distributed-optimizer",
        "--fp8-schedule bf16:1,fp8",
        "--recompute-granularity full",
        "--recompute-granularity selective --recompute-modules mlp",
    ],
)
def test_compatible_settings(text: str) -> None:
    assert found(f"{REQUESTED} {text}") == []


@pytest.mark.parametrize(
    "text",
    [
        "--fp8-recipe tensorwise",
        "--fp8-recipe blockwise",
        "--attention-backend unfused",
        "--context-parallel-size 2",
        "--attention-dropout 0.1",
        "--window-size 128",
    ],
)
def test_incompatible_settings_are_refused(text: str) -> None:
    (problem,) = found(f"{REQUESTED} {text}")
    assert problem.startswith(f"--fp8-dot-product-attention with {text}: ")


@pytest.mark.parametrize("text", ["--context-parallel-size 2", "--attention-dropout 0.1", "--window-size 128"])
def test_what_was_not_run_says_so(text: str) -> None:
    (problem,) = found(f"{REQUESTED} {text}")
    assert "no run has compared its losses with those of BF16 attention" in problem


def test_recomputing_attention_alone_is_refused() -> None:
    (problem,) = found(f"{REQUESTED} --recompute-granularity selective")
    assert "with --recompute-modules core_attn: " in problem


def test_fp8_attention_needs_bf16_weights() -> None:
    (problem,) = found(REQUESTED.removeprefix("--bf16 "))
    assert problem.startswith("--fp8-dot-product-attention without --bf16: ")


def test_fp8_attention_needs_an_fp8_recipe() -> None:
    (problem,) = found("--bf16 --fp8-dot-product-attention")
    assert problem.startswith("--fp8-dot-product-attention has no effect without --fp8-format")


@pytest.mark.parametrize(
    ("target", "extra", "said"),
    [
        ("h200", "", ""),
        ("h200", "--kv-channels 64", "only 128 channels per head are supported, not 64"),
        ("b200", "", "only compute capability 9.0 is supported, b200 has 10.0"),
        ("cpu", "", "has no CUDA device"),
        ("h200", "--transformer-impl emulated", "needs --transformer-impl transformer_engine"),
    ],
)
def test_fp8_attention_needs_kernels_of_the_gpu(target: str, extra: str, said: str) -> None:
    found = capability_problems(flags.parse(f"{REQUESTED} {MODEL} {extra}".split()).config, TARGETS[target])
    assert len(found) == bool(said), found
    assert all(said in problem for problem in found)


def test_fp8_attention_is_part_of_the_number_formats() -> None:
    for text, expected in ((REQUESTED, True), (REQUESTED.rsplit(maxsplit=1)[0], False)):
        formats = number_formats(flags.parse(text.split()).config.precision)
        assert formats["fp8_dot_product_attention"] is expected
