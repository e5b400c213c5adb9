"""Flags that change nothing without another flag: Megatron-LM's give a warning, megafp8's own are refused."""

from __future__ import annotations

import pytest

from megafp8.config import flags, rules
from megafp8.config.rules.declared import unused_settings

RUN = (
    "--model-preset tiny --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 8 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500"
)


def problems(text: str) -> list[str]:
    return rules.setting_problems(flags.parse(f"{RUN} {text}".split()).config, 1)


def warnings(text: str) -> list[str]:
    return list(unused_settings(flags.parse(f"{RUN} {text}".split()).config))


IDLE = {
    "--tp-comm-overlap": [
        "--tp-comm-overlap-cfg FILE", "--disable-tp-comm-overlap-ag", "--disable-tp-comm-overlap-rs",
        "--tp-comm-overlap-rs-dgrad", "--disable-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-wgrad",
        "--tp-comm-bootstrap-backend gloo",
    ],
    "--save": ["--save-interval 10", "--async-save", "--no-save-optim", "--no-save-rng"],
    "--load": [
        "--no-load-optim", "--no-load-rng", "--use-checkpoint-opt_param-scheduler", "--override-opt_param-scheduler",
    ],
    "--wandb-project": ["--wandb-entity us", "--wandb-exp-name run", "--wandb-save-dir FOLDER"],
    "--recompute-granularity full": ["--recompute-method uniform", "--recompute-num-layers 1"],
    "--recompute-granularity selective": ["--recompute-modules mlp"],
    "--lr-decay-style WSD": ["--lr-wsd-decay-iters 2", "--lr-wsd-decay-style linear"],
    "--decoupled-lr": ["--decoupled-min-lr 0.0001"],
    "--eval-interval": ["--start-eval-at-iter 4"],
    "--manual-gc": ["--manual-gc-interval 5"],
}  # fmt: skip
CASES = [(part, needs) for needs, parts in IDLE.items() for part in parts]


@pytest.mark.parametrize(("part", "needs"), CASES)
def test_a_flag_without_its_main_flag_gives_a_warning(part: str, needs: str) -> None:
    assert problems(part) == []
    (warning,) = warnings(part)
    assert warning.startswith(part.removesuffix(" FILE")) and f" has no effect without {needs}" in warning


@pytest.mark.parametrize(
    "text",
    [
        "--save A --load A --save-interval 10 --async-save --no-load-optim --override-opt_param-scheduler",
        "--wandb-project p --wandb-exp-name run",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-activations --recompute-modules mlp",
        "--lr-decay-style WSD --lr-wsd-decay-iters 2",
        "--manual-gc --manual-gc-interval 5",
        "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16",
        "--position-embedding-type rope --rotary-base 500000",
        "",
    ],
)
def test_a_flag_with_its_main_flag_gives_no_warning(text: str) -> None:
    assert warnings(text) == []


def test_rotary_settings_without_rotary_embeddings_give_warnings() -> None:
    text = "--position-embedding-type none --rotary-base 500000 --rotary-percent 0.5 --rotary-interleaved"
    assert problems(text) == []
    assert [warning.split()[0] for warning in warnings(text)] == [
        "--rotary-base", "--rotary-percent", "--rotary-interleaved",
    ]  # fmt: skip


def test_the_amax_history_gives_a_warning_under_a_recipe_without_one() -> None:
    text = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
    assert problems(text) == []
    assert warnings(text) == [
        "--fp8-amax-history-len 1024 has no effect with --fp8-recipe tensorwise",
        "--fp8-amax-compute-algo max has no effect with --fp8-recipe tensorwise",
    ]


def test_averaging_in_the_collective_gives_a_warning() -> None:
    assert problems("--ddp-average-in-collective") == []
    (warning,) = warnings("--ddp-average-in-collective")
    assert warning.startswith("--ddp-average-in-collective has no effect")


def test_main_grads_in_bf16_are_reduced_in_bf16() -> None:
    state = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16"
    assert problems(state) == problems(f"{state} --grad-reduce-in-bf16") == []
    (text,) = problems(f"{state} --accumulate-allreduce-grads-in-fp32")
    assert "contradict each other" in text
