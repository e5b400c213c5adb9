"""Which layers have experts (`--num-experts`, `--moe-layer-freq`). Below `derived`, which precision maps need."""

from __future__ import annotations

from typing import Union

from megafp8.config.layer_patterns import evaluate_pattern
from megafp8.config.schema import ModelConfig


def is_mixture(model: ModelConfig) -> bool:
    """Whether the model has experts. `--num-experts 0` is a dense model, as in Megatron-LM."""
    return bool(model.num_experts)


def has_capacity(model: ModelConfig) -> bool:
    """Whether experts drop tokens above a capacity. A negative factor is no limit, as in megatron-core."""
    return model.moe_expert_capacity_factor is not None and model.moe_expert_capacity_factor >= 0


def layer_frequency(text: str) -> Union[int, list[int]]:
    """Parse `--moe-layer-freq`: a number, or a Python list expression of 0 and 1 with `+` and `*`.

    Example:
        >>> layer_frequency("([0]*2+[1]*3)")
        [0, 0, 1, 1, 1]

    Raises:
        ValueError: it is neither.
    """
    text = text.strip()
    shown = text or "''"
    try:
        value = evaluate_pattern(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{shown} is neither a number nor a list") from error
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"{shown} is less than 1")
        return value
    if not set(value) <= {0, 1}:
        raise ValueError(f"{shown} has an element that is neither 0 nor 1")
    return value


def expert_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has experts, from the first to the last.

    A rule reports a pattern that does not fit; its layers then count as layers with experts.
    """
    assert model.num_layers is not None
    if not is_mixture(model):
        return (False,) * model.num_layers
    try:
        frequency = layer_frequency(model.moe_layer_freq)
    except ValueError:
        frequency = 1
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(model.num_layers))
    pattern = [bool(each) for each in frequency] + [True] * model.num_layers
    return tuple(pattern[: model.num_layers])


def num_expert_layers(model: ModelConfig) -> int:
    """Number of layers with experts."""
    return sum(expert_layers(model))
