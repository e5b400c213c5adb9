"""Command lines with automatic settings, checked for a machine."""

from __future__ import annotations

from megafp8.config import flags
from megafp8.training.checks import ValidatedRun, check

MODEL = (
    "--model-preset llama-1b --bf16 --seq-length 2048 --micro-batch-size 8 --global-batch-size 64 --train-iters 100 "
    "--lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 50303 --dry-run"
)
DELAYED = "--fp8-format hybrid --fp8-recipe delayed"
BETA2 = "--adam-beta2 0.95"
MIXTURE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm --eval-iters 0"
)


def validated(extra: str, target: str = "h200", world_size: int = 1) -> ValidatedRun:
    words = f"{MODEL} --target {target} --world-size {world_size} {extra}"
    return check(*flags.parse_with_problems(words.split()))


def chosen(extra: str, target: str = "h200", world_size: int = 1) -> dict[str, str]:
    return {choice.flag: choice.value for choice in validated(extra, target, world_size).choices}
