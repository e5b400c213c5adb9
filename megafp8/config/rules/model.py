"""The shape of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.rules.rule import Rule, positive, round_up, without
from megafp8.config.schema import ModelConfig, RunConfig


def shape_is_given(config: RunConfig, world_size: int) -> Iterator[str]:
    """Layers, width and heads have no default."""
    model = config.model
    required = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
    }
    missing = [flag for flag, value in required.items() if value is None]
    if missing:
        yield f"the model has no {' and no '.join(missing)}: give them, or a shape by name with --model-preset"


def heads_divide_hidden_size(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without --kv-channels a head is hidden size / heads wide."""
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_channels is not None or not positive(hidden, heads):
        return
    assert hidden is not None and heads is not None
    if hidden % heads:
        yield (
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: use --hidden-size "
            f"{round_up(hidden, heads)}, or give the width of a head with --kv-channels"
        )


def query_groups_divide_heads(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every key/value head serves equally many query heads."""
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if not model.group_query_attention:
        if groups != 1:
            yield without(f"--num-query-groups {groups}", "--group-query-attention")
        return
    if positive(heads, groups) and heads is not None and heads % groups:
        divisor = math.gcd(heads, groups)
        yield (
            f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}: "
            f"use --num-query-groups {divisor}, or another divisor"
        )


def one_activation(config: RunConfig, world_size: int) -> Iterator[str]:
    """The MLP has one activation."""
    if config.model.swiglu and config.model.squared_relu:
        yield "--swiglu and --squared-relu are both given: keep one"


def mlp_has_width(config: RunConfig, world_size: int) -> Iterator[str]:
    """The derived width with SwiGLU is rounded down to a multiple of 64, which leaves nothing of a very small model."""
    hidden = config.model.hidden_size
    if positive(hidden) and derived.ffn_hidden_size(config.model) == 0:
        yield f"--hidden-size {hidden} with --swiglu derives an MLP of width 0: give --ffn-hidden-size"


def positions_reach_the_sequence(config: RunConfig, world_size: int) -> Iterator[str]:
    """Learned positions are a table with one row per token of the sequence."""
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


def rotary_settings_need_rope(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of rotary embeddings do nothing without them."""
    model, default = config.model, ModelConfig()
    if model.position_embedding_type != "rope":
        asked = {
            "--rotary-base": model.rotary_base != default.rotary_base,
            "--rotary-percent": model.rotary_percent != default.rotary_percent,
            "--rotary-interleaved": model.rotary_interleaved,
            "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
            "--use-rope-scaling": model.use_rope_scaling,
        }
        for flag in (flag for flag, given in asked.items() if given):
            yield without(flag, "--position-embedding-type rope")
    if model.rope_scaling_factor != default.rope_scaling_factor and not model.use_rope_scaling:
        yield without(f"--rope-scaling-factor {model.rope_scaling_factor:g}", "--use-rope-scaling")


def rotated_channels_are_pairs(config: RunConfig, world_size: int) -> Iterator[str]:
    """Rotary embeddings turn pairs of channels."""
    model = config.model
    if model.position_embedding_type != "rope" or not positive(model.rotary_percent):
        return
    if model.kv_channels is None and not positive(model.hidden_size, model.num_attention_heads):
        return
    channels = derived.kv_channels(model)
    rotated = int(channels * model.rotary_percent)
    if channels > 0 and (rotated < 2 or rotated % 2):
        yield (
            f"--rotary-percent {model.rotary_percent:g} of a head's {channels} channels is {rotated}, which is no "
            "number of pairs: change it, or the width of a head with --kv-channels"
        )


RULES: tuple[Rule, ...] = (
    shape_is_given,
    heads_divide_hidden_size,
    query_groups_divide_heads,
    one_activation,
    mlp_has_width,
    positions_reach_the_sequence,
    rotary_settings_need_rope,
    rotated_channels_are_pairs,
)
