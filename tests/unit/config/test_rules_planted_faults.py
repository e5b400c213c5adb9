"""`--planted-fault`: why a model cannot have a fault is said alone in reports, and with a fix in a refusal."""

from typing import Optional

import pytest

from megafp8.config import flags, rules
from megafp8.config.rules.planted_faults import unsupported_in_model
from megafp8.config.schema import RunConfig

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 4 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 "
    "--bf16 --disable-bias-linear --position-embedding-type rope --fp8-format hybrid --fp8-recipe tensorwise"
)
MIXTURE = "--swiglu --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48"


def config_of(words: str) -> RunConfig:
    return flags.parse(f"{RUN} {words}".split()).config


@pytest.mark.parametrize(
    ("fault", "words", "reason", "fixed"),
    [
        ("outlier-channel", MIXTURE, "the model has only routed experts", "--moe-layer-freq [0,1]"),
        ("aligned-swiglu", MIXTURE, "only routed experts", "--moe-shared-expert-intermediate-size 64"),
        ("aligned-swiglu", "", "it aligns the weights of SwiGLU", "--swiglu"),
        ("inflated-qk", "--qk-layernorm", "so that the logits cannot grow", None),
        ("inflated-qk", "--qk-l2-norm", "so that the logits cannot grow", None),
    ],
)
def test_a_reason_has_no_fix_and_a_refusal_has_one(fault: str, words: str, reason: str, fixed: Optional[str]) -> None:
    config = config_of(f"{words} --planted-fault {fault}")
    (unsupported,) = unsupported_in_model(fault, config.model)
    assert unsupported.startswith(f"--planted-fault {fault} with") and reason in unsupported and ";" not in unsupported
    (problem,) = rules.setting_problems(config, 1)
    assert problem.startswith(f"{unsupported}; ")
    if fixed is not None:
        assert rules.setting_problems(config_of(f"{words} --planted-fault {fault} {fixed}"), 1) == []


@pytest.mark.parametrize(
    ("fault", "linear"),
    [("outlier-channel", "linear_fc1"), ("inflated-qk", "linear_qkv"), ("infinite-activation", "linear_fc2")],
)
def test_a_fault_needs_a_quantized_linear(fault: str, linear: str) -> None:
    words = f"--planted-fault {fault} --precision"
    (problem,) = rules.setting_problems(config_of(f"{words} *.{linear}=bf16"), 1)
    assert f"it is planted into a quantized {linear}" in problem and "all are in high precision" in problem
    assert rules.setting_problems(config_of(f"{words} layers.0.{linear}=bf16"), 1) == []
