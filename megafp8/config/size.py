"""How many parameters a model has, and how many floating-point operations one of its tokens costs. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import derived
from megafp8.config.schema import ModelConfig

FORWARD_AND_BACKWARD = 3
"""A backward pass does two GEMMs (dgrad, wgrad) for each one of the forward pass."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a whole model, by part. The counts of a layer are those of one layer."""

    num_layers: int
    word_embeddings: int
    position_embeddings: int
    attention_weights_per_layer: int
    mlp_weights_per_layer: int
    biases_per_layer: int
    norms_per_layer: int
    final_norm: int
    output_layer: int
    """0 when the output layer shares the word embeddings."""

    @property
    def per_layer(self) -> int:
        return (
            self.attention_weights_per_layer + self.mlp_weights_per_layer + self.biases_per_layer + self.norms_per_layer
        )

    @property
    def embeddings(self) -> int:
        """Word and position embeddings and an output layer of its own."""
        return self.word_embeddings + self.position_embeddings + self.output_layer

    @property
    def quantizable(self) -> int:
        """Weights of the layers' linears: what an FP8 recipe covers."""
        return self.num_layers * (self.attention_weights_per_layer + self.mlp_weights_per_layer)

    @property
    def total(self) -> int:
        return self.num_layers * self.per_layer + self.final_norm + self.embeddings


def count_parameters(model: ModelConfig, padded_vocab: int) -> ParameterCount:
    """Count the parameters of `model` with `padded_vocab` rows in the embedding.

    Attention: hidden x (query + 2 key/value channels) in, query channels x hidden out. MLP: 2 matrices hidden x ffn,
    3 with --swiglu. LayerNorm has a weight and a bias, RMSNorm a weight.
    """
    assert model.num_layers is not None and model.hidden_size is not None
    hidden, ffn = model.hidden_size, derived.ffn_hidden_size(model)
    query, kv = derived.query_projection_size(model), derived.kv_projection_size(model)
    ffn_in = 2 * ffn if model.swiglu else ffn
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)
    qk_norms = 2 * derived.kv_channels(model) * (norm // hidden) if model.qk_layernorm else 0
    learned = model.position_embedding_type == "learned_absolute"
    word_embeddings = padded_vocab * hidden
    return ParameterCount(
        num_layers=model.num_layers,
        word_embeddings=word_embeddings,
        position_embeddings=(model.max_position_embeddings or 0) * hidden if learned else 0,
        attention_weights_per_layer=hidden * (query + 2 * kv) + query * hidden,
        mlp_weights_per_layer=hidden * ffn_in + ffn * hidden,
        biases_per_layer=_biases_per_layer(model, query + 2 * kv, ffn_in),
        norms_per_layer=2 * norm + qk_norms,
        final_norm=norm,
        output_layer=0 if model.share_embeddings_and_output_weights else word_embeddings,
    )


def _biases_per_layer(model: ModelConfig, qkv_channels: int, ffn_in: int) -> int:
    assert model.hidden_size is not None
    if model.add_bias_linear:
        return qkv_channels + model.hidden_size + ffn_in + model.hidden_size
    return qkv_channels if model.add_qkv_bias else 0


def flops_per_token(model: ModelConfig, padded_vocab: int, seq_length: int) -> float:
    """Model FLOPs of one token, forward and backward, recomputation not counted.

        6 * N  +  6 * L * h * s

    N: all parameters, embeddings included (two FLOPs each in the forward pass, four in the backward).
    L: layers. h: channels of the query heads. s: sequence length. The second term is attention's Q*K and P*V:
    2 GEMMs x 2 FLOPs x h x s/2 keys that a token sees on average under the causal mask, times 3 for the backward.
    A sliding window of w tokens replaces s/2 by the mean number of keys w - w^2 / 2s.

    The lookup in an untied embedding is counted as if it were a GEMM, so that the number is comparable with the
    common `6 N` of others; Megatron-LM leaves it out (its number is 0.93 of this one for the preset llama-1b).
    """
    assert model.num_layers is not None
    parameters = count_parameters(model, padded_vocab).total
    window = min(model.window_size or seq_length, seq_length)
    mean_keys = window - window * window / (2 * seq_length)
    attention_forward = model.num_layers * 2 * 2 * derived.query_projection_size(model) * mean_keys
    return FORWARD_AND_BACKWARD * (2 * parameters + attention_forward)
