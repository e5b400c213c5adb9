"""Initial weights, multipliers and parameter groups of muP, compared with those of megatron-core 0.19."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.config import flags
from megafp8.config.layer_backends import LOCAL
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megatron.core import optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megafp8.config.mup import without_mup
from megafp8.mcore.config import build_optimizer_config, build_transformer_config
from megafp8.mcore.patches import is_installed
from megafp8.optimizer.parameter_groups import mup_overrides

pytestmark = pytest.mark.skipif(is_installed("<0.19"), reason="megatron-core 0.16 has no muP")

FLAGS = (
    "--num-layers 3 --hidden-size 96 --num-attention-heads 4 --lr 1e-3 --min-lr 1e-4 --init-method-std 0.05 --use-mup "
    "--mup-base-hidden-size 32"
)
WEIGHTS = {
    "embedding.word_embeddings.weight": (128, 96),
    "decoder.layers.0.self_attention.linear_qkv.weight": (288, 96),
    "decoder.layers.0.self_attention.linear_qkv.bias": (288,),
    "decoder.layers.0.mlp.linear_fc2.weight": (96, 384),
    "decoder.final_layernorm.weight": (96,),
    "output_layer.weight": (128, 96),
}


@pytest.mark.parametrize(
    "more",
    ["", "--mup-base-head-dim 8 --mup-attn-scale-power 0.7", "--mup-output-mult 0.3 --embedding-init-method-std 0.4"],
)
def test_the_model_is_that_of_megatron_core(more: str) -> None:
    config = flags.parse_with_problems(f"{FLAGS} {more}".split())[0].config
    model, ours = config.model, build_transformer_config(config, LOCAL, on_cuda=False)
    options: dict[str, Any] = {name: getattr(model, name) for name in vars(model) if "mup" in name}
    theirs = TransformerConfig(
        num_layers=3, hidden_size=96, num_attention_heads=4, init_method_std=model.init_method_std,
        embedding_init_method_std=model.embedding_init_method_std, **options,
    )  # fmt: skip
    assert ours.softmax_scale == theirs.softmax_scale
    assert without_mup(model).logits_scaling == pytest.approx(1 / theirs.mup_output_mult)
    assert ours.init_method_std == pytest.approx(theirs.init_method.keywords["std"])
    assert ours.embedding_init_method_std == theirs.embedding_init_method.keywords["std"]
    residual_std = ours.init_method_std / (2 * ours.num_layers) ** 0.5
    assert residual_std == pytest.approx(theirs.output_layer_init_method.keywords["std"])


@pytest.mark.parametrize("more", ["", "--decoupled-lr 5e-3"])
def test_the_groups_are_those_of_megatron_core(more: str) -> None:
    config = flags.parse_with_problems(f"{FLAGS} {more}".split())[0].config
    core_config = build_optimizer_config(config, LOCAL)
    standard = optimizer.get_standard_config_overrides(core_config)
    theirs = {**standard, **optimizer.get_mup_config_overrides(core_config, 3.0)}
    for name, shape in WEIGHTS.items():
        weight: Any = torch.nn.Parameter(torch.empty(shape))
        is_table = name.startswith(("embedding", "output_layer"))
        weight.is_embedding_parameter = weight.is_embedding_or_output_parameter = is_table
        ours = settings_of(weight, name, mup_overrides(config.model, core_config))
        ours.pop("lr_mult", None)
        assert ours == pytest.approx(settings_of(weight, name, theirs)), name


def settings_of(weight: torch.nn.Parameter, name: str, overrides: Any) -> dict[str, float]:
    """All settings of a weight that the overrides have."""
    found: dict[str, float] = {}
    for key, settings in overrides.items():
        if key.matches(weight, name):
            found |= settings
    return found
