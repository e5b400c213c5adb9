"""A step captured as a CUDA graph has the losses of separately launched kernels, bitwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import (
    FP8_RECIPES,
    GRAPH,
    RECIPES,
    check_graph_equals_launched_kernels,
    gpu_run,
    unbroken_and_resumed,
)
from small_run import SourceSamples, statistics_step

from megafp8.checkpoint.progress import Progress
from megafp8.metrics.records import EventRecord
from megafp8.training.evaluation import build_batches, evaluate
from megafp8.training.extensions.guard import LayerStatistics
from megafp8.training.extensions.statistics import StatisticsCollector
from megafp8.training.run import Run
from megafp8.training.step import train_step

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
FUSER = "--use-transformer-engine-op-fuser"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"

MIXTURE = (
    "--fp8-format e4m3 --fp8-recipe tensorwise --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-expert-kernels triton"
)


def variants() -> Iterator[str]:
    for recipe, flags in RECIPES.items():
        yield flags
        yield f"{flags} {FUSER}"
        if recipe in FP8_RECIPES:
            yield f"{flags} --fp8-param-gather"
            yield f"{flags} {FUSER} --fp8-param-gather"
    for recipe in FP8_RECIPES:  # the default with a graph, and a setting that is not
        for kernels in ("triton", "te"):
            yield f"{RECIPES[recipe]} {FUSER} --quantize-kernels {kernels}"
    yield f"{RECIPES['delayed']} {FUSER} --residual-norm-fusion"
    yield f"{RECIPES['tensorwise']} --precision output_layer=tensorwise"
    yield f"{RECIPES['delayed']} {MOMENTS}"
    yield f"{RECIPES['delayed']} --num-attention-heads 2 --fp8-dot-product-attention"
    yield f"{RECIPES['bf16']} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te"
    yield f"{RECIPES['delayed']} --no-gradient-overwrite --max-skipped-steps 1 {OVERLAP}"
    for recipe in RECIPES:
        yield f"{RECIPES[recipe]} --recompute-granularity selective --recompute-modules core_attn mlp"
        yield f"{RECIPES[recipe]} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    yield f"{RECIPES['tensorwise']} {FUSER} --recompute-granularity selective --recompute-modules layernorm mlp"
    for recipe in ("bf16", "delayed"):
        yield f"{RECIPES[recipe]} {DROPOUT}"


@pytest.mark.parametrize("extra", variants())
def test_cuda_graph_equals_launched_kernels(extra: str) -> None:
    check_graph_equals_launched_kernels(extra)


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """What containers hold, by the path to it: a comparison names what differs."""
    if not isinstance(value, (dict, list)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {path: leaf for key, each in items for path, leaf in leaves(each, f"{name}/{key}").items()}


def losses_with_validation_and_statistics(run: Run) -> list[float]:
    """Losses of steps with validations between them, some of them statistics steps."""
    samples, batch, losses = SourceSamples(run.config.data.seq_length), run.global_batch_size, []
    batches = build_batches(run, samples, 0, 12 * batch, num_workers=0)
    collector = StatisticsCollector(run)
    for step in range(1, 13):
        losses.append(statistics_step(run, batches, step, collector)[0].loss)
        if step % 2 == 0:
            record = evaluate(run, "valid", samples, step, 0)
            assert record is not None
            losses.append(record.loss)
    return losses


@pytest.mark.parametrize(
    "extra",
    [
        *RECIPES.values(),
        f"{RECIPES['tensorwise']} --fp8-param-gather",
        f"{RECIPES['bf16']} {DROPOUT}",
        f"{RECIPES['delayed']} --recompute-granularity selective --recompute-modules core_attn",
        *(f"{RECIPES[recipe]} {FUSER}" for recipe in FP8_RECIPES),
    ],
)
def test_validation_and_statistics_steps_do_not_change_training(extra: str) -> None:
    """Neither does a graph of the validations, which is captured in the second of them, between two of these steps."""
    found = []
    statistics = "--fp8-log-interval 3"
    if "--fp8-recipe" not in extra:  # statistics of recipes that it does not use, and no others
        statistics += " --fp8-what-if tensorwise,nvfp4"
    for graph in ("", GRAPH, f"{GRAPH} --cuda-graph-evaluation"):
        with gpu_run(f"{extra} {statistics} --eval-iters 2 {graph}") as run:
            found.append(losses_with_validation_and_statistics(run))
            has_graph = run.graph.has_graphs and run.graph.evaluation.graph is not None
            assert has_graph == ("evaluation" in graph)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "extra",
    [
        *(RECIPES[recipe] for recipe in FP8_RECIPES),
        MIXTURE,
        *(f"{RECIPES[recipe]} {FUSER}" for recipe in FP8_RECIPES),
    ],
)
def test_statistics_of_a_graph_equal_those_of_launched_kernels(extra: str) -> None:
    """Also of recipes that round stochastically, and where some statistics steps are launched."""
    what_if = ",".join({"blockwise", "mxfp8", "nvfp4"}.difference(extra.split()))
    found = []
    for graph in ("", GRAPH):
        with gpu_run(f"{extra} --fp8-log-interval 2 --fp8-what-if {what_if} {graph}") as run:
            samples, collector = SourceSamples(run.config.data.seq_length), StatisticsCollector(run)
            batches = build_batches(run, samples, 0, 12 * run.global_batch_size, num_workers=0)
            steps = [statistics_step(run, batches, step, collector, is_eager=step == 10) for step in range(1, 13)]
            assert not graph or [hooks for hooks, each in run.graph.by_hooks.items() if hooks and each.graph]
        found.append([  # of health events only the names: their suggestions depend on the flags
            leaves({"loss": result.loss} | {
                f"{record.kind}s": record.name if isinstance(record, EventRecord) else dataclasses.asdict(record)
                for record in records
            })
            for result, records in steps
        ])  # fmt: skip
    for launched, captured in zip(*found, strict=True):
        assert captured == launched
    assert any("what_if/nvfp4" in name for name in found[0][1])


@pytest.mark.parametrize("extra", [*RECIPES.values(), MIXTURE, f"{RECIPES['delayed']} {FUSER}"])
def test_what_the_guard_sees_in_a_graph_equals_what_it_sees_of_launched_kernels(extra: str) -> None:
    """Also beside quantization statistics, in a third graph."""
    found = []
    for graph in ("", GRAPH):
        with gpu_run(f"{extra} --fp8-guard warn --fp8-log-interval 4 --fp8-what-if mxfp8 {graph}") as run:
            samples, guard = SourceSamples(run.config.data.seq_length), LayerStatistics(run)
            batches = build_batches(run, samples, 0, 14 * run.global_batch_size, num_workers=0)
            collector, seen = StatisticsCollector(run), []
            for step in range(1, 15):
                step_hooks = [*([guard.start()] if step % 2 == 0 else []), *collector.start_if_due(step)]
                result = train_step(run, batches, Progress(step - 1), step_hooks=step_hooks)
                seen.append((result.loss, guard.take() if step % 2 == 0 else {}))
            assert not graph or len([hooks for hooks, each in run.graph.by_hooks.items() if hooks and each.graph]) == 2
        found.append(seen)
    assert found[0] == found[1] and max(found[0][1][1].values()) > 0


@pytest.mark.parametrize("extra", [RECIPES["bf16"], RECIPES["delayed"], DROPOUT])
def test_resume_equals_the_unbroken_run(extra: str, tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(f"{extra} {GRAPH}", 4, tmp_path)
    assert resumed == unbroken
