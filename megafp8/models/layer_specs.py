"""megatron-core layer specs of every implementation, and LayerNorm and RMSNorm without Transformer Engine.

Emulated and Transformer Engine layers have the same parameters under the same checkpoint keys, so either can load the
other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from megafp8.config import attention_layers, derived, dimensions, latent_attention, multi_token, precision_map
from megafp8.config.expert_layers import expert_layers
from megafp8.config.grouped_experts import expert_choices, grouped_expert_obstacles
from megafp8.config.precision_map import EXPERTS, LINEARS, MLP_LINEARS, build_linear_recipe
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.config.stages import stage_layers
from megafp8.mcore.modules import NormedSelfAttention, mlp_spec, mlp_submodules
from megafp8.mcore.multi_token import local_spec, transformer_engine_spec
from megafp8.models.attention import CausalAttention
from megafp8.models.dispatch import DispatchingLayer
from megafp8.models.emulated_layers import EmulatedColumnParallelLinear, EmulatedRowParallelLinear
from megafp8.models.experts import Linear, mixture_spec
from megafp8.models.grouped_moe import ExchangedExperts, GroupedExperts, GroupedMoELayer
from megafp8.models.latent_attention import DOWN, latent_attention_spec
from megafp8.models.local_rotary import LocalRotaryLayer
from megafp8.models.query_key_norm import AcrossHeadsNorm
from megafp8.models.residual import POST_NORM_KEYS, ParallelResidualLayer, residual_add
from megafp8.models.rms_norm import InputSavingRMSNorm
from megafp8.models.router import Router
from megafp8.quantization.delayed_scaling import AmaxExchange
from megafp8.recipes.base import LinearRecipe

# The norm before a linear has the key of Transformer Engine's fused norm and linear.
# Before experts there is no such linear.
ATTENTION_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", **POST_NORM_KEYS}
LATENT_ATTENTION_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
MLP_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_COLUMN, _ROW = (ColumnParallelLinear, EmulatedColumnParallelLinear), (RowParallelLinear, EmulatedRowParallelLinear)
LINEAR_CLASSES: Mapping[str, tuple[type, type]] = MappingProxyType(
    dict(zip(LINEARS, (_COLUMN, _ROW) * 2, strict=True))
    | dict.fromkeys(latent_attention.PROJECTIONS, _COLUMN)
    | dict.fromkeys(latent_attention.DOWN_PROJECTIONS, DOWN)
)
"""The plain and the emulated class of each linear."""


def build_block_spec(
    config: RunConfig, transformer_config: TransformerConfig, implementation: str, vp_stage: Optional[int]
) -> TransformerBlockSubmodules:
    """Build the block spec of one model chunk of this pipeline rank.

    Args:
        implementation: `transformer_engine`, `emulated` or `local`, already resolved.
        vp_stage: index of the chunk in the interleaved schedule; None without it.
    """
    layers = chunk_layers(config, transformer_config, vp_stage)
    has_experts = expert_layers(config.model)
    if implementation == "transformer_engine":
        from megafp8.te import layers as te_layers  # needs Transformer Engine

        kinds = {kind: te_layer_spec(config, kind) for kind in set(has_experts)}
        return TransformerBlockSubmodules([kinds[has_experts[layer]] for layer in layers], te_layers.norm())
    recipes = linear_recipes(config) if implementation == "emulated" else {}
    exchange = AmaxExchange()  # shared by all layers of the chunk
    specs = []
    for layer in layers:
        names = precision_map.layer_linears(config.model, has_experts[layer])
        chosen = {name: recipes.get(f"layers.{layer}.{name}") for name in names}
        specs.append(layer_spec(config, transformer_config, layer, chosen, exchange, implementation == "emulated"))
    return TransformerBlockSubmodules(specs, Norm)


def te_layer_spec(config: RunConfig, has_experts: bool) -> ModuleSpec:
    """Build the spec of one layer on Transformer Engine."""
    from megafp8.te import layers as te_layers  # needs Transformer Engine

    layer = te_layers.layer_spec(config, has_experts)
    if config.model.attention_logit_softcapping is not None:  # Transformer Engine's attention has none
        layer.submodules.self_attention.submodules.core_attention = torch_attention(config)
    if has_experts:
        submodules = mlp_submodules(layer.submodules.mlp)
        submodules.router = Router
        if not any(grouped_expert_obstacles(config)):
            layer.submodules.mlp = grouped_mixture_spec(submodules, config)
    return layer


def build_multi_token_spec(
    config: RunConfig, transformer_config: TransformerConfig, implementation: str, vp_stage: Optional[int]
) -> Optional[MultiTokenPredictionBlockSubmodules]:
    """Build the spec of multi-token prediction of one model chunk; None without it, and on all chunks but the last.

    Arguments are those of `build_block_spec`.
    """
    model, precision = config.model, config.precision
    if not multi_token.num_depths(model):
        return None
    last = len(expert_layers(model)) - 1
    if implementation == "transformer_engine":
        from megafp8.te import layers as te_layers  # needs Transformer Engine

        layer = te_layer_spec(config, expert_layers(model)[last])
        return transformer_engine_spec(transformer_config, layer, te_layers.norm(), vp_stage)
    recipe = None
    if implementation == "emulated":
        recipe = build_linear_recipe(precision, precision_map.multi_token_choice(precision))
    names = precision_map.layer_linears(model, expert_layers(model)[last])
    exchange = AmaxExchange()
    layer = layer_spec(config, transformer_config, last, dict.fromkeys(names, recipe), exchange)
    params = linear_params(config, recipe, exchange, f"{config.training.seed}|{multi_token.PROJECTION}")
    projection = ColumnParallelLinear if recipe is None else ModuleSpec(EmulatedColumnParallelLinear, params)
    return local_spec(transformer_config, layer, projection, Norm, vp_stage)


def chunk_layers(config: RunConfig, transformer_config: TransformerConfig, vp_stage: Optional[int]) -> range:
    """Global indices of the layers that megatron-core builds in a chunk of this rank.

    Raises:
        RuntimeError: they are not those that the settings give, on which rules and planner rely.
    """
    start = get_transformer_layer_offset(transformer_config, vp_stage)
    layers = range(start, start + get_num_layers_to_build(transformer_config, vp_stage))
    expected = stage_layers(config)[parallel_state.get_pipeline_model_parallel_rank()][vp_stage or 0]
    if layers != expected:
        raise RuntimeError(f"megatron-core builds {layers} of the layers on this stage, not {expected}")
    return layers


def grouped_mixture_spec(submodules: MoESubmodules, config: RunConfig) -> ModuleSpec:
    """Spec of a layer's experts that run in one launch per GEMM. Its `experts` replace those of `submodules`."""
    (choice,) = expert_choices(config)
    # One exchange for all layers that are built from the spec: on Transformer Engine those of a model chunk.
    arguments = {"recipe": build_linear_recipe(config.precision, choice), "exchange": AmaxExchange()}
    has_ranks = config.parallel.expert_model_parallel_size > 1
    submodules.experts = ModuleSpec(ExchangedExperts if has_ranks else GroupedExperts, arguments)
    params = {"sends_codes": config.parallel.moe_dispatch_in_fp8} if has_ranks else {}
    return ModuleSpec(DispatchingLayer if has_ranks else GroupedMoELayer, params, submodules)


