"""The rank arithmetic, compared with megatron-core's where it has a pure function."""

import pytest

from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.config.topology import ParallelLayout, RankCoordinates, data_parallel_size, layout_of
from megafp8.errors import ConfigError

LAYOUTS = [
    ParallelLayout(1),
    ParallelLayout(8, tensor=2),
    ParallelLayout(16, tensor=2, pipeline=2),
    ParallelLayout(16, tensor=2, context=2, pipeline=2, virtual=2),
    ParallelLayout(12, tensor=1, context=3, pipeline=2),
    ParallelLayout(16, tensor=2, pipeline=2, data_is_last=True),
    ParallelLayout(24, tensor=2, context=3, pipeline=2, data_is_last=True),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_unique_coordinates(layout):
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
    order = "tp-cp-ep-pp-dp" if layout.data_is_last else "tp-cp-ep-dp-pp"
    generator = parallel_state.RankGenerator(
        tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context, order=order
    )
    assert sorted(layout.groups(*axes)) == sorted(map(tuple, generator.get_ranks(token)))


def test_every_rank_is_in_one_group_of_each_axis():
    layout = LAYOUTS[3]
    for axis in ("tensor", "context", "data", "pipeline"):
        assert sorted(rank for group in layout.groups(axis) for rank in group) == list(range(16))


def test_data_is_the_slowest_axis_with_the_other_mapping():
    layout = ParallelLayout(16, tensor=2, pipeline=2, data_is_last=True)
    assert layout.groups("pipeline")[0] == (0, 2)
    assert layout.groups("data")[0] == (0, 4, 8, 12)
    assert (layout.stride("pipeline"), layout.stride("data")) == (2, 4)


def test_invalid_ranks_and_axes_are_refused():
    with pytest.raises(ValueError, match="tensor 2 x context 1 x pipeline 2 = 4"):
        ParallelLayout(6, tensor=2, pipeline=2)
    layout = ParallelLayout(2, pipeline=2)
    with pytest.raises(ValueError, match="rank 2"):
        layout.coordinates(2)
    for call in (layout.groups, layout.stride):
        with pytest.raises(ValueError, match="no such axis: expert"):
            call("expert")


HALVES = ((range(4),), (range(4, 8),))


def test_description_lists_the_ranks_of_each_part():
    assert ParallelLayout(4, tensor=2, pipeline=2).describe(HALVES) == [
        "ranks 0-1: stage 0, data 0: embedding + layers 0-3",
        "ranks 2-3: stage 1, data 0: layers 4-7 + output",
    ]
    interleaved = ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))
    assert "layers 0-1, 4-5" in ParallelLayout(2, pipeline=2, virtual=2).describe(interleaved)[0]
    assert ParallelLayout(2, pipeline=2).describe(((range(0),), (range(3),)))[0].endswith("data 0: embedding")


def test_description_of_stages_has_their_ranks_in_both_orders():
    first, second, _ = ParallelLayout(16, tensor=2, pipeline=2).describe_stages(HALVES)
    assert first.startswith("stage 0: ranks 0-7:") and second.startswith("stage 1: ranks 8-15:")
    layout = ParallelLayout(16, tensor=2, pipeline=2, data_is_last=True)
    first, second, _ = layout.describe_stages(HALVES)
    assert first.startswith("stage 0: ranks 0-1 of every 4:") and second.startswith("stage 1: ranks 2-3 of every 4:")


def test_layout_of_a_configuration():
    config = with_values(
        RunConfig(),
        {
            "model.num_layers": 8,
            "parallel.tensor_model_parallel_size": 2,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.num_layers_per_virtual_pipeline_stage": 2,
            "parallel.use_tp_pp_dp_mapping": True,
        },
    )
    assert layout_of(config, 8) == ParallelLayout(8, tensor=2, pipeline=2, virtual=2, data_is_last=True)


def test_data_parallel_size_and_its_error():
    config = with_values(RunConfig(), {"parallel.tensor_model_parallel_size": 2, "parallel.context_parallel_size": 2})
    assert data_parallel_size(config, 16) == 4
    assert data_parallel_size(config, 16, with_context_parallel=True) == 8
    with pytest.raises(ConfigError, match="2 x 1 x 2 = 4"):
        data_parallel_size(config, 6)
