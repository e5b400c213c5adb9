"""Emulated layers with experts in one launch per GEMM, which otherwise are for Transformer Engine's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from megafp8.models import layer_specs
from megafp8.models.grouped_moe import ExchangedExperts, GroupedExperts, GroupedMoELayer, PeerMoELayer

MODEL = (
    "--num-layers 2 --hidden-size 128 --kv-channels 32 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --bf16 --seq-length 16 --micro-batch-size 2 "
    "--transformer-impl emulated --fp8-format e4m3 --fp8-recipe delayed --fp8-amax-history-len 4 "
    "--fp8-amax-compute-algo max"
)
EP2 = "--expert-model-parallel-size 2"


def stack_experts(are_peers: bool = False) -> None:
    """Build the experts of this process's models so, with the recipe of their linears. One rank has no dispatcher, and
    neither have peers."""
    original, exchange = layer_specs.mixture_spec, layer_specs.AmaxExchange()

    def mixture_spec(linear: Callable[[str], ModuleSpec], *args: Any) -> ModuleSpec:
        spec = original(linear, *args)
        arguments = {"recipe": linear("experts.linear_fc1").params["recipe"], "exchange": exchange}
        spec.submodules.experts = ModuleSpec(ExchangedExperts, arguments)
        if are_peers or torch.distributed.get_world_size() == 1:
            spec.module, spec.params = PeerMoELayer if are_peers else GroupedMoELayer, {}
            spec.submodules.experts = ModuleSpec(GroupedExperts, arguments)
        return spec

    layer_specs.mixture_spec = mixture_spec
