"""The layers of each stage, compared with what megatron-core builds and how it reads layout strings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megafp8.config import rules, stages
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import ConfigError

parallel_state = pytest.importorskip("megatron.core.parallel_state")

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megafp8.mcore.config import parallel_fields

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT, CHUNKS = "pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank"
PER_CHUNK = "num_layers_per_virtual_pipeline_stage"

# Layers, stages, settings, and layers per chunk of each stage.
SPLITS: list[tuple[int, int, dict[str, Any], list[list[int]]]] = [
    (8, 1, {}, [[8]]),
    (8, 4, {}, [[2]] * 4),
    (8, 2, {CHUNKS: 2}, [[2, 2]] * 2),
    (24, 4, {PER_CHUNK: 2}, [[2, 2, 2]] * 4),
    (12, 4, {FIRST: 2, LAST: 2}, [[2], [4], [4], [2]]),
    (7, 4, {FIRST: 1}, [[1], [2], [2], [2]]),
    (7, 4, {LAST: 1}, [[2], [2], [2], [1]]),
    (5, 2, {FIRST: 2, LAST: 3}, [[2], [3]]),
    (16, 4, {FIRST: 2, LAST: 2, CHUNKS: 2}, [[1, 1], [3, 3], [3, 3], [1, 1]]),
    (6, 2, {FIRST: 2, CHUNKS: 2}, [[1, 1], [2, 2]]),
    (7, 2, {EMBEDDING: True}, [[3], [4]]),
    (7, 2, {LOSS: True}, [[4], [3]]),
    (126, 16, {EMBEDDING: True, LOSS: True}, [[7], *[[8]] * 14, [7]]),
    (6, 4, {EMBEDDING: True, LOSS: True, CHUNKS: 2}, [[0, 1], [1, 1], [1, 1], [1, 0]]),
    (14, 4, {EMBEDDING: True, LOSS: True, PER_CHUNK: 2}, [[1, 2], [2, 2], [2, 2], [2, 1]]),
    (15, 2, {LAYOUT: "Et*3|(tt|)*6L"}, [[3, 2, 2, 2], [2, 2, 2, 0]]),
    (14, 4, {LAYOUT: "Et*2|(tt|)*5t|tL"}, [[2, 2], [2, 2], [2, 1], [2, 1]]),
    (14, 2, {LAYOUT: "Et*7,|t*7,L"}, [[7], [7]]),
    (3, 2, {LAYOUT: "E|tttL"}, [[0], [3]]),
]


def config_of(layers: int, pipeline: int, settings: dict[str, Any]) -> RunConfig:
    values = {f"parallel.{name}": value for name, value in settings.items()}
    return with_values(
        RunConfig(), {"model.num_layers": layers, "parallel.pipeline_model_parallel_size": pipeline, **values}
    )


@pytest.mark.parametrize(
    ("settings", "chunks"),
    [({}, None), ({PER_CHUNK: 2}, 3), ({PER_CHUNK: 6}, None), ({CHUNKS: 2}, 2), ({CHUNKS: 1}, None)],
)
def test_virtual_pipeline_size(settings, chunks):
    config = config_of(12, 2, settings)
    assert stages.virtual_pipeline_size(config.model, config.parallel) == chunks


@pytest.fixture
def no_groups() -> Iterator[None]:
    """megatron-core asks its global state whether there are virtual stages."""
    yield
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    parallel_state.set_pipeline_model_parallel_rank(None)


@pytest.mark.parametrize(("layers", "pipeline", "settings", "expected"), SPLITS)
def test_layers_are_those_that_megatron_core_builds(
    layers: int, pipeline: int, settings: dict[str, Any], expected: list[list[int]], no_groups: None
) -> None:
    config = config_of(layers, pipeline, settings)
    found = stages.stage_layers(config)
    assert [[len(chunk) for chunk in chunks] for chunks in found] == expected
    assert not stage_problems(config)
    fields = parallel_fields(config) | {"num_layers": layers, "hidden_size": 32, "num_attention_heads": 4}
    core = TransformerConfig(**fields, pipeline_dtype="float32")
    num_chunks = core.virtual_pipeline_model_parallel_size
    assert num_chunks == stages.virtual_pipeline_size(config.model, config.parallel)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(num_chunks)
    for stage, chunks in enumerate(found):
        parallel_state.set_pipeline_model_parallel_rank(stage)
        for chunk, here in enumerate(chunks):
            vp_stage = None if num_chunks is None else chunk
            assert get_num_layers_to_build(core, vp_stage, stage) == len(here)
            assert get_transformer_layer_offset(core, vp_stage, stage) == here.start


def stage_problems(config: RunConfig) -> list[str]:
    return rules.found_by(rules.pipeline.LAYER_RULES, config, config.parallel.pipeline_model_parallel_size)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_layer_is_on_one_stage(split: tuple[int, int, dict[str, Any], Any]) -> None:
    layers, pipeline, settings, _ = split
    config = config_of(layers, pipeline, settings)
    held = [layer for stage in range(pipeline) for chunk in stages.stage_layers(config)[stage] for layer in chunk]
    assert sorted(held) == list(range(layers))


@pytest.mark.parametrize(
    "text",
    ["Et*3|(tt|)*29,tL", "Etttt|ttttL", "E|(t|)*4L", "E,t*2|t*2,L", "Et|(tt|)*6L", "(E|t)*2", "Et*10|L", "E(t|)*3tL"],
)
def test_layout_strings_are_read_as_megatron_core_does(text: str) -> None:
    letters = {"embedding": "E", "decoder": "t", "loss": "L"}
    parsed = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert stages.expand_layout(text) == ["".join(letters[layer.name] for layer in stage) for stage in parsed]


def test_huge_repetitions_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4096"):
        stages.expand_layout("E(t|)*99999999L")


BROKEN: list[tuple[int, int, dict[str, Any], str]] = [
    (8, 3, {}, "8 / 3 = 2.667"),
    (7, 2, {EMBEDDING: True, LOSS: True}, "--num-layers 7 with 2 for embedding or loss is not divisible"),
    (8, 2, {FIRST: 3, LAST: 3}, "have 6 layers together, not --num-layers 8"),
    (12, 4, {FIRST: 4}, "leave 8 of --num-layers 12 for 3 other pipeline stages"),
    (4, 4, {FIRST: 3, LAST: 1}, "leave 0 of --num-layers 4"),
    (8, 1, {FIRST: 8}, "has no effect without --pipeline-model-parallel-size of at least 2"),
    (8, 2, {FIRST: 3, EMBEDDING: True}, "keep one of these"),
    (8, 2, {LAYOUT: "Et*4|t*4L", LAST: 3}, "keep one of these"),
    (8, 2, {LAYOUT: "Et*4|t*4L", CHUNKS: 2}, "has the virtual stages already"),
    (8, 2, {LAYOUT: "Et*4|t*3L"}, "has 7 layers (t), not --num-layers 8"),
    (8, 2, {LAYOUT: "Et*4|t*2|t*2L"}, "has 3 stages, not a multiple of --pipeline-model-parallel-size 2"),
    (8, 2, {LAYOUT: "t*4|Et*4L"}, "E, the embedding, must be there once, at the beginning"),
    (8, 2, {LAYOUT: "Et*4|Lt*4"}, "L, output layer and loss, must be there once, at the end"),
    (8, 2, {LAYOUT: "Et*4;t*4L"}, "stages are separated by |"),
    (8, 2, {LAYOUT: ""}, "must be there once"),
    (12, 4, {FIRST: 3, LAST: 3, CHUNKS: 2}, "--num-virtual-stages-per-pipeline-rank 2 does not divide the 3 layers"),
    (8, 2, {FIRST: 4, LAST: 4, CHUNKS: 2}, "megatron-core divides by the number of other stages"),
    (10, 4, {FIRST: 2, LAST: 2, PER_CHUNK: 1}, "have no common number of layers per chunk"),
]


@pytest.mark.parametrize(("layers", "pipeline", "settings", "text"), BROKEN)
def test_broken_splits_are_refused(layers: int, pipeline: int, settings: dict[str, Any], text: str) -> None:
    problems = stage_problems(config_of(layers, pipeline, settings))
    assert any(text in problem for problem in problems), problems


def test_two_interleaved_end_stages_are_refused_by_megatron_core_too(no_groups: None) -> None:
    """The rule can go when this fails."""
    fields = parallel_fields(config_of(8, 2, {FIRST: 4, LAST: 4, CHUNKS: 2}))
    core = TransformerConfig(**fields, num_layers=8, hidden_size=32, num_attention_heads=4, pipeline_dtype="float32")
    with pytest.raises(ZeroDivisionError):
        get_transformer_layer_offset(core, 0, 1)


def test_kinds_of_stages_count_all_of_them() -> None:
    assert stages.kinds_of_stages(config_of(8, 1, {})) == {0: 1}
    assert stages.kinds_of_stages(config_of(8, 2, {})) == {0: 1, 1: 1}
    assert stages.kinds_of_stages(config_of(12, 4, {FIRST: 2, LAST: 2})) == {0: 1, 1: 2, 3: 1}
    assert stages.kinds_of_stages(config_of(7, 5, {LAYOUT: "Et|tt|t|tt|tL"})) == {0: 1, 1: 2, 2: 1, 4: 1}
