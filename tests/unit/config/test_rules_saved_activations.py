"""What `--fp8-saved-activations` needs, and what it excludes."""

from __future__ import annotations

import pytest

from megafp8.config import flags, rules

RUN = (
    "--model-preset tiny --vocab-size 1000 --seq-length 128 --micro-batch-size 1 --train-iters 10 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer"
)
BOTH = "--fp8-saved-activations norm activation"
SELECTIVE = "--recompute-granularity selective --recompute-modules"


def problems_of(text: str) -> list[str]:
    return rules.setting_problems(flags.parse(f"{RUN} {text}".split()).config, 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "needs --bf16: FP32 is exact"),
        ("--fp16", "needs --bf16: FP16's largest activations would overflow"),
        ("--bf16 --ffn-hidden-size 24", "--ffn-hidden-size on a tensor-parallel rank, 24, must be a multiple"),
        (
            "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "keeps only the inputs of layers",
        ),
        (f"--bf16 {SELECTIVE} layernorm", "keeps the inputs of norms in high precision"),
        (f"--bf16 {SELECTIVE} mlp", "keeps the MLP's input in high precision"),
        (
            "--bf16 --fine-grained-activation-offloading --offload-modules core_attn",
            "both replace saved activations",
        ),
        ("--bf16 --num-experts 4", "the activations of experts are not packed"),
        ("--bf16 --override transformer.activation_func_fp8_input_store=true", "casts the same tensor without a scale"),
    ],
)
def test_refused(more: str, message: str) -> None:
    (found,) = [problem for problem in problems_of(f"{BOTH} {more}") if "--fp8-saved-activations" in problem]
    assert message in found


@pytest.mark.parametrize(
    "text",
    [
        f"{BOTH} --bf16",
        f"{BOTH} --bf16 {SELECTIVE} core_attn",
        "--fp8-saved-activations norm --bf16 --num-experts 4",
        f"--fp8-saved-activations activation --bf16 {SELECTIVE} layernorm",
    ],
)
def test_accepted(text: str) -> None:
    assert not problems_of(text)
