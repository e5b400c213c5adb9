"""Settings that cannot be captured as a CUDA graph are refused, each with its flag."""

from __future__ import annotations

import dataclasses
from typing import Optional

import pytest

from megafp8.config import flags
from megafp8.config.layer_backends import LAYER_BACKENDS, TRANSFORMER_ENGINE
from megafp8.config.rules import cuda_graph, warnings
from megafp8.device import capability

BASE = "--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer"
REQUESTED = f"--cuda-graph-impl local {BASE}"


def problems(text: str) -> list[str]:
    config = flags.parse(text.split()).config
    rules = (cuda_graph.cuda_graph_steps_are_identical, cuda_graph.cuda_graph_has_warmup_steps)
    return [problem for rule in rules for problem in rule(config, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--cuda-graph-impl none --fp16 --tp-comm-overlap",
        REQUESTED,
        f"{REQUESTED} --cuda-graph-scope full_iteration --cuda-graph-warmup-steps 1 --tensor-model-parallel-size 2",
        f"{REQUESTED} --overlap-grad-reduce --overlap-param-gather",
        f"{REQUESTED} --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform",
        f"{REQUESTED} --context-parallel-size 2 --recompute-granularity selective",
        f"{REQUESTED} --attention-dropout 0.1 --hidden-dropout 0.1",
        f"{REQUESTED} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2",
        f"{REQUESTED} --tensor-model-parallel-size 2 --context-parallel-size 4 --cp-comm-type allgather",
        f"{REQUESTED} --tensor-model-parallel-size 2 --context-parallel-size 4 --reset-attention-mask",
        f"{REQUESTED} --fp8-format hybrid --fp8-param-gather --fp8-log-interval 100",
    ],
)
def test_compatible_settings(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "--attention-dropout 0.1 --recompute-granularity full --recompute-method uniform",
        "--hidden-dropout 0.1 --recompute-activations",
        "--moe-input-jitter-eps 0.01 --moe-layer-recompute",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--no-overlap-p2p-communication",
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --context-parallel-size 4",
        "--fp16",
        "--loss-scale 2",
        "--tp-comm-overlap",
        "--distributed-backend gloo",
        "--moe-router-load-balancing-type sinkhorn",
        "--micro-batch-size auto",
        "--rampup-batch-size 4 4 100",
        "--step-batch-size-schedule 0:4,1K:8",
        "--no-one-pass-optimizer",
        "--optimizer sgd",
        "--main-params-dtype fp16",
        "--use-precision-aware-optimizer --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather",
    ],
)
def test_incompatible_settings_are_refused(text: str) -> None:
    (problem,) = problems(f"{REQUESTED} {text}")
    assert text.split()[0] in problem


def test_the_optimizer_that_a_graph_needs_is_named() -> None:
    (problem,) = problems("--cuda-graph-impl local --attention-dropout 0 --hidden-dropout 0")
    assert problem.startswith(
        "no --use-distributed-optimizer with --cuda-graph-impl local: CUDA graphs need the one-pass"
    )


MIXTURE = f"--model-preset mixtral-8x7b --bf16 --moe-token-dispatcher-type alltoall {REQUESTED}"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"


EP2 = "--expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        (
            "--fp8-format e5m2",
            "experts in another precision than BF16 or tensorwise e4m3/hybrid",
            "use --fp8-format e4m3, or",
        ),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "experts in another precision than", "change that, or use"),
        (
            "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
            "--moe-pad-expert-input-to-capacity with",
            "change that, or use",
        ),
        (f"{EP2} --fp8-format hybrid", "--expert-model-parallel-size 2 with", "of a node, or use"),
        (f"{TENSOR} --expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 1 with", "of a node, or use"),
    ],
)
def test_the_setting_of_experts_that_excludes_a_graph_is_named_once(text: str, begin: str, end: str) -> None:
    (problem,) = problems(f"{MIXTURE} {text}")
    assert problem.startswith(begin) and problem.endswith(f"{end} --cuda-graph-impl none")


@pytest.mark.parametrize("text", ["", "--fp8-format e4m3 --fp8-recipe tensorwise", "--fp8-format hybrid"])
def test_experts_in_one_launch_have_a_graph(text: str) -> None:
    assert not problems(f"{MIXTURE} {text}")


@pytest.mark.parametrize(
    ("text", "implementation", "world_size", "part"),
    [
        (BASE, "transformer_engine", 4, None),
        (REQUESTED, "transformer_engine", 1, None),
        (f"{REQUESTED} --tensor-model-parallel-size 2", "transformer_engine", 2, "slow ranks cannot be identified"),
        (f"{REQUESTED} --tensor-model-parallel-size 2", "transformer_engine", 4, "slow ranks cannot be identified"),
    ],
)
def test_graph_warnings(text: str, implementation: str, world_size: int, part: Optional[str]) -> None:
    found = warnings(flags.parse(text.split()).config, LAYER_BACKENDS[implementation], world_size)
    about = [warning for warning in found if "--cuda-graph-impl local" in warning]
    assert len(about) == (part is not None) and all(part in warning for warning in about)


@pytest.mark.parametrize("steps", [0, 5])
def test_warmup_steps_without_a_graph_have_no_effect(steps: int) -> None:
    """As in Megatron-LM, whose tests give them with graphs of layers."""
    text = f"--cuda-graph-impl none --cuda-graph-warmup-steps {steps}"
    found = warnings(flags.parse(text.split()).config, TRANSFORMER_ENGINE, 1)
    assert f"--cuda-graph-warmup-steps {steps} has no effect without --cuda-graph-impl local" in found
    assert not any("warmup-steps" in problem for problem in problems(text))


@pytest.mark.parametrize(
    ("name", "extra", "problem"),
    [
        ("cpu", "", "--cuda-graph-impl local: cpu has no CUDA device; remove the flag"),
        (
            "h200 without Transformer Engine",
            "",
            "--transformer-impl emulated with --cuda-graph-impl local: graphs need the one-pass optimizer",
        ),
        ("h200", "--transformer-impl local", "--transformer-impl local with --cuda-graph-impl local: its layers"),
        ("h200", "--transformer-impl emulated", None),
        ("h200", "--fp4-recipe nvfp4 --fp4-format e2m1", None),  # emulated
        (
            "b200",
            "--fp4-recipe nvfp4 --fp4-format e2m1",
            "--fp4-recipe nvfp4 with --cuda-graph-impl local: Transformer",
        ),
        (
            "h200",
            "--transformer-impl emulated --tensor-model-parallel-size 2 --sequence-parallel",
            "--transformer-impl emulated with --cuda-graph-impl local: its graphs are of one GPU",
        ),
    ],
)
def test_layers_in_graphs(name: str, extra: str, problem: Optional[str]) -> None:
    config = flags.parse(f"{REQUESTED} {extra}".split()).config
    targets = capability.TARGETS
    without_te = dataclasses.replace(targets["h200"], transformer_engine=None)
    target = targets.get(name, without_te)
    found = [text for text in capability.capability_problems(config, target) if "graph" in text]
    assert len(found) == (problem is not None) and all(text.startswith(problem) for text in found)


@pytest.mark.parametrize(
    "stages",
    [
        "--num-layers-per-virtual-pipeline-stage 3",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-layout Et|t|t|tL",
    ],
)
def test_virtual_stages_are_refused_with_the_flag_that_gives_them(stages: str) -> None:
    (problem,) = problems(f"{REQUESTED} --num-layers 12 --pipeline-model-parallel-size 2 {stages}")
    assert problem.startswith(f"{stages} with --cuda-graph-impl local: ")
