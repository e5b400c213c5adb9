"""Named model shapes. A preset sets fields of the model section only, never the batch, the layout or the numerics.

`llama-1b` is the shape of our single-GPU measurements: 24 layers of width 2048 are 1.233e9 parameters, and the untied
embedding and output matrices of 50,304 tokens (GPT-2's 50,257 padded to a multiple of 128) bring it to 1.439e9.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int, **others: Any) -> Mapping[str, Any]:
    """GPT-2's style (Radford et al. 2019): learned positions, LayerNorm, GELU, biases, tied embeddings, dropout."""
    fields = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "ffn_hidden_size": 4 * hidden_size,
        "max_position_embeddings": 1024,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "swiglu": False,
        "add_bias_linear": True,
        "share_embeddings_and_output_weights": True,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    }
    return _of_model(fields | others)


def _llama(
    num_layers: int, hidden_size: int, num_attention_heads: int, ffn_hidden_size: int, **others: Any
) -> Mapping[str, Any]:
    """Llama's style (Touvron et al. 2023): rotary positions, RMSNorm, SwiGLU, no biases, untied, no dropout."""
    fields = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "swiglu": True,
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return _of_model(fields | others)


def _of_model(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType({f"model.{name}": value for name, value in fields.items()})


_GROUPED = {"group_query_attention": True, "num_query_groups": 8}
_LLAMA3 = _GROUPED | {"rotary_base": 500_000, "vocab_size": 128_256, "max_position_embeddings": 8192}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _llama(
            2, 128, 4, 384, group_query_attention=True, num_query_groups=2, max_position_embeddings=512
        ),
        "tiny-gpt2": _gpt2(2, 128, 4, max_position_embeddings=512),
        "gpt2-124m": _gpt2(12, 768, 12, vocab_size=50_257),
        "gpt2-350m": _gpt2(24, 1024, 16, vocab_size=50_257),
        "llama-1b": _llama(24, 2048, 16, 5632, max_position_embeddings=2048, vocab_size=50_304),
        "llama3-8b": _llama(32, 4096, 32, 14_336, **_LLAMA3),
        "llama3-70b": _llama(80, 8192, 64, 28_672, **_LLAMA3),
    }
)
"""Settings (`section.field` -> value) under the preset's name. The tiny ones leave the vocabulary to the tokenizer."""
