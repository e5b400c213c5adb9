"""The verdict of a dry run on memory, and its suggestions."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from megafp8.config import flags
from megafp8.device import platform
from megafp8.planning.dry_run import describe_run
from megafp8.training.checks import check

RUN = (
    "--train-iters 10 --lr 1e-4 --bf16 --fp8-format hybrid --fp8-recipe delayed --mock-data "
    "--tokenizer-type NullTokenizer --target h200 --dry-run"
)
LLAMA = "--model-preset llama-1b --vocab-size 50303 --seq-length 2048 --micro-batch-size"
WHOLE_8B = "--model-preset llama3-8b --vocab-size 128255 --seq-length 8192 --micro-batch-size 1 --global-batch-size 8"
RECOMPUTED = "--recompute-granularity selective --recompute-modules mlp"
MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype"


def verdict(words: str, world_size: int = 1) -> str:
    text = describe_run(check(*flags.parse_with_problems(f"{words} {RUN} --world-size {world_size}".split()))).text
    lines = text.splitlines()
    assert ("speed: not predicted (the run does not fit)" in lines) == lines[1].startswith("does not fit: ")
    return lines[1]


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (f"{LLAMA} 64 --global-batch-size 64", "--micro-batch-size 16"),
        (WHOLE_8B, f"{RECOMPUTED} {MOMENTS} fp16"),
        (f"{WHOLE_8B} --adam-beta2 0.95", f"{RECOMPUTED} {MOMENTS} bf16"),
        (
            WHOLE_8B.replace("--micro-batch-size 1 ", "--micro-batch-size 4 "),
            f"--micro-batch-size 1 {RECOMPUTED} {MOMENTS} fp16",
        ),
    ],
)
def test_a_suggestion_fits(words: str, suggestion: str) -> None:
    assert verdict(words).endswith(f"; try {suggestion}")
    assert verdict(f"{words} {suggestion}").startswith("fits: ")


def test_the_verdict_has_the_memory_of_the_gpu() -> None:
    assert re.fullmatch(r"fits: \d+\.\d+ of 140\.40 GiB a GPU", verdict(f"{LLAMA} 8 --global-batch-size 64"))
    assert verdict(WHOLE_8B, 8).startswith("fits: ")
    assert " GiB a GPU, h200 has 140.40, less 5% for fragments; try " in verdict(WHOLE_8B)


def test_the_planner_is_named_where_nothing_suffices() -> None:
    words = f"{LLAMA} 1 --global-batch-size 8"
    assert verdict(f"{words} --num-layers 96 --hidden-size 4096").endswith(
        "; try megafp8 plan --model-preset llama-1b --gpus 1 --gpu h200"
    )


def test_on_a_cpu_the_memory_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--model-preset tiny --seq-length 64 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
    words += " --tokenizer-type NullTokenizer --vocab-size 100 --dry-run"
    if torch.cuda.is_available():
        pytest.skip("of a machine without a GPU")
    described = describe_run(check(flags.parse(words.split()), []))
    assert described.fits and re.search(
        r"^fits: [\d.]+ of [\d.]+ GiB of this machine, estimated$", described.text, re.M
    )
    monkeypatch.setattr(platform.psutil, "virtual_memory", lambda: SimpleNamespace(total=2**20))
    described = describe_run(check(flags.parse(words.split()), []))
    assert not described.fits and "GiB, this machine has 0.00; reduce --micro-batch-size" in described.text
