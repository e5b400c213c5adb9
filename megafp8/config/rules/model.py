"""Rules about the shape of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config import dimensions
from megafp8.config.activations import is_gated
from megafp8.config.features import given_flags
from megafp8.config.rules.base import all_positive, no_effect_without
from megafp8.config.schema import RunConfig
from megafp8.utils.integers import round_up


def shape_is_given(config: RunConfig, world_size: int) -> Iterator[str]:
    """The number of layers, hidden size and number of heads have no default."""
    model = config.model
    required = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
    }
    missing = [flag for flag, value in required.items() if value is None]
    if missing:
        yield f"{', '.join(missing)}: missing; give them, or choose a named shape with --model-preset"


def heads_divide_hidden_size(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without --kv-channels the width of a head is hidden size / heads."""
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_channels is not None or not all_positive(hidden, heads):
        return
    assert hidden is not None and heads is not None
    if hidden % heads:
        yield (
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: use --hidden-size "
            f"{round_up(hidden, heads)}, or set the channels per head with --kv-channels"
        )


def query_groups_divide_heads(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every key/value head serves equally many query heads."""
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if not model.group_query_attention:
        if groups != 1:
            yield no_effect_without(f"--num-query-groups {groups}", "--group-query-attention")
        return
    if all_positive(heads, groups) and heads is not None and heads % groups:
        divisor = math.gcd(heads, groups)
        yield (
            f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}: "
            f"use --num-query-groups {divisor}, or another divisor"
        )


def one_activation(config: RunConfig, world_size: int) -> Iterator[str]:
    """The MLP has one activation function, and settings of a gate have one."""
    model = config.model
    activations = ("--swiglu", "--geglu", "--squared-relu", "--quick-geglu", "--openai-gelu")
    given = given_flags(config, activations)
    if len(given) > 1:
        yield f"{' and '.join(given)} are given together: keep one"
    clamp, offset = model.activation_func_clamp_value, model.glu_linear_offset
    if clamp is not None and not is_gated(model):
        yield no_effect_without(f"--activation-func-clamp-value {clamp}", "--swiglu or --quick-geglu")
    if offset != 0 and not is_gated(model):
        yield no_effect_without(f"--glu-linear-offset {offset:g}", "--swiglu or --quick-geglu")


def mlp_has_width(config: RunConfig, world_size: int) -> Iterator[str]:
    """The default width with SwiGLU is rounded down to a multiple of 64, which is 0 for very small models."""
    hidden = config.model.hidden_size
    if all_positive(hidden) and dimensions.ffn_hidden_size(config.model) == 0:
        yield f"--hidden-size {hidden} with --swiglu results in an MLP of hidden size 0: give --ffn-hidden-size"


def positions_reach_the_sequence(config: RunConfig, world_size: int) -> Iterator[str]:
    """Learned position embeddings have one row per position of the sequence."""
    model, seq = config.model, config.data.seq_length
    if model.position_embedding_type != "learned_absolute":
        return
    if model.max_position_embeddings is None:
        yield (
            "learned position embeddings need --max-position-embeddings (at least the sequence length); "
            "--position-embedding-type rope needs none"
        )
    elif seq is not None and model.max_position_embeddings < seq:
        yield (
            f"--max-position-embeddings {model.max_position_embeddings} is less than --seq-length {seq}: "
            f"use --max-position-embeddings {seq}, or a shorter sequence"
        )


def rotated_channels_are_pairs(config: RunConfig, world_size: int) -> Iterator[str]:
    """Rotary embeddings rotate pairs of channels."""
    model = config.model
    if model.position_embedding_type not in ("rope", "yarn") or not 0 < model.rotary_percent <= 1:
        return
    if model.multi_latent_attention:  # `rules.mla` has its own
        return
    if model.kv_channels is None and not all_positive(model.hidden_size, model.num_attention_heads):
        return
    channels = dimensions.kv_channels(model)
    rotated = int(channels * model.rotary_percent)
    if channels > 0 and (rotated < 2 or rotated % 2):
        yield (
            f"--rotary-percent {model.rotary_percent:g} of a head's {channels} channels is {rotated}, but rotary "
            "embedding needs an even number of at least 2: change --rotary-percent or --kv-channels"
        )
