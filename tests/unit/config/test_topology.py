"""The rank arithmetic, against megatron-core's own where it has a pure one."""

import pytest

from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.config.topology import ParallelLayout, RankCoordinates, layout_of

LAYOUTS = [
    ParallelLayout(1),
    ParallelLayout(8, tensor=2),
    ParallelLayout(16, tensor=2, pipeline=2),
    ParallelLayout(16, tensor=2, context=2, pipeline=2, virtual=2),
    ParallelLayout(12, tensor=1, context=3, pipeline=2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_coordinates_of_its_own(layout):
    seen = set()
    for rank in range(layout.world_size):
        here = layout.coordinates(rank)
        seen.add(here)
    assert len(seen) == layout.world_size


def test_the_example_of_the_docstring():
    layout = ParallelLayout(16, tensor=2, pipeline=2)
    assert layout.data == 4
    assert layout.groups("tensor")[0] == (0, 1)
    assert layout.groups("data")[0] == (0, 2, 4, 6)
    assert layout.groups("pipeline")[0] == (0, 8)
    assert layout.coordinates(11) == RankCoordinates(tensor=1, context=0, data=1, pipeline=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("axes", "token"),
    [
        (("tensor",), "tp"),
        (("context",), "cp"),
        (("data",), "dp"),
        (("pipeline",), "pp"),
        (("data", "context"), "dp-cp"),
        (("tensor", "pipeline"), "tp-pp"),
        (("tensor", "data"), "tp-dp"),
    ],
)
def test_groups_are_megatron_cores(layout, axes, token):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    generator = parallel_state.RankGenerator(
        tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context, order="tp-cp-ep-dp-pp"
    )
    assert sorted(layout.groups(*axes)) == sorted(map(tuple, generator.get_ranks(token)))


def test_every_rank_is_in_one_group_of_each_axis():
    layout = LAYOUTS[3]
    for axis in ("tensor", "context", "data", "pipeline"):
        assert sorted(rank for group in layout.groups(axis) for rank in group) == list(range(16))


def test_layers_without_virtual_stages():
    layout = ParallelLayout(4, pipeline=4)
    assert [list(layout.layers_of(stage, 0, 8)) for stage in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_layers_with_virtual_stages():
    layout = ParallelLayout(2, pipeline=2, virtual=2)
    assert layout.layers_on(0, 8) == (0, 1, 4, 5)
    assert layout.layers_on(1, 8) == (2, 3, 6, 7)


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, None), (2, None), (4, None), (2, 2), (4, 3), (2, 6)])
def test_layers_are_a_partition(pipeline, virtual):
    layout = ParallelLayout(pipeline, pipeline=pipeline, virtual=virtual)
    held = [layer for stage in range(pipeline) for layer in layout.layers_on(stage, 24)]
    assert sorted(held) == list(range(24))


@pytest.mark.parametrize(("pipeline", "virtual"), [(2, None), (2, 2), (4, 3)])
def test_layer_offsets_are_megatron_cores(pipeline, virtual):
    layer_module = pytest.importorskip("megatron.core.transformer.transformer_layer")
    config_module = pytest.importorskip("megatron.core.transformer.transformer_config")
    core = config_module.TransformerConfig(
        num_layers=24,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_dtype="float32",
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
    )
    layout = ParallelLayout(pipeline, pipeline=pipeline, virtual=virtual)
    for stage in range(pipeline):
        for chunk in range(virtual or 1):
            offset = layer_module.get_transformer_layer_offset(core, vp_stage=chunk if virtual else None, pp_rank=stage)
            assert layout.layers_of(stage, chunk, 24).start == offset


def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match="tensor 2 x context 1 x pipeline 2 = 4"):
        ParallelLayout(6, tensor=2, pipeline=2)
    layout = ParallelLayout(2, pipeline=2)
    with pytest.raises(ValueError, match="rank 2"):
        layout.coordinates(2)
    with pytest.raises(ValueError, match="do not divide"):
        layout.layers_of(0, 0, 7)
    with pytest.raises(ValueError, match="no chunk"):
        layout.layers_of(2, 0, 8)
    with pytest.raises(ValueError, match="no such axis: expert"):
        layout.groups("expert")


def test_description_names_who_holds_what():
    assert ParallelLayout(4, tensor=2, pipeline=2).describe(8) == [
        "ranks 0-1: stage 0, data 0: embedding + layers 0-3",
        "ranks 2-3: stage 1, data 0: layers 4-7 + output",
    ]
    assert "layers 0-1, 4-5" in ParallelLayout(2, pipeline=2, virtual=2).describe(8)[0]


def test_layout_of_a_configuration():
    config = with_values(
        RunConfig(),
        {
            "model.num_layers": 8,
            "parallel.tensor_model_parallel_size": 2,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.num_layers_per_virtual_pipeline_stage": 2,
        },
    )
    assert layout_of(config, 8) == ParallelLayout(8, tensor=2, pipeline=2, virtual=2)
