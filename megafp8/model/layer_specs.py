"""Which class computes each part of a transformer layer: megatron-core's layer spec for every implementation.

The emulated layer and Transformer Engine's have the same parameters under the same checkpoint keys, so a checkpoint
moves between them.
"""

from __future__ import annotations

from typing import Any, Optional

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

from megafp8.config.schema import RunConfig
from megafp8.fp8.delayed import AmaxExchange
from megafp8.fp8.recipes import Recipe, build_recipe
from megafp8.model.attention import CausalAttention
from megafp8.model.emulated_layers import EmulatedColumnParallelLinear, EmulatedRowParallelLinear
from megafp8.model.high_precision import is_high_precision
from megafp8.model.norm import Norm

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
    recipe = build_recipe(config.precision) if implementation == "emulated" else None
    exchange = AmaxExchange()  # one for all layers of the chunk
    first = get_transformer_layer_offset(transformer_config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(transformer_config, vp_stage))
    num_layers = config.model.num_layers
    assert num_layers is not None
    recipes = [None if is_high_precision(i, num_layers, config.precision) else recipe for i in layers]
    specs = [
        layer_spec(config, recipe_of_layer, exchange, f"{config.training.seed}|layer {i}")
        for i, recipe_of_layer in zip(layers, recipes, strict=True)
    ]
    return TransformerBlockSubmodules(specs, Norm)


def layer_spec(config: RunConfig, recipe: Optional[Recipe], exchange: AmaxExchange, noise_name: str) -> ModuleSpec:
    """One layer without Transformer Engine: quantizing linears with a recipe, megatron-core's own without.

    Args:
        exchange: what the linears update their scales by, under delayed scaling.
        noise_name: whose random numbers the linears round by, under stochastic rounding.
    """
    column, row = ColumnParallelLinear, RowParallelLinear
    if recipe is not None:
        params: dict[str, Any] = {"recipe": recipe, "amax_reduction": config.precision.fp8_amax_reduction}
        if recipe.delayed is not None:
            params["amax_exchange"] = exchange
        if recipe.is_stochastic:
            params["noise_name"] = noise_name
        column = ModuleSpec(EmulatedColumnParallelLinear, params)
        row = ModuleSpec(EmulatedRowParallelLinear, params)
    query_key_norm = Norm if config.model.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=CausalAttention,
            linear_proj=row,
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
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=CHECKPOINT_KEYS,
        ),
    )
