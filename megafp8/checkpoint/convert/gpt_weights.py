"""The weights of a dense GPT of megatron-core: names in a checkpoint, shapes, order in the module, tensor parallelism.

Names are those of Transformer Engine's layers, in which a norm belongs to the linear after it. megatron-core gives its
own layers' weights the same names in checkpoints, but its modules have the norms in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Optional

from torch import Tensor

from megafp8.checkpoint.state_dict import EMBEDDING, OUTPUT_LAYER
from megafp8.config import dimensions
from megafp8.config.schema import ModelConfig

POSITIONS = "embedding.position_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm"


@dataclass(frozen=True)
class Weight:
    """A weight of the complete model.

    Attributes:
        split_dim: that tensor-parallel ranks split; None if each has all of it.
        is_gated: it consists of two equal halves along dim 0, gate and value, and ranks split each.
    """

    name: str
    shape: tuple[int, ...]
    split_dim: Optional[int] = None
    is_gated: bool = False

    def local_shape(self, num_ranks: int) -> tuple[int, ...]:
        """Return the shape of a tensor-parallel rank's part."""
        return tuple(size // num_ranks if dim == self.split_dim else size for dim, size in enumerate(self.shape))

    def local_part(self, weight: Tensor, rank: int, num_ranks: int) -> list[Tensor]:
        """Return views of a complete weight that are a rank's part, to be concatenated along dim 0."""
        if self.split_dim is None:
            return [weight]
        halves = weight.chunk(2) if self.is_gated else (weight,)
        return [half.chunk(num_ranks, self.split_dim)[rank] for half in halves]


def gpt_weights(model: ModelConfig, num_rows: int, has_fused_norms: bool = True) -> list[Weight]:
    """Return the weights of a model in the order of the module's parameters.

    Args:
        num_rows: of the embedding.
        has_fused_norms: the order of Transformer Engine's layers, otherwise of megatron-core's own.
    """
    assert model.num_layers is not None and model.hidden_size is not None
    hidden = model.hidden_size
    weights = [Weight(EMBEDDING, (num_rows, hidden), 0)]
    if model.position_embedding_type == "learned_absolute":
        weights.append(Weight(POSITIONS, (model.max_position_embeddings or 0, hidden)))
    layer = list(layer_weights(model, has_fused_norms))
    for number in range(model.num_layers):
        weights += [replace(weight, name=f"decoder.layers.{number}.{weight.name}") for weight in layer]
    weights += norm(model, f"{FINAL_NORM}.", hidden)
    if not model.share_embeddings_and_output_weights:
        weights.append(Weight(OUTPUT_LAYER, (num_rows, hidden), 0))
    return weights


def layer_weights(model: ModelConfig, has_fused_norms: bool) -> Iterator[Weight]:
    """Yield the weights of one layer, named without the layer's prefix."""
    assert model.hidden_size is not None
    hidden, ffn = model.hidden_size, dimensions.ffn_hidden_size(model)
    query, key = dimensions.query_projection_size(model), dimensions.kv_projection_size(model)
    input_norm = norm(model, "self_attention.linear_qkv.layer_norm_", hidden)
    mlp_norm = norm(model, "mlp.linear_fc1.layer_norm_", hidden)
    has_qkv_bias = model.add_bias_linear or model.add_qkv_bias
    if not has_fused_norms:
        yield from input_norm
    yield from linear("self_attention.linear_proj", (hidden, query), 1, model.add_bias_linear)
    if has_fused_norms:
        yield from input_norm
    yield from linear("self_attention.linear_qkv", (query + 2 * key, hidden), 0, has_qkv_bias)
    if model.qk_layernorm:
        channels = dimensions.kv_channels(model)
        yield from norm(model, "self_attention.q_layernorm.", channels)
        yield from norm(model, "self_attention.k_layernorm.", channels)
    yield from mlp_norm
    for weight in linear("mlp.linear_fc1", (ffn * (2 if model.swiglu else 1), hidden), 0, model.add_bias_linear):
        yield replace(weight, is_gated=model.swiglu)
    yield from linear("mlp.linear_fc2", (hidden, ffn), 1, model.add_bias_linear)


def norm(model: ModelConfig, prefix: str, num_channels: int) -> list[Weight]:
    """Return the weights of a norm."""
    names = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    return [Weight(prefix + name, (num_channels,)) for name in names]


def linear(name: str, shape: tuple[int, int], split_dim: int, has_bias: bool) -> list[Weight]:
    """Return weight and bias of a linear. Ranks that split its inputs (dim 1) each have the complete bias."""
    weight = Weight(f"{name}.weight", shape, split_dim)
    return [weight, Weight(f"{name}.bias", shape[:1], 0 if split_dim == 0 else None)] if has_bias else [weight]
