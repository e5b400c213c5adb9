"""Emulated layers captured as a CUDA graph have the losses, weights, statistics and counts of launched kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from small_run import SourceSamples, statistics_step, train

from megafp8.metrics.records import EventRecord
from megafp8.recipes.known_bad import KNOWN_BAD
from megafp8.training.evaluation import build_batches, evaluate
from megafp8.training.extensions.statistics import StatisticsCollector

EMULATED = "--transformer-impl emulated"
ALL_RECIPES = RECIPES | {
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "rowwise": "--fp8-format e4m3 --fp8-recipe rowwise",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
    "quartet2": "--fp4-format e2m1 --fp4-recipe quartet2",
}

OTHER_SETTINGS = (
    *(flags for _, flags in KNOWN_BAD.values()),
    f"{ALL_RECIPES['nvfp4']} --fp4-four-over-six",
    f"{ALL_RECIPES['tensorwise']} --fp8-saved-activations norm activation",
    f"{ALL_RECIPES['mxfp8']} --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 32 --v-head-dim 64 --rope-type rope",
)


def variants() -> Iterator[str]:
    yield from ALL_RECIPES.values()
    for recipe in FP8_RECIPES:
        yield f"{RECIPES[recipe]} --fp8-param-gather"
    for recipe in ("delayed", "nvfp4", "quartet2"):
        yield f"{ALL_RECIPES[recipe]} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    yield f"{ALL_RECIPES['nvfp4']} --attention-dropout 0.1 --hidden-dropout 0.1"
    yield from OTHER_SETTINGS


@pytest.mark.parametrize("extra", variants())
def test_cuda_graph_equals_launched_kernels(extra: str) -> None:
    check_graph_equals_launched_kernels(f"{extra} {EMULATED}")


@pytest.mark.parametrize("extra", [*ALL_RECIPES.values(), f"{RECIPES['tensorwise']} --fp8-param-gather"])
def test_validations_in_a_graph_have_the_losses_of_launched_kernels(extra: str) -> None:
    found = []
    for graph in ("", f"{GRAPH} --cuda-graph-evaluation"):
        with gpu_run(f"{extra} {EMULATED} {graph}") as run:
            samples, losses = SourceSamples(run.config.data.seq_length), []
            for step in range(1, 9):
                losses += train(run, 1, first_step=step).losses
                record = evaluate(run, "valid", samples, step, 0)
                assert record is not None
                losses.append(record.loss)
            assert not graph or run.graph.evaluation.graph is not None
            found.append(losses)
    assert found[0] == found[1]


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4", "quartet2"])
def test_resume_equals_the_unbroken_run(recipe: str, tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(f"{ALL_RECIPES[recipe]} {EMULATED} {GRAPH}", 4, tmp_path)
    assert resumed == unbroken


@pytest.mark.parametrize("recipe", [recipe for recipe in ALL_RECIPES if recipe != "bf16"])
def test_statistics_and_counts_equal_those_of_launched_kernels(recipe: str) -> None:
    found = []
    for graph in ("", GRAPH):
        with gpu_run(f"{ALL_RECIPES[recipe]} {EMULATED} --fp8-log-interval 2 --log-interval 1 {graph}") as run:
            samples, collector = SourceSamples(run.config.data.seq_length), StatisticsCollector(run)
            batches = build_batches(run, samples, 0, 12 * run.global_batch_size, num_workers=0)
            steps = [statistics_step(run, batches, step, collector) for step in range(1, 13)]
            losses = [(result.loss, result.nonfinite_operands) for result, _ in steps]
            records = [record for _, made in steps for record in made if not isinstance(record, EventRecord)]
            found.append((losses, records))
    assert found[0] == found[1]
