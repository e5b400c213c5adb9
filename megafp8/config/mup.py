"""Maximal update parametrization (muP): what depends on the width of a model, so that its settings need not.

With m = hidden size / base hidden size, for Adam (Yang et al. 2022, Tensor Programs V, table 8):

    initial weights of matrices in the layers      standard deviation / sqrt(m)
    learning rate and epsilon of these matrices    / m
    logits                                         / m
    Q*K                                            * sqrt(base channels per head) / channels per head

Embeddings, an untied output layer, norms and biases have the initial weights and the learning rate of the settings.
Weight decay is decoupled: a step multiplies a weight by 1 - learning rate * decay, so that matrices decay more slowly,
too. Flags and meanings are those of megatron-core 0.19. Here both versions train by the multipliers that other settings
have (`without_mup`), by `models.initialization` and by `optimizer.parameter_groups`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megafp8.config import dimensions
from megafp8.config.schema import ModelConfig
from megafp8.config.schema.model import MupConfig


def width_multiplier(model: ModelConfig) -> float:
    """Hidden size / base hidden size; 1 without muP."""
    hidden, base = model.hidden_size, model.mup_base_hidden_size
    return hidden / base if model.use_mup and hidden and base else 1.0


def without_mup(model: ModelConfig) -> ModelConfig:
    """The same function of the weights with other settings in place of muP's, and the same initial weights.

    The initial output layer is the exception: its standard deviation is that of the embeddings.
    """
    if not model.use_mup:
        return model
    width, head_dim = width_multiplier(model), model.mup_base_head_dim
    channels = dimensions.kv_channels(model)
    embedding_std = model.embedding_init_method_std
    without: dict[str, Any] = {each.name: each.default for each in fields(MupConfig)}
    return replace(
        model,
        **without,
        softmax_scale=(1.0 if head_dim is None else head_dim**0.5) / channels**model.mup_attn_scale_power,
        embedding_multiplier=model.mup_embedding_mult,
        logits_scaling=width if model.mup_output_mult == 1 else 1 / model.mup_output_mult,
        init_method_std=model.init_method_std / width**0.5,
        embedding_init_method_std=model.init_method_std if embedding_std is None else embedding_std,
    )
