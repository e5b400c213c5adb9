"""Which settings exclude one launch for all experts, by their messages."""

from __future__ import annotations

from typing import Optional

import pytest

from megafp8.config import flags, mixture
from megafp8.config.grouped_experts import grouped_expert_problems, one_launch_suggestion
from megafp8.config.layer_backends import LAYER_BACKENDS
from megafp8.device.layer_support import expert_launch_warnings

DELAYED, HYBRID = "--fp8-format e4m3 --fp8-recipe delayed", "--fp8-format hybrid --fp8-recipe delayed"
ROWWISE = "--fp8-format e4m3 --fp8-recipe rowwise"
TRITON = "--moe-expert-kernels triton"
ONE_LAUNCH = ", ".join(f"{recipe} e4m3/hybrid" for recipe in ("tensorwise", "delayed", "rowwise", "blockwise"))
OTHERS = [f"experts in another precision than BF16 or {ONE_LAUNCH}"]
BLOCKWISE, MXFP8 = (f"--fp8-format e4m3 --fp8-recipe {recipe}" for recipe in ("blockwise", "mxfp8"))


@pytest.mark.parametrize(
    ("extra", "problems"),
    [
        ("--fp8-format e4m3 --fp8-recipe tensorwise", []),
        (DELAYED, []),
        (f"{DELAYED} {TRITON} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", []),
        ("--expert-tensor-parallel-size 2", ["expert tensor-parallel ranks: give --expert-tensor-parallel-size 1"]),
        ("--tensor-model-parallel-size 2", ["tensor-parallel ranks without expert-parallel ones"]),
        (HYBRID, []),
        ("--fp8-format hybrid --fp8-recipe tensorwise", []),
        (BLOCKWISE, []),
        ("--fp8-format hybrid --fp8-recipe blockwise", []),
        (f"{MXFP8} {TRITON}", OTHERS),
        ("--fp8-format e5m2 --fp8-recipe tensorwise", OTHERS),
        (f"{ROWWISE} {TRITON}", []),
        (ROWWISE, ["emulated experts, unless --moe-expert-kernels triton is given"]),
        (f"--fp8-format hybrid --fp8-recipe rowwise {TRITON}", []),
        (f"{ROWWISE} --no-fp8-wgrad {TRITON}", OTHERS),
    ],
)
def test_problems(extra: str, problems: list[str]) -> None:
    config = flags.parse(f"--model-preset mixtral-8x7b --bf16 {extra}".split()).config
    assert list(grouped_expert_problems(config)) == problems


EP2 = "--expert-model-parallel-size 2"
FORMAT = "with --fp8-format e4m3 all of them run in one launch"


@pytest.mark.parametrize(
    ("extra", "implementation", "suggestion"),
    [
        (DELAYED, "transformer_engine", None),
        ("", "transformer_engine", None),
        (EP2, "transformer_engine", None),
        (f"{EP2} --moe-token-dispatcher-type allgather", "transformer_engine", None),
        (HYBRID, "transformer_engine", None),
        ("--fp8-format e5m2", "transformer_engine", FORMAT),
        ("--fp8-format e5m2 --moe-expert-kernels te", "transformer_engine", FORMAT),
        (f"{BLOCKWISE} --moe-ffn-hidden-size 1024", "transformer_engine", None),
        (MXFP8, "transformer_engine", "with --fp8-recipe tensorwise all of them run in one launch"),
        (f"{DELAYED} --moe-expert-kernels te", "transformer_engine", "without --moe-expert-kernels te all of them run"),
        (
            f"{EP2} --moe-token-dispatcher-type flex",
            "transformer_engine",
            "with --moe-token-dispatcher-type alltoall",
        ),
        (
            f"{DELAYED} --moe-apply-probs-on-input --moe-router-topk 1",
            "transformer_engine",
            "does not support --moe-apply-probs-on-input",
        ),
        (ROWWISE, "emulated", "with --moe-expert-kernels triton all of them run in one launch"),
        (f"{ROWWISE} {TRITON}", "emulated", None),
        ("", "local", "--transformer-impl auto may run them in one launch"),
    ],
)
def test_a_run_whose_experts_run_one_by_one_says_what_avoids_it(
    extra: str, implementation: str, suggestion: Optional[str]
) -> None:
    config = flags.parse(f"--model-preset mixtral-8x7b --bf16 {extra}".split()).config
    found = expert_launch_warnings(config, "cuda", LAYER_BACKENDS[implementation])
    assert bool(found) == (suggestion is not None)
    measured = "16 times as long" if "--fp8" in extra else "5 times as long"
    assert all(suggestion in warning and measured in warning for warning in found if suggestion)
    assert expert_launch_warnings(config, "cpu", LAYER_BACKENDS[implementation]) == []