def torch_attention(config: RunConfig) -> ModuleSpec:
    """Spec of attention without Transformer Engine."""
    options = {
        "logit_softcapping": config.model.attention_logit_softcapping,
        "is_unfused": config.precision.attention_backend == "unfused",
    }
    return ModuleSpec(CausalAttention, options)


def linear_recipes(config: RunConfig) -> dict[str, Optional[LinearRecipe]]:
    """The recipe of every linear of the model, by name; None in high precision."""
    choices = precision_map.resolve(config.model, config.precision)
    return {name: build_linear_recipe(config.precision, choice) for name, choice in choices.items()}


def layer_spec(
    config: RunConfig,
    transformer_config: TransformerConfig,
    layer: int,
    recipes: Mapping[str, Optional[LinearRecipe]],
    exchange: AmaxExchange,
    may_stack_experts: bool = False,
) -> ModuleSpec:
    """Build the spec of one layer: emulated linears where there is a recipe, else megatron-core's linears.

    Args:
        layer: its index in the model.
        recipes: of the layer's linears, by the names of `precision_map.layer_linears`.
        exchange: updates the scales of delayed scaling.
        may_stack_experts: with `--moe-expert-kernels triton`, experts on a GPU run in one launch per GEMM.
    """

    def linear(name: str) -> Linear:
        recipe = recipes.get(name)
        plain, emulated = LINEAR_CLASSES[name.rpartition(".")[2]]
        if recipe is None:
            return plain
        return ModuleSpec(emulated, linear_params(config, recipe, exchange, noise_name))

    noise_name = f"{config.training.seed}|layer {layer}"
    has_experts = EXPERTS + MLP_LINEARS[0] in recipes
    if has_experts:
        mlp: Any = mixture_spec(
            linear, derived.gemm_alignment(config.precision), noise_name, config.parallel.moe_dispatch_in_fp8
        )
        on_cuda = not transformer_config.use_cpu_initialization
        if may_stack_experts and config.parallel.moe_expert_kernels == "triton" and on_cuda:
            mlp = grouped_mixture_spec(mlp.submodules, config)
    else:
        mlp = mlp_spec(MLP, MLPSubmodules(linear_fc1=linear("linear_fc1"), linear_fc2=linear("linear_fc2")))
    input_norm = IdentityOp if config.model.norm_placement == "post" else Norm
    add = residual_add(config.model, transformer_config, Norm)
    module, params = layer_module(config.model, layer)
    return ModuleSpec(
        module=module,
        params=params,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=attention_spec(config, linear),
            self_attn_bda=add,
            pre_mlp_layernorm=input_norm,
            mlp=mlp,
            mlp_bda=add,
            sharded_state_dict_keys_map=checkpoint_keys(config.model, has_experts),
        ),
    )


