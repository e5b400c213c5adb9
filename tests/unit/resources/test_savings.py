"""Flags that save memory, by the memory model."""

from __future__ import annotations

import pytest

from megafp8.config import flags, rules
from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.config.run_sizes import run_sizes
from megafp8.resources.memory import estimate_memory
from megafp8.resources.savings import savings

RUN = "--model-preset llama3-8b --seq-length 8192 --mock-data --tokenizer-type NullTokenizer --vocab-size 128255 "
RUN += "--global-batch-size 64 --train-iters 2 --lr 1e-3 --bf16 --micro-batch-size 4"


def test_the_largest_saving_is_first_and_each_is_the_difference_of_two_estimates() -> None:
    config = flags.parse(RUN.split()).config
    found = savings(config, 8, 128256, 0, TRANSFORMER_ENGINE)
    assert [each.num_bytes for each in found] == sorted((each.num_bytes for each in found), reverse=True)
    named = {each.flags.split()[0]: each for each in found}
    assert {"--micro-batch-size", "--recompute-granularity", "--tensor-model-parallel-size"} <= set(named)
    now = estimate_memory(run_sizes(config, 8, 128256), stage=0).total_bytes
    for each in found:
        changed = flags.parse([*RUN.split(), *each.flags.split()]).config
        assert rules.setting_problems(changed, 8) == []
        assert now - estimate_memory(run_sizes(changed, 8, 128256), stage=0).total_bytes == each.num_bytes, each.flags


def test_what_a_run_has_already_and_what_breaks_a_rule_is_not_named() -> None:
    extra = "--micro-batch-size 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    config = flags.parse(f"{RUN} {extra} --use-distributed-optimizer".split()).config
    found = " ".join(each.flags for each in savings(config, 1, 128256, 0, TRANSFORMER_ENGINE))
    assert not any(flag in found for flag in ("micro-batch", "recompute", "distributed-optimizer", "tensor-model"))


@pytest.mark.parametrize(
    ("model", "short"),
    [("", "--recompute-activations"), ("--num-experts 8 --moe-router-topk 2", "--moe-layer-recompute")],
)
def test_complete_recomputation_takes_the_place_of_a_short_flag_for_selective(model: str, short: str) -> None:
    run = f"{RUN} {model}".split()
    config = flags.parse([*run, short]).config
    found = {each.flags: each.num_bytes for each in savings(config, 8, 128256, 0, TRANSFORMER_ENGINE)}
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    changed = flags.parse([*run, *full.split()]).config
    now, then = (estimate_memory(run_sizes(each, 8, 128256), stage=0).total_bytes for each in (config, changed))
    assert found[f"{full} in place of {short}"] == now - then > 0