@pytest.mark.parametrize(
    ("extra", "fix"),
    [
        (f"{EP2} {HYBRID} --moe-token-dispatcher-type alltoall", "auto takes peer"),
        (f"{EP2} {HYBRID} --moe-token-dispatcher-type allgather", "auto takes peer"),
        (f"{EP2} {HYBRID} --moe-token-dispatcher-type alltoall --moe-dispatch-in-fp8", "support --moe-dispatch-in-fp8"),
        (f"{EP2} {HYBRID} --moe-token-dispatcher-type peer", None),
        (f"{EP2} --moe-token-dispatcher-type alltoall", None),
        (HYBRID, None),
    ],
)
def test_a_run_in_fp8_says_what_a_collective_costs(extra: str, fix: Optional[str]) -> None:
    config = flags.parse(f"--model-preset mixtral-8x7b --bf16 {extra}".split()).config
    found = expert_launch_warnings(config, "cuda", LAYER_BACKENDS["transformer_engine"])
    assert [fix in warning for warning in found] == [True] * (fix is not None)


@pytest.mark.parametrize(
    ("extra", "is_slower"),
    [
        (BLOCKWISE, True),
        (f"{BLOCKWISE} --num-experts 16", False),
        (f"{BLOCKWISE} --moe-ffn-hidden-size 1024", False),
        (f"{BLOCKWISE} --num-experts 16 {EP2}", True),
        (HYBRID, False),
    ],
)
def test_few_experts_say_that_scales_of_blocks_are_slower_in_one_launch(extra: str, is_slower: bool) -> None:
    config = flags.parse(f"--model-preset mixtral-8x7b --bf16 {extra}".split()).config
    found = expert_launch_warnings(config, "cuda", LAYER_BACKENDS["transformer_engine"])
    assert any("as long as in megatron-core" in warning for warning in found) == is_slower


def test_the_suggestion_may_be_several_flags() -> None:
    text = f"--fp8-format e5m2 --fp8-recipe mxfp8 {EP2} --moe-token-dispatcher-type flex"
    config = flags.parse(f"--model-preset mixtral-8x7b --bf16 {text}".split()).config
    suggestion = one_launch_suggestion(config)
    assert all(
        flag in suggestion for flag in ("--moe-token-dispatcher-type alltoall", "--fp8-format e4m3", "--fp8-recipe")
    )


@pytest.mark.parametrize(
    ("extra", "dispatcher"),
    [
        ("", "allgather"),
        (EP2, "alltoall"),
        (f"{EP2} --moe-token-dispatcher-type allgather", "allgather"),
        ("--moe-expert-capacity-factor 1.5", "alltoall"),
        ("--moe-expert-capacity-factor -1", "allgather"),
        (f"{EP2} --moe-token-dispatcher-type flex", "flex"),
    ],
)
def test_tokens_are_exchanged_by_alltoall_where_ranks_exchange_them(extra: str, dispatcher: str) -> None:
    config = flags.parse(f"--model-preset mixtral-8x7b --bf16 {extra}".split()).config
    assert mixture.token_dispatcher(config) == dispatcher
