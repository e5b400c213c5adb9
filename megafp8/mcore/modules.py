"""The linear modules of megatron-core's layers, by name."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megafp8.config.precision_map import OUTPUT_LAYER


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
