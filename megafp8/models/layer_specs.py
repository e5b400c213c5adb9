"""megatron-core layer specs of every implementation, and LayerNorm and RMSNorm without Transformer Engine.

Emulated and Transformer Engine layers have the same parameters under the same checkpoint keys, so either can load the
other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
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
from torch import Tensor

from megafp8.config import precision_map
from megafp8.config.precision_map import LINEARS, build_linear_recipe
from megafp8.config.schema import RunConfig
from megafp8.mcore.modules import mlp_spec
from megafp8.models.attention import CausalAttention
from megafp8.models.emulated_layers import EmulatedColumnParallelLinear, EmulatedRowParallelLinear
from megafp8.quantization.delayed_scaling import AmaxExchange
from megafp8.recipes.base import LinearRecipe

# The norm before a linear has the key of Transformer Engine's fused norm and linear.
CHECKPOINT_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def build_block_spec(
    config: RunConfig, transformer_config: TransformerConfig, implementation: str, vp_stage: Optional[int]
) -> TransformerBlockSubmodules:
    """Build the block spec of one model chunk of this pipeline rank.

    Args:
        implementation: `transformer_engine`, `emulated` or `local`, already resolved.
        vp_stage: index of the chunk in the interleaved schedule; None without it.
    """
    if implementation == "transformer_engine":
        from megafp8.te import layers as te_layers  # needs Transformer Engine

        layer, norm = te_layers.layer_spec(config), te_layers.norm()
        return TransformerBlockSubmodules([layer] * get_num_layers_to_build(transformer_config, vp_stage), norm)
    recipes = linear_recipes(config) if implementation == "emulated" else {}
    exchange = AmaxExchange()  # shared by all layers of the chunk
    offset = get_transformer_layer_offset(transformer_config, vp_stage)
    layers = range(offset, offset + get_num_layers_to_build(transformer_config, vp_stage))
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
    choices = precision_map.resolve(config.model, config.precision)
    return {name: build_linear_recipe(config.precision, choice) for name, choice in choices.items()}


def layer_spec(
    config: RunConfig, recipes: Sequence[Optional[LinearRecipe]], exchange: AmaxExchange, noise_name: str
) -> ModuleSpec:
    """Build the spec of one layer: emulated linears where there is a recipe, else megatron-core's linears.

    Args:
        recipes: of the layer's linears, in the order of LINEARS.
        exchange: updates the scales of delayed scaling.
        noise_name: seeds the random numbers of stochastic rounding.
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
            mlp=mlp_spec(MLP, MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=CHECKPOINT_KEYS,
        ),
    )


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, selected by `config.normalization`.

    Shapes: input and output (..., hidden_size); weight (and bias of LayerNorm) (hidden_size,).
    Numerics: torch's kernels, with FP32 statistics. `layernorm_zero_centered_gamma` stores weight - 1.

    Under sequence parallelism each tensor-parallel rank normalizes another part of the sequence. megatron-core sums the
    gradients of parameters marked `sequence_parallel` over these ranks; without the mark the weights would diverge.
    megatron-core's `WrappedTorchNorm` does not support sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.is_rms = config.normalization == "RMSNorm"
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = self.build_parameter(device, config)
        self.bias = None if self.is_rms else self.build_parameter(device, config)

    def build_parameter(self, device: torch.device, config: TransformerConfig) -> torch.nn.Parameter:
        """An uninitialized vector, marked `sequence_parallel` if its gradient needs the reduction."""
        parameter = torch.nn.Parameter(torch.empty(self.shape, dtype=config.params_dtype, device=device))
        parameter.sequence_parallel = config.sequence_parallel
        return parameter

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        weight = self.weight + 1 if self.is_zero_centered else self.weight
        if self.is_rms:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)
