"""Which layers have experts, and the sizes that follow from expert parallelism."""

from __future__ import annotations

import pytest

from megafp8.config import mixture
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