def linear_params(
    config: RunConfig, recipe: Optional[LinearRecipe], exchange: AmaxExchange, noise_name: str
) -> dict[str, Any]:
    """Further arguments of the constructor of an emulated linear."""
    params: dict[str, Any] = {"recipe": recipe, "amax_reduction": config.precision.fp8_amax_reduction}
    if recipe is not None and recipe.delayed is not None:
        params["amax_exchange"] = exchange
    if recipe is not None and recipe.is_stochastic:
        params["noise_name"] = noise_name
    return params


def checkpoint_keys(model: ModelConfig, has_experts: bool) -> dict[str, str]:
    """The map from the keys of a layer's norms to those of Transformer Engine's layer."""
    keys = LATENT_ATTENTION_KEYS if latent_attention.is_latent(model) else ATTENTION_KEYS
    return dict(keys if has_experts else keys | MLP_KEYS)


def attention_spec(config: RunConfig, linear: Callable[[str], Linear]) -> ModuleSpec:
    """Build the spec of the attention of one layer.

    Args:
        linear: returns the linear of a name.
    """
    model = config.model
    norm = L2Norm if model.qk_l2_norm else Norm if model.qk_layernorm else IdentityOp
    if latent_attention.is_latent(model):
        return latent_attention_spec(model, linear, norm, torch_attention(config))
    across_heads = across_heads_norms(model)
    query_norm, key_norm = across_heads or (norm, norm)
    return ModuleSpec(
        module=NormedSelfAttention if across_heads else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear("linear_qkv"),
            core_attention=torch_attention(config),
            linear_proj=linear("linear_proj"),
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        ),
    )


def layer_module(model: ModelConfig, layer: int) -> tuple[type[TransformerLayer], dict[str, Any]]:
    """The class of a layer, and further arguments of its constructor."""
    if model.parallel_residual:
        return ParallelResidualLayer, {}
    if model.rotary_base_local is not None and attention_layers.windowed_layers(model)[layer]:
        return LocalRotaryLayer, {"rotary_base": model.rotary_base_local, "rotary_percent": model.rotary_percent}
    return TransformerLayer, {}


def across_heads_norms(model: ModelConfig) -> Optional[tuple[ModuleSpec, ModuleSpec]]:
    """The norms of queries and of keys over all heads; None if each head has its own."""
    if not model.qk_layernorm_across_heads:
        return None
    query, key = (
        ModuleSpec(AcrossHeadsNorm, {"num_heads": num_heads})
        for num_heads in (model.num_attention_heads, dimensions.num_query_groups(model))
    )
    return query, key


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, selected by `config.normalization`.

    Shapes: input and output (..., hidden_size); weight (and bias of LayerNorm) (hidden_size,).
    Numerics: torch's kernels, with FP32 statistics. `layernorm_zero_centered_gamma` stores weight - 1.

    Under sequence parallelism each tensor-parallel rank normalizes another part of the sequence. megatron-core sums the
    gradients of parameters marked `sequence_parallel` over these ranks; without the mark the weights would diverge.
    megatron-core's `WrappedTorchNorm` does not support sequence parallelism.

    Attributes:
        saves_input: save the input for the backward pass, and nothing larger, on a CPU too.
    """

    saves_input = False

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
        if self.is_rms and self.saves_input and not x.is_cuda:
            normalized: Tensor = InputSavingRMSNorm.apply(x, weight, self.eps)
            return normalized
        if self.is_rms:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)
