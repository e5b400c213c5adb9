"""The tensors of a model as megatron-core names them in a checkpoint: shapes, order in the module, tensor parallelism.

Names are those of Transformer Engine's layers, in which a norm belongs to the linear after it. megatron-core gives its
own layers' weights the same names in checkpoints, but its modules have the norms in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Optional

from torch import Tensor

from megafp8.config import dimensions, latent_attention, mixture
from megafp8.config.activations import is_gated
from megafp8.config.schema import ModelConfig

POSITIONS = "embedding.position_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm"
# The dimension of a weight that tensor-parallel ranks split; they have all of the others.
SPLIT_DIMS = {
    "word_embeddings": 0, "output_layer": 0, "linear_qkv": 0, "linear_proj": 1, "linear_fc1": 0, "linear_fc2": 1
}  # fmt: skip
EXPERT_BIAS = "expert_bias"
"""What a router adds to the scores when it selects experts; always in FP32."""


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of a checkpoint.

    Attributes:
        module: its name without the kind; `{}` stands for the layer.
        kind: `weight` or `bias`, or `EXPERT_BIAS` of a router.
        shape: complete, not of one rank.
        layer: index of the layer; None outside of the layers.
        is_linear: weight of a linear in a layer, also of the router, which no FP8 recipe quantizes.
        num_experts: size of the first dimension, of experts; None if there is none.
    """

    module: str
    kind: str
    shape: tuple[int, ...]
    layer: int | None = None
    is_linear: bool = False
    num_experts: int | None = None

    @property
    def name(self) -> str:
        """Name in a checkpoint. The norm in front of a linear has the key of Transformer Engine's fused layer."""
        return self.module.format(self.layer) + ("_" if self.module.endswith(".layer_norm") else ".") + self.kind


def model_tensors(model: ModelConfig, num_rows: int) -> Iterator[ModelTensor]:
    """Yield all tensors of a model.

    Args:
        num_rows: of the embedding, with padding.
    """
    assert model.hidden_size is not None and model.num_layers is not None
    hidden = model.hidden_size
    yield ModelTensor("embedding.word_embeddings", "weight", (num_rows, hidden))
    if model.position_embedding_type == "learned_absolute":
        yield ModelTensor("embedding.position_embeddings", "weight", (model.max_position_embeddings or 0, hidden))
    for layer in range(model.num_layers):
        yield from _layer_tensors(model, layer)
    yield from _norm(model, "decoder.final_layernorm", hidden, None)
    if not model.share_embeddings_and_output_weights:
        yield ModelTensor("output_layer", "weight", (num_rows, hidden))


def _layer_tensors(model: ModelConfig, layer: int) -> Iterator[ModelTensor]:
    """Yield the tensors of one layer."""
    assert model.hidden_size is not None
    mlp, hidden = "decoder.layers.{}.mlp.", model.hidden_size
    has_pre_norms, has_post_norms = model.norm_placement != "post", model.norm_placement != "pre"
    yield from (_latent_tensors if latent_attention.is_latent(model) else _attention_tensors)(model, layer)
    if mixture.expert_layers(model)[layer]:
        yield from _expert_tensors(model, mlp, layer)
    else:
        if has_pre_norms:
            yield from _norm(model, mlp + "linear_fc1.layer_norm", hidden, layer)
        ffn = dimensions.ffn_hidden_size(model)
        fc1_rows = 2 * ffn if is_gated(model) else ffn
        yield from _linear(mlp + "linear_fc1", (fc1_rows, hidden), model.add_bias_linear, layer)
        yield from _linear(mlp + "linear_fc2", (hidden, ffn), model.add_bias_linear, layer)
    if has_post_norms:
        yield from _norm(model, mlp + "post_layernorm", hidden, layer)


def _attention_tensors(model: ModelConfig, layer: int) -> Iterator[ModelTensor]:
    """Yield the tensors of attention, with its norms."""
    assert model.hidden_size is not None
    attention, hidden = "decoder.layers.{}.self_attention.", model.hidden_size
    query, key = dimensions.query_projection_size(model), dimensions.kv_projection_size(model)
    has_qkv_bias = model.add_bias_linear or model.add_qkv_bias
    has_pre_norms, has_post_norms = model.norm_placement != "post", model.norm_placement != "pre"
    channels = dimensions.kv_channels(model)
    norm_widths = (query, key) if model.qk_layernorm_across_heads else (channels, channels)
    if has_pre_norms:
        yield from _norm(model, attention + "linear_qkv.layer_norm", hidden, layer)
    yield from _linear(attention + "linear_qkv", (query + 2 * key, hidden), has_qkv_bias, layer)
    if model.qk_layernorm:
        yield from _norm(model, attention + "q_layernorm", norm_widths[0], layer)
        yield from _norm(model, attention + "k_layernorm", norm_widths[1], layer)
    yield from _linear(attention + "linear_proj", (hidden, query), model.add_bias_linear, layer)
    if has_post_norms:
        yield from _norm(model, attention + "post_layernorm", hidden, layer)


