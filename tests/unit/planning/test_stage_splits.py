"""Uneven pipeline stages in the planner: what it proposes, and the memory and time of each stage."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.config import flags, rules, stages, topology
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.device.gpus import GPUS
from megafp8.planning import layouts
from megafp8.planning.layouts import UNEVEN, pipeline_sizes, stage_splits, uneven_ends
from megafp8.planning.planned_run import PlannedRun
from megafp8.planning.step_time import stage_time, step_time
from megafp8.resources.memory import estimate_memory, estimate_stages, parameters_on_stage

PADDED_VOCAB = 128_256
FLAGS = (
    "--model-preset llama3-405b --seq-length 8192 --micro-batch-size 1 --global-batch-size 512 --bf16 "
    "--use-distributed-optimizer --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 16"
)
SPLIT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
ENDS = "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7"


def config_of(text: str) -> RunConfig:
    config = flags.parse(f"{FLAGS} {text}".split()).config
    assert not rules.setting_problems(config, 1024)
    return config


def run_of(text: str) -> PlannedRun:
    return PlannedRun(config=config_of(text), gpu=GPUS["h100"], world_size=1024, padded_vocab=PADDED_VOCAB)


@pytest.mark.parametrize("pipeline", [2, 4, 5, 8, 9, 16, 32, 63])
@pytest.mark.parametrize("num_layers", [24, 31, 61, 63, 126])
def test_proposals_violate_no_rule(num_layers: int, pipeline: int) -> None:
    """Where the layers do not divide, the ends are shorter than the others by at most what is missing."""
    config = with_values(config_of(SPLIT), {
        "model.num_layers": num_layers, "parallel.pipeline_model_parallel_size": pipeline,
        "parallel.account_for_embedding_in_pipeline_split": False,
        "parallel.account_for_loss_in_pipeline_split": False, "training.global_batch_size": 6300 * 128,
    })  # fmt: skip
    for split in stage_splits(config, pipeline, ()):
        chosen = with_values(config, split)
        problems = rules.found_by(rules.rules_of(rules.pipeline), chosen, 8 * pipeline)
        is_uneven = any(name in split for name in UNEVEN)
        if not is_uneven and num_layers % pipeline:
            assert problems, "no proposal: the rules report it"
            continue
        assert is_uneven == bool(num_layers % pipeline)
        interleaving = [text for text in problems if "microbatches" not in text]
        assert not interleaving
        sizes = [sum(map(len, chunks)) for chunks in stages.stage_layers(chosen)]
        assert sum(sizes) == num_layers and len(set(sizes[1:-1])) <= 1
        assert max(sizes) == -(-num_layers // pipeline)


def test_shorter_ends_take_the_missing_layers() -> None:
    assert uneven_ends(126, 14) == {}
    assert uneven_ends(127, 16) == {"parallel.account_for_loss_in_pipeline_split": True}
    assert len(uneven_ends(126, 16)) == 2
    assert list(uneven_ends(124, 16).values()) == [6, 6]
    assert uneven_ends(17, 16) == {}, "the ends would have no layers"


def test_pipelines_of_powers_of_two_are_tried() -> None:
    assert {2, 16, 32, 63} <= set(pipeline_sizes(126)) and 128 not in pipeline_sizes(126)


def test_given_splits_are_kept() -> None:
    config = config_of(ENDS)
    given = {"parallel.decoder_first_pipeline_num_layers", "parallel.decoder_last_pipeline_num_layers"}
    assert stage_splits(config, 16, given) == [{"parallel.num_virtual_stages_per_pipeline_rank": None}]


def test_both_spellings_of_a_split_are_planned_alike() -> None:
    ends, split = run_of(ENDS), run_of(SPLIT)
    assert step_time(ends) == step_time(split)
    assert estimate_stages(ends.sizes) == estimate_stages(split.sizes)


def test_parameters_of_uneven_stages_are_those_of_the_model() -> None:
    """The sum over stages equals the sum over even stages of a model with the same layers."""

    def total(config: RunConfig) -> int:
        sizes = run_sizes(config, topology.model_parallel_size(config), PADDED_VOCAB)
        return sum(sum(parameters_on_stage(sizes, stage)) for stage in range(len(sizes.layers)))

    even = with_values(config_of(SPLIT), {
        "parallel.pipeline_model_parallel_size": 14, "parallel.account_for_embedding_in_pipeline_split": False,
        "parallel.account_for_loss_in_pipeline_split": False,
    })  # fmt: skip
    assert total(config_of(SPLIT)) == total(config_of(ENDS)) == total(even)


def test_a_larger_inner_stage_may_need_the_most_memory() -> None:
    """Stage 1 has more layers than stage 0 and nearly as many microbatches in flight."""
    config = config_of("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 12")
    estimates = estimate_stages(run_sizes(config, 1024, PADDED_VOCAB))
    assert [estimate.stage for estimate in estimates] == [0, 1, 15]
    assert max(estimates, key=lambda estimate: estimate.total_bytes).stage == 1
    every = [estimate_memory(run_sizes(config, 1024, PADDED_VOCAB), stage=stage).total_bytes for stage in range(16)]
    assert max(every) == max(estimate.total_bytes for estimate in estimates)


def test_the_bubble_is_the_time_of_all_other_stages() -> None:
    run = run_of("--pipeline-model-parallel-layout Et*2|t*12|t*6|t*8|t*8|t*8|t*8|t*8|t*8|t*8|t*8|t*8|t*8|t*8|t*8|t*10L")
    seconds = [stage_time(run, stage).seconds for stage in range(16)]
    parts = step_time(run).parts
    assert parts["bubble"] == pytest.approx(sum(seconds) - max(seconds))
    assert parts["linears"] == pytest.approx(64 * stage_time(run, 1).parts["linears"])


def test_a_stage_without_layers_is_planned() -> None:
    text = "--pipeline-model-parallel-layout " + "E|" + "t*9|" * 14 + "L"
    run = run_of(text)
    assert parameters_on_stage(run.sizes, 15)[0] == 0
    assert estimate_memory(run_sizes(run.config, 1024, PADDED_VOCAB), stage=0).activations_bytes == 0
    assert step_time(run).seconds > 0


def test_llama3_405b_is_planned_with_shorter_ends() -> None:
    config = config_of(SPLIT)
    given: dict[str, Any] = dict.fromkeys((layouts.TENSOR, layouts.CONTEXT, layouts.MICRO, layouts.SEQUENCE))
    found = layouts.find_layouts(
        with_values(config, {
            "parallel.account_for_embedding_in_pipeline_split": False,
            "parallel.account_for_loss_in_pipeline_split": False,
        }),
        GPUS["h200"], 1024, lambda candidate: PADDED_VOCAB, given,
    ).layouts  # fmt: skip
    names = [layout.name for layout in found]
    assert any("PP 16" in name and name.endswith("stages of 7, 8, 7 layers") for name in names), names
    for layout in found:
        assert not rules.setting_problems(layout.run.config, 1024)
