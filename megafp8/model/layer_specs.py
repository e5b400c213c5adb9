"""Which class computes each part of a transformer layer: megatron-core's layer spec for every implementation.

The emulated layer and Transformer Engine's have the same parameters under the same checkpoint keys, so a checkpoint
moves between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megafp8.config import precision_map
from megafp8.config.linear_recipes import build_linear_recipe
from megafp8.config.precision_map import LINEARS
from megafp8.config.schema import RunConfig
from megafp8.fp8.delayed import AmaxExchange
from megafp8.model.attention import CausalAttention
from megafp8.model.emulated_layers import EmulatedColumnParallelLinear, EmulatedRowParallelLinear
from megafp8.model.norm import Norm
from megafp8.recipes.base import LinearRecipe

# The norm before a linear is stored under that linear's key, as Transformer Engine's fused layer has it.
CHECKPOINT_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def build_block_spec(
    config: RunConfig, transformer_config: TransformerConfig, implementation: str, vp_stage: Optional[int]
) -> TransformerBlockSubmodules:
    """The layers of one model chunk of this pipeline rank.

    Args:
        implementation: `transformer_engine`, `emulated` or `local`, already resolved.
        vp_stage: which chunk of the interleaved schedule; None without it.
    """
    if implementation == "transformer_engine":
        from megafp8.model import te_layers  # needs Transformer Engine

        layer, norm = te_layers.layer_spec(config), te_layers.norm()
        return TransformerBlockSubmodules([layer] * get_num_layers_to_build(transformer_config, vp_stage), norm)
    recipes = linear_recipes(config) if implementation == "emulated" else {}
    exchange = AmaxExchange()  # one for all layers of the chunk
    first = get_transformer_layer_offset(transformer_config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(transformer_config, vp_stage))
    specs = [
        layer_spec(
            config, [recipes.get(f"layers.{layer}.{linear}") for linear in LINEARS], exchange,
            f"{config.training.seed}|layer {layer}",
        )
        for layer in layers
    ]  # fmt: skip
    return TransformerBlockSubmodules(specs, Norm)


def linear_recipes(config: RunConfig) -> dict[str, Optional[LinearRecipe]]:
    """The recipe of every linear of the model, by name; None in high precision."""
    chosen = precision_map.resolve(config.model, config.precision)
    return {name: build_linear_recipe(config.precision, choice) for name, choice in chosen.items()}


def layer_spec(
    config: RunConfig, recipes: Sequence[Optional[LinearRecipe]], exchange: AmaxExchange, noise_name: str
) -> ModuleSpec:
    """One layer without Transformer Engine: quantizing linears with a recipe, megatron-core's own without.

    Args:
        recipes: of the layer's linears, in the order of LINEARS.
        exchange: what the linears update their scales by, under delayed scaling.
        noise_name: whose random numbers the linears round by, under stochastic rounding.
    """

    def linear(plain: type, emulated: type, recipe: Optional[LinearRecipe]) -> Union[type, ModuleSpec]:
        if recipe is None:
            return plain
        params: dict[str, Any] = {"recipe": recipe, "amax_reduction": config.precision.fp8_amax_reduction}
        if recipe.delayed is not None:
            params["amax_exchange"] = exchange
        if recipe.is_stochastic:
            params["noise_name"] = noise_name
        return ModuleSpec(emulated, params)

    column, row = (ColumnParallelLinear, EmulatedColumnParallelLinear), (RowParallelLinear, EmulatedRowParallelLinear)
    qkv, proj, fc1, fc2 = (linear(*kind, recipe) for kind, recipe in zip((column, row) * 2, recipes, strict=True))
    query_key_norm = Norm if config.model.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=qkv,
            core_attention=CausalAttention,
            linear_proj=proj,
            q_layernorm=query_key_norm,
            k_layernorm=query_key_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=CHECKPOINT_KEYS,
        ),
    )
