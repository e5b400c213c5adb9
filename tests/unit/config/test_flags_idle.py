"""Flags that would do nothing by themselves are refused, with what they need."""

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
def test_parts_of_the_overlap_need_it(part: str) -> None:
    flag = part.removesuffix(" FILE")
    assert problems(part) == [f"{flag} has no effect without --tp-comm-overlap: give --tp-comm-overlap, or remove it"]


def test_gradients_that_the_optimizer_reads_are_those_that_are_reduced() -> None:
    state = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16"
    (text,) = problems(state)
    assert text.startswith("--main-grads-dtype bf16: ") and "also give --grad-reduce-in-bf16" in text
    assert problems(f"{state} --grad-reduce-in-bf16") == []
