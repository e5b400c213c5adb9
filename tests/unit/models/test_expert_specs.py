"""Emulated layers on a GPU have their experts in one launch where that is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megafp8.config import flags
from megafp8.config.model_plan import plan_model
from megafp8.mcore.modules import mlp_submodules
from megafp8.models import layer_specs
from megafp8.models.dispatch import DispatchingLayer
from megafp8.models.experts import PaddedExperts
from megafp8.models.grouped_moe import ExchangedExperts, GroupedExperts, GroupedMoELayer, PeerMoELayer
from megafp8.quantization.delayed_scaling import AmaxExchange

ROWWISE = "--model-preset mixtral-8x7b --bf16 --fp8-format e4m3 --fp8-recipe rowwise"
TRITON = "--moe-expert-kernels triton"
RANKS = "--expert-model-parallel-size 2 --moe-token-dispatcher-type"


@pytest.mark.parametrize(
    ("extra", "on_cuda", "layer", "experts"),
    [
        (TRITON, True, GroupedMoELayer, GroupedExperts),
        (f"{TRITON} {RANKS} alltoall", True, DispatchingLayer, ExchangedExperts),
        (f"{TRITON} {RANKS} allgather", True, DispatchingLayer, ExchangedExperts),
        (f"{TRITON} {RANKS} peer", True, PeerMoELayer, GroupedExperts),
        (TRITON, False, DispatchingLayer, PaddedExperts),
        ("", True, DispatchingLayer, PaddedExperts),
    ],
)
def test_experts_of_emulated_layers(extra: str, on_cuda: bool, layer: type, experts: type) -> None:
    config = flags.parse(f"{ROWWISE} {extra}".split()).config
    here: Any = SimpleNamespace(use_cpu_initialization=not on_cuda)
    everywhere = layer_specs.linear_recipes(config.model, config.precision)
    recipes = {name[len("layers.0.") :]: everywhere[name] for name in everywhere if name.startswith("layers.0.")}
    spec = layer_specs.layer_spec(
        plan_model(config), here, 0, recipes, AmaxExchange(), may_stack_experts=True
    ).submodules.mlp
    assert spec.module is layer
    found = mlp_submodules(spec).experts
    assert found.module is experts
    if experts is not PaddedExperts:
        assert found.params["recipe"].name == "rowwise"
