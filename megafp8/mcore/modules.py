"""Modules of megatron-core's layers: the linears by name, and the spec of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Optional

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megafp8.config.precision_map import OUTPUT_LAYER
from megafp8.mcore.patches import is_installed


def named_linears(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linears of a chunk's layers, numbered from 0 over all stages, and the output layer if it quantizes."""
    for layer in (module for module in chunk.modules() if isinstance(module, TransformerLayer)):
        prefix = f"layers.{layer.layer_number - 1}."
        attention, mlp = layer.self_attention, layer.mlp
        yield prefix + "linear_qkv", attention.linear_qkv
        yield prefix + "linear_proj", attention.linear_proj
        yield prefix + "linear_fc1", mlp.linear_fc1
        yield prefix + "linear_fc2", mlp.linear_fc2
    yield from ((OUTPUT_LAYER, module) for module in chunk.modules() if getattr(module, "is_output", False))


def mlp_spec(module: type[MLP], submodules: MLPSubmodules, **params: Any) -> ModuleSpec | Callable[..., MLP]:
    """The entry `mlp` of a layer's spec: a class of MLP with its linears and further arguments of its constructor.

    Since megatron-core 0.19 a layer calls the entry with all its process groups.
    """
    if is_installed("<0.19"):
        return ModuleSpec(module=module, params=params, submodules=submodules)

    def build_mlp(*, config: Any, pg_collection: Any, is_mtp_layer: bool, name: Optional[str]) -> MLP:
        return module(config=config, submodules=submodules, tp_group=pg_collection.tp, name=name, **params)

    return build_mlp


def mlp_submodules(spec: Any) -> MLPSubmodules:
    """The linears of an entry `mlp` that megatron-core made."""
    return spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]
