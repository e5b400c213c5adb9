"""Activations, windows and layers without rotary embedding in megatron-core's modules, against their definition."""

from typing import Optional

import pytest
import torch
import torch.nn.functional as F

from megafp8.config import flags
from megafp8.config.layer_backends import LOCAL, TRANSFORMER_ENGINE, LayerBackend
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.mcore.config import activation_function, build_transformer_config

NO_BIAS = "--disable-bias-linear"
SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 2"


def core_config(text: str, on_cuda: bool = False, implementation: LayerBackend = LOCAL):
    return build_transformer_config(flags.parse(f"{SHAPE} {text}".split()).config, implementation, on_cuda)


def test_activations() -> None:
    x = torch.linspace(-4, 4, 101)
    expected = {
        "": F.gelu(x),
        "--openai-gelu": 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
        "--quick-geglu": x * torch.sigmoid(1.702 * x),
        "--swiglu": x * torch.sigmoid(x),
        "--squared-relu": x.clamp(min=0) ** 2,
    }
    for text, values in expected.items():
        model = flags.parse(f"{SHAPE} {text}".split()).config.model
        torch.testing.assert_close(activation_function(model)(x), values, rtol=1e-6, atol=1e-6)
        assert core_config(text).gated_linear_unit == (text in ("--quick-geglu", "--swiglu"))


@pytest.mark.parametrize(("factor", "expected"), [("-1", None), ("1.5", 1.5)])
def test_a_negative_capacity_reaches_megatron_core_as_no_limit(factor: str, expected: Optional[float]) -> None:
    """megatron-core replaces it, which the check against what was asked for reports as a change."""
    experts = f"--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --swiglu {NO_BIAS}"
    text = f"{experts} --moe-expert-capacity-factor {factor}"
    assert core_config(text).moe_expert_capacity_factor == expected


@pytest.mark.parametrize(
    ("text", "is_fused"),
    [
        ("--swiglu", True),
        ("--swiglu --activation-func-clamp-value 7", False),  # the fused kernel would not clamp
        ("--swiglu --glu-linear-offset 1", False),
        ("--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1", False),
        ("--openai-gelu", False),
        ("", True),
    ],
)
def test_only_plain_activations_are_fused(text: str, is_fused: bool) -> None:
    assert core_config(text, on_cuda=True, implementation=TRANSFORMER_ENGINE).bias_activation_fusion == is_fused


def test_fields_of_layers() -> None:
    plain, chosen = (
        core_config(""),
        core_config(
            "--position-embedding-type rope --no-rope-freq 4 --window-size 127,0 --window-attn-skip-freq 2 "
            "--softmax-type learnable --qk-l2-norm --embedding-init-method-std 1"
        ),
    )
    assert (plain.window_size, plain.window_attn_skip_freq, plain.no_rope_freq) == (None, None, None)
    assert plain.embedding_init_method_std == plain.init_method_std
    assert (chosen.window_size, chosen.window_attn_skip_freq) == ((127, 0), [1, 0, 1, 0])
    assert chosen.no_rope_freq == [0, 0, 0, 1]
    assert (chosen.softmax_type, chosen.qk_l2_norm, chosen.embedding_init_method_std) == ("learnable", True, 1)
    assert core_config("--window-size 127,0 --window-attn-skip-freq 1").window_size is None  # all layers are full
    assert core_config("--window-size 127,0").window_attn_skip_freq is None
