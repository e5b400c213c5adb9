"""Patterns of layers with a sliding window or without rotary embedding."""

import pytest

from megafp8.config import attention_layers
from megafp8.config.schema import ModelConfig
from megafp8.errors import ConfigError


def model(**fields) -> ModelConfig:
    return ModelConfig(num_layers=6, **fields)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127,0", (127, 0)), ("(127, 0)", (127, 0)), ("127", (127, 0)), ("-1,0", (-1, 0)), (None, None)],
)
def test_window_size(text, expected):
    assert attention_layers.window_size(model(window_size=text)) == expected


@pytest.mark.parametrize("text", [f"{1 << 31},0", f"0,{1 << 64}", str(-(1 << 31))])
def test_a_window_that_no_kernel_can_hold(text):
    with pytest.raises(ConfigError, match="sizes are at most 2,147,483,647"):
        attention_layers.window_size(model(window_size=text))


@pytest.mark.parametrize("text", ["", "a,0", "1,2,3", "1.5,0"])
def test_an_unreadable_window(text):
    with pytest.raises(ConfigError, match="give LEFT,RIGHT"):
        attention_layers.window_size(model(window_size=text))


@pytest.mark.parametrize(
    ("window", "pattern", "expected"),
    [
        (None, None, "000000"),
        ("-1,0", None, "000000"),
        ("3,0", None, "111111"),
        ("3,0", "2", "101010"),
        ("3,0", "3", "110110"),
        ("3,0", "1", "000000"),
        ("3,0", "([1]*2+[0])*2", "110110"),
        ("3,0", "[0,0,0,1,1,1]", "000111"),
    ],
)
def test_windowed_layers(window, pattern, expected):
    layers = attention_layers.windowed_layers(model(window_size=window, window_attn_skip_freq=pattern))
    assert "".join(str(int(layer)) for layer in layers) == expected


def test_windows_agree_with_megatron_core():
    from megafp8.mcore import cpu_patches

    cpu_patches.install()
    from megatron.core.transformer.utils import is_layer_window_attention

    for frequency in (1, 2, 3, 4):
        ours = attention_layers.windowed_layers(model(window_size="3,0", window_attn_skip_freq=str(frequency)))
        assert ours == tuple(is_layer_window_attention((3, 0), frequency, layer) for layer in range(1, 7))


def test_layers_without_rope():
    assert attention_layers.layers_without_rope(model()) == ()
    assert attention_layers.layers_without_rope(model(no_rope_freq="3")) == (False, False, True) * 2
    assert attention_layers.layers_without_rope(model(no_rope_freq="[1]+[0]*5")) == (True,) + (False,) * 5
    with pytest.raises(ConfigError, match="4 does not divide --num-layers 6"):
        attention_layers.layers_without_rope(model(no_rope_freq="4"))


@pytest.mark.parametrize(
    "text", ["0", "-2", "x", "[]", "[1]*3", "[1]*10**9", "[2]*6", "[[1]]*6", "__import__('os')", "[1]*-1", "(", "1.5"]
)
def test_unreadable_patterns(text):
    with pytest.raises(ConfigError, match="--window-attn-skip-freq"):
        attention_layers.windowed_layers(model(window_size="3,0", window_attn_skip_freq=text))


def test_mean_keys():
    full, windowed = model(), model(window_size="3,0", window_attn_skip_freq="2")
    assert attention_layers.mean_keys(full, 16) == 8
    assert attention_layers.windows_in_tokens(windowed, 16) == (4, 16, 4, 16, 4, 16)
    assert attention_layers.mean_keys(windowed, 16) == (3.5 + 8) / 2
    assert attention_layers.mean_keys(model(window_size="99,0"), 16) == 8
