"""What cannot be captured as a CUDA graph is refused, each with its flag."""

from __future__ import annotations

import pytest

from megafp8.config import flags
from megafp8.config.rules import graphs
from megafp8.device import capability

ASKED = "--cuda-graph-impl local --attention-dropout 0 --hidden-dropout 0"


def problems(text: str) -> list[str]:
    config = flags.parse(text.split()).config
    return [problem for rule in graphs.RULES for problem in rule(config, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--cuda-graph-impl none --fp16 --tp-comm-overlap",
        ASKED,
        f"{ASKED} --cuda-graph-scope full_iteration --cuda-graph-warmup-steps 1 --tensor-model-parallel-size 2",
        f"{ASKED} --overlap-grad-reduce --overlap-param-gather",
        f"{ASKED} --fp8-format hybrid --fp8-param-gather --fp8-log-interval 100",
    ],
)
def test_what_goes_together(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "--attention-dropout 0.1",
        "--hidden-dropout 0.1",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
        "--recompute-granularity full",
        "--fp8-schedule 1:bf16,10:fp8",
        "--fp16",
        "--loss-scale 2",
        "--tp-comm-overlap",
        "--micro-batch-size auto",
    ],
)
def test_what_does_not(text: str) -> None:
    (problem,) = problems(f"{ASKED} {text}")
    assert text.split()[0] in problem


def test_settings_of_graphs_need_one() -> None:
    assert "no effect without --cuda-graph-impl local" in problems("--cuda-graph-warmup-steps 5")[0]


def test_other_layers_have_none() -> None:
    config = flags.parse(f"{ASKED} --transformer-impl emulated".split()).config
    found = capability.problems(config, capability.TARGETS["h200"])
    assert any(text.startswith("--cuda-graph-impl local: needs --transformer-impl") for text in found)
