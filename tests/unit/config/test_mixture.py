"""Which layers have experts, and the sizes that follow from expert parallelism."""

from __future__ import annotations

from typing import Optional

import pytest

from megafp8.config import mixture
from megafp8.config.rules import moe, routing
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.config.settings import from_json, to_json, with_values


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("2", 2), ("[0]*1+[1]*2", [0, 1, 1]), ("([0]*1+[1]*1)*2", [0, 1, 0, 1]), ("([0,1]*2)", [0, 1, 0, 1])],
)
def test_layer_frequencies_are_read(text: str, expected: object) -> None:
    assert mixture.layer_frequency(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "x", "[2]", "[0]*10**9", "__import__('os')", "[[1]]", "1.5", "[1]*[1]"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        mixture.layer_frequency(text)


def test_every_nth_layer_has_experts() -> None:
    model = ModelConfig(num_layers=4, num_experts=2, moe_layer_freq="2")
    assert mixture.expert_layers(model) == (True, False, True, False)
    assert mixture.expert_layers(ModelConfig(num_layers=2)) == (False, False)


@pytest.mark.parametrize(("factor", "expected"), [(None, False), (-1.0, False), (0.5, True)])
def test_a_negative_capacity_is_no_limit(factor: Optional[float], expected: bool) -> None:
    assert mixture.has_capacity(ModelConfig(moe_expert_capacity_factor=factor)) is expected


MIXTURE = {"model.num_experts": 4, "model.num_layers": 2}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model.moe_router_num_groups": 3, "model.moe_router_group_topk": 1}, "use 2 or 4 groups"),
        ({"model.moe_router_num_groups": 9, "model.moe_router_group_topk": 1}, "use 4 groups"),
        (
            {"model.num_experts": 1, "model.moe_router_num_groups": 2, "model.moe_router_group_topk": 1},
            "use no groups",
        ),
        ({"model.moe_expert_capacity_factor": 0.0}, "above 0, or leave it out"),
        ({"model.moe_router_load_balancing_type": ("sinkhorn",), "model.moe_aux_loss_coeff": (0.1,)}, "coeff 0"),
        ({"model.moe_layer_freq": "[0,2]"}, "such as ([0]*1+[1]*3)"),
    ],
)
def test_errors_name_values_that_are_valid(values: dict, text: str) -> None:
    found = [
        problem
        for rule in (*routing.RULES, *moe.MODEL_RULES)
        for problem in rule(with_values(RunConfig(), MIXTURE | values), 1)
    ]
    assert any(text in problem for problem in found), found


def test_experts_have_their_own_data_parallel_size() -> None:
    config = with_values(
        RunConfig(),
        {
            "model.num_experts": 8, "parallel.tensor_model_parallel_size": 2,
            "parallel.expert_model_parallel_size": 2, "parallel.expert_tensor_parallel_size": 1,
        },
    )  # fmt: skip
    assert mixture.expert_data_size(config, 8) == 4
    assert mixture.experts_per_rank(config) == 4
    assert mixture.has_expert_ranks(config)


def test_lists_of_numbers_survive_json() -> None:
    config = with_values(RunConfig(), {"model.moe_aux_loss_coeff": (1e-2, 1.0)})
    assert from_json(to_json(config)) == config
