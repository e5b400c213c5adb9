"""Which layers have a sliding window or no rotary embedding, from the settings of the model."""

from __future__ import annotations

import argparse
from typing import Optional

from megafp8.config.layer_patterns import evaluate_pattern
from megafp8.config.schema import ModelConfig
from megafp8.errors import ConfigError
from megafp8.utils.numbers import whole_number

INT32_MAX = (1 << 31) - 1  # of the attention kernels


def window_size(model: ModelConfig) -> Optional[tuple[int, int]]:
    """Tokens before and after its own that a token attends to, of layers with a sliding window; None without one.

    Raises:
        ConfigError: `--window-size` is not one or two integers.
    """
    if model.window_size is None:
        return None
    words = model.window_size.strip("()").split(",")
    try:
        sizes = [whole_number(word.strip(" ")) for word in words]  # Megatron-LM takes (127, 0), too
    except argparse.ArgumentTypeError:
        sizes = []
    if len(sizes) not in (1, 2):
        raise ConfigError(f"--window-size {model.window_size}: give LEFT,RIGHT, for example 127,0")
    if any(abs(size) > INT32_MAX for size in sizes):
        raise ConfigError(f"--window-size {model.window_size}: sizes are at most {INT32_MAX:,}")
    return sizes[0], sizes[1] if len(sizes) == 2 else 0


def windowed_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has the sliding window.

    Raises:
        ConfigError: a setting cannot be read, or is not for this number of layers.
    """
    assert model.num_layers is not None
    window = window_size(model)
    if window is None or window[0] < 0:
        return (False,) * model.num_layers
    if model.window_attn_skip_freq is None:
        return (True,) * model.num_layers
    flag, pattern = "--window-attn-skip-freq", parse_pattern("--window-attn-skip-freq", model.window_attn_skip_freq)
    if isinstance(pattern, int):
        return tuple((layer + 1) % pattern != 0 for layer in range(model.num_layers))
    return _for_layers(flag, pattern, model.num_layers)


def layers_without_rope(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has no rotary embedding; empty if all layers have one.

    Raises:
        ConfigError: the pattern cannot be read, or is not for this number of layers.
    """
    if model.no_rope_freq is None:
        return ()
    assert model.num_layers is not None
    flag, pattern = "--no-rope-freq", parse_pattern("--no-rope-freq", model.no_rope_freq)
    if isinstance(pattern, tuple):
        return _for_layers(flag, pattern, model.num_layers)
    if model.num_layers % pattern:
        raise ConfigError(
            f"{flag} {pattern} does not divide --num-layers {model.num_layers}: give a divisor, or a list of 0 and 1"
        )
    return tuple((layer + 1) % pattern == 0 for layer in range(model.num_layers))


def mean_keys(model: ModelConfig, seq_length: float) -> float:
    """Mean number of keys that a query attends to, over the positions of a sequence and the layers."""
    windows = windows_in_tokens(model, seq_length)
    return sum(window - window * window / (2 * seq_length) for window in windows) / len(windows)


def windows_in_tokens(model: ModelConfig, seq_length: float) -> tuple[float, ...]:
    """The number of tokens in the window of each layer, its own included; the sequence length without a window."""
    window = window_size(model)
    local = seq_length if window is None else min(window[0] + 1, seq_length)
    return tuple(local if is_windowed else seq_length for is_windowed in windowed_layers(model))


def parse_pattern(flag: str, text: str) -> int | tuple[int, ...]:
    """Read an integer N, or a list of integers with + and *, like `([1]*3+[0])*4`.

    Raises:
        ConfigError: it is neither; the message starts with the flag.
    """
    try:
        value = evaluate_pattern(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = None
    if isinstance(value, int) and value >= 1:
        return value
    if isinstance(value, list) and value:
        return tuple(value)
    raise ConfigError(f"{flag} {text}: give an integer of at least 1, or a list of 0 and 1 like ([1]*3+[0])*4")


def _for_layers(flag: str, pattern: tuple[int, ...], num_layers: int) -> tuple[bool, ...]:
    if len(pattern) != num_layers or not set(pattern) <= {0, 1}:
        raise ConfigError(
            f"{flag}: a list needs one 0 or 1 for each of the {num_layers} layers, but has {len(pattern)} entries: "
            f"{list(pattern[:16])}"
        )
    return tuple(map(bool, pattern))
