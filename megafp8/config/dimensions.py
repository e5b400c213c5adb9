"""Dimensions of the model, where a setting leaves them to a default or to padding.

They follow Megatron-LM's `validate_args`. The settings that they read must have passed the rules in `config/rules`.
"""

from __future__ import annotations

import math

from megafp8.config import derived
from megafp8.config.schema import DataConfig, ModelConfig, RunConfig
from megafp8.errors import ConfigError
from megafp8.utils.integers import round_up


def ffn_hidden_size(model: ModelConfig) -> int:
    """Width of the MLP: by default 4 x hidden size; with SwiGLU 2/3 of that, rounded down to a multiple of 64."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    assert model.hidden_size is not None
    if model.swiglu:
        return int((4 * model.hidden_size * 2 / 3) / 64) * 64
    return 4 * model.hidden_size


def kv_channels(model: ModelConfig) -> int:
    """Width of one attention head."""
    if model.kv_channels is not None:
        return model.kv_channels
    assert model.hidden_size is not None and model.num_attention_heads is not None
    return model.hidden_size // model.num_attention_heads


def num_query_groups(model: ModelConfig) -> int:
    """Key/value heads: one per query head without grouped-query attention."""
    assert model.num_attention_heads is not None
    return model.num_query_groups if model.group_query_attention else model.num_attention_heads


def divides_heads(config: RunConfig, context_ranks: int) -> bool:
    """Whether context-parallel ranks can each have all tokens of some key-value heads of a tensor-parallel rank."""
    return num_query_groups(config.model) % (config.parallel.tensor_model_parallel_size * context_ranks) == 0


def cp_exchange(config: RunConfig) -> str:
    """`--cp-comm-type`, but no ring where attention stays within documents, which it would need padded.

    In its place heads are exchanged, where ranks divide them, or else keys and values gathered, which took 9% longer
    with two ranks and 32,768 tokens (benchmarks/results/attention.md). Deterministic kernels need less memory so.
    """
    parallel, model = config.parallel, config.model
    if not config.data.reset_attention_mask or parallel.cp_comm_type != "p2p":
        return parallel.cp_comm_type
    is_divided = model.num_attention_heads is not None and divides_heads(config, parallel.context_parallel_size)
    is_plain = model.softmax_type == "vanilla" and not config.precision.deterministic_mode
    return "a2a" if is_divided and is_plain else "allgather"


def query_projection_size(model: ModelConfig) -> int:
    """Channels of all query heads, which is the width of the output of attention."""
    assert model.num_attention_heads is not None
    return kv_channels(model) * model.num_attention_heads


def kv_projection_size(model: ModelConfig) -> int:
    """Channels of all key heads, which is also that of all value heads."""
    return kv_channels(model) * num_query_groups(model)


def vocabulary_size(model: ModelConfig, data: DataConfig, tokenizer_size: int) -> int:
    """Size of the vocabulary before padding: `--vocab-size` if given, otherwise the tokenizer's.

    NullTokenizer adds its end-of-document id after the `--vocab-size` ids, as Megatron-LM's does.

    Raises:
        ConfigError: the tokenizer has more ids than `--vocab-size`.
    """
    requested = model.vocab_size
    if requested is None or data.tokenizer_type == "NullTokenizer":
        return tokenizer_size
    if tokenizer_size > requested:
        raise ConfigError(
            f"--vocab-size {requested} (from the flag or the preset) is less than the tokenizer's {tokenizer_size} "
            f"ids; use --vocab-size {tokenizer_size}"
        )
    return requested


def padded_vocab_size(config: RunConfig, vocab_size: int) -> int:
    """Rows of the embedding and of the output layer: `vocab_size` and padding, or --padded-vocab-size."""
    return config.model.padded_vocab_size or round_up(vocab_size, vocab_multiple(config))


def vocab_multiple(config: RunConfig) -> int:
    """The vocabulary is padded to a multiple of this.

    As in Megatron-LM it is a multiple of --make-vocab-size-divisible-by x tensor-parallel size. In addition, the rows
    of each rank are a multiple of the recipe's GEMM alignment, so that the output layer can be quantized.
    """
    per_rank = math.lcm(config.model.make_vocab_size_divisible_by, derived.gemm_alignment(config.precision))
    return per_rank * config.parallel.tensor_model_parallel_size
