"""Which layers have experts, and the sizes that follow from expert parallelism."""

from __future__ import annotations

from typing import Optional

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megafp8.config import mixture
from megafp8.config.layer_backends import EMULATED
from megafp8.config.rules import moe_model, routing, warnings
from megafp8.config.rules.base import rules_of
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
        (
            {"model.moe_router_num_groups": 2, "model.moe_router_group_topk": 2, "model.moe_router_topk": 1},
            "use a --moe-router-topk from 2 to 4",
        ),
        (
            {"model.moe_router_num_groups": 2, "model.moe_router_group_topk": 1, "model.moe_router_topk": 3},
            "use a --moe-router-topk from 1 to 2",
        ),
    ],
)
def test_errors_name_values_that_are_valid(values: dict, text: str) -> None:
    found = [
        problem
        for rule in rules_of(routing, moe_model)
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


@pytest.mark.parametrize("text", ["x", "1.5", "[[1]]", "1 +", "", "[0]*10**9", "[2]", "0"])
def test_a_bad_layer_frequency_is_shown(text: str) -> None:
    config = with_values(RunConfig(), MIXTURE | {"model.moe_layer_freq": text})
    (problem,) = (problem for rule in rules_of(moe_model) for problem in rule(config, 1))
    shown = text or "''"
    reasons = ("is neither a number nor a list", "has an element that is neither 0 nor 1", "is less than 1")
    fix = "give a number from 1 on, or a list of 0 and 1 such as ([0]*1+[1]*3)"
    assert problem in [f"--moe-layer-freq {shown} {reason}: {fix}" for reason in reasons]


SINKHORN = {"model.moe_router_load_balancing_type": ("sinkhorn",)}


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"model.moe_router_num_groups": 2, "model.moe_router_group_topk": 1}, "--moe-router-num-groups 2"),
        ({"model.moe_router_num_groups": 2, "model.moe_router_group_topk": 1}, "--moe-router-group-topk 1"),
        ({"model.moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid"),
        ({"model.moe_router_topk_scaling_factor": 2.5}, "--moe-router-topk-scaling-factor 2.5"),
        ({"model.moe_router_pre_softmax": True}, "--moe-router-pre-softmax"),
    ],
)
def test_settings_that_sinkhorn_does_not_read_are_refused(values: dict, flag: str) -> None:
    def problems(changes: dict) -> list[str]:
        config = with_values(RunConfig(), MIXTURE | changes)
        return [problem for rule in rules_of(routing) for problem in rule(config, 1)]

    reason = "with sinkhorn, which does not read it: the score of an expert is its softmax over all experts; remove it"
    assert f"{flag} {reason}" in problems(SINKHORN | values)
    assert not problems(values) and not problems(SINKHORN | {"model.moe_router_topk_scaling_factor": 1.0})


def test_groups_may_be_scored_by_a_rounded_number_of_experts() -> None:
    """megatron-core divides and rounds down; every selected expert is in a selected group."""
    groups = {"model.moe_router_num_groups": 4, "model.moe_router_group_topk": 2}
    config = with_values(RunConfig(), MIXTURE | groups | {"model.num_experts": 8, "model.moe_router_topk": 3})
    assert not [problem for rule in rules_of(routing) for problem in rule(config, 1)]
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    chosen = topk_routing_with_score_function(logits, 3, num_groups=4, group_topk=2)[1]
    best = logits.view(64, 4, 2).amax(-1).topk(2).indices
    in_groups = torch.zeros(64, 4, dtype=torch.bool).scatter(1, best, True).repeat_interleave(2, dim=1)
    assert (chosen.sum(1) == 3).all() and not (chosen & ~in_groups).any()
    (warning,) = (text for text in warnings(config, EMULATED, 1) if "--moe-router-group-topk" in text)
    assert "a group is scored by its 1 best expert (3 / 2, rounded down)" in warning
