"""Flags without effect on their own are refused, with the flags that they need."""

from __future__ import annotations

import pytest

from megafp8.config import flags, rules

RUN = (
    "--model-preset tiny --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 8 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500"
)


def problems(text: str) -> list[str]:
    return rules.setting_problems(flags.parse(f"{RUN} {text}".split()).config, 1)


@pytest.mark.parametrize(
    "part",
    ["--tp-comm-overlap-cfg FILE", "--disable-tp-comm-overlap-ag", "--disable-tp-comm-overlap-rs",
     "--tp-comm-overlap-rs-dgrad", "--disable-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-wgrad",
     "--tp-comm-bootstrap-backend gloo"],
)  # fmt: skip
def test_overlap_options_need_tp_comm_overlap(part: str) -> None:
    flag = part.removesuffix(" FILE")
    assert problems(part) == [f"{flag} has no effect without --tp-comm-overlap: give --tp-comm-overlap, or remove it"]


def test_main_grads_dtype_must_match_the_reduced_gradients() -> None:
    state = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16"
    (text,) = problems(state)
    assert text.startswith("--main-grads-dtype bf16: ") and "also give --grad-reduce-in-bf16" in text
    assert problems(f"{state} --grad-reduce-in-bf16") == []
