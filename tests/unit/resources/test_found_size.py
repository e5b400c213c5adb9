"""`--micro-batch-size auto`: once trials have found the size, the run is that of a command line that has it."""

from __future__ import annotations

import dataclasses
from typing import Optional

import pytest
from automatic_runs import BETA2, DELAYED, validated

from megafp8.config import settings
from megafp8.config.micro_batch_sizes import is_auto
from megafp8.config.schema import RunConfig
from megafp8.device.platform import detect_platform
from megafp8.errors import ConfigError
from megafp8.resilience.watchdog import Watchdog
from megafp8.training import checks, pretrain
from megafp8.training.checks import ValidatedRun

AUTO = "--micro-batch-size auto"
SIZE = 4
MIXTURE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm"
)


def after_search(
    monkeypatch: pytest.MonkeyPatch, extra: str, target: str, world_size: int, size: Optional[int] = SIZE
) -> ValidatedRun:
    """The command line after a search that found a size, or was ended by a signal."""
    before = validated(f"{extra} {AUTO}", target, world_size)
    monkeypatch.setattr(pretrain, "choose_micro_batch", lambda *_: (size, "why"))
    found, detail = pretrain.find_size(before, detect_platform(None), Watchdog())
    assert detail == "why"
    return found


def graph_of(config: RunConfig) -> str:
    return config.training.cuda_graph_impl


@pytest.mark.parametrize(
    ("extra", "target", "world_size", "graph"),
    [
        (DELAYED, "h200", 1, "local"),
        (f"{DELAYED} --micro-batch-size-memory-limit 100", "h200", 2, "local"),
        (f"{DELAYED} --cuda-graph-warmup-steps 5 --cuda-graph-evaluation", "h200", 2, "local"),
        (f"{DELAYED} {BETA2} --performance max --micro-batch-size-memory-limit 100", "h200", 2, "local"),
        (f"--fp8-format e4m3 --fp8-recipe delayed {MIXTURE}", "h200", 1, "local"),
        (f"{DELAYED} --cuda-graph-impl none", "h200", 1, "none"),
        ("--use-torch-fsdp2", "h200", 2, "none"),
        (DELAYED, "cpu", 2, "none"),
    ],
)
def test_everything_is_chosen_and_noticed_as_for_the_size_given(
    extra: str, target: str, world_size: int, graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = after_search(monkeypatch, extra, target, world_size)
    without_limit = extra.replace("--micro-batch-size-memory-limit 100", "")
    given = validated(f"{without_limit} --micro-batch-size {SIZE}", target, world_size)
    assert found.invocation.config == given.invocation.config
    assert settings.to_json(found.invocation.config) == settings.to_json(given.invocation.config)
    assert graph_of(found.invocation.config) == graph
    assert (found.implementation, found.warnings) == (given.implementation, given.warnings)
    *choices, size = found.choices
    assert tuple(choices) == given.choices
    assert (size.flag, size.value) == ("--micro-batch-size", str(SIZE))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_resumed_run_keeps_the_form_of_its_checkpoint(is_sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = dataclasses.replace(RunConfig().parallel, use_distributed_optimizer=is_sharded)
    monkeypatch.setattr(checks, "saved_config", lambda _: dataclasses.replace(RunConfig(), parallel=parallel))
    found = after_search(monkeypatch, DELAYED, "h200", 1).invocation.config
    assert found == validated(f"{DELAYED} --micro-batch-size {SIZE}").invocation.config
    assert found.parallel.use_distributed_optimizer is is_sharded
    assert graph_of(found) == ("local" if is_sharded else "none")


def test_trials_are_launched_and_a_signal_leaves_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = after_search(monkeypatch, DELAYED, "h200", 1, size=None)
    assert stopped == validated(f"{DELAYED} {AUTO}")
    assert is_auto(stopped.invocation.config.training) and graph_of(stopped.invocation.config) == "none"


def test_what_the_choices_of_a_size_break_is_refused_before_the_search() -> None:
    for size in (AUTO, f"--micro-batch-size {SIZE}"):
        with pytest.raises(ConfigError, match="--cuda-graph-warmup-steps 0 with --cuda-graph-impl local"):
            validated(f"{DELAYED} --cuda-graph-warmup-steps 0 {size}")