def _latent_tensors(model: ModelConfig, layer: int) -> Iterator[ModelTensor]:
    """Yield the tensors of multi-latent attention. The norm before it is not that of one linear."""
    assert model.hidden_size is not None
    attention = "decoder.layers.{}.self_attention."
    yield from _norm(model, "decoder.layers.{}.input_layernorm", model.hidden_size, layer)
    for linear in latent_attention.linear_shapes(model):
        if model.qk_layernorm and linear.name in ("linear_q_up_proj", "linear_kv_up_proj"):
            yield from _norm(model, f"{attention}{linear.name}.layer_norm", linear.in_features, layer)
        has_bias = model.add_bias_linear and linear.name == "linear_proj"
        yield from _linear(attention + linear.name, (linear.out_features, linear.in_features), has_bias, layer)


def _expert_tensors(model: ModelConfig, mlp: str, layer: int) -> Iterator[ModelTensor]:
    """Yield router and experts in place of an MLP. No family has biases or a gate of shared experts there."""
    assert model.hidden_size is not None and model.num_experts is not None
    hidden, experts, ffn = model.hidden_size, model.num_experts, mixture.moe_ffn_hidden_size(model)
    fc1_rows = 2 * ffn if is_gated(model) else ffn
    yield from _norm(model, "decoder.layers.{}.pre_mlp_layernorm", hidden, layer)
    yield from _linear(mlp + "router", (experts, hidden), False, layer)
    if model.moe_router_enable_expert_bias:
        yield ModelTensor(mlp + "router", EXPERT_BIAS, (experts,), layer)
    for linear, shape in (("linear_fc1", (experts, fc1_rows, hidden)), ("linear_fc2", (experts, hidden, ffn))):
        yield ModelTensor(f"{mlp}experts.experts.{linear}", "weight", shape, layer, True, experts)
    if shared := model.moe_shared_expert_intermediate_size:
        shared_rows = 2 * shared if is_gated(model) else shared
        yield from _linear(mlp + "shared_experts.linear_fc1", (shared_rows, hidden), False, layer)
        yield from _linear(mlp + "shared_experts.linear_fc2", (hidden, shared), False, layer)


def _linear(module: str, shape: tuple[int, int], has_bias: bool, layer: int) -> Iterator[ModelTensor]:
    yield ModelTensor(module, "weight", shape, layer, is_linear=True)
    if has_bias:
        yield ModelTensor(module, "bias", shape[:1], layer)


def _norm(model: ModelConfig, module: str, width: int, layer: int | None) -> Iterator[ModelTensor]:
    yield ModelTensor(module, "weight", (width,), layer)
    if model.normalization == "LayerNorm":
        yield ModelTensor(module, "bias", (width,), layer)


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
    # Attention's output projection is made before the linear of its inputs, and so before that one's norm if it has it.
    first = ("linear_proj",) if has_fused_norms else ("linear_qkv.layer_norm", "linear_proj")
    weights = []
    for _, group in groupby(model_tensors(model, num_rows), key=lambda tensor: tensor.layer):
        tensors = list(group)
        leading = [tensor for name in first for tensor in tensors if tensor.module.endswith(name)]
        weights += leading + [tensor for tensor in tensors if tensor not in leading]
    return [split_weight(tensor, is_gated=model.swiglu) for tensor in weights]


def split_weight(tensor: ModelTensor, is_gated: bool) -> Weight:
    """Return a tensor with the way in which tensor-parallel ranks split it.

    Args:
        is_gated: the model has a gated MLP.
    """
    linear = tensor.module.rpartition(".")[2]
    split_dim = SPLIT_DIMS.get(linear)
    if split_dim == 1 and tensor.kind == "bias":
        split_dim = None  # ranks that split the inputs of a linear each have the complete bias
    return Weight(tensor.name, tensor.shape, split_dim, is_gated and linear == "linear_fc1")
